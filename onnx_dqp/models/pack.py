"""Floating-point initializers of a model as payloads and DequantizePacked nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_dqp.console import printable
from onnx_dqp.dequantize import dequantize
from onnx_dqp.formats import PackedFormat
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
from onnx_dqp.models.opsets import lift
from onnx_dqp.models.scopes import scopes
from onnx_dqp.models.selection import Selection, chooser
from onnx_dqp.quantizers import Quantizer, find_quantizer
from onnx_dqp.rules import OUTPUT_DTYPES, find_format, packed_size, payload_size
from onnx_dqp.schema import OP_TYPE

_FEW = 4096
"""Elements under which an initializer is not packed, unless it is selected."""

_LARGEST = float(np.finfo(np.float16).max)
"""Magnitude of a weight: scales of most formats are FLOAT16; over it, some of ggml's quantizers end the process."""

_AT_ONCE = 1 << 22
"""Elements that are quantized at a time."""


@dataclass
class Packed:
    """A model with packed initializers.

    Attributes
    ----------
    model
        The model.
    kept
        Names of initializers that were meant to be packed and stay as they are, and why.
    count, before, after
        How many were packed, and their bytes before and after.
    """

    model: ModelProto
    kept: list[tuple[str, str]] = field(default_factory=list)
    count: int = 0
    before: int = 0
    after: int = 0


def pack(
    model: ModelProto,
    format: str | PackedFormat,
    *,
    select: Selection = None,
    quantizer: str | Quantizer | None = None,
    base_dir: str | os.PathLike[str] = ".",
    external_data: str | os.PathLike[str] | None = None,
) -> ModelProto:
    """Replace floating-point initializers by payloads, and by DequantizePacked nodes whose outputs have their names.

    A format's blocks must fill rows (rule R3). An initializer whose last dimension does not fit is packed flattened to
    [first dimension, the rest], and a Reshape restores it; or, of two dimensions, transposed, and a Transpose restores
    it. One that fits in no way stays as it is, as one does that is empty or an input, that has NaN or infinities, or
    magnitudes over 65504. Those in subgraphs are packed too.

    Parameters
    ----------
    model
        Of opset 11 to 29; stays as it is.
    format
        A block format or its identifier.
    select
        A shell pattern of names, several, or a function that tells of a name: which FLOAT, FLOAT16, BFLOAT16 and DOUBLE
        initializers are packed. None for those of two dimensions or more and 4096 elements or more.
    quantizer
        ``"ggml"`` (its compiled library, extra ``ggml``; all formats but Q8_1 and Q8_K), ``"gguf"`` (the package's
        Python, extra ``gguf``; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0 and MXFP4), None for the first of them that
        is installed and knows the format, or a function: it is given the format and FLOAT weights of shape (rows,
        elements), C-contiguous, whole blocks a row, some rows at a time, and returns their payload, uint8 of rank 1.
    base_dir
        The folder of the model's external data.
    external_data
        A file to write the payloads to, one after the other; the result must be saved in its folder. None for keeping
        them in the model.

    Returns
    -------
    The new model, of opset 29. A node's ``output_dtype`` is the type that the initializer had.

    Raises
    ------
    PackedTensorError
        The identifier breaks rule R1.
    ImportError
        No quantizer for the format is installed.
    ValueError
        No initializer is selected; no quantizer knows the format; a quantizer's payload has another length or type;
        external data are not as the model states, or in another folder than ``external_data``; the payloads do not fit
        in a model; or (OpsetError) the model cannot be expressed in opset 29.
    """
    format, base = find_format(format), Path(base_dir)
    quantize = find_quantizer(quantizer, format)
    if select is not None:
        select = chooser(select)  # an iterator gives its patterns once
    if external_data is None:
        if inline_size(model, format, select) > MOST_INLINE:
            raise ModelFileError("the model and its payloads have over 2 GiB, expected less without external data")
        return pack_into(model, format, select, quantize, base, None).model
    demand_other_files(model, base, Path(external_data))
    with DataFile(Path(external_data)) as data:
        result = pack_into(model, format, select, quantize, base, data).model
        keep_data(result, base, data)
    return result


def inline_size(model: ModelProto, format: PackedFormat, select: Selection) -> int:
    """About how many bytes the packed model has, if its payloads are in it."""
    size = int(model.ByteSize())
    for _, tensor in _meant(model, select):
        size += math.prod(tensor.dims) // format.elements * format.bytes
        size -= tensor.ByteSize() if tensor.data_location != TensorProto.EXTERNAL else 0
    return size


def pack_into(
    model: ModelProto,
    format: PackedFormat,
    select: Selection,
    quantize: Quantizer,
    base: Path,
    data: DataFile | None,
    progress: Progress = no_progress,
) -> Packed:
    """As ``pack``, into an open file of external data, with an account of what was done."""
    copy = ModelProto()
    copy.CopyFrom(model)
    result = Packed(lift(copy))
    taken = {name for scope in scopes(result.model) for name in scope.names}
    packing, meant = _Packing(format, quantize, base, taken, data), list(_meant(result.model, select))
    if not meant and select is not None:
        raise ModelFileError("no floating-point initializer is selected, expected some")
    total, done = sum(math.prod(tensor.dims) for _, tensor in meant), 0
    for graph, tensor in meant:
        elements, size = math.prod(tensor.dims), OUTPUT_DTYPES[tensor.data_type].itemsize
        try:
            result.after += _replace(graph, tensor, packing)
            result.before += elements * size
            result.count += 1
        except _StaysError as reason:
            result.kept.append((tensor.name, str(reason)))
        done += elements
        progress(done, total)
    return result


