"""DequantizePacked nodes as standard operators, for runtimes that do not have the operator."""

from __future__ import annotations

import onnx.inliner
from onnx import AttributeProto, FunctionProto, ModelProto, helper

from onnx_dqp.console import one_line
from onnx_dqp.evaluator import inlined
from onnx_dqp.models.check import demand_valid
from onnx_dqp.models.functions import DOMAIN, function
from onnx_dqp.models.opsets import LOWEST_OPSET, OpsetError, checked_opset, lower
from onnx_dqp.models.scopes import MAIN_DOMAINS, Scope, declared_opset, is_packed, output_type, scopes
from onnx_dqp.rules import find_format


def expand(model: ModelProto, *, opset: int | None = None, inline: bool = False) -> ModelProto:
    """Replace every DequantizePacked node, in subgraphs and local functions too, by standard operators.

    They compute the same bits. Each node becomes a call of a local function of the domain ``onnx_dqp``, one for each
    format and output type that the model uses, for example ``dequantize_packed_q4_0_float16``.

    Parameters
    ----------
    model
        Stays as it is. External data are neither read nor changed: the result refers to the same files.
    opset
        The opset of the main domain that the result declares, 18 or later, if the model's is newer; None for 28. A node
        of another operator stays as it is where it means the same there; else ``onnx.version_converter`` converts the
        model (local functions, which it would drop, are inlined before). Functions are also inlined where a node in one
        has attributes by reference.
    inline
        Put the functions' nodes where the calls would be, with ``onnx.inliner``.

    Returns
    -------
    The new model.

    Raises
    ------
    PackedTensorError
        A node breaks a rule of the contract: the first problem that ``check`` finds.
    OpsetError
        A node cannot be expressed in the opset.
    ValueError
        Functions call one another in a circle. The others are ValueErrors too.
    """
    target = checked_opset(opset)
    result = lower(prepared(model), target)
    made = _expand_nodes(result)
    if inline and made:
        try:
            result = onnx.inliner.inline_selected_functions(result, [(DOMAIN, name) for name in made])
        except Exception as error:  # of ONNX's C++
            raise OpsetError(f"onnx.inliner: {one_line(error)}") from None
        if all(node.domain != DOMAIN for scope in scopes(result) for node in scope.proto.node):
            _forget_domain(result)
    return result


def prepared(model: ModelProto) -> ModelProto:
    """A copy of a model whose nodes break no rule and say all by themselves, its main domain spelled empty.

    Where a node in a function has attributes by reference, functions are inlined, so that what callers give is checked.

    Raises
    ------
    PackedTensorError, ValueError
        As ``expand`` does.
    """
    demand_valid(model)
    result = ModelProto()
    result.CopyFrom(model)
    for holder in (result, *result.functions):
        for imported in holder.opset_import:
            if imported.domain in MAIN_DOMAINS:
                imported.domain = ""
    for scope in scopes(result):
        for node in scope.proto.node:
            if node.domain and node.domain in MAIN_DOMAINS:
                node.domain = ""
    if any(map(_decided_by_caller, scopes(result))):
        result = inlined(result)
        demand_valid(result)
        for scope in filter(_decided_by_caller, scopes(result)):
            raise OpsetError(f"{scope.where} has attributes by reference, and imports another opset than the model")
    return result


def _decided_by_caller(scope: Scope) -> bool:
    """Whether a node here has an attribute by reference to a function's."""
    return any(attribute.ref_attr_name for node in scope.proto.node if is_packed(node) for attribute in node.attribute)


def _expand_nodes(model: ModelProto) -> list[str]:
    """Turn nodes into calls, and add the functions that are called; their names."""
    version = max(map(declared_opset, (model, *model.functions)))
    ours = {f.name: f for f in model.functions if f.domain == DOMAIN}
    made: dict[str, FunctionProto] = {}
    holder: ModelProto | FunctionProto = model
    for scope in scopes(model):
        if isinstance(scope.proto, FunctionProto):
            holder = scope.proto
        for node in scope.proto.node:
            if not is_packed(node):
                continue
            if declared_opset(holder) < LOWEST_OPSET:
                raise OpsetError(f"the model imports opset {declared_opset(holder)}, expected {LOWEST_OPSET} or later")
            attributes = {attribute.name: attribute for attribute in node.attribute}
            format, dtype = find_format(attributes["format"].s.decode()), output_type(node)
            assert dtype is not None  # prepared() leaves none by reference
            new = function(format, dtype, version)
            if new.name in ours and ours[new.name] != new:
                raise OpsetError(f"the model has another function {DOMAIN}.{new.name}, expected none of that name")
            made[new.name] = new
            shape = AttributeProto()
            shape.CopyFrom(attributes["shape"])
            del node.attribute[:]
            node.attribute.append(shape)
            node.op_type, node.domain = new.name, DOMAIN
            node.ClearField("overload")
            _import_domain(holder)
    if made:
        _import_domain(model)
    others = list(model.functions)
    del model.functions[:]
    # First: ONNX's reference evaluator knows in a function only those that come before it.
    model.functions.extend([*(made[name] for name in sorted(made) if name not in ours), *others])
    return sorted(made)


def _import_domain(holder: ModelProto | FunctionProto) -> None:
    if all(imported.domain != DOMAIN for imported in holder.opset_import):
        holder.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _forget_domain(model: ModelProto) -> None:
    for holder in (model, *model.functions):
        kept = [imported for imported in holder.opset_import if imported.domain != DOMAIN]
        del holder.opset_import[:]
        holder.opset_import.extend(kept)
