"""An independent decoder: plain Python, one element at a time, exact rational arithmetic, one rounding.

The test data's expected values come from here. It shares nothing with the decoders in ``onnx_dqp``: it has its own
description of the 27 formats and reads the codebook files, nothing else.

A value is a :class:`Number`: a rational with a sign, so that a zero has one, or an infinity, or NaN. Products and sums
follow IEEE 754 in all but rounding: they are exact. ``decode`` rounds the result once to FLOAT and then converts the
FLOAT once to the output type. (That is what FLOAT arithmetic gives: in every format but for the last operation, all
results are exact in FLOAT.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from importlib.resources import files

__all__ = ["BFLOAT16", "DOUBLE", "FLOAT", "FLOAT16", "FORMATS", "Binary", "Number", "decode"]


# --- Numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """A sign and a magnitude; the magnitude is None for an infinity. NaN has ``nan`` set."""

    negative: bool
    magnitude: Fraction | None
    nan: bool = False

    def __mul__(self, other: Number) -> Number:
        """The exact product; its sign is the exclusive or of the signs; 0 times infinity is NaN."""
        negative = self.negative != other.negative
        if self.nan or other.nan:
            return NAN
        if self.magnitude is None or other.magnitude is None:
            return NAN if self.magnitude == 0 or other.magnitude == 0 else Number(negative, None)
        return Number(negative, self.magnitude * other.magnitude)

    def __neg__(self) -> Number:
        """The same with the other sign, as IEEE 754's negate."""
        return Number(not self.negative, self.magnitude, self.nan)

    def __add__(self, other: Number) -> Number:
        """The exact sum; a zero sum is +0 unless both are -0; opposite infinities give NaN."""
        if self.nan or other.nan:
            return NAN
        if self.magnitude is None or other.magnitude is None:
            if self.magnitude is None and other.magnitude is None and self.negative != other.negative:
                return NAN
            return self if self.magnitude is None else other
        total = self.signed() + other.signed()
        if total == 0:
            return Number(self.negative and other.negative, Fraction(0))
        return Number(total < 0, abs(total))

    def __sub__(self, other: Number) -> Number:
        """The sum with the negated number."""
        return self + -other

    def signed(self) -> Fraction:
        """The rational, for a finite number."""
        assert self.magnitude is not None
        return -self.magnitude if self.negative else self.magnitude


NAN = Number(False, Fraction(0), nan=True)


@cache
def integer(value: int) -> Number:
    """An integer as a number; 0 is +0, as a converted integer is."""
    return Number(value < 0, Fraction(abs(value)))


def rational(numerator: int, denominator: int) -> Number:
    """A rational constant."""
    return Number(numerator < 0, Fraction(abs(numerator), denominator))


# --- Binary interchange formats ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binary:
    """An IEEE 754 binary interchange format (or BFLOAT16, built alike): 1 sign bit, exponent bits, fraction bits."""

    exponent_bits: int
    fraction_bits: int

    @property
    def bias(self) -> int:
        """The exponent's bias, which is also the largest exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """The bits of +infinity."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @lru_cache(maxsize=1 << 12)  # noqa: B019 - there are four of these
    def number(self, bits: int) -> Number:
        """The number that a bit pattern stands for, exactly."""
        fraction = bits & ((1 << self.fraction_bits) - 1)
        exponent = bits >> self.fraction_bits & ((1 << self.exponent_bits) - 1)
        negative = bool(bits >> (self.exponent_bits + self.fraction_bits))
        if exponent == (1 << self.exponent_bits) - 1:
            return NAN if fraction else Number(negative, None)
        if exponent:
            fraction |= 1 << self.fraction_bits
        scale = max(exponent, 1) - self.bias - self.fraction_bits
        magnitude = Fraction(fraction << scale) if scale >= 0 else Fraction(fraction, 1 << -scale)
        return Number(negative, magnitude)

    def round(self, number: Number) -> int:
        """The bits of the nearest value, ties to even, overflow to infinity; NaN gives the positive quiet NaN."""
        if number.nan:
            return self.infinity | 1 << (self.fraction_bits - 1)
        sign = int(number.negative) << (self.exponent_bits + self.fraction_bits)
        if number.magnitude is None:
            return sign | self.infinity
        if number.magnitude == 0:
            return sign
        # The exponent of the leading bit, not below that of the subnormals; values there are a unit apart.
        numerator, denominator = number.magnitude.numerator, number.magnitude.denominator
        exponent = numerator.bit_length() - denominator.bit_length()
        if numerator << max(-exponent, 0) < denominator << max(exponent, 0):
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        unit = exponent - self.fraction_bits
        units, rest = divmod(numerator << max(-unit, 0), denominator << max(unit, 0))
        below_half = (denominator << max(unit, 0)) - 2 * rest
        if below_half < 0 or (below_half == 0 and units % 2):
            units += 1
        # Units of at least 2**fraction_bits carry into the exponent field by themselves, to infinity at the top.
        return sign | min(((exponent + self.bias - 1) << self.fraction_bits) + units, self.infinity)


