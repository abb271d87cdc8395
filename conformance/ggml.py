"""ggml's compiled library, through ctypes: the decoders that everyone else's are measured by, and its quantizers.

Needs the package ``libggml-python`` (extra ``ggml``), which carries the library.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats import PackedFormat

__all__ = ["NO_DECODER", "NO_QUANTIZER", "dequantize", "library", "quantize"]

NO_DECODER = frozenset({"gguf:q8_1"})
"""Formats without a ``dequantize_row_*``."""

NO_QUANTIZER = frozenset({"gguf:q8_1", "gguf:q8_k"})
"""Formats that ``ggml_quantize_chunk`` does not offer."""


@cache
def library() -> ctypes.CDLL:
    """Load ``libggml-base.so``.

    Raises
    ------
    ImportError
        The package ``libggml-python`` is not installed.
    """
    spec = find_spec("libggml")
    if spec is None or spec.origin is None:
        raise ImportError("ggml's compiled library is not installed: pip install onnx_dqp[ggml]")
    loaded = ctypes.CDLL(str(Path(spec.origin).parent / "lib64" / "libggml-base.so"))
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return loaded


def _pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def dequantize(format: PackedFormat, payload: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Decode whole blocks, a C-contiguous uint8 array of rank 1, with ``dequantize_row_<format>``."""
    name = format.identifier.removeprefix("gguf:")
    name = name.removesuffix("_k") + "_K" if name.endswith("_k") else name
    out = np.empty(payload.size // format.bytes * format.elements, np.float32)
    assert payload.flags.c_contiguous
    library()[f"dequantize_row_{name}"](_pointer(payload), _pointer(out), ctypes.c_int64(out.size))
    return out


def quantize(format: PackedFormat, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize weights (rows, elements) with ``ggml_quantize_chunk``; importance is uniform where it needs any."""
    rows, per_row = weights.shape
    source = np.ascontiguousarray(weights, np.float32)
    payload = np.empty(rows * per_row // format.elements * format.bytes, np.uint8)
    needs_importance = library().ggml_quantize_requires_imatrix(format.ggml_type)  # without, it aborts the process
    importance = np.ones(per_row, np.float32)
    written = library().ggml_quantize_chunk(
        ctypes.c_int(format.ggml_type),
        _pointer(source),
        _pointer(payload),
        ctypes.c_int64(0),
        ctypes.c_int64(rows),
        ctypes.c_int64(per_row),
        _pointer(importance) if needs_importance else None,
    )
    assert written == payload.size, f"ggml wrote {written} bytes, expected {payload.size}"
    return payload
