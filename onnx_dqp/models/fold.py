"""DequantizePacked nodes of constant payloads as the floating-point tensors that they give."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_dqp.attributes import Attributes, read_attributes
from onnx_dqp.dequantize import dequantize
from onnx_dqp.models.expand import prepared
from onnx_dqp.models.files import (
    MOST_INLINE,
    DataFile,
    ModelFileError,
    Progress,
    demand_other_files,
    keep_data,
    no_progress,
    octets,
)
from onnx_dqp.models.opsets import OpsetError, checked_opset, lower
from onnx_dqp.models.scopes import Scope, packed_nodes, scopes
from onnx_dqp.rules import OUTPUT_DTYPES, TYPE_NAMES, check_output_dtype
from onnx_dqp.schema import SINCE_VERSION


def fold(
    model: ModelProto,
    *,
    dtype: int | None = None,
    opset: int | None = None,
    base_dir: str | os.PathLike[str] = ".",
    external_data: str | os.PathLike[str] | None = None,
) -> ModelProto:
    """Replace every DequantizePacked node whose payload is constant by an initializer of its output.

    A payload is constant if it is an initializer that is no input, or comes from a Constant node. In a function, where
    there are no initializers, a Constant node takes the node's place.

    Parameters
    ----------
    model
        Stays as it is.
    dtype
        The initializers' type: FLOAT, FLOAT16, BFLOAT16 or DOUBLE; None for each node's own. A Cast gives what follows
        the node's own type.
    opset
        The opset of the main domain that the result declares, if the model's is newer; None for 28, as in ``expand``,
        unless nodes remain, which need 29.
    base_dir
        The folder of the model's external data.
    external_data
        A file to write the initializers to, one after the other, so that there is never more than one in memory; the
        result must be saved in its folder. It appears when it is complete. None for keeping them in the model.

    Returns
    -------
    The new model.

    Raises
    ------
    PackedTensorError
        A node breaks a rule of the contract, or ``dtype`` is none of the four.
    ValueError
        The initializers do not fit in a model without external data; the payloads' file is not as the model states; or
        (OpsetError) the model cannot be expressed in the opset.
    """
    base = Path(base_dir)
    if external_data is None:
        return folded(model, dtype, opset, base, None)
    demand_other_files(model, base, Path(external_data))
    with DataFile(Path(external_data)) as data:
        result = folded(model, dtype, opset, base, data)
        keep_data(result, base, data)
    return result


@dataclass
class _Folding:
    scope: Scope
    node: NodeProto
    attributes: Attributes
    payload: TensorProto
    dtype: int

    @property
    def size(self) -> int:
        return math.prod(self.attributes.dims or ()) * OUTPUT_DTYPES[self.dtype].itemsize

    def decoded(self, base: Path) -> NDArray[Any]:
        assert self.attributes.format is not None
        assert self.attributes.dims is not None
        content = octets(self.payload, base)
        return dequantize(content, self.attributes.format.identifier, self.attributes.dims, self.dtype)


def folded(
    model: ModelProto,
    dtype: int | None,
    opset: int | None,
    base: Path,
    data: DataFile | None,
    progress: Progress = no_progress,
) -> ModelProto:
    """As ``fold``, into an open file of external data."""
    target = checked_opset(opset)
    if dtype is not None:
        check_output_dtype(dtype)
    result = prepared(model)
    foldings, remaining = _plan(result, dtype)
    if remaining and opset is not None and target < SINCE_VERSION:
        raise OpsetError(f"{remaining} DequantizePacked without a constant payload must stay, in opset {SINCE_VERSION}")
    total, done = sum(folding.size for folding in foldings), 0
    if data is None and total > MOST_INLINE:
        raise ModelFileError(f"the folded tensors have {total} bytes, expected at most 2 GiB without external data")
    taken = {name for scope in scopes(result) for name in scope.names}
    for folding in foldings:
        _replace(folding, base, data, taken)
        done += folding.size
        progress(done, total)
    _drop_unused(result, {folding.payload.name for folding in foldings})
    return result if remaining else lower(result, target)


def folded_size(model: ModelProto, dtype: int | None) -> int:
    """Bytes of the initializers that ``fold`` makes of a model that ``check`` finds nothing in."""
    return sum(folding.size for folding in _plan(model, dtype)[0])


def _plan(model: ModelProto, dtype: int | None) -> tuple[list[_Folding], int]:
    """The nodes to fold, and how many others there are."""
    foldings, remaining = [], 0
    for scope, node in packed_nodes(model):
        attributes = read_attributes(node.attribute)
        payload = scope.constant(node.input[0])
        own = attributes.output_dtype
        if payload is None or own is None or attributes.dims is None or attributes.format is None:
            remaining += 1
        else:
            foldings.append(_Folding(scope, node, attributes, payload, own if dtype is None else dtype))
    return foldings, remaining


def _replace(folding: _Folding, base: Path, data: DataFile | None, taken: set[str]) -> None:
    """Put the decoded tensor in the node's place, under a name that is not taken anywhere in the model."""
    proto, node = folding.scope.proto, folding.node
    y = node.output[0]
    values = folding.decoded(base)
    own = folding.attributes.output_dtype
    name = y if folding.dtype == own else f"{y}_as_{TYPE_NAMES[folding.dtype]}"
    while name != y and name in taken:
        name += "_"
    taken.add(name)
    nodes = []
    if isinstance(proto, GraphProto):
        tensor = proto.initializer.add()
        if data is not None:
            tensor.name, tensor.data_type = name, folding.dtype
            tensor.dims.extend(values.shape)
            data.add(tensor, values)
        else:
            tensor.CopyFrom(numpy_helper.from_array(values, name))
    else:
        nodes.append(helper.make_node("Constant", [], [name], node.name, value=numpy_helper.from_array(values, name)))
    if name != y:
        nodes.append(helper.make_node("Cast", [name], [y], node.name, to=own))
    _substitute(proto, node, nodes)


def _substitute(proto: GraphProto | FunctionProto, node: NodeProto, nodes: list[NodeProto]) -> None:
    place = next(i for i, other in enumerate(proto.node) if other is node)
    del proto.node[place]
    for offset, new in enumerate(nodes):
        proto.node.insert(place + offset, new)


def _drop_unused(model: ModelProto, names: set[str]) -> None:
    """Take out payloads that nothing refers to any more."""
    used: set[str] = set()
    for scope in scopes(model):
        for node in scope.proto.node:
            used.update(node.input)
        used.update(value if isinstance(value, str) else value.name for value in scope.proto.output)
    unused = names - used
    for scope in scopes(model):
        proto = scope.proto
        if isinstance(proto, GraphProto):
            for place in reversed(range(len(proto.initializer))):
                if proto.initializer[place].name in unused:
                    del proto.initializer[place]
        for place in reversed(range(len(proto.node))):
            node = proto.node[place]
            if node.op_type == "Constant" and node.output and node.output[0] in unused:
                del proto.node[place]