FLOAT16 = Binary(5, 10)
BFLOAT16 = Binary(8, 7)
FLOAT = Binary(8, 23)
DOUBLE = Binary(11, 52)


# --- Reading a block ---------------------------------------------------------------------------------------------


def f16(block: bytes, offset: int) -> Number:
    """A FLOAT16 field."""
    return FLOAT16.number(u16(block, offset))


def u16(block: bytes, offset: int) -> int:
    """A 16-bit field."""
    return block[offset] | block[offset + 1] << 8


def u32(block: bytes, offset: int) -> int:
    """A 32-bit field."""
    return u16(block, offset) | u16(block, offset + 2) << 16


def i8(block: bytes, offset: int) -> int:
    """A signed byte."""
    return int(struct.unpack_from("b", block, offset)[0])


def field(value: int, shift: int, width: int) -> int:
    """``width`` bits of an integer from bit ``shift`` on."""
    return value >> shift & ((1 << width) - 1)


def half(byte: int, high: int) -> int:
    """The low (0) or high (1) nibble of a byte."""
    return field(byte, 4 * high, 4)


# --- The formats -------------------------------------------------------------------------------------------------

Element = Callable[[bytes, int], Number]
"""Element i of a block, exactly."""


@dataclass(frozen=True)
class Format:
    """Elements and bytes per block, and the rule of an element."""

    elements: int
    bytes: int
    element: Element


FORMATS: dict[str, Format] = {}
"""Identifier -> Format; this module's own table."""


def packed(identifier: str, elements: int, size: int) -> Callable[[Element], Element]:
    """Add the rule of a format to the table."""

    def add(element: Element) -> Element:
        FORMATS[identifier] = Format(elements, size, element)
        return element

    return add


def decode(identifier: str, payload: bytes, output: Binary = FLOAT) -> Iterator[int]:
    """Decode a payload, element by element.

    Parameters
    ----------
    identifier
        A key of ``FORMATS``.
    payload
        Whole blocks.
    output
        ``FLOAT``, ``FLOAT16``, ``BFLOAT16`` or ``DOUBLE`` of this module.

    Yields
    ------
    The bits of each element; every NaN is the positive quiet NaN without a payload.

    Raises
    ------
    ValueError
        The identifier is unknown, or the payload is not whole blocks.
    """
    if identifier not in FORMATS:
        raise ValueError(f"unknown format {identifier!r}")
    rule = FORMATS[identifier]
    if len(payload) % rule.bytes:
        raise ValueError(f"{identifier}: the payload has {len(payload)} bytes, expected whole blocks of {rule.bytes}")
    for start in range(0, len(payload), rule.bytes):
        block = payload[start : start + rule.bytes]
        for i in range(rule.elements):
            bits = FLOAT.round(rule.element(block, i))
            yield bits if output is FLOAT else output.round(FLOAT.number(bits))


