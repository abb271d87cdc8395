"""Another opset for a model: an older one for runtimes that know no newer, or the operator's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import onnx.version_converter
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, TypeProto, defs, helper

from onnx_dqp.evaluator import inlined
from onnx_dqp.models.scopes import MAIN_DOMAINS, Scope, declared_opset, is_packed, label, scopes, with_types
from onnx_dqp.rules import integer, shown
from onnx_dqp.schema import OP_TYPE, SINCE_VERSION

DEFAULT_OPSET = 28
"""The newest that ONNX Runtime 1.32 accepts."""

LOWEST_OPSET = 18
"""The first with operators on the bits of integers, of which the functions are made."""

NEWEST_KNOWN = 29
"""The opset up to which the changes below were looked for."""

_LOWEST_IR = 8
"""The first with model-local functions."""

_OVERLOADS_IR = 10
"""The first with overloads of functions."""


class OpsetError(ValueError):
    """A model that cannot be expressed in an opset: one line with the operator, its node and both versions.

    Also an opset that none can be expressed in.
    """


_Unfit = Callable[[NodeProto, Scope, int, int], str | None]
"""Why a node does not mean in a target (the last) what it means in a version."""


def checked_opset(value: int | None) -> int:
    """The opset to lower to; anything but None and 18 to 29 is an OpsetError."""
    if value is None:
        return DEFAULT_OPSET
    try:
        number = integer(value)
    except TypeError:
        number = -1
    if not LOWEST_OPSET <= number <= NEWEST_KNOWN:
        raise OpsetError(f"opset is {shown(value)}, expected {LOWEST_OPSET} to {NEWEST_KNOWN}")
    return number


def _given(name: str, *values: Any) -> Callable[[Mapping[str, Any], TypeProto | None], bool]:
    return lambda attributes, _: attributes.get(name) in values


def _present(name: str) -> Callable[[Mapping[str, Any], TypeProto | None], bool]:
    return lambda attributes, _: bool(attributes.get(name))


def _not_integers(attributes: Mapping[str, Any], output: TypeProto | None) -> bool:
    integers = {TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
    return not attributes.get("fmod") and (output is None or output.tensor_type.elem_type not in integers)


_FLOAT8_UNSIGNED_ZERO = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)

CHANGES: Mapping[str, tuple[int, Callable[[Mapping[str, Any], TypeProto | None], bool]]] = {
    "AveragePool": (22, _present("ceil_mode")),  # windows that start in the padding at the end are ignored
    "MaxPool": (22, _present("ceil_mode")),
    "Pad": (19, _given("mode", b"wrap")),
    "Resize": (19, _given("coordinate_transformation_mode", b"half_pixel_symmetric")),
    "GridSample": (20, _given("mode", b"linear", b"cubic")),  # these were called bilinear and bicubic
    "GroupNormalization": (21, lambda *_: True),  # a scale for each group became one for each channel
    "Cast": (24, _given("to", *_FLOAT8_UNSIGNED_ZERO)),  # infinities became the largest number
    "CastLike": (24, lambda _, output: output is None or output.tensor_type.elem_type in _FLOAT8_UNSIGNED_ZERO),
    "Attention": (24, _present("is_causal")),  # another alignment of the mask
    "Mod": (28, _not_integers),  # fmod = 0 was for integers only
}
"""Operator -> version, and whether a node means something that it did not mean before that version.

