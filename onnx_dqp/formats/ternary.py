"""Ternary formats: 256 elements in {-1, 0, 1} times one scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import planes, widen


@packed_format("gguf:tq1_0", ggml_type=34, elements=256, layout=[("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
def tq1_0(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = (t - 1) * d``; a byte v is a fraction v / 256 whose ternary digits are t.

    Digit n is ``((v * 3**n mod 256) * 3) >> 8``. Digits lie in planes: elements 0 to 159 are the five digits of
    ``qs[:32]``, 160 to 239 those of ``qs[32:]``, 240 to 255 the first four of ``qh``.
    """
    fractions = np.empty(out.shape, np.uint8)
    start = 0
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        for n in range(digits):
            stop = start + packed.shape[1]
            np.multiply(packed, 3**n, out=fractions[:, start:stop])  # uint8: modulo 256
            start = stop
    # (f * 3) >> 8 in eight bits: it reaches 1 at f = 86 and 2 at f = 171.
    digit = (fractions >= 86).view(np.int8)
    digit += (fractions >= 171).view(np.int8)
    digit -= 1
    out[...] = digit
    out *= widen(blocks["d"])


@packed_format("gguf:tq2_0", ggml_type=35, elements=256, layout=[("qs", "u1", 64), ("d", "<f2")])
def tq2_0(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = (c - 1) * d`` (so 3 gives 2d); each half of ``qs`` (32 bytes) holds 128 elements in four 2-bit planes."""
    codes = planes(blocks["qs"].reshape(-1, 2, 32), 2).view(np.int8)
    codes -= 1
    out[...] = codes.reshape(out.shape)
    out *= widen(blocks["d"])
