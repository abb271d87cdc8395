"""ggml's compiled library, through ctypes, and its quantizers.

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

NO_QUANTIZER = frozenset({"gguf:q8_1", "gguf:q8_k"})
"""Formats that ``ggml_quantize_chunk`` does not offer."""


@cache
def library() -> ctypes.CDLL:
    """Load ggml's base library.

    Raises
    ------
    ImportError
        The package ``libggml-python`` is not installed, or has no library for this platform.
    """
    spec = find_spec("libggml")
    if spec is None or spec.origin is None:
        raise ImportError("ggml's compiled library is not installed: pip install 'onnx_dqp[ggml]'")
    names = ("libggml-base.so", "libggml-base.dylib", "ggml-base.dll")
    found = [path for name in names for path in Path(spec.origin).parent.rglob(name)]
    if not found:
        raise ImportError("libggml-python has no library for this platform")
    loaded = ctypes.CDLL(str(found[0]))
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return loaded


def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """An array's address, as an argument for the library."""
    return ctypes.c_void_p(array.ctypes.data)


def quantize(format: PackedFormat, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize with ``ggml_quantize_chunk``; importance is uniform where the format needs any.

    Parameters
    ----------
    format
        Any but those of ``NO_QUANTIZER``.
    weights
        Shape (rows, elements), whole blocks a row.

    Returns
    -------
    The payload, of rank 1.

    Raises
    ------
    ValueError
        ggml has no quantizer for the format, or a row is not whole blocks.
    """
    if format.identifier in NO_QUANTIZER:
        raise ValueError(f"ggml has no quantizer for {format.identifier}")
    rows, per_row = weights.shape
    if per_row % format.elements:
        raise ValueError(f"a row has {per_row} elements, expected whole blocks of {format.elements}")
    source = np.ascontiguousarray(weights, np.float32)
    payload = np.empty(rows * per_row // format.elements * format.bytes, np.uint8)
    needs_importance = library().ggml_quantize_requires_imatrix(format.ggml_type)  # without, it aborts the process
    importance = np.ones(per_row, np.float32)
    library().ggml_quantize_chunk(
        ctypes.c_int(format.ggml_type),
        pointer(source),
        pointer(payload),
        ctypes.c_int64(0),
        ctypes.c_int64(rows),
        ctypes.c_int64(per_row),
        pointer(importance) if needs_importance else None,
    )
    return payload