These are the changes from opset 18 to 29 that do not show in inputs, attributes, their defaults and types, from the
schemas' documents.
"""


def lower(model: ModelProto, target: int) -> ModelProto:
    """Let a model declare an older opset of the main domain.

    A node stays as it is where it means the same in the older opset; attributes that came later are dropped where they
    say what is meant without them. Where one does not, ``onnx.version_converter`` converts the graph, after functions,
    which it would drop, are inlined. It loses metadata of graphs and nodes. DequantizePacked nodes are left alone.

    Parameters
    ----------
    model
        Changed where nothing needs to be converted.
    target
        The opset. A model that declares it, or an older one, stays as it is.

    Raises
    ------
    OpsetError
        A node does not exist in the older opset, and cannot be converted.
    """
    if max(map(declared_opset, (model, *model.functions))) <= target:
        return model
    problems = list(_problems(model, target, _unfit))
    if problems and model.functions:
        return lower(inlined(model), target) if _can_inline(model) else _refuse(problems)
    for scope in scopes(model):
        for node in scope.proto.node:
            if scope.opset > target and node.domain in MAIN_DOMAINS and not is_packed(node):
                _drop_newer_defaults(node, scope.opset, target)
    if problems:
        model = _converted(model, target, problems)
    for holder in (model, *model.functions):
        for imported in holder.opset_import:
            if imported.domain in MAIN_DOMAINS:
                imported.version = min(imported.version, target)
    lowest = max([ir for _, ir, main, *_ in helper.VERSION_TABLE if main <= target], default=_LOWEST_IR)
    overloads = any(function.overload for function in model.functions)
    model.ir_version = min(model.ir_version, max(lowest, _OVERLOADS_IR if overloads else _LOWEST_IR))
    return model


def lift(model: ModelProto) -> ModelProto:
    """Let a model declare opset 29, the first with DequantizePacked.

    A node stays as it is where it means the same there. Where one does not, or the model is older than opset 18, from
    which on changes are known, ``onnx.version_converter`` converts the graph, after functions, which it would drop, are
    inlined. It loses metadata of graphs and nodes.

    Parameters
    ----------
    model
        Changed where nothing needs to be converted.

    Raises
    ------
    OpsetError
        The model declares a newer opset, or a node does not exist in opset 29 and cannot be converted.
    """
    opsets = [scope.opset for scope in scopes(model) if scope.opset]
    if not opsets or max(opsets) > SINCE_VERSION:
        raise OpsetError(f"the model declares opset {max(opsets, default=0)}, expected 1 to {SINCE_VERSION}")
    problems = list(_problems(model, SINCE_VERSION, _unfit_above))
    if problems or min(opsets) < LOWEST_OPSET:
        if model.functions:
            if not _can_inline(model):
                raise OpsetError(problems[0][1] if problems else "the model has functions older than opset 18")
            return lift(inlined(model))
        newest = min(known_opset(), SINCE_VERSION)
        if max(opsets) < newest:
            model = _converted(model, newest, problems)
            problems = list(_problems(model, SINCE_VERSION, _unfit_above))
        if problems:
            raise OpsetError(problems[0][1])
    for holder in (model, *model.functions):
        for imported in holder.opset_import:
            if imported.domain in MAIN_DOMAINS:
                imported.version = SINCE_VERSION
    return model


def _unfit_above(node: NodeProto, typed: Scope, version: int, target: int) -> str | None:
    """Why a node of an older opset does not mean the same in the target, or None where it does."""
    if version >= target:
        return None
    old, new = _schema(node, version), _schema(node, target)
    if old is None or new is None:
        return None  # of a version that onnx does not know, or no operator in either
    if new.deprecated:
        return f"the operator was taken out in opset {new.since_version}"
    if old.since_version != new.since_version:
        problem = (
            _unfit_attributes(node, old, new, later=True)
            or _unfit_values(list(node.input), new.inputs, new.min_input, new.max_input, "input", typed, new)
            or _unfit_values(list(node.output), new.outputs, new.min_output, new.max_output, "output", typed, new)
        )
        if problem:
            return problem
    return _changed(node, typed.type(next(iter(node.output), "")), version, target)


def _can_inline(model: ModelProto) -> bool:
    """Whether ONNX's inliner leaves fewer functions: it leaves those of another opset than the model's."""
    return any(declared_opset(function) in (0, declared_opset(model)) for function in model.functions)


def _refuse(problems: list[tuple[NodeProto, str]]) -> ModelProto:
    raise OpsetError(problems[0][1])


def _problems(model: ModelProto, target: int, unfit: _Unfit) -> Iterator[tuple[NodeProto, str]]:
    """The nodes that do not mean the same in the target, and what is wrong with each."""
    for scope, typed in zip(scopes(model), scopes(with_types(model)), strict=True):
        for node in scope.proto.node:
            if node.domain in MAIN_DOMAINS and not is_packed(node):
                problem = unfit(node, typed, scope.opset, target)
                if problem:
                    where = f"{node.op_type} node {label(node)} ({scope.where})"
                    yield node, f"{where} of opset {scope.opset} cannot be expressed in opset {target}: {problem}"


@cache
def known_opset() -> int:
    """The newest opset whose operators the installed ``onnx`` knows, whatever ``register_schema`` has added."""
    schemas = defs.get_all_schemas_with_history()
    return max(schema.since_version for schema in schemas if schema.domain == "" and schema.name != OP_TYPE)


def _schema(node: NodeProto, version: int) -> defs.OpSchema | None:
    try:
        return defs.get_schema(node.op_type, version, "")
    except defs.SchemaError:
        return None


def _unfit(node: NodeProto, typed: Scope, version: int, target: int) -> str | None:
    """Why a node does not mean in an older target what it means in a version, or None where it does."""
    if version <= target:
        return None
    new, old = _schema(node, version), _schema(node, target)
    if new is None:
        return f"onnx {onnx.__version__} does not know the operator"
    if old is None:
        return f"the operator came with opset {new.since_version}"
    if new.since_version > NEWEST_KNOWN:
        return f"it changed in opset {new.since_version}"
    same = new.since_version == old.since_version
    if same and version <= known_opset():
        return None
    # The installed onnx may be older than the model: of what came since it knows nothing but what is listed here.
    since = new.since_version if version <= known_opset() else version
    return (
        _unfit_attributes(node, new, old)
        or _unfit_values(list(node.input), old.inputs, old.min_input, old.max_input, "input", typed, old)
        or _unfit_values(list(node.output), old.outputs, old.min_output, old.max_output, "output", typed, old)
        or _changed(node, typed.type(next(iter(node.output), "")), target, since)
    )


def _is_default(attribute: AttributeProto, schema: defs.OpSchema) -> bool:
    """Whether an attribute says what is meant where it is left out."""
    known = schema.attributes.get(attribute.name)
    if known is None or not known.default_value.name or attribute.ref_attr_name:
        return False
    return bool(helper.get_attribute_value(known.default_value) == helper.get_attribute_value(attribute))


def _drop_newer_defaults(node: NodeProto, version: int, target: int) -> None:
    """Take out attributes that the target does not have, and that say what is meant without them."""
    new, old = _schema(node, version), _schema(node, target)
    if new is None or old is None:
        return
    for place in reversed(range(len(node.attribute))):
        attribute = node.attribute[place]
        if attribute.name not in old.attributes and _is_default(attribute, new):
            del node.attribute[place]


def _unfit_attributes(node: NodeProto, new: defs.OpSchema, old: defs.OpSchema, later: bool = False) -> str | None:
    """Why a node of the first schema is none of the second, which is the later one or not.

    An attribute that came with the later one has a default that keeps the meaning.
    """
    given = set()
    for attribute in node.attribute:
        given.add(attribute.name)
        if attribute.name not in old.attributes:
            if not _is_default(attribute, new):
                return f"attribute {attribute.name!r} does not exist there"
        elif _attribute_type(old, attribute.name) != attribute.type:
            return f"attribute {attribute.name!r} has another type there"
    for name, attribute in old.attributes.items():
        if name in given:
            continue
        if attribute.required:
            return f"attribute {name!r} is required there"
        if later and name not in new.attributes:
            continue
        default = attribute.default_value.SerializeToString()
        newer = new.attributes[name].default_value.SerializeToString() if name in new.attributes else b""
        if default != newer:
            return f"the default of attribute {name!r} is another there"
    return None


def _unfit_values(
    names: list[str], parameters: Any, least: int, most: int, what: str, typed: Scope, old: defs.OpSchema
) -> str | None:
    while names and not names[-1]:
        names.pop()
    if not least <= len(names) <= most:
        return f"it has {len(names)} {what}s, where the operator has {least} to {most} there"
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in old.type_constraints}
    for place, name in enumerate(names):
        parameter = parameters[min(place, len(parameters) - 1)]
        known = _type_string(typed.type(name)) if name else None
        if known is not None and known not in allowed.get(parameter.type_str, [parameter.type_str]):
            return f"{what} {name[:60]!r} is a {known}, which it does not take there"
    return None


def _attribute_type(schema: defs.OpSchema, name: str) -> int:
    return int(AttributeProto.AttributeType.Value(str(schema.attributes[name].type).rpartition(".")[2]))


def _type_string(type: TypeProto | None) -> str | None:
    """A tensor's type as schemas spell it; None for an unknown one, and for other kinds."""
    if type is None or type.tensor_type.elem_type not in TensorProto.DataType.values()[1:]:
        return None
    return f"tensor({helper.tensor_dtype_to_string(type.tensor_type.elem_type).removeprefix('TensorProto.').lower()})"


