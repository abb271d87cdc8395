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
from onnx_dqp.formats.unpack import (
    NibbleTable,
    Scratch,
    fields,
    gather,
    nibbles,
    octets,
    scaled,
    take,
    widen,
)

_IQ4_VALUES = NibbleTable([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])

# Values of bit fields: of one and two bits as they are, and of a bit that makes a value negative.
_BIT = (0, 1)
_TWO_BITS = (0, 1, 2, 3)
_SIGN = (1, -1)


def _parity_signs() -> NDArray[np.int8]:
    """Eight signs for seven stored bits, a row for each: the eighth bit is set where their number of ones is odd."""
    seven = np.arange(128, dtype=np.uint8)[:, np.newaxis]
    stored = seven >> np.arange(7, dtype=np.uint8) & 1
    bits = np.append(stored, np.bitwise_xor.reduce(stored, axis=1, keepdims=True), axis=1)
    return np.where(bits, np.int8(-1), np.int8(1))


@cache
def _parity_sign_pairs() -> NDArray[np.void]:
    """Sixteen signs for two times seven stored bits, as one item."""
    signs, index = _parity_signs(), np.arange(1 << 14)
    return np.concatenate([signs[index & 127], signs[index >> 7]], axis=1).view("V16")[:, 0]


def _parity_signed(
    name: str, index: NDArray[np.uint8], packed: NDArray[np.uint32], scratch: Scratch
) -> NDArray[np.int8]:
    """Codebook rows by index, with four times seven bits of signs in each integer (n, 8): -> (n, 256)."""
    pairs = scratch.empty((*packed.shape, 2), np.intp)
    pairs[..., 0] = packed & 0x3FFF
    pairs[..., 1] = packed >> 14 & 0x3FFF
    values = take(_rows(name), index, scratch).view(np.int8).reshape(len(index), -1)
    values *= take(_parity_sign_pairs(), pairs, scratch).view(np.int8).reshape(values.shape)
    return values


def _signed(name: str, index: NDArray[Any], signs: NDArray[np.uint8], scratch: Scratch) -> NDArray[np.int8]:
    """Codebook rows by index, with a bit for each sign: -> (n, 256)."""
    values = take(_rows(name), index, scratch).view(np.int8)
    values *= fields(signs, _SIGN, scratch)
    return values


@cache
def _rows(name: str) -> NDArray[Any]:
    """A codebook with each row as one item."""
    values = codebook(name)
    return values.view(np.uint64 if values.shape[1] == 8 else np.uint32)[:, 0]


@cache
def _iq1_rows() -> NDArray[np.uint64]:
    """Eight times (G + delta) for each row G: 2048 rows for delta = 0.125, then 2048 for delta = -0.125."""
    values = 8 * codebook("iq1_s")
    return np.concatenate([values + np.int8(1), values - np.int8(1)]).view(np.uint64)[:, 0]


