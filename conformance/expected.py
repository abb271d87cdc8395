"""The exact decoder's results as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from conformance import exact
from onnx_dqp.rules import OUTPUT_DTYPES

BINARIES: Mapping[int, exact.Binary] = MappingProxyType(
    {
        int(TensorProto.FLOAT): exact.FLOAT,
        int(TensorProto.FLOAT16): exact.FLOAT16,
        int(TensorProto.BFLOAT16): exact.BFLOAT16,
        int(TensorProto.DOUBLE): exact.DOUBLE,
    }
)
"""ONNX element type -> binary format."""


def expected(identifier: str, payload: bytes, output_dtype: int = TensorProto.FLOAT) -> NDArray[Any]:
    """What the operator gives, by ``conformance.exact``.

    Parameters
    ----------
    identifier
        A format's identifier, for example ``"gguf:q4_0"``.
    payload
        Whole blocks.
    output_dtype
        ``TensorProto.FLOAT``, ``FLOAT16``, ``BFLOAT16`` or ``DOUBLE``.

    Returns
    -------
    The elements, of rank 1, in the type's NumPy dtype; NaNs are positive and quiet.

    Raises
    ------
    ValueError
        The identifier is unknown, or the payload is not whole blocks.
    """
    dtype, binary = OUTPUT_DTYPES[output_dtype], BINARIES[output_dtype]
    bits = _float_bits(identifier, payload)
    if binary is not exact.FLOAT:
        bits = tuple(_converted(b, binary) for b in bits)
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


@lru_cache(maxsize=64)
def _float_bits(identifier: str, payload: bytes) -> tuple[int, ...]:
    """Kept, because a payload is often decoded to all four types in turn."""
    return tuple(exact.decode(identifier, payload))


@lru_cache(maxsize=1 << 18)
def _converted(bits: int, binary: exact.Binary) -> int:
    return binary.round(exact.FLOAT.number(bits))
