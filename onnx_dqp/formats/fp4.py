"""FP4 formats: E2M1 elements with a power-of-two scale (MXFP4) or an unsigned E4M3 scale (NVFP4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import NibbleTable, Scratch, scaled, take

# Twice the E2M1 values, so that they are integers; the scales below are halved to match. Code 8 is +0, not -0.
_E2M1_TWICE = NibbleTable([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])

# 2**(e - 128) for every byte e: subnormal for 0 and 1, and 2**127, not NaN, for 255.
_E8M0_HALF = np.ldexp(np.float32(1), np.arange(-128, 128)).astype(np.float32)


def _unsigned_e4m3_half() -> NDArray[np.float32]:
    """Half of the unsigned E4M3 number, for every byte: 0x00 and 0x7F give 0, else bit 7 is ignored."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(1 + mantissa / 8, exponent - 8))
    value[[0x00, 0x7F]] = 0
    half: NDArray[np.float32] = value.astype(np.float32)
    return half


_E4M3_HALF = _unsigned_e4m3_half()


@packed_format("gguf:mxfp4", ggml_type=39, elements=32, layout=[("e", "u1"), ("qs", "u1", 16)])
def mxfp4(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = P[c] * 2**(e - 128)`` for any byte e; P is twice the E2M1 value.

    c is the low nibble of ``qs[j]`` for element j < 16, the high one for element 16 + j.
    P = 0 1 2 3 4 6 8 12 0 -1 -2 -3 -4 -6 -8 -12.
    """
    scaled(_E2M1_TWICE.planes(blocks["qs"], scratch), take(_E8M0_HALF, blocks["e"][:, np.newaxis], scratch), out)


@packed_format("gguf:nvfp4", ggml_type=40, elements=64, layout=[("d", "u1", 4), ("qs", "u1", 32)])
def nvfp4(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = P[c] * U(d[s])`` for the 16 elements of sub-block s; U is half the unsigned E4M3 value.

    P is twice the E2M1 value, as in MXFP4; U(0x00) and U(0x7F) are 0, and bit 7 is ignored otherwise.

    c is a nibble of ``qs[8 s + j]``: the low one for element j < 8 of the sub-block, the high one for 8 + j.
    """
    scaled(_E2M1_TWICE.planes(blocks["qs"], scratch, run=8), take(_E4M3_HALF, blocks["d"], scratch), out)
