"""I-quants: magnitudes from a codebook with separate signs (IQ2, IQ3, IQ1), or from a table of 16 values (IQ4).

A codebook row has eight values (IQ3: four) in int8; it is fetched, and its signs applied, as one 64-bit (32-bit) item.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.codebooks import codebook
from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import bit_fields, bits, lookup, nibbles, planes, widen

_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

# Row b: -1 where bit j of the byte b is set, else 1.
_SIGNS = (1 - 2 * bits(np.arange(256, dtype=np.uint8)).astype(np.int8)).view(np.int64)[:, 0]


def _parity_signs() -> NDArray[np.int64]:
    """The rows of ``_SIGNS`` for seven stored bits: bit 7 is set where their number of ones is odd."""
    seven = np.arange(128, dtype=np.uint8)
    odd = bits(seven).sum(axis=1, dtype=np.uint8) & 1
    rows: NDArray[np.int64] = _SIGNS[seven | odd << 7]
    return rows


_PARITY_SIGNS = _parity_signs()
_SEVEN_BITS = (0, 7, 14, 21)


@cache
def _rows(name: str) -> NDArray[Any]:
    """A codebook with each row as one item."""
    values = codebook(name)
    return values.view(np.int64 if values.shape[1] == 8 else np.int32)[:, 0]


@cache
def _iq1_rows() -> NDArray[np.int64]:
    """Eight times (G + delta) for each row G: 2048 rows for delta = 0.125, then 2048 for delta = -0.125."""
    values = 8 * codebook("iq1_s")
    return np.concatenate([values + np.int8(1), values - np.int8(1)]).view(np.int64)[:, 0]


def _signed(name: str, index: NDArray[Any], signs: NDArray[np.int64]) -> NDArray[np.int8]:
    """Codebook rows by index, times sign rows: (n, ...) twice -> (n, 256)."""
    values = _rows(name).take(index).reshape(len(index), -1).view(np.int8)
    values *= signs.reshape(len(index), -1).view(np.int8)
    return values


def _scaled(values: NDArray[np.int8], scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out = values * scale``, a scale (n, k) for each 256 / k elements."""
    y = out.reshape(*scale.shape, -1)
    y[...] = values.reshape(y.shape)
    y *= scale[..., np.newaxis]


def _half_step_scale(d: NDArray[np.float16], k: NDArray[Any], last: float) -> NDArray[np.float32]:
    """``d * (0.5 + k) * last``: (n,) and (n, sub-blocks) -> (n, sub-blocks)."""
    scale = k.astype(np.float32)
    scale += 0.5
    scale *= widen(d)
    scale *= last
    return scale


