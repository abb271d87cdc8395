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

LOWEST_LIFTED = 11
"""The first that is brought to opset 29: before, ``onnx.version_converter`` leaves nodes alone that change (Resize)."""

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


_Meaning = Callable[[Mapping[str, Any], TypeProto | None, int], bool]
"""Of a node's attributes, its output's type and its number of inputs: whether it means something else."""


def _given(name: str, *values: Any) -> _Meaning:
    return lambda attributes, *_: attributes.get(name) in values


def _present(name: str) -> _Meaning:
    return lambda attributes, *_: bool(attributes.get(name))


def _not_integers(attributes: Mapping[str, Any], output: TypeProto | None, _: int) -> bool:
    integers = {TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)}
    return not attributes.get("fmod") and (output is None or output.tensor_type.elem_type not in integers)


_FLOAT8_UNSIGNED_ZERO = (TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ)

_GRID_SAMPLE_MODES = (b"linear", b"cubic", b"bilinear", b"bicubic")
"""The first two are what the others were called before."""

CHANGES: Mapping[str, tuple[int, _Meaning]] = {
    "AveragePool": (22, _present("ceil_mode")),  # windows that start in the padding at the end are ignored
    "MaxPool": (22, _present("ceil_mode")),
    "Pad": (19, _given("mode", b"wrap")),
    "Resize": (19, _given("coordinate_transformation_mode", b"half_pixel_symmetric")),
    "GridSample": (20, _given("mode", *_GRID_SAMPLE_MODES)),
    "GroupNormalization": (21, lambda *_: True),  # a scale for each group became one for each channel
    "Cast": (24, _given("to", *_FLOAT8_UNSIGNED_ZERO)),  # infinities became the largest number
    "CastLike": (24, lambda _, output, __: output is None or output.tensor_type.elem_type in _FLOAT8_UNSIGNED_ZERO),
    "Attention": (24, _present("is_causal")),  # another alignment of the mask
    "Mod": (28, _not_integers),  # fmod = 0 was for integers only
}
"""Operator -> version, and whether a node means something that it did not mean before that version.

These are the changes from opset 18 to 29 that do not show in inputs, attributes, their defaults and types, from the
schemas' documents.
"""


_FROM_AXIS_ON = (13, lambda attributes, *_: attributes.get("axis") != -1)
"""Before, all dimensions from the axis on were taken as one."""

EARLIER_CHANGES: Mapping[str, tuple[int, _Meaning]] = {
    "Hardmax": _FROM_AXIS_ON,
    "LogSoftmax": _FROM_AXIS_ON,
    "Softmax": _FROM_AXIS_ON,
    "Split": (18, lambda attributes, _, inputs: inputs < 2 and "num_outputs" not in attributes),  # one is required
}
"""The same from opset 11 to 18, which matters where a model is brought to a newer opset."""


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

    A node stays as it is where it means the same there. Where one does not, ``onnx.version_converter`` converts the
    graph, after functions, which it would drop, are inlined. It loses metadata of graphs and nodes.

    Parameters
    ----------
    model
        Changed where nothing needs to be converted.

    Raises
    ------
    OpsetError
        The model or a function declares an opset before 11 or after 29, or a node does not exist in opset 29 and cannot
        be converted.
    """
    opsets = [scope.opset for scope in scopes(model) if scope.opset]
    for opset in {min(opsets, default=0), max(opsets, default=0)}:
        if not LOWEST_LIFTED <= opset <= SINCE_VERSION:
            raise OpsetError(f"the model declares opset {opset}, expected {LOWEST_LIFTED} to {SINCE_VERSION}")
    problems = list(_problems(model, SINCE_VERSION, _unfit_above))
    if problems:
        if model.functions:
            if not _can_inline(model):
                _refuse(problems)
            return lift(inlined(model))
        newest = min(known_opset(), SINCE_VERSION)
        if max(opsets) < newest:
            model = _converted(model, newest, problems)
            problems = list(_problems(model, SINCE_VERSION, _unfit_above))
        if problems:
            _refuse(problems)
    for holder in (model, *model.functions):
        for imported in holder.opset_import:
            if imported.domain in MAIN_DOMAINS:
                imported.version = SINCE_VERSION
    if not declared_opset(model):
        model.opset_import.append(helper.make_opsetid("", SINCE_VERSION))
    return model


def _unfit_above(node: NodeProto, typed: Scope, version: int, target: int) -> str | None:
    """Why a node of an older opset does not mean the same in the target, or None where it does."""
    if version >= target:
        return None
    old, new = _schema(node, version), _schema(node, target)
    if old is None or new is None:
        return None  # of a version that onnx does not know, or no operator in either
    if old.since_version != new.since_version:
        problem = _unfit_attributes(node, old, new, later=True) or _unfit_values(node, new, typed)
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
        or _unfit_values(node, old, typed)
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


def _unfit_attributes(node: NodeProto, source: defs.OpSchema, target: defs.OpSchema, later: bool = False) -> str | None:
    """Why a node's attributes do not mean in the target what they mean in the source; ``later``, if that is older.

    An attribute that came with the later one keeps, where it is left out, what was meant before (looked at in all that
    came from opset 11 to 29). What was meant without one that is gone there may be another now (DFT's axis).
    """
    given = set()
    for attribute in node.attribute:
        given.add(attribute.name)
        if attribute.name not in target.attributes:
            if later or not _is_default(attribute, source):
                return f"attribute {attribute.name!r} does not exist there"
        elif _attribute_type(target, attribute.name) != attribute.type:
            return f"attribute {attribute.name!r} has another type there"
    for name, attribute in target.attributes.items():
        if name in given:
            continue
        if attribute.required:
            return f"attribute {name!r} is required there"
        if later and name not in source.attributes:
            continue
        default = attribute.default_value.SerializeToString()
        was = source.attributes[name].default_value.SerializeToString() if name in source.attributes else b""
        if default != was:
            return f"the default of attribute {name!r} is another there"
    for name, attribute in source.attributes.items():
        if later and name not in given and name not in target.attributes and attribute.default_value.name:
            return f"attribute {name!r}, which is left out, does not exist there"
    return None


def _unfit_values(node: NodeProto, target: defs.OpSchema, typed: Scope) -> str | None:
    """Why a node's inputs or outputs are none of the target's."""
    inputs = ("input", node.input, target.inputs, target.min_input, target.max_input)
    outputs = ("output", node.output, target.outputs, target.min_output, target.max_output)
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in target.type_constraints}
    for what, given, parameters, least, most in (inputs, outputs):
        names = list(given)
        while names and not names[-1]:
            names.pop()
        if not least <= len(names) <= most:
            return f"it has {len(names)} {what}s, where the operator has {least} to {most} there"
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
    since, meant_otherwise = {**EARLIER_CHANGES, **CHANGES}.get(node.op_type, (0, None))
    if meant_otherwise is None or not target < since <= version:
        return None
    referring = next((attribute.name for attribute in node.attribute if attribute.ref_attr_name), None)
    if referring is not None:
        return f"its meaning may have changed in opset {since}: attribute {referring!r} is given by reference"
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    inputs = sum(map(bool, node.input))
    return f"its meaning changed in opset {since}" if meant_otherwise(attributes, output, inputs) else None


def _converted(model: ModelProto, target: int, problems: list[tuple[NodeProto, str]]) -> ModelProto:
    """The model by way of ``onnx.version_converter``, which drops functions and refuses opsets it does not know.

    It also leaves nodes alone that the older opset has with another meaning, or for fewer types. Those are refused.
    """
    problem = problems[0][1]
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