def _meant(model: ModelProto, select: Selection) -> Iterator[tuple[GraphProto, TensorProto]]:
    chosen = chooser(select)
    for scope in scopes(model):
        if isinstance(scope.proto, GraphProto):
            for tensor in list(scope.proto.initializer):
                large = len(tensor.dims) > 1 and math.prod(tensor.dims) >= _FEW
                if tensor.data_type in OUTPUT_DTYPES and (large if select is None else chosen(tensor.name)):
                    yield scope.proto, tensor


class _StaysError(Exception):
    """Why an initializer is not packed."""


@dataclass(frozen=True)
class _Packing:
    format: PackedFormat
    quantize: Quantizer
    base: Path
    taken: set[str]
    data: DataFile | None

    def name(self, wanted: str) -> str:
        """A name that nothing has."""
        while wanted in self.taken:
            wanted += "_"
        self.taken.add(wanted)
        return wanted


def _replace(graph: GraphProto, tensor: TensorProto, packing: _Packing) -> int:
    """Put a payload and nodes in the place of an initializer; the payload's bytes."""
    name, dims, elements = tensor.name, list(tensor.dims), packing.format.elements
    if not name or any(value.name == name for value in graph.input):
        raise _StaysError("it is an input, which callers can replace" if name else "it has no name")
    if min(dims, default=1) < 0:
        raise _StaysError(f"shape {dims} has a negative dimension")
    if not math.prod(dims):
        raise _StaysError("it is empty")
    bits = _bits(tensor, packing.base)
    nodes: list[NodeProto] = []
    if dims and dims[-1] % elements == 0:
        rows, shape, output = bits.reshape(-1, dims[-1]), dims, name
    elif len(dims) > 1 and math.prod(dims[1:]) % elements == 0:
        rows, output = bits.reshape(dims[0], -1), packing.name(f"{name}/flat")
        shape, restored = list(rows.shape), packing.name(f"{name}/shape")
        nodes = [
            helper.make_node("Constant", [], [restored], value_ints=dims),
            helper.make_node("Reshape", [output, restored], [name]),
        ]
    elif len(dims) == 2 and dims[0] % elements == 0:
        rows, output = bits.reshape(dims).T, packing.name(f"{name}/transposed")
        shape = list(rows.shape)
        nodes = [helper.make_node("Transpose", [output], [name])]
    else:
        raise _StaysError(f"shape {dims} has no rows of whole blocks of {elements} elements")
    own = tensor.data_type
    content = _payload(rows, own, name, packing)
    tensor.Clear()
    tensor.name, tensor.data_type = packing.name(f"{name}/packed"), TensorProto.UINT8
    tensor.dims.append(content.size)
    if packing.data is None:
        tensor.raw_data = content.tobytes()
    else:
        packing.data.add(tensor, content)
    node = helper.make_node(OP_TYPE, [tensor.name], [output], name, format=packing.format.identifier, shape=shape)
    if own != TensorProto.FLOAT:
        node.attribute.append(helper.make_attribute("output_dtype", own))
    for new in reversed([node, *nodes]):
        graph.node.insert(0, new)
    return content.size


def _bits(tensor: TensorProto, base: Path) -> NDArray[np.unsignedinteger]:
    """An initializer's elements as unsigned integers, little-endian; of external data, mapped."""
    content = octets(tensor, base)
    dtype = OUTPUT_DTYPES[tensor.data_type]
    if content.size != math.prod(tensor.dims) * dtype.itemsize:
        found = f"initializer {printable(tensor.name, 60)!r} has {content.size} bytes"
        raise ModelFileError(f"{found}, expected {math.prod(tensor.dims) * dtype.itemsize} for its shape")
    return content.view(f"<u{dtype.itemsize}")


def _payload(rows: NDArray[np.unsignedinteger], elem_type: int, name: str, packing: _Packing) -> NDArray[np.uint8]:
    """Quantize rows, some at a time; what cannot be is an error before its quantizer sees it."""
    format, dtype, (count, per_row) = packing.format, OUTPUT_DTYPES[elem_type], rows.shape
    payload = np.empty(packed_size(format, (count, per_row)), np.uint8)
    step = max(1, _AT_ONCE // per_row)
    for start in range(0, count, step):
        some = np.ascontiguousarray(rows[start : start + step])
        with np.errstate(all="ignore"):
            weights = some.astype(f"u{dtype.itemsize}", copy=False).view(dtype).astype(np.float32)
        largest = float(np.abs(weights).max())
        if not largest <= _LARGEST:
            found = "NaN" if math.isnan(largest) else f"a magnitude of {largest:.6g}"
            raise _StaysError(f"it has {found}, expected magnitudes up to {_LARGEST:.0f}")
        part = packing.quantize(format, weights)
        size = payload_size(format, weights.shape)
        if not isinstance(part, np.ndarray) or part.dtype != np.uint8 or part.shape != (size,):
            found = f"{part.dtype.name}{list(part.shape)}" if isinstance(part, np.ndarray) else type(part).__name__
            raise ModelFileError(f"{printable(name, 60)!r}: the quantizer gave {found}, expected uint8[{size}]")
        if not np.isfinite(dequantize(part, format, weights.shape, elem_type)).all():
            raise _StaysError("its values, or what the format makes of them, are too large")
        place = start * (per_row // format.elements) * format.bytes
        payload[place : place + size] = part
    return payload