@packed_format(
    "gguf:iq2_xxs",
    ggml_type=16,
    elements=256,
    layout=[("d", "<f2"), ("groups", [("qs", "u1", 4), ("signs_and_scale", "<u4")], 8)],
)
def iq2_xxs(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``, for each group of 32 elements: four codebook rows ``qs``.

    Bits 7r to 7r + 6 of ``signs_and_scale`` are the signs of row r (the eighth makes their number even), its top
    four bits are k.
    """
    groups = blocks["groups"]
    signs = _PARITY_SIGNS.take(bit_fields(groups["signs_and_scale"], _SEVEN_BITS, 7))
    values = _signed("iq2_xxs", groups["qs"], signs)
    _scaled(values, _half_step_scale(blocks["d"], groups["signs_and_scale"] >> 28, 0.25), out)


@packed_format("gguf:iq2_xs", ggml_type=17, elements=256, layout=[("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
def iq2_xs(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``; ``qs[l]`` is the 9-bit index of codebook row l and above it its signs.

    Seven signs are stored, the eighth makes their number even; k is a nibble of ``scales`` for 16 elements.
    """
    signs = _PARITY_SIGNS.take(blocks["qs"] >> 9)
    values = _signed("iq2_xs", blocks["qs"] & 511, signs)
    _scaled(values, _half_step_scale(blocks["d"], nibbles(blocks["scales"]), 0.25), out)


@packed_format(
    "gguf:iq3_xxs",
    ggml_type=18,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 64), ("signs_and_scale", "<u4", 8)],
)
def iq3_xxs(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (0.5 + k) * 0.5 * G * sign``: a codebook row of four values for each byte of ``qs``.

    For each group of 32 elements, bits 7r to 7r + 6 of ``signs_and_scale`` are the signs of its eight elements r (the
    eighth makes their number even), and its top four bits are k.
    """
    signs = _PARITY_SIGNS.take(bit_fields(blocks["signs_and_scale"], _SEVEN_BITS, 7))
    values = _signed("iq3_xxs", blocks["qs"], signs)
    _scaled(values, _half_step_scale(blocks["d"], blocks["signs_and_scale"] >> 28, 0.5), out)


@packed_format("gguf:iq1_s", ggml_type=19, elements=256, layout=[("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
def iq1_s(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (2k + 1) * (G + delta)``, for each group of 32 elements.

    Bits 3r to 3r + 2 of ``qh`` are the high bits of row r's index, bits 12 to 14 are k, and bit 15 makes delta
    -0.125 instead of 0.125.
    """
    qh = blocks["qh"]
    index = bit_fields(qh, (0, 3, 6, 9), 3)
    index <<= 8
    index |= blocks["qs"].reshape(index.shape)
    index |= (qh >> 15 << 11)[..., np.newaxis]
    _iq1(blocks["d"], qh >> 12 & 7, index, out)


def _iq1(
    d: NDArray[np.float16],
    k: NDArray[Any],
    index: NDArray[Any],
    out: NDArray[np.float32],
) -> None:
    """``d * (2k + 1) * (G + delta)``; the rows hold G + delta times 8, so the scale is divided by 8, exactly."""
    scale = (2 * k + 1).astype(np.float32)
    scale *= widen(d)
    scale *= 0.125
    _scaled(_iq1_rows().take(index).view(np.int8), scale, out)


@packed_format("gguf:iq4_nl", ggml_type=20, elements=32, layout=[("d", "<f2"), ("qs", "u1", 16)])
def iq4_nl(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * T[c]``; c is the low nibble of ``qs[j]`` for element j < 16, the high one for element 16 + j.

    T = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
    """
    out[...] = lookup(_IQ4_VALUES, planes(blocks["qs"], 4)).reshape(out.shape)
    out *= widen(blocks["d"])


@packed_format(
    "gguf:iq3_s",
    ggml_type=21,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
)
def iq3_s(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (1 + 2k) * G * sign``: a row of four values for each byte of ``qs`` and its ninth bit in ``qh``.

    k is a nibble of ``scales`` for 32 elements; bit j of ``signs[l]`` set makes element 8l + j negative.
    """
    index = bits(blocks["qh"]).astype(np.uint16)
    index <<= 8
    index |= blocks["qs"]
    values = _signed("iq3_s", index, _SIGNS.take(blocks["signs"]))
    _scaled(values, widen(blocks["d"]) * (2 * nibbles(blocks["scales"]) + 1), out)


@packed_format(
    "gguf:iq2_s",
    ggml_type=22,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
)
def iq2_s(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``; codebook row l has its index in ``qs[l]`` and two bits of ``qh[l / 4]``.

    Bit j of ``signs[l]`` set makes element 8l + j negative; k is a nibble of ``scales`` for 16 elements.
    """
    index = bit_fields(blocks["qh"], (0, 2, 4, 6), 2).astype(np.uint16)
    index <<= 8
    index |= blocks["qs"].reshape(index.shape)
    values = _signed("iq2_s", index, _SIGNS.take(blocks["signs"]))
    _scaled(values, _half_step_scale(blocks["d"], nibbles(blocks["scales"]), 0.25), out)


@packed_format(
    "gguf:iq4_xs",
    ggml_type=23,
    elements=256,
    layout=[("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)],
)
def iq4_xs(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = (d * (scale - 32)) * T[c]`` for each group g of 32 elements.

    c is the low nibble of ``qs[16g + j]`` for element j < 16 of the group, the high one for element 16 + j, and
    T = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
    The scale has its low nibble in ``scales_l``, its high two bits at bit 2g of ``scales_h``.
    """
    scales = bit_fields(blocks["scales_h"], range(0, 16, 2), 2).astype(np.uint8)
    scales <<= 4
    scales |= nibbles(blocks["scales_l"])
    values = lookup(_IQ4_VALUES, planes(blocks["qs"].reshape(-1, 8, 16), 4))
    _scaled(values, widen(blocks["d"]) * (scales.view(np.int8) - np.int8(32)), out)


@packed_format(
    "gguf:iq1_m", ggml_type=29, elements=256, layout=[("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]
)
def iq1_m(blocks: Blocks, out: NDArray[np.float32]) -> None:
    """``y = d * (2k + 1) * (G + delta)``, for each group of 16 elements: two codebook rows of eight.

    A nibble of ``qh`` has the three high bits of a row's index, and the bit that makes delta -0.125 instead of 0.125.
    The top nibbles of the four ``scales`` are the bits of d, lowest first; below them lie four 3-bit k each.
    """
    index = nibbles(blocks["qh"]).astype(np.uint16)
    index <<= 8  # three bits of the index, and the sign of delta as bit 11
    index |= blocks["qs"]
    scales = blocks["scales"]
    d = np.bitwise_or.reduce(scales >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1).view(np.float16)
    k = bit_fields(scales, (0, 3, 6, 9), 3).reshape(-1, 16)
    _iq1(d, k, index, out)