def _changed(node: NodeProto, output: TypeProto | None, target: int, version: int) -> str | None:
    since, meant_otherwise = CHANGES.get(node.op_type, (0, None))
    if meant_otherwise is None or not target < since <= version:
        return None
    referring = next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None)
    if referring is not None:
        return f"its meaning may have changed in opset {since}: attribute {referring!r} is given by reference"
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return f"its meaning changed in opset {since}" if meant_otherwise(attributes, output) else None


def _converted(model: ModelProto, target: int, problems: list[tuple[NodeProto, str]]) -> ModelProto:
    """The model by way of ``onnx.version_converter``, which drops functions and refuses opsets it does not know.

    It also leaves nodes alone that the older opset has with another meaning, or for fewer types. Those are refused.
    """
    problem = problems[0][1] if problems else f"the model cannot be expressed in opset {target}"
    unfit = {_content(node): problem for node, problem in problems}
    held = ModelProto()
    held.CopyFrom(model)
    for scope in scopes(held):
        for node in scope.proto.node:
            if is_packed(node):
                node.domain = "onnx_dqp.unconverted"
    for imported in held.opset_import:
        if imported.domain in MAIN_DOMAINS and imported.version > known_opset():
            imported.version = known_opset()
    held.opset_import.append(helper.make_opsetid("onnx_dqp.unconverted", 1))
    try:
        held = onnx.version_converter.convert_version(held, target)
    except Exception as error:  # of ONNX's C++: RuntimeError and its own
        reason = " ".join(str(error).split())[:200]
        raise OpsetError(f"{problem}; onnx.version_converter: {reason}") from None
    for scope in scopes(held):
        for node in scope.proto.node:
            if node.domain == "onnx_dqp.unconverted":
                node.domain = ""
            elif _content(node) in unfit:
                raise OpsetError(f"{unfit[_content(node)]}; onnx.version_converter does not change it")
    imports = [imported for imported in held.opset_import if imported.domain != "onnx_dqp.unconverted"]
    del held.opset_import[:]
    held.opset_import.extend(imports)
    if not held.metadata_props:  # up to onnx 1.22 they are lost
        held.metadata_props.extend(model.metadata_props)
    return held


def _content(node: NodeProto) -> tuple[Any, ...]:
    """What a node is, whatever the order of its attributes."""
    attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
    return node.op_type, tuple(node.input), tuple(node.output), tuple(attributes)
