"""Where in a block every element's code, scale, minimum and sign lie, bit by bit, and what they are worth.

The formats once more, as data: what ``explain`` shows, and what ``expand`` makes ONNX operators of. ``dequantize`` does
not use it. The suite's tables of wrong decoders are variations of it, and tests hold it to exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.codebooks import codebook

Bits = NDArray[np.int64]
"""Shape (elements, width), or (1, width) for all elements: bit positions in the block, that of lowest value first.

Bit p is bit p mod 8 of byte p / 8, so that the bits of little-endian integers follow one another.
"""


@dataclass(frozen=True)
class Rule:
    """How a format decodes: ``y = sign * (weight * scale) - or + minimum``.

    Attributes
    ----------
    elements, bytes
        Per block.
    scale
        The bits of the block's scale (of the sub-block's, in NVFP4).
    scale_dtype
        NumPy's name of the scale's type: f2, f4, or u1 for an entry of ``scale_table``.
    factor
        Bits of the sub-block's integer k, or None; the scale is multiplied with ``factor_slope * k + factor_offset``.
    factor_signed
        k is in two's complement.
    constants
        Further factors of the scale, in order.
    code
        Bits of the element's code.
    code_signed, code_offset
        The code is in two's complement; this is added to it.
    values
        The code's value, by code, or None for the code itself.
    rows, column
        The code is the number of one of these rows; the element is the entry ``column`` of it.
    digit
        The power of 3 that moves the element's ternary digit to the top of the code, a byte, or None.
    sign
        Bits whose exclusive or makes the element negative, or None.
    delta
        The bit that makes ``delta_size`` negative, which is added to the value, or None.
    minimum, minimum_factor, minimum_sign
        Bits of the FLOAT16 minimum and of the integer that it is multiplied with, or None; +1 adds it, -1 subtracts it.
    """

    elements: int
    bytes: int
    scale: Bits
    code: Bits
    scale_dtype: str = "f2"
    scale_table: NDArray[np.float32] | None = None
    factor: Bits | None = None
    factor_signed: bool = False
    factor_slope: float = 1
    factor_offset: float = 0
    constants: tuple[float, ...] = ()
    code_signed: bool = False
    code_offset: int = 0
    values: NDArray[np.int64] | None = None
    rows: NDArray[np.int64] | None = None
    column: NDArray[np.int64] | None = None
    digit: NDArray[np.int64] | None = None
    sign: Bits | None = None
    delta: Bits | None = None
    delta_size: float = 0.125
    minimum: Bits | None = None
    minimum_factor: Bits | None = None
    minimum_sign: int = -1


def at(byte: Any, bit: Any = 0, width: int = 8) -> Bits:
    """``width`` bits from bit ``bit`` of byte ``byte`` on, each a number or an array over elements."""
    first = np.atleast_1d(8 * np.asarray(byte, np.int64) + bit)
    return first[:, np.newaxis] + np.arange(width)


def joined(*parts: Bits) -> Bits:
    """The bits of several fields as those of one number, the first the lowest."""
    elements = max(len(part) for part in parts)
    return np.concatenate([np.broadcast_to(part, (elements, part.shape[1])) for part in parts], axis=1)


def _rules() -> dict[str, Rule]:
    i = np.arange(32)
    halves = i % 16, 4 * (i // 16)
    iq4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    e2m1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    e8m0 = np.array([2.0 ** (e - 128) for e in range(256)], np.float32)
    e4m3 = np.array(
        [
            (v & 7) * 2.0**-10 if v >> 3 & 15 == 0 else (1 + (v & 7) / 8) * 2.0 ** ((v >> 3 & 15) - 8)
            for v in range(256)
        ],
        np.float32,
    )
    e4m3[[0x00, 0x7F]] = 0
    f16 = at(0, 0, 16)

    def nibble(offset: int) -> Bits:
        return at(offset + halves[0], halves[1], 4)

    rules = {
        "Q4_0": Rule(32, 18, f16, nibble(2), code_offset=-8),
        "Q4_1": Rule(32, 20, f16, nibble(4), minimum=at(2, 0, 16), minimum_sign=1),
        "Q5_0": Rule(32, 22, f16, joined(nibble(6), at(2, i, 1)), code_offset=-16),
        "Q5_1": Rule(32, 24, f16, joined(nibble(8), at(4, i, 1)), minimum=at(2, 0, 16), minimum_sign=1),
        "Q8_0": Rule(32, 34, f16, at(2 + i), code_signed=True),
        "Q8_1": Rule(32, 36, f16, at(4 + i), code_signed=True),
        "IQ4_NL": Rule(32, 18, f16, nibble(2), values=iq4),
        "MXFP4": Rule(32, 17, at(0), nibble(1), scale_dtype="u1", scale_table=e8m0, values=e2m1),
    }
    i = np.arange(64)
    s, j = i // 16, i % 16
    rules["NVFP4"] = Rule(
        64, 36, at(s), at(4 + 8 * s + j % 8, 4 * (j // 8), 4), scale_dtype="u1", scale_table=e4m3, values=e2m1
    )
    rules["Q2_0"] = Rule(64, 18, f16, at(2 + i // 4, 2 * (i % 4), 2), code_offset=-1)
    i = np.arange(128)
    rules["Q1_0"] = Rule(128, 18, f16, at(2 + i // 8, i % 8, 1), values=np.array([-1, 1]))
    return rules | _k_quants() | _codebooks() | _others(iq4)


def _k_quants() -> dict[str, Rule]:
    i = np.arange(256)
    s16, s32, l = i // 16, i // 32, i % 32

    def two_bits(offset: int) -> Bits:
        return at(offset + 32 * (i // 128) + l, 2 * (i % 128 // 32), 2)

    first = (s32 < 4)[:, np.newaxis]
    scale_6 = np.where(first, at(4 + s32, 0, 6), joined(at(8 + s32, 0, 4), at(s32, 6, 2)))
    min_6 = np.where(first, at(8 + s32, 0, 6), joined(at(8 + s32, 4, 4), at(4 + s32, 6, 2)))
    q4 = at(0, 4 * (s32 % 2), 4) + 8 * (32 * (s32 // 2) + l)[:, np.newaxis]
    return {
        "Q2_K": Rule(
            256,
            84,
            at(80, 0, 16),
            two_bits(16),
            factor=at(s16, 0, 4),
            minimum=at(82, 0, 16),
            minimum_factor=at(s16, 4, 4),
        ),
        "Q3_K": Rule(
            256,
            110,
            at(108, 0, 16),
            joined(two_bits(32), at(l, s32, 1)),
            code_offset=-4,
            factor=joined(at(96 + s16 % 8, 4 * (s16 // 8), 4), at(104 + s16 % 4, 2 * (s16 // 4), 2)),
            factor_offset=-32,
        ),
        "Q4_K": Rule(256, 144, at(0, 0, 16), q4 + 8 * 16, factor=scale_6, minimum=at(2, 0, 16), minimum_factor=min_6),
        "Q5_K": Rule(
            256,
            176,
            at(0, 0, 16),
            joined(q4 + 8 * 48, at(16 + l, s32, 1)),
            factor=scale_6,
            minimum=at(2, 0, 16),
            minimum_factor=min_6,
        ),
        "Q6_K": Rule(
            256,
            210,
            at(208, 0, 16),
            joined(at(64 * (i // 128) + i % 64, 4 * (i % 128 // 64), 4), two_bits(128)),
            code_offset=-32,
            factor=at(192 + s16),
            factor_signed=True,
        ),
        "Q8_K": Rule(256, 292, at(0, 0, 32), at(4 + i), scale_dtype="f4", code_signed=True),
    }


def _codebooks() -> dict[str, Rule]:
    i = np.arange(256)
    l, j, g, r = i // 8, i % 8, i // 32, i % 32 // 8
    half = l % 4 // 2
    quad = 2 * l + j // 4
    rows = {
        name: codebook(name).astype(np.int64) for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s")
    }

    def implied(first: NDArray[np.int64], zero: int) -> Bits:
        """Seven stored sign bits from ``first`` on: bit j for j < 7, and the exclusive or of all for j = 7."""
        seven = first[:, np.newaxis] + np.arange(7)
        stored = np.where(np.arange(7) == j[:, np.newaxis], seven, zero)
        return np.where((j == 7)[:, np.newaxis], seven, stored)

    f16 = at(0, 0, 16)
    iq2: dict[str, Any] = {"factor_offset": 0.5, "constants": (0.25,), "column": j}
    return {
        "IQ2_XXS": Rule(
            256,
            66,
            f16,
            at(2 + 8 * g + r),
            rows=rows["iq2_xxs"],
            sign=implied(8 * (6 + 8 * g) + 7 * r, 8 * 66),
            factor=at(6 + 8 * g, 28, 4),
            **iq2,
        ),
        "IQ2_XS": Rule(
            256,
            74,
            f16,
            at(2 + 2 * l, 0, 9),
            rows=rows["iq2_xs"],
            sign=implied(8 * (2 + 2 * l) + 9, 8 * 74),
            factor=at(66 + g, 4 * half, 4),
            **iq2,
        ),
        "IQ2_S": Rule(
            256,
            82,
            f16,
            joined(at(2 + l), at(66 + g, 2 * r, 2)),
            rows=rows["iq2_s"],
            sign=at(34 + l, j, 1),
            factor=at(74 + g, 4 * half, 4),
            **iq2,
        ),
        "IQ3_XXS": Rule(
            256,
            98,
            f16,
            at(2 + quad),
            rows=rows["iq3_xxs"],
            column=j % 4,
            sign=implied(8 * (66 + 4 * g) + 7 * r, 8 * 98),
            factor=at(66 + 4 * g, 28, 4),
            factor_offset=0.5,
            constants=(0.5,),
        ),
        "IQ3_S": Rule(
            256,
            110,
            f16,
            joined(at(2 + quad), at(66 + g, 2 * r + j // 4, 1)),
            rows=rows["iq3_s"],
            column=j % 4,
            sign=at(74 + l, j, 1),
            factor=at(106 + g // 2, 4 * (g % 2), 4),
            factor_slope=2,
            factor_offset=1,
        ),
        "IQ1_S": Rule(
            256,
            50,
            f16,
            joined(at(2 + l), at(34 + 2 * g, 3 * r, 3)),
            rows=rows["iq1_s"],
            column=j,
            factor=at(34 + 2 * g, 12, 3),
            factor_slope=2,
            factor_offset=1,
            delta=at(34 + 2 * g, 15, 1),
        ),
        "IQ1_M": Rule(
            256,
            56,
            joined(at(49, 4, 4), at(51, 4, 4), at(53, 4, 4), at(55, 4, 4)),
            joined(at(l), at(32 + l // 2, 4 * (l % 2), 3)),
            rows=rows["iq1_s"],
            column=j,
            factor=at(48 + 2 * (g // 2), 6 * (g % 2) + 3 * half, 3),
            factor_slope=2,
            factor_offset=1,
            delta=at(32 + l // 2, 4 * (l % 2) + 3, 1),
        ),
    }


def _others(iq4: NDArray[np.int64]) -> dict[str, Rule]:
    i = np.arange(256)
    g = i // 32
    # TQ1_0's planes: digit and byte of elements 0 to 159, 160 to 239, 240 to 255.
    digit = np.where(i < 160, i // 32, np.where(i < 240, (i - 160) // 16, (i - 240) // 4))
    byte = np.where(i < 160, i % 32, np.where(i < 240, 32 + i % 16, 48 + i % 4))
    return {
        "IQ4_XS": Rule(
            256,
            136,
            at(0, 0, 16),
            at(8 + 16 * g + i % 16, 4 * (i % 32 // 16), 4),
            values=iq4,
            factor=joined(at(4 + g // 2, 4 * (g % 2), 4), at(2, 2 * g, 2)),
            factor_offset=-32,
        ),
        "TQ1_0": Rule(256, 54, at(52, 0, 16), at(byte), digit=3**digit, code_offset=-1),
        "TQ2_0": Rule(256, 66, at(64, 0, 16), at(32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2), code_offset=-1),
    }


RULES: Mapping[str, Rule] = MappingProxyType(_rules())
"""Format name -> rule."""
