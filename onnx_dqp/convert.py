"""From FLOAT to the operator's other output types: one rounding, to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.unpack import Scratch

_LEAST_OVERFLOW = np.float32(65520)
"""FLOAT16's largest number is 65504; from half a unit above on, FLOAT rounds to infinity."""


def convert(values: NDArray[np.float32], out: NDArray[Any], scratch: Scratch, alone: bool) -> None:
    """Fill ``out``, of any of the four types and C-contiguous, from FLOAT of its shape, which may be overwritten.

    NumPy's conversion to FLOAT16 goes element by element and takes twice as long as integer arithmetic on whole arrays
    does for a thread that is ``alone``. Others would wait for one another between the many short loops.
    """
    if out.dtype == np.float16 and alone and values.min() > -_LEAST_OVERFLOW and values.max() < _LEAST_OVERFLOW:
        _to_half(values, out.view(np.uint16), scratch)
    else:
        out[...] = values


def _to_half(values: NDArray[np.float32], out: NDArray[np.uint16], scratch: Scratch) -> None:
    """FLOAT16 bits of numbers that FLOAT16 can hold, subnormals included.

    Let 2**E be the power of two at or below ``|x|``, or 2**-14, below which FLOAT16 is subnormal, where that is
    larger. FLOAT16 has multiples of 2**(E - 10) there, which is the unit of FLOAT from 2**(E + 13) on, so the sum
    ``|x| + 2**(E + 13)`` is ``|x|`` rounded as wanted, and its low bits count the units, up to 2**11. With
    E + 14 added to the exponent's field above ten bits, they are FLOAT16's: a count of 2**10 carries the last one.
    """
    bits = values.view(np.uint32)
    exponent = scratch.empty(values.shape, np.uint32)
    half = scratch.empty(values.shape, np.uint16)
    np.right_shift(bits, 16, out=exponent)
    np.copyto(out, exponent, casting="unsafe")  # the high half, of which the sign stays
    out &= 0x8000
    np.abs(values, out=values)
    np.bitwise_and(bits, 0x7F800000, out=exponent)  # biased by 127: FLOAT's exponent field
    np.clip(exponent, (127 - 14) << 23, 0x7F800000, out=exponent)  # numpy.maximum takes three times as long
    exponent += 13 << 23
    values += exponent.view(np.float32)
    exponent >>= 13  # from FLOAT's field at bit 23 to FLOAT16's at bit 10, where it is too large by 127 + 13 - 14
    bits += exponent
    np.copyto(half, bits, casting="unsafe")
    half -= (127 + 13 - 14) << 10 & 0xFFFF
    out |= half
