"""ggml's first formats: 32 elements that share one scale, or a scale and a minimum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import Scratch, fields, gather, octets, planes, scaled, widen

# What the fifth bit adds to a code, clear or set: a code as it is stored, and one from -16 on.
_FIFTH_BIT = (0, 16)
_CENTRED_FIFTH_BIT = (-16, 0)


@packed_format("gguf:q4_0", ggml_type=2, elements=32, layout=[("d", "<f2"), ("qs", "u1", 16)])
def q4_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (c - 8) * d``; c is the low nibble of ``qs[j]`` for element j < 16, the high one for element 16 + j."""
    codes = planes(blocks["qs"], 4, scratch).view(np.int8)
    codes -= 8
    scaled(codes, widen(blocks["d"]), out)


@packed_format("gguf:q4_1", ggml_type=3, elements=32, layout=[("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
def q4_1(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = c * d + m``; c is the low nibble of ``qs[j]`` for element j < 16, the high one for element 16 + j."""
    scaled(planes(blocks["qs"], 4, scratch), widen(blocks["d"]), out)
    out += widen(blocks["m"])


@packed_format("gguf:q5_0", ggml_type=6, elements=32, layout=[("d", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)])
def q5_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (c - 16) * d``; c is a nibble of ``qs``, plus 16 where bit i of ``qh`` is set for element i.

    The nibble is the low one of ``qs[j]`` for element j < 16, the high one for element 16 + j.
    """
    codes = fields(octets(blocks["qh"], scratch), _CENTRED_FIFTH_BIT, scratch)
    codes += planes(blocks["qs"], 4, scratch).view(np.int8)
    scaled(codes, widen(blocks["d"]), out)


@packed_format(
    "gguf:q5_1", ggml_type=7, elements=32, layout=[("d", "<f2"), ("m", "<f2"), ("qh", "<u4"), ("qs", "u1", 16)]
)
def q5_1(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = c * d + m``; c is a nibble of ``qs``, plus 16 where bit i of ``qh`` is set for element i.

    The nibble is the low one of ``qs[j]`` for element j < 16, the high one for element 16 + j.
    """
    codes = fields(octets(blocks["qh"], scratch), _FIFTH_BIT, scratch)
    codes += planes(blocks["qs"], 4, scratch).view(np.int8)
    scaled(codes, widen(blocks["d"]), out)
    out += widen(blocks["m"])


@packed_format("gguf:q8_0", ggml_type=8, elements=32, layout=[("d", "<f2"), ("qs", "i1", 32)])
def q8_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = c * d``; c is ``qs[i]``."""
    scaled(gather(blocks["qs"], scratch), widen(blocks["d"]), out)


@packed_format("gguf:q8_1", ggml_type=9, elements=32, layout=[("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)])
def q8_1(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = c * d``; c is ``qs[i]``; ``s``, a sum kept for dot products, is not used, even if it is NaN."""
    q8_0(blocks, out, scratch)