def _four_bytes(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Rows of four small values as one item each."""
    items: NDArray[np.uint32] = values.astype(np.uint8).view(np.uint32)[:, 0]
    return items


@cache
def _iq1_s_high() -> NDArray[np.uint32]:
    """For every ``qh`` of IQ1_S the high bits of four rows' indices, then the sign of delta: four bytes as one item."""
    qh = np.arange(1 << 16)[:, np.newaxis]
    return _four_bytes(qh >> np.array([0, 3, 6, 9]) & 7 | qh >> 12 & 8)


@cache
def _iq1_m_scales() -> NDArray[np.uint32]:
    """For every twelve bits four 3-bit scales, as one item."""
    return _four_bytes(np.arange(1 << 12)[:, np.newaxis] >> np.array([0, 3, 6, 9]) & 7)


@cache
def _iq2_xs_rows() -> NDArray[np.uint64]:
    """Signed rows for all 16 bits of index and signs: half a MiB, for one look-up instead of two and a product."""
    rows = codebook("iq2_xs") * _parity_signs()[:, np.newaxis]
    return rows.reshape(-1, 8).view(np.uint64)[:, 0]


def _index(high: NDArray[np.int8] | NDArray[np.uint8], low: NDArray[np.uint8], scratch: Scratch) -> NDArray[np.uint16]:
    """Row numbers from their high bits and their low eight: (n, k) twice -> (n, k)."""
    index, rest = scratch.empty(low.shape, np.uint16), scratch.empty(low.shape, np.uint16)
    np.copyto(index, high.view(np.uint8))
    index *= 256
    np.copyto(rest, low)  # an operation on two types would go through NumPy's buffers
    index |= rest
    return index


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
def iq2_xxs(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``, for each group of 32 elements: four codebook rows ``qs``.

    Bits 7r to 7r + 6 of ``signs_and_scale`` are the signs of row r (the eighth makes their number even), its top
    four bits are k.
    """
    packed = np.ascontiguousarray(blocks["groups"]["signs_and_scale"])
    values = _parity_signed("iq2_xxs", blocks["groups"]["qs"], packed, scratch)
    scaled(values, _half_step_scale(blocks["d"], packed >> 28, 0.25), out)


@packed_format("gguf:iq2_xs", ggml_type=17, elements=256, layout=[("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
def iq2_xs(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``; ``qs[l]`` is the 9-bit index of codebook row l and above it its signs.

    Seven signs are stored, the eighth makes their number even; k is a nibble of ``scales`` for 16 elements.
    """
    values = take(_iq2_xs_rows(), blocks["qs"], scratch).view(np.int8)
    scaled(values, _half_step_scale(blocks["d"], nibbles(blocks["scales"], scratch), 0.25), out)


@packed_format(
    "gguf:iq3_xxs",
    ggml_type=18,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 64), ("signs_and_scale", "<u4", 8)],
)
def iq3_xxs(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (0.5 + k) * 0.5 * G * sign``: a codebook row of four values for each byte of ``qs``.

    For each group of 32 elements, bits 7r to 7r + 6 of ``signs_and_scale`` are the signs of its eight elements r (the
    eighth makes their number even), and its top four bits are k.
    """
    packed = gather(blocks["signs_and_scale"], scratch)
    values = _parity_signed("iq3_xxs", blocks["qs"], packed, scratch)
    scaled(values, _half_step_scale(blocks["d"], packed >> 28, 0.5), out)


@packed_format("gguf:iq1_s", ggml_type=19, elements=256, layout=[("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
def iq1_s(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (2k + 1) * (G + delta)``, for each group of 32 elements.

    Bits 3r to 3r + 2 of ``qh`` are the high bits of row r's index, bits 12 to 14 are k, and bit 15 makes delta
    -0.125 instead of 0.125.
    """
    qh = gather(blocks["qh"], scratch)
    _iq1(blocks, take(_iq1_s_high(), qh, scratch).view(np.uint8), blocks["d"], qh >> 12 & 7, out, scratch)


def _iq1(
    blocks: Blocks,
    high: NDArray[Any],
    d: NDArray[np.float16],
    k: NDArray[Any],
    out: NDArray[np.float32],
    scratch: Scratch,
) -> None:
    """``d * (2k + 1) * (G + delta)``; ``high`` (n, 32) has the high bits of a row's index, then the sign of delta.

    The rows hold G + delta times 8, so the scale is divided by 8, exactly.
    """
    scale = (2 * k + 1).astype(np.float32)
    scale *= widen(d)
    scale *= 0.125
    scaled(take(_iq1_rows(), _index(high, blocks["qs"], scratch), scratch).view(np.int8), scale, out)


@packed_format("gguf:iq4_nl", ggml_type=20, elements=32, layout=[("d", "<f2"), ("qs", "u1", 16)])
def iq4_nl(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * T[c]``; c is the low nibble of ``qs[j]`` for element j < 16, the high one for element 16 + j.

    T = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
    """
    scaled(_IQ4_VALUES.planes(blocks["qs"], scratch), widen(blocks["d"]), out)


@packed_format(
    "gguf:iq3_s",
    ggml_type=21,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
)
def iq3_s(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (1 + 2k) * G * sign``: a row of four values for each byte of ``qs`` and its ninth bit in ``qh``.

    k is a nibble of ``scales`` for 32 elements; bit j of ``signs[l]`` set makes element 8l + j negative.
    """
    index = _index(fields(blocks["qh"], _BIT, scratch), blocks["qs"], scratch)
    values = _signed("iq3_s", index, blocks["signs"], scratch)
    scaled(values, widen(blocks["d"]) * (2 * nibbles(blocks["scales"], scratch) + 1), out)


@packed_format(
    "gguf:iq2_s",
    ggml_type=22,
    elements=256,
    layout=[("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
)
def iq2_s(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (0.5 + k) * 0.25 * G * sign``; codebook row l has its index in ``qs[l]`` and two bits of ``qh[l / 4]``.

    Bit j of ``signs[l]`` set makes element 8l + j negative; k is a nibble of ``scales`` for 16 elements.
    """
    index = _index(fields(blocks["qh"], _TWO_BITS, scratch), blocks["qs"], scratch)
    values = _signed("iq2_s", index, blocks["signs"], scratch)
    scaled(values, _half_step_scale(blocks["d"], nibbles(blocks["scales"], scratch), 0.25), out)


@packed_format(
    "gguf:iq4_xs",
    ggml_type=23,
    elements=256,
    layout=[("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)],
)
def iq4_xs(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (d * (scale - 32)) * T[c]`` for each group g of 32 elements.

    c is the low nibble of ``qs[16g + j]`` for element j < 16 of the group, the high one for element 16 + j, and
    T = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
    The scale has its low nibble in ``scales_l``, its high two bits at bit 2g of ``scales_h``.
    """
    scales = fields(octets(blocks["scales_h"], scratch), _TWO_BITS, scratch)
    scales *= 16
    scales += nibbles(blocks["scales_l"], scratch).view(np.int8)
    scales -= 32
    values = _IQ4_VALUES.planes(blocks["qs"], scratch, run=16)
    scaled(values, widen(blocks["d"]) * scales, out)


@packed_format(
    "gguf:iq1_m", ggml_type=29, elements=256, layout=[("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]
)
def iq1_m(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d * (2k + 1) * (G + delta)``, for each group of 16 elements: two codebook rows of eight.

    A nibble of ``qh`` has the three high bits of a row's index, and the bit that makes delta -0.125 instead of 0.125.
    The top nibbles of the four ``scales`` are the bits of d, lowest first; below them lie four 3-bit k each.
    """
    scales = gather(blocks["scales"], scratch)
    first, second, third, fourth = scales.T
    d = (first >> 12 | second >> 8 & 0xF0 | third >> 4 & 0xF00 | fourth & 0xF000).view(np.float16)
    k = take(_iq1_m_scales(), scales & 0xFFF, scratch).view(np.uint8)
    _iq1(blocks, nibbles(blocks["qh"], scratch), d, k, out, scratch)
