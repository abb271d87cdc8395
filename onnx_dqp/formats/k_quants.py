"""K-quants: super-blocks of 256 elements in sub-blocks of 16 or 32, whose own scales (and minima) are quantized too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import Scratch, gather, planes, scaled, widen


def _scales_and_mins(packed: NDArray[np.uint8], scratch: Scratch) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Q4_K's and Q5_K's eight 6-bit scales and eight 6-bit minima from 12 bytes: (n, 12) -> (n, 8) twice.

    Four bytes at a time, as one word: what a shift brings from one byte into the next is masked off.
    """
    first, second, rest = gather(packed, scratch).view(np.uint32).T
    scales, mins = np.empty((2, len(packed), 2), np.uint32)
    scales[:, 0] = first & 0x3F3F3F3F
    scales[:, 1] = rest & 0x0F0F0F0F | first >> 2 & 0x30303030
    mins[:, 0] = second & 0x3F3F3F3F
    mins[:, 1] = rest >> 4 & 0x0F0F0F0F | second >> 2 & 0x30303030
    return scales.view(np.uint8), mins.view(np.uint8)


def _scale_and_shift(
    blocks: Blocks,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    mins: NDArray[Any],
    out: NDArray[np.float32],
) -> None:
    """``(d * scale) * c - dmin * min``; ``codes`` (n, 256), ``scales`` and ``mins`` (n, sub-blocks)."""
    y = scaled(codes, widen(blocks["d"]) * scales, out)
    y -= (widen(blocks["dmin"]) * mins)[..., np.newaxis]


@packed_format(
    "gguf:q2_k",
    ggml_type=10,
    elements=256,
    layout=[("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")],
)
def q2_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * lo(scales[s])) * c - dmin * hi(scales[s])`` for the 16 elements of sub-block s.

    Each half of ``qs`` (32 bytes) holds 128 elements in four 2-bit planes.
    """
    codes = planes(blocks["qs"], 2, scratch, run=32)
    scales = blocks["scales"]
    _scale_and_shift(blocks, codes, scales & 15, scales >> 4, out)


@packed_format(
    "gguf:q3_k",
    ggml_type=11,
    elements=256,
    layout=[("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")],
)
def q3_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * (scale - 32)) * c`` for the 16 elements of sub-block s.

    c has two bits from ``qs``, as in Q2_K, and is 4 less unless its bit in ``hmask`` is set: plane s / 2,
    byte 16 (s mod 2) + l. The 6-bit scales have their low nibbles in planes in ``scales[:8]``, their high
    two bits in planes in ``scales[8:]``.
    """
    codes = planes(blocks["hmask"], 1, scratch, at=2)
    codes |= planes(blocks["qs"], 2, scratch, run=32)
    signed = codes.view(np.int8)
    signed -= 4
    scales = planes(blocks["scales"][:, 8:], 2, scratch, at=4)
    scales |= planes(blocks["scales"][:, :8], 4, scratch)
    scaled(signed, widen(blocks["d"]) * (scales.view(np.int8) - np.int8(32)), out)


@packed_format(
    "gguf:q4_k",
    ggml_type=12,
    elements=256,
    layout=[("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)],
)
def q4_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * scale) * c - dmin * min`` for the 32 elements of sub-block s, scale and min of six bits each.

    c is a nibble of ``qs[32 (s / 2) + l]``, the low one if s is even.
    """
    codes = planes(blocks["qs"], 4, scratch, run=32)
    _scale_and_shift(blocks, codes, *_scales_and_mins(blocks["scales"], scratch), out)


@packed_format(
    "gguf:q5_k",
    ggml_type=13,
    elements=256,
    layout=[("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
)
def q5_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * scale) * c - dmin * min`` for the 32 elements of sub-block s, scale and min of six bits each.

    c is a nibble of ``qs[32 (s / 2) + l]``, the low one if s is even, plus 16 where bit s of ``qh[l]`` is set.
    """
    codes = planes(blocks["qh"], 1, scratch, at=4)
    codes |= planes(blocks["qs"], 4, scratch, run=32)
    _scale_and_shift(blocks, codes, *_scales_and_mins(blocks["scales"], scratch), out)


@packed_format(
    "gguf:q6_k",
    ggml_type=14,
    elements=256,
    layout=[("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
)
def q6_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * scales[i / 16]) * (c - 32)``.

    In each half of 128 elements c has its low nibble from 64 bytes of ``ql`` in two planes, its high two bits
    from 32 bytes of ``qh`` in four planes.
    """
    codes = planes(blocks["qh"], 2, scratch, run=32, at=4)
    codes |= planes(blocks["ql"], 4, scratch, run=64)
    signed = codes.view(np.int8)
    signed -= 32
    scaled(signed, widen(blocks["d"]) * blocks["scales"], out)


@packed_format("gguf:q8_k", ggml_type=15, elements=256, layout=[("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])
def q8_k(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:  # noqa: ARG001
    """``y = d * c``, c is ``qs[i]`` and d a FLOAT; ``bsums``, kept for dot products, is not used."""
    # Rows are long enough to be cast where they lie.
    scaled(blocks["qs"], widen(blocks["d"]), out)
