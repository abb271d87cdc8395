"""From a payload to an array: check everything, then decode and convert tile by tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnx_dqp.convert import convert
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.unpack import Scratch
from onnx_dqp.rules import (
    check_array_fits,
    check_out,
    check_output_dtype,
    check_payload_size,
    check_shape,
    find_format,
    show,
    type_name,
)
from onnx_dqp.threads import share, thread_count

TILE_ELEMENTS = 1 << 17
"""Elements decoded at a time by one thread: 512 KiB of FLOAT, which stays in a processor's cache with its scratch."""

SHARED_TILE_ELEMENTS = 1 << 20
"""The same, at most, where threads share the work: in small tiles they wait for the interpreter more than they gain."""

ELEMENTS_IN_WORK = 1 << 21
"""Elements in the tiles of all threads together, at about ten bytes of scratch each: smaller tiles for more threads."""

Payload = NDArray[np.uint8] | bytes | bytearray | memoryview


def dequantize(
    x: Payload,
    format: str | PackedFormat,
    shape: Sequence[int],
    output_dtype: int = TensorProto.FLOAT,
    *,
    out: NDArray[Any] | None = None,
    threads: int | None = None,
) -> NDArray[Any]:
    """Decode one packed tensor, as the operator DequantizePacked does.

    Parameters
    ----------
    x
        The payload: a uint8 array of rank 1 (of any strides, alignment and writability), bytes, bytearray or a
        memoryview of bytes. It is only read.
    format
        One of ``FORMATS``, or its identifier.
    shape
        The dimensions of the result; the last one a multiple of the format's elements per block.
    output_dtype
        ``TensorProto.FLOAT``, ``FLOAT16``, ``BFLOAT16`` or ``DOUBLE``. Whatever it is, blocks are decoded in
        FLOAT arithmetic, and the FLOAT values are converted once, to nearest, ties to even.
    out
        An array to fill: C-contiguous, writable, of the result's shape and type, in memory of its own. If this function
        raises anything but PackedTensorError, an interrupt for example, what it holds is undefined.
    threads
        How many threads share the work, the calling one included; at most 32 are used. 1 starts none. None means the
        number in the environment variable ``ONNX_DQP_THREADS`` or, where that is not set or empty, as many as pay
        for the tensor's size, at most 4 and at most the processors that the process may use. The result does not depend
        on it, but perhaps for which NaN a NaN is.

    Returns
    -------
    ``out``, or a new C-contiguous array of that shape: float32, float16, ml_dtypes.bfloat16 or float64.

    Raises
    ------
    PackedTensorError
        An argument breaks a rule of the contract (R1 to R4, R9), NumPy cannot hold the shape, ``out`` or ``threads`` is
        not as described, or the environment variable is no positive integer. Nothing was allocated or written.
    """
    found = find_format(format)
    dtype = check_output_dtype(output_dtype)
    dims = check_shape(found, shape)
    payload = as_bytes(x)
    check_payload_size(found, dims, payload.size)
    check_array_fits(found, dims, dtype)
    count = thread_count(threads, math.prod(dims))
    if out is None:
        filled = out = np.empty(dims, dtype)
    else:
        filled = check_out(found, dims, dtype, out)
        if np.shares_memory(payload, filled.reshape(-1)):
            raise PackedTensorError("out overlaps x, expected memory of its own")
    _decode(payload, found, filled.reshape(-1, found.elements), count)
    return out


def as_bytes(x: object) -> NDArray[np.uint8]:
    """``x`` as a uint8 array of rank 1, without a copy (R9)."""
    if isinstance(x, (bytes, bytearray)):
        x = memoryview(x)
    if isinstance(x, memoryview):
        try:
            item = x.format
        except ValueError:
            raise PackedTensorError("x is a released memoryview", "one of bytes", "R9") from None
        if item.lstrip("@=<>!") != "B":
            raise PackedTensorError(f"x is a memoryview of format {item[:20]!r}", "'B' (unsigned bytes)", "R9")
        x = np.asarray(x)
    if not isinstance(x, np.ndarray):
        raise PackedTensorError(
            f"x is of type {type_name(x)}", "a uint8 array of rank 1, bytes, bytearray or memoryview", "R9"
        )
    if x.dtype != np.uint8:
        raise PackedTensorError(f"x has element type {x.dtype.name[:20]}", "uint8", "R9")
    if x.ndim != 1:
        raise PackedTensorError(f"x has rank {x.ndim} (shape {show(x.shape)})", "rank 1", "R9")
    return np.asarray(x)


def _decode(payload: NDArray[np.uint8], format: PackedFormat, out: NDArray[Any], threads: int) -> None:
    """Fill ``out`` (blocks, elements), of any of the four types, from as many blocks of payload."""
    step = _tile_blocks(format, len(out), threads)

    def work(starts: Iterator[int]) -> None:
        scratch = Scratch()
        # Overflow, NaN and subnormals are values here, not accidents: no payload makes NumPy warn or raise.
        with np.errstate(all="ignore"):
            for start in starts:
                _decode_tile(payload, format, start, out[start : start + step], scratch, threads == 1)

    starts = range(0, len(out), step)
    share(starts, min(threads, len(starts)), work)


def _tile_blocks(format: PackedFormat, blocks: int, threads: int) -> int:
    """Blocks in a tile: of equal number in each tile where threads share them."""
    if threads == 1:
        return TILE_ELEMENTS // format.elements
    most = min(SHARED_TILE_ELEMENTS, ELEMENTS_IN_WORK // threads) // format.elements
    rounds = max(1, math.ceil(blocks / (most * threads)))
    return max(1, math.ceil(blocks / (rounds * threads)))


def _decode_tile(
    payload: NDArray[np.uint8], format: PackedFormat, start: int, out: NDArray[Any], scratch: Scratch, alone: bool
) -> None:
    """Fill the rows ``out`` of a tile, whose first block is block ``start`` of the payload."""
    scratch.rewind()
    octets = payload[start * format.bytes : (start + len(out)) * format.bytes]
    blocks = np.ascontiguousarray(octets).view(format.layout)
    if out.dtype == np.float32:
        format.decode(blocks, out, scratch)
    else:
        values = scratch.empty(out.shape, np.float32)
        format.decode(blocks, values, scratch)
        convert(values, out, scratch, alone)
