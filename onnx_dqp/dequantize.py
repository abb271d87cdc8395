"""From a payload to an array: check everything, then decode and convert tile by tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import PackedFormat
from onnx_dqp.rules import (
    check_array_fits,
    check_output_dtype,
    check_payload_size,
    check_shape,
    find_format,
    show,
    type_name,
)

TILE_ELEMENTS = 1 << 18
"""Elements decoded at a time: 1 MiB of FLOAT, so that scratch does not grow with the tensor."""

Payload = NDArray[np.uint8] | bytes | bytearray | memoryview


def dequantize(
    x: Payload,
    format: str,
    shape: Sequence[int],
    output_dtype: int = TensorProto.FLOAT,
) -> NDArray[Any]:
    """Decode one packed tensor, as the operator DequantizePacked does.

    Parameters
    ----------
    x
        The payload: a uint8 array of rank 1 (of any strides, alignment and writability), bytes, bytearray or a
        memoryview of bytes. It is only read.
    format
        One of the identifiers in ``FORMATS``.
    shape
        The dimensions of the result; the last one a multiple of the format's elements per block.
    output_dtype
        ``TensorProto.FLOAT``, ``FLOAT16``, ``BFLOAT16`` or ``DOUBLE``. Whatever it is, blocks are decoded in
        FLOAT arithmetic, and the FLOAT values are converted once, to nearest, ties to even.

    Returns
    -------
    A new C-contiguous array of that shape: float32, float16, ml_dtypes.bfloat16 or float64.

    Raises
    ------
    PackedTensorError
        An argument breaks a rule of the contract (R1 to R4, R9), or NumPy cannot hold the shape.
        Nothing was allocated.
    """
    found = find_format(format)
    dtype = check_output_dtype(output_dtype)
    dims = check_shape(found, shape)
    payload = _as_bytes(x)
    check_payload_size(found, dims, payload.size)
    check_array_fits(found, dims, dtype)
    out = np.empty(dims, dtype)
    _decode(payload, found, out.reshape(-1, found.elements))
    return out


def _as_bytes(x: object) -> NDArray[np.uint8]:
    """``x`` as a uint8 array of rank 1, without a copy (R9)."""
    if isinstance(x, (bytes, bytearray)):
        x = memoryview(x)
    if isinstance(x, memoryview):
        try:
            item = x.format
        except ValueError:
            raise PackedTensorError("x is a released memoryview, expected one of bytes") from None
        if item.lstrip("@=<>!") != "B":
            raise PackedTensorError(f"x is a memoryview of format {item[:20]!r}, expected 'B' (unsigned bytes)")
        x = np.asarray(x)
    if not isinstance(x, np.ndarray):
        raise PackedTensorError(
            f"x is of type {type_name(x)}, expected a uint8 array of rank 1, bytes, bytearray or memoryview"
        )
    if x.dtype != np.uint8:
        raise PackedTensorError(f"x has element type {x.dtype.name[:20]}, expected uint8")
    if x.ndim != 1:
        raise PackedTensorError(f"x has rank {x.ndim} (shape {show(x.shape)}), expected rank 1")
    return np.asarray(x)


def _decode(payload: NDArray[np.uint8], format: PackedFormat, out: NDArray[Any]) -> None:
    """Fill ``out`` (blocks, elements), of any of the four types, from as many blocks of payload."""
    step = TILE_ELEMENTS // format.elements
    converted = out.dtype != np.float32
    scratch = np.empty((min(step, len(out)), format.elements), np.float32) if converted else out
    # Overflow, NaN and subnormals are values here, not accidents: no payload makes NumPy warn or raise.
    with np.errstate(all="ignore"):
        for start in range(0, len(out), step):
            rows = out[start : start + step]
            octets = payload[start * format.bytes : (start + len(rows)) * format.bytes]
            blocks = np.ascontiguousarray(octets).view(format.layout)
            if converted:
                tile = scratch[: len(rows)]
                format.decode(blocks, tile)
                rows[...] = tile
            else:
                format.decode(blocks, rows)
