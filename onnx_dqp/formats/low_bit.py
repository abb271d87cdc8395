"""One and two bits an element: consecutive elements in one byte, the lowest bits first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import bit_fields, bits, widen

# The four values c - 1 that a byte holds, as one 32-bit item, so that a byte costs one look-up.
_FOUR_CODES = (bit_fields(np.arange(256, dtype=np.uint8), (0, 2, 4, 6), 2).view(np.int8) - np.int8(1)).view(np.int32)[
    :, 0
]


@packed_format("gguf:q1_0", ggml_type=41, elements=128, layout=[("d", "<f2"), ("qs", "u1", 16)])
def q1_0(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d`` where bit i of ``qs`` is set, else ``-d``."""
    signs = bits(blocks["qs"]).view(np.int8)
    signs *= 2
    signs -= 1
    out[...] = signs
    out *= widen(blocks["d"])


@packed_format("gguf:q2_0", ggml_type=42, elements=64, layout=[("d", "<f2"), ("qs", "u1", 16)])
def q2_0(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = (c - 1) * d``; c is two bits of ``qs[i / 4]``, from bit 2 (i mod 4) (so 3 gives 2d)."""
    out[...] = _FOUR_CODES.take(blocks["qs"]).view(np.int8)
    out *= widen(blocks["d"])