def split_nibble(block: bytes, offset: int, i: int) -> int:
    """The code of element i of 32: 16 low nibbles, then 16 high ones."""
    return half(block[offset + i % 16], i // 16)


@packed("gguf:q4_0", 32, 18)
def _(b: bytes, i: int) -> Number:
    return integer(split_nibble(b, 2, i) - 8) * f16(b, 0)


@packed("gguf:q4_1", 32, 20)
def _(b: bytes, i: int) -> Number:
    return integer(split_nibble(b, 4, i)) * f16(b, 0) + f16(b, 2)


@packed("gguf:q5_0", 32, 22)
def _(b: bytes, i: int) -> Number:
    code = split_nibble(b, 6, i) + 16 * field(u32(b, 2), i, 1)
    return integer(code - 16) * f16(b, 0)


@packed("gguf:q5_1", 32, 24)
def _(b: bytes, i: int) -> Number:
    code = split_nibble(b, 8, i) + 16 * field(u32(b, 4), i, 1)
    return integer(code) * f16(b, 0) + f16(b, 2)


@packed("gguf:q8_0", 32, 34)
def _(b: bytes, i: int) -> Number:
    return integer(i8(b, 2 + i)) * f16(b, 0)


@packed("gguf:q8_1", 32, 36)
def _(b: bytes, i: int) -> Number:
    return integer(i8(b, 4 + i)) * f16(b, 0)


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@packed("gguf:iq4_nl", 32, 18)
def _(b: bytes, i: int) -> Number:
    return f16(b, 0) * integer(IQ4_VALUES[split_nibble(b, 2, i)])


E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@packed("gguf:mxfp4", 32, 17)
def _(b: bytes, i: int) -> Number:
    scale = rational(1 << b[0], 1 << 128)
    return integer(E2M1_TWICE[split_nibble(b, 1, i)]) * scale


@packed("gguf:nvfp4", 64, 36)
def _(b: bytes, i: int) -> Number:
    s, j = divmod(i, 16)
    code = half(b[4 + 8 * s + j % 8], j // 8)
    exponent, mantissa = field(b[s], 3, 4), field(b[s], 0, 3)
    if b[s] in (0x00, 0x7F):
        scale = integer(0)
    elif exponent == 0:
        scale = rational(mantissa, 1 << 10)
    else:
        scale = rational((8 + mantissa) << exponent, 8 << 8)
    return integer(E2M1_TWICE[code]) * scale


@packed("gguf:q1_0", 128, 18)
def _(b: bytes, i: int) -> Number:
    return f16(b, 0) if field(b[2 + i // 8], i % 8, 1) else -f16(b, 0)


@packed("gguf:q2_0", 64, 18)
def _(b: bytes, i: int) -> Number:
    return integer(field(b[2 + i // 4], 2 * (i % 4), 2) - 1) * f16(b, 0)


# K-quants: sub-block s, element l in it.


def two_bits(b: bytes, offset: int, i: int) -> int:
    """Element i of 256: each 32 bytes hold 128 elements in four planes of two bits."""
    return field(b[offset + 32 * (i // 128) + i % 32], 2 * (i % 128 // 32), 2)


@packed("gguf:q2_k", 256, 84)
def _(b: bytes, i: int) -> Number:
    scale = b[i // 16]
    return (f16(b, 80) * integer(half(scale, 0))) * integer(two_bits(b, 16, i)) - f16(b, 82) * integer(half(scale, 1))


@packed("gguf:q3_k", 256, 110)
def _(b: bytes, i: int) -> Number:
    s = i // 16
    low = half(b[96 + s % 8], s // 8)
    high = field(b[96 + 8 + s % 4], 2 * (s // 4), 2)
    code = two_bits(b, 32, i) - (0 if field(b[i % 32], i // 32, 1) else 4)
    return (f16(b, 108) * integer(low + 16 * high - 32)) * integer(code)


def scale_and_min(b: bytes, s: int) -> tuple[int, int]:
    """Six bits each, from the 12 bytes at offset 4, for sub-block s of 8."""
    if s < 4:
        return field(b[4 + s], 0, 6), field(b[8 + s], 0, 6)
    packed_pair, high_scale, high_min = b[8 + s], b[s], b[4 + s]
    return half(packed_pair, 0) + 16 * field(high_scale, 6, 2), half(packed_pair, 1) + 16 * field(high_min, 6, 2)


def scaled_minus_min(b: bytes, s: int, code: int) -> Number:
    """Q4_K's and Q5_K's value."""
    scale, minimum = scale_and_min(b, s)
    return (f16(b, 0) * integer(scale)) * integer(code) - f16(b, 2) * integer(minimum)


@packed("gguf:q4_k", 256, 144)
def _(b: bytes, i: int) -> Number:
    s, l = divmod(i, 32)
    return scaled_minus_min(b, s, half(b[16 + 32 * (s // 2) + l], s % 2))


@packed("gguf:q5_k", 256, 176)
def _(b: bytes, i: int) -> Number:
    s, l = divmod(i, 32)
    code = half(b[48 + 32 * (s // 2) + l], s % 2) + 16 * field(b[16 + l], s, 1)
    return scaled_minus_min(b, s, code)


@packed("gguf:q6_k", 256, 210)
def _(b: bytes, i: int) -> Number:
    p, r, l = i // 128, i % 128 // 32, i % 32
    code = half(b[64 * p + 32 * (r % 2) + l], r // 2) + 16 * field(b[128 + 32 * p + l], 2 * r, 2)
    return (f16(b, 208) * integer(i8(b, 192 + i // 16))) * integer(code - 32)


@packed("gguf:q8_k", 256, 292)
def _(b: bytes, i: int) -> Number:
    return FLOAT.number(u32(b, 0)) * integer(i8(b, 4 + i))


# Codebook formats: row position l of eight elements, group g of four positions, r within the group.


@cache
def codebook(name: str) -> tuple[tuple[int, ...], ...]:
    """The rows of a codebook file."""
    text = files("onnx_dqp.codebooks").joinpath(f"{name}.txt").read_text(encoding="ascii")
    return tuple(tuple(map(int, line.split())) for line in text.splitlines() if not line.startswith("#"))


def sign(mask: int, j: int) -> Number:
    """-1 where bit j is set."""
    return integer(-1 if field(mask, j, 1) else 1)


def mask7(seven: int) -> int:
    """Seven stored sign bits and the eighth, which makes the number of ones even."""
    return seven | seven.bit_count() % 2 << 7


HALF, QUARTER, EIGHTH = rational(1, 2), rational(1, 4), rational(1, 8)


def iq2(d: Number, k: int, magnitude: int, negative: Number) -> Number:
    """The value in all three IQ2 formats."""
    return d * (HALF + integer(k)) * QUARTER * integer(magnitude) * negative


@packed("gguf:iq2_xxs", 256, 66)
def _(b: bytes, i: int) -> Number:
    g, r, j = i // 32, i % 32 // 8, i % 8
    w = u32(b, 6 + 8 * g)
    row = codebook("iq2_xxs")[b[2 + 8 * g + r]]
    return iq2(f16(b, 0), w >> 28, row[j], sign(mask7(field(w, 7 * r, 7)), j))


@packed("gguf:iq2_xs", 256, 74)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    w = u16(b, 2 + 2 * l)
    k = half(b[66 + l // 4], l % 4 // 2)
    return iq2(f16(b, 0), k, codebook("iq2_xs")[w & 511][j], sign(mask7(w >> 9), j))


@packed("gguf:iq2_s", 256, 82)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    g, r = divmod(l, 4)
    row = codebook("iq2_s")[b[2 + l] + 256 * field(b[66 + g], 2 * r, 2)]
    return iq2(f16(b, 0), half(b[74 + g], r // 2), row[j], sign(b[34 + l], j))


@packed("gguf:iq3_xxs", 256, 98)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    g, r = divmod(l, 4)
    w = u32(b, 66 + 4 * g)
    row = codebook("iq3_xxs")[b[2 + 2 * l + j // 4]]
    scale = f16(b, 0) * (HALF + integer(w >> 28)) * HALF
    return scale * integer(row[j % 4]) * sign(mask7(field(w, 7 * r, 7)), j)


@packed("gguf:iq3_s", 256, 110)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    g, r = divmod(l, 4)
    index = b[2 + 2 * l + j // 4] + 256 * field(b[66 + g], 2 * r + j // 4, 1)
    k = half(b[106 + g // 2], g % 2)
    scale = f16(b, 0) * integer(1 + 2 * k)
    return scale * integer(codebook("iq3_s")[index][j % 4]) * sign(b[74 + l], j)


def iq1(d: Number, k: int, value: int, delta_negative: int) -> Number:
    """The value in both IQ1 formats."""
    delta = -EIGHTH if delta_negative else EIGHTH
    return d * integer(2 * k + 1) * (integer(value) + delta)


@packed("gguf:iq1_s", 256, 50)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    g, r = divmod(l, 4)
    h = u16(b, 34 + 2 * g)
    row = codebook("iq1_s")[b[2 + l] + 256 * field(h, 3 * r, 3)]
    return iq1(f16(b, 0), field(h, 12, 3), row[j], field(h, 15, 1))


@packed("gguf:iq1_m", 256, 56)
def _(b: bytes, i: int) -> Number:
    l, j = divmod(i, 8)
    g, r = divmod(l, 4)
    scales = [u16(b, 48 + 2 * n) for n in range(4)]
    d = FLOAT16.number(sum((scale >> 12) << 4 * n for n, scale in enumerate(scales)))
    k = field(scales[g // 2], 6 * (g % 2) + 3 * (r // 2), 3)
    n = half(b[32 + l // 2], l % 2)
    row = codebook("iq1_s")[b[l] + 256 * (n & 7)]
    return iq1(d, k, row[j], n >> 3)


@packed("gguf:iq4_xs", 256, 136)
def _(b: bytes, i: int) -> Number:
    g = i // 32
    scale = half(b[4 + g // 2], g % 2) + 16 * field(u16(b, 2), 2 * g, 2) - 32
    code = split_nibble(b, 8 + 16 * g, i % 32)
    return (f16(b, 0) * integer(scale)) * integer(IQ4_VALUES[code])


# Ternary formats.


@packed("gguf:tq1_0", 256, 54)
def _(b: bytes, i: int) -> Number:
    if i < 160:
        n, byte = i // 32, b[i % 32]
    elif i < 240:
        n, byte = (i - 160) // 16, b[32 + (i - 160) % 16]
    else:
        n, byte = (i - 240) // 4, b[48 + (i - 240) % 4]
    digit = byte * 3**n % 256 * 3 >> 8
    return integer(digit - 1) * f16(b, 52)


@packed("gguf:tq2_0", 256, 66)
def _(b: bytes, i: int) -> Number:
    return integer(two_bits(b, 0, i) - 1) * f16(b, 64)
