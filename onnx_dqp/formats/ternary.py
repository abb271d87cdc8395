"""Ternary formats: 256 elements in {-1, 0, 1} times one scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import Scratch, gather, planes, row, scaled, widen


@packed_format("gguf:tq1_0", ggml_type=34, elements=256, layout=[("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
def tq1_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (t - 1) * d``; a byte v is a fraction v / 256 whose ternary digits are t.

    Digit n is ``((v * 3**n mod 256) * 3) >> 8``. Digits lie in planes: elements 0 to 159 are the five digits of
    ``qs[:32]``, 160 to 239 those of ``qs[32:]``, 240 to 255 the first four of ``qh``.
    """
    fractions = scratch.empty(out.shape, np.uint8)
    start = 0
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        octets = gather(packed, scratch)
        shifted = scratch.empty(octets.shape, np.uint8)
        stop = start + digits * packed.shape[1]
        planes_of_digits = fractions[:, start:stop].view(row(packed.shape[1]))
        for n in range(digits):
            np.multiply(octets, 3**n, out=shifted)  # uint8: modulo 256
            planes_of_digits[:, n] = shifted.view(planes_of_digits.dtype)[:, 0]
        start = stop
    # (f * 3) >> 8 in eight bits: it reaches 1 at f = 86 and 2 at f = 171.
    digit, more = scratch.empty(out.shape, np.bool_), scratch.empty(out.shape, np.bool_)
    np.greater_equal(fractions, 86, out=digit)
    np.greater_equal(fractions, 171, out=more)
    digit, more = digit.view(np.int8), more.view(np.int8)
    digit += more
    digit -= 1
    scaled(digit, widen(blocks["d"]), out)


@packed_format("gguf:tq2_0", ggml_type=35, elements=256, layout=[("qs", "u1", 64), ("d", "<f2")])
def tq2_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (c - 1) * d`` (so 3 gives 2d); each half of ``qs`` (32 bytes) holds 128 elements in four 2-bit planes."""
    codes = planes(blocks["qs"], 2, scratch, run=32).view(np.int8)
    codes -= 1
    scaled(codes, widen(blocks["d"]), out)
