"""DequantizePacked nodes as standard operators, for runtimes that do not have the operator."""

from __future__ import annotations

import onnx.inliner
from onnx import AttributeProto, ModelProto, helper

from onnx_dqp.errors import PackedTensorError
from onnx_dqp.evaluator import inlined
from onnx_dqp.models.check import check
from onnx_dqp.models.functions import DOMAIN, function
from onnx_dqp.models.lower import LOWEST_OPSET, OpsetError, checked_opset, lower
from onnx_dqp.models.scopes import Scope, declared_opset, is_packed, output_type, scopes
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
        model (local functions, which it would drop, are inlined before).
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
        A node cannot be expressed in the opset. Both are ValueErrors.
    """
    target = checked_opset(opset)
    for problem in check(model):
        raise PackedTensorError(str(problem), rule=problem.rule)
    result = ModelProto()
    result.CopyFrom(model)
    if any(_decided_by_caller(scope) for scope in scopes(result)):
        result = inlined(result)
    try:
        result = lower(result, target)
    except OpsetError:
        if not result.functions:
            raise
        result = lower(inlined(result), target)
    _expand_nodes(result)
    if inline:
        made = [(f.domain, f.name) for f in result.functions if f.domain == DOMAIN]
        result = onnx.inliner.inline_selected_functions(result, made)
        _forget_domain(result)
    return result


def _decided_by_caller(scope: Scope) -> bool:
    """Whether a node here has its format or output type by reference to a function's attribute."""
    return any(
        attribute.ref_attr_name and attribute.name != "shape"
        for node in scope.proto.node
        if is_packed(node)
        for attribute in node.attribute
    )


def _expand_nodes(model: ModelProto) -> None:
    """Turn nodes into calls, and add the functions that are called."""
    version = declared_opset(model)
    if version < LOWEST_OPSET:
        raise OpsetError(f"the model imports opset {version}, expected {LOWEST_OPSET} or later")
    ours = {f.name: f for f in model.functions if f.domain == DOMAIN}
    made = {}
    holder: ModelProto | onnx.FunctionProto = model
    for scope in scopes(model):
        if isinstance(scope.proto, onnx.FunctionProto):
            holder = scope.proto
        for node in scope.proto.node:
            if not is_packed(node):
                continue
            attributes = {attribute.name: attribute for attribute in node.attribute}
            format = find_format(attributes["format"].s.decode())
            dtype = output_type(node)
            assert dtype is not None  # an inlined function leaves none by reference
            new = function(format, dtype, version)
            if new.name in ours and ours[new.name] != new:
                raise OpsetError(f"the model has another function {DOMAIN}.{new.name}, expected none of that name")
            made[new.name] = new
            shape = AttributeProto()
            shape.CopyFrom(attributes["shape"])
            del node.attribute[:]
            node.attribute.append(shape)
            node.op_type, node.domain = new.name, DOMAIN
            if all(imported.domain != DOMAIN for imported in holder.opset_import):
                holder.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    if made and all(imported.domain != DOMAIN for imported in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    others = list(model.functions)
    del model.functions[:]
    # First: ONNX's reference evaluator knows in a function only those that come before it.
    model.functions.extend([*(made[name] for name in sorted(made) if name not in ours), *others])


def _forget_domain(model: ModelProto) -> None:
    for holder in (model, *model.functions):
        kept = [imported for imported in holder.opset_import if imported.domain != DOMAIN]
        del holder.opset_import[:]
        holder.opset_import.extend(kept)
