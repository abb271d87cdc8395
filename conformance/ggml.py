"""The decoders of ggml's compiled library, by which everyone else's are measured.

Needs the package ``libggml-python`` (extra ``ggml``), which carries the library.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats import PackedFormat
from onnx_dqp.ggml import library, pointer

NO_DECODER = frozenset({"gguf:q8_1"})
"""Formats without a ``dequantize_row_*``."""


def dequantize(
    format: PackedFormat, payload: NDArray[np.uint8], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Decode with ``dequantize_row_<format>``.

    Parameters
    ----------
    format
        Any but those of ``NO_DECODER``.
    payload
        Whole blocks: uint8 of rank 1, C-contiguous.
    out
        An array to fill: float32 of rank 1, C-contiguous, of the blocks' number of elements.

    Returns
    -------
    ``out``, or a new array of the elements, of rank 1.

    Raises
    ------
    ValueError
        ggml has no decoder for the format, or the payload or ``out`` is not as described.
    """
    if format.identifier in NO_DECODER:
        raise ValueError(f"ggml has no decoder for {format.identifier}")
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous:
        raise ValueError("the payload is expected to be a contiguous uint8 array of rank 1")
    if payload.size % format.bytes:
        raise ValueError(f"the payload has {payload.size} bytes, expected whole blocks of {format.bytes}")
    name = format.identifier.removeprefix("gguf:")
    name = name.removesuffix("_k") + "_K" if name.endswith("_k") else name
    elements = payload.size // format.bytes * format.elements
    if out is None:
        out = np.empty(elements, np.float32)
    elif out.dtype != np.float32 or out.shape != (elements,) or not out.flags.c_contiguous:
        raise ValueError(f"out is expected to be a contiguous float32 array of shape [{elements}]")
    library()[f"dequantize_row_{name}"](pointer(payload), pointer(out), ctypes.c_int64(out.size))
    return out
