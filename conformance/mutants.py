"""The suite's own score: wrong decoders, made systematically, that the committed cases must catch.

A mutant is the table decoder with one thing changed: a field of its rule, the arithmetic, the conversion, or the order
of rows and blocks. A case kills it where its output differs by type, shape or a bit. What is equivalent on all inputs
is no mutant; ``_EXACT`` and the comments beside the kinds say where that is so and why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from conformance.cases.case import TYPE_NAMES
from conformance.table_decoder import Stored
from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.anatomy import RULES, Bits, Rule, at, joined
from onnx_dqp.rules import OUTPUT_DTYPES

Array = NDArray[Any]
FLOAT, FLOAT16 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)
BFLOAT16, DOUBLE = int(TensorProto.BFLOAT16), int(TensorProto.DOUBLE)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A wrong decoder of one format.

    Attributes
    ----------
    kind, name
        What is wrong, generally and exactly; the name is unique in a format.
    rule
        The rule to decode by.
    dtype, stored
        Arithmetic, and what becomes of scales as they are read.
    only
        The output type for which ``dtype`` is used; None for all.
    finish
        From decoded values (blocks, elements), the case's shape and output type to the output.
    octets
        What becomes of the payload first.
    """

    kind: str
    name: str
    rule: Rule
    dtype: Any = np.float32
    only: int | None = None
    stored: Stored = lambda scale: scale
    finish: Callable[[Array, tuple[int, ...], int], Array] = lambda y, shape, to: converted(y, to).reshape(shape)
    octets: Callable[[bytes], bytes] | None = None


def converted(y: Array, output_dtype: int) -> Array:
    """One conversion, as it should be."""
    return y.astype(np.float32).astype(OUTPUT_DTYPES[output_dtype])


# --- Kinds ---------------------------------------------------------------------------------------------------------

_FIELDS = ("scale", "factor", "code", "sign", "delta", "minimum", "minimum_factor")


def mutants(format: PackedFormat) -> Iterator[Mutant]:
    """All mutants of a format."""
    rule = RULES[format.name]
    yielded = {_fingerprint(rule)}
    for kind, name, changed in (
        *_of_bits(format, rule),
        *_of_element_order(rule),
        *_of_constants(rule),
        *_of_tables(rule),
        *_of_sub_blocks(rule),
        *_of_signs(rule),
        *_seen(format, rule),
    ):
        # Several ways of being wrong may be the same in a format: each rule counts once, under its first name.
        if (fingerprint := _fingerprint(changed)) not in yielded:
            yielded.add(fingerprint)
            yield Mutant(kind, name, changed)
    yield from _of_scales(format, rule)
    yield from _of_arithmetic(format, rule)
    yield from _of_conversion(format, rule)
    yield from _of_order(rule)
    if format.name == "Q8_1":
        # d and s as FLOATs: 40 bytes a block. There are too few bytes then: the payload is filled up.
        wide = replace(rule, bytes=40, scale=at(0, 0, 32), scale_dtype="f4", code=at(8 + np.arange(32)))
        filled = Mutant("seen in public decoders", "40 bytes a block", wide, octets=lambda x: x + bytes(len(x) // 9))
        yield filled
    if rule.rows is not None:
        yield from _of_rows(rule)


Change = tuple[str, str, Rule]


def _fingerprint(rule: Rule) -> tuple[Any, ...]:
    """What two rules that decode alike in form have in common."""
    parts: list[Any] = []
    for value in vars(rule).values():
        if isinstance(value, np.ndarray):
            parts.append((value.shape, value.astype(np.float64).tobytes()))
        elif isinstance(value, tuple):
            parts.append(tuple(map(float, value)))
        else:
            parts.append(value)
    return tuple(parts)


def _fields(rule: Rule) -> Iterator[tuple[str, Bits]]:
    for name in _FIELDS:
        bits = getattr(rule, name)
        if bits is not None:
            yield name, bits


def _of_bits(format: PackedFormat, rule: Rule) -> Iterator[Change]:
    """Fields read from the wrong bits."""
    end, zero = 8 * rule.bytes, 8 * rule.bytes
    for name, bits in _fields(rule):
        real = bits < end
        for by, what in ((8, "a byte late"), (-8, "a byte early"), (16, "two bytes late"), (-16, "two bytes early")):
            yield "offset", f"{name} {what}", _with(rule, name, np.where(real, (bits + by) % end, bits))
        for by, what in ((1, "a bit late"), (-1, "a bit early")):
            yield "shift", f"{name} {what}", _with(rule, name, np.where(real, (bits + by) % end, bits))
        if name != "sign":
            for column, what in ((-1, "highest"), (0, "lowest")):
                cut = bits.copy()
                cut[:, column] = zero
                yield "mask", f"{name} without its {what} bit", _with(rule, name, cut)
        if bits.shape[1] > 1 and name != "sign":
            yield "bit order", f"{name} reversed", _with(rule, name, bits[:, ::-1])
        yield "nibble order", f"{name} from the other nibble", _with(rule, name, np.where(real, bits ^ 4, bits))
        yield (
            "byte order",
            f"{name} from the neighbouring byte",
            _with(rule, name, np.where(real, (bits ^ 8) % end, bits)),
        )
    for field, positions in _multibyte(format):
        changed: dict[str, Any] = {
            name: np.where(np.isin(bits, list(positions)), _mapped(bits, positions), bits)
            for name, bits in _fields(rule)
        }
        if any((changed[name] != bits).any() for name, bits in _fields(rule)):
            yield "endianness", f"{field} big-endian", replace(rule, **changed)


def _multibyte(format: PackedFormat) -> Iterator[tuple[str, dict[int, int]]]:
    """Each multibyte field of the layout, with the bit position that a big-endian reader takes for each."""

    def walk(layout: Any, base: int, prefix: str) -> Iterator[tuple[str, int, int]]:
        for name in layout.names:
            item, offset = layout.fields[name][:2]
            count = int(np.prod(item.shape, dtype=int))
            for i in range(count):
                start = base + offset + i * item.base.itemsize
                if item.base.names:
                    yield from walk(item.base, start, f"{prefix}{name}.")
                elif item.base.itemsize > 1:
                    yield f"{prefix}{name}", start, item.base.itemsize

    found: dict[str, dict[int, int]] = defaultdict(dict)
    for name, start, size in walk(format.layout, 0, ""):
        for byte in range(size):
            for bit in range(8):
                found[name][8 * (start + byte) + bit] = 8 * (start + size - 1 - byte) + bit
    yield from found.items()


def _mapped(bits: Bits, positions: dict[int, int]) -> Bits:
    mapped: Bits = np.vectorize(lambda p: positions.get(int(p), int(p)), otypes=[np.int64])(bits)
    return mapped


def _with(rule: Rule, name: str, bits: Bits) -> Rule:
    return replace(rule, **{name: bits})  # type: ignore[arg-type]


def _of_element_order(rule: Rule) -> Iterator[Change]:
    """Codes given to the wrong elements, and with them what belongs to each code."""
    elements = np.arange(rule.elements)
    orders = {
        "reversed": elements[::-1],
        "neighbours exchanged": elements ^ 1,
        "half-blocks exchanged": (elements + rule.elements // 2) % rule.elements,
    }
    for size in (16, 32, 64, 128, 256):
        if size <= rule.elements:
            inside, group = elements % size, elements - elements % size
            orders[f"in pairs instead of halves of {size}"] = group + inside // 2 + inside % 2 * (size // 2)
            orders[f"halves of {size} exchanged"] = group + (inside + size // 2) % size
    for what, order in orders.items():
        if (order != elements).any():
            changed: dict[str, Any] = {"code": rule.code[order]}
            if rule.rows is not None and rule.column is not None:
                changed["column"] = rule.column[order]
            if rule.digit is not None:
                changed["digit"] = rule.digit[order]
            yield "element order", what, replace(rule, **changed)


def _of_constants(rule: Rule) -> Iterator[Change]:
    """Constants off by one, doubled, halved or dropped."""
    for by in (1, -1):
        yield "constant", f"code offset {by:+d}", replace(rule, code_offset=rule.code_offset + by)
    if rule.code_offset:
        yield "constant", "code offset dropped", replace(rule, code_offset=0)
        yield "constant", "code offset added twice", replace(rule, code_offset=2 * rule.code_offset)
    if rule.factor is not None:
        for step in (1, -1, 0.5, -0.5):
            yield "constant", f"scale offset {step:+}", replace(rule, factor_offset=rule.factor_offset + step)
        for slope in {1, 2, 3} - {rule.factor_slope}:
            yield "constant", f"scale slope {slope}", replace(rule, factor_slope=slope)
        if rule.factor_offset:
            yield "constant", "scale offset dropped", replace(rule, factor_offset=0)
        signed = not rule.factor_signed
        yield "constant", f"sub-scale {'signed' if signed else 'unsigned'}", replace(rule, factor_signed=signed)
        yield "constant", "sub-scale dropped", replace(rule, factor=None)
    for factor in (2, 0.5, 4, 0.25):
        yield "constant", f"value times {factor}", replace(rule, constants=(*rule.constants, factor))
    for i in range(len(rule.constants)):
        kept = rule.constants[:i] + rule.constants[i + 1 :]
        yield "constant", f"constant {rule.constants[i]} dropped", replace(rule, constants=kept)
    if rule.rows is None and rule.values is None and rule.digit is None and rule.code.shape[1] > 1:
        signed = not rule.code_signed
        yield "constant", f"code {'signed' if signed else 'unsigned'}", replace(rule, code_signed=signed)
    if rule.delta is not None:
        for size in (0.25, 0.0625, 0.0, -0.125):
            yield "constant", f"delta {size}", replace(rule, delta_size=size)
    if rule.minimum is not None:
        yield "minimum", "of the other sign", replace(rule, minimum_sign=-rule.minimum_sign)
        yield "minimum", "dropped", replace(rule, minimum=None)
        if rule.minimum_factor is not None:
            yield "minimum", "without its factor", replace(rule, minimum_factor=None)
            yield "minimum", "with the scale's factor", replace(rule, minimum_factor=rule.factor)
            yield (
                "minimum",
                "and scale factors exchanged",
                replace(rule, factor=rule.minimum_factor, minimum_factor=rule.factor),
            )
        yield "minimum", "and scale exchanged", replace(rule, scale=rule.minimum, minimum=rule.scale)
    if rule.digit is not None:
        yield "constant", "digit of the next power", replace(rule, digit=rule.digit * 3)
        yield "constant", "digit of the lowest power first", replace(rule, digit=rule.digit.max() // rule.digit)


def _of_tables(rule: Rule) -> Iterator[Change]:
    """One entry of a value or scale table changed."""
    if rule.values is not None:
        for i in range(len(rule.values)):
            values = rule.values.copy()
            values[i] += 1
            yield "table entry", f"value {i}", replace(rule, values=values)
        if len(rule.values) == 16 and rule.values[8] == 0:
            signed = rule.values.astype(np.float64)
            signed[8] = -0.0
            yield "table entry", "code 8 is -0", replace(rule, values=signed)  # type: ignore[arg-type]
    if rule.scale_table is not None:
        for i in range(256):
            table = rule.scale_table.copy()
            table[i] = np.nextafter(table[i], np.float32(np.inf), dtype=np.float32) if table[i] < 1e38 else table[i] / 2
            yield "table entry", f"scale byte {i}", replace(rule, scale_table=table)


def _of_sub_blocks(rule: Rule) -> Iterator[Change]:
    """A sub-block's scale or minimum exchanged with its neighbour's."""
    for name in ("factor", "minimum_factor", "scale"):
        bits = getattr(rule, name)
        if bits is None or len(bits) == 1:
            continue
        edges = np.flatnonzero((bits[1:] != bits[:-1]).any(axis=1)) + 1
        starts = [0, *edges.tolist(), len(bits)]
        for number, (first, second) in enumerate(pairwise(starts[:-1])):
            size = second - first
            order = np.arange(len(bits))
            order[first : second + size] = np.roll(order[first : second + size], size)
            yield (
                "sub-block",
                f"{name} of sub-blocks {number} and {number + 1} exchanged",
                _with(rule, name, bits[order]),
            )


def _of_signs(rule: Rule) -> Iterator[Change]:
    yield "sign", "of all values inverted", replace(rule, constants=(*rule.constants, -1.0))
    if rule.sign is None:
        return
    zero, one = 8 * rule.bytes, 8 * rule.bytes + 1
    column = np.arange(rule.elements) % 8
    yield "sign", "bits ignored", replace(rule, sign=None)
    reverse = np.arange(rule.elements) ^ 7
    yield "sign", "bits from the top", replace(rule, sign=rule.sign[reverse])
    if rule.sign.shape[1] > 1:
        implied = (column == 7)[:, np.newaxis]
        yield "sign", "without the implied one", replace(rule, sign=np.where(implied, zero, rule.sign))
        odd = joined(rule.sign, np.where(implied, one, zero))
        yield "sign", "with the number of ones odd", replace(rule, sign=odd)
        for j in range(7):
            fewer = rule.sign.copy()
            fewer[column == 7, j] = zero
            yield "sign", f"implied by all but bit {j}", replace(rule, sign=fewer)
    for j in range(8):
        flipped = joined(rule.sign, np.where(column == j, one, zero)[:, np.newaxis])
        yield "sign", f"of element {j} of each row inverted", replace(rule, sign=flipped)


def _seen(format: PackedFormat, rule: Rule) -> Iterator[Change]:
    """Bugs of public decoders, where the systematic kinds do not make them; and unused fields used."""
    kind = "seen in public decoders"
    i = np.arange(rule.elements)
    if format.name == "MXFP4":
        assert rule.scale_table is not None
        assert rule.values is not None
        yield kind, "E2M1 values not doubled, scale as if", replace(rule, constants=(0.5,))
        yield kind, "scale twice as large", replace(rule, constants=(2.0,))
        nan = rule.scale_table.copy()
        nan[255] = np.nan
        yield kind, "scale byte 255 is NaN", replace(rule, scale_table=nan)
        flushed = rule.scale_table.copy()
        flushed[:2] = 0
        yield kind, "subnormal scales are 0", replace(rule, scale_table=flushed)
        for byte in (0, 1):
            shifted = rule.scale_table.copy()
            shifted[byte] = shifted[2]
            yield kind, f"scale byte {byte} is the smallest normal number", replace(rule, scale_table=shifted)
    if format.name == "NVFP4":
        assert rule.scale_table is not None
        exponent, mantissa = np.arange(256) >> 3 & 15, np.arange(256) & 7
        unbiased = np.ldexp(1 + mantissa / 8, exponent).astype(np.float32)
        yield kind, "exponent not rebiased", replace(rule, scale_table=unbiased)
        full = rule.scale_table.copy()
        full[0x7F] = 240
        yield kind, "0x7F is a number", replace(rule, scale_table=full)
        signed = rule.scale_table.copy()
        signed[128:] *= -1
        yield kind, "bit 7 is a sign", replace(rule, scale_table=signed)
        nan = rule.scale_table.copy()
        nan[[0x7F, 0xFF]] = np.nan
        yield kind, "0x7F and 0xFF are NaN", replace(rule, scale_table=nan)
        no_subnormal = rule.scale_table.copy()
        no_subnormal[exponent == 0] = 0
        yield kind, "subnormal scale bytes are 0", replace(rule, scale_table=no_subnormal)
        yield kind, "the first scale for all sub-blocks", replace(rule, scale=at(0))
    if format.name == "Q5_K":
        s, l = i // 32, i % 32
        for what, high in (
            ("advanced with the pairs of sub-blocks", at(16 + 32 * (s // 2) + l, s % 2, 1)),
            ("advanced with the pairs, the bit moving too", at(16 + 32 * (s // 2) + l, s, 1)),
            ("not moving with the sub-blocks", at(16 + l, s % 2, 1)),
        ):
            yield kind, f"plane of high bits {what}", replace(rule, code=joined(rule.code[:, :4], high))
    unused = {"Q8_1": at(2, 0, 16), "Q8_K": at(260 + 2 * (i // 16), 0, 16)}
    if format.name in unused:
        bits = unused[format.name]
        yield "unused field", "added", replace(rule, minimum=bits, minimum_sign=1)
        yield "unused field", "subtracted", replace(rule, minimum=bits)
        yield "unused field", "multiplied", replace(rule, factor=bits, factor_signed=True)
        yield "unused field", "taken for the scale", replace(rule, scale=bits, scale_dtype="f2")


def _of_scales(format: PackedFormat, rule: Rule) -> Iterator[Mutant]:
    """Special scales "sanitized". A scale that is a byte is never infinite or NaN, and NVFP4's is never subnormal."""

    def where(condition: Callable[[Array], Array], value: float) -> Stored:
        return lambda scale: np.where(condition(scale), np.copysign(value, scale), scale).astype(scale.dtype)

    def subnormal(scale: Array) -> Array:
        small: Array = (np.abs(scale) < np.finfo(scale.dtype).tiny) & (scale != 0)
        return small

    # NaN has no sign that counts: 0 is put in its place, not a signed one.
    if rule.scale_table is None:
        largest = float(np.finfo(rule.scale_dtype).max)
        ways: tuple[tuple[str, Stored], ...] = (
            ("NaN becomes 0", lambda scale: np.where(np.isnan(scale), 0, scale).astype(scale.dtype)),
            ("infinite becomes 0", where(np.isinf, 0)),
            ("infinite becomes the largest number", where(np.isinf, largest)),
            ("infinite becomes NaN", where(np.isinf, np.nan)),
            ("sign of zero lost", lambda scale: scale + np.zeros((), scale.dtype)),
            ("sign lost", np.abs),
            ("zero becomes one", lambda scale: np.where(scale == 0, np.copysign(1, scale), scale).astype(scale.dtype)),
            ("subnormal becomes 0", where(subnormal, 0)),
            ("subnormal becomes the smallest normal number", where(subnormal, float(np.finfo(rule.scale_dtype).tiny))),
        )
        for name, stored in ways:
            yield Mutant("scale", name, rule, stored=stored)
    elif format.name == "MXFP4":
        yield Mutant("scale", "subnormal becomes 0", rule, stored=where(subnormal, 0))


# Formats whose values are exact in a type, whatever the payload (infinite where they are beyond its range): a FLOAT16
# scale times -1, 0, 1 or 2 is a FLOAT16, up to overflow. NVFP4's values have at most 2 + 4 significant bits and lie on
# multiples of 2^-10 up to 2880, MXFP4's have 2, and are BFLOAT16 numbers down to its subnormals.
_EXACT = {
    FLOAT16: frozenset({"Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "NVFP4"}),
    BFLOAT16: frozenset({"MXFP4", "NVFP4"}),
}

# Formats in which FLOAT arithmetic rounds or overflows; all others are exact in FLOAT, and so the same in DOUBLE.
_ROUNDED_IN_FLOAT = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "Q8_K", "MXFP4"})

# Formats that are the same in the type's arithmetic for all outputs: their scales and products are numbers of it. (Q2_0
# and TQ2_0 are not: twice the largest FLOAT16 overflows there.)
_SAME_ARITHMETIC = {FLOAT16: frozenset({"Q1_0", "TQ1_0", "NVFP4"}), BFLOAT16: frozenset({"NVFP4", "MXFP4"})}

# Formats that are the same in it for outputs of that type: one product of numbers of the type is rounded once, as its
# exact FLOAT is; and a BFLOAT16 scale times -1, 0, 1 or 2 is as well rounded before as after.
_SAME_FOR_ITSELF = {
    FLOAT16: frozenset({"Q4_0", "Q5_0", "Q8_0", "Q8_1", "IQ4_NL"}),
    BFLOAT16: frozenset({"Q1_0", "Q2_0", "TQ1_0", "TQ2_0"}),
}


def _of_arithmetic(format: PackedFormat, rule: Rule) -> Iterator[Mutant]:
    """Decoding in another type than FLOAT."""
    for output_dtype, dtype in ((FLOAT16, np.float16), (BFLOAT16, ml_dtypes.bfloat16)):
        if format.name not in _SAME_ARITHMETIC[output_dtype]:
            name = TYPE_NAMES[output_dtype]
            yield Mutant("arithmetic", f"in {name} for all outputs", rule, dtype)
            if format.name not in _EXACT[output_dtype] | _SAME_FOR_ITSELF[output_dtype]:
                yield Mutant("arithmetic", f"in {name} for {name} outputs", rule, dtype, output_dtype)
    if format.name in _ROUNDED_IN_FLOAT:
        # For FLOAT outputs that is the same: FLOAT arithmetic rounds once and last, and DOUBLE arithmetic is exact
        # (sums are multiples of 2^-24 below 2^28, Q8_K's products have 24 + 7 bits).
        yield Mutant("arithmetic", "in double for double outputs", rule, np.float64, DOUBLE, finish=_directly)
    if format.name in _ROUNDED_IN_FLOAT - {"MXFP4"}:  # MXFP4 only overflows, beyond either type's range
        for output_dtype in (FLOAT16, BFLOAT16):
            name = f"in double for {TYPE_NAMES[output_dtype]} outputs, rounded once"
            yield Mutant("arithmetic", name, rule, np.float64, output_dtype, finish=_directly)


def _directly(y: Array, shape: tuple[int, ...], to: int) -> Array:
    """From DOUBLE values to the output type in one rounding (subnormal results aside, which are rounded twice)."""
    if y.dtype != np.float64:
        return converted(y, to).reshape(shape)
    if to == DOUBLE:
        return y.reshape(shape)
    near = y.astype(np.float32)
    if to in (FLOAT16, BFLOAT16):
        # A FLOAT that is a tie of the type goes to the side of the value it was rounded from.
        dropped = 13 if to == FLOAT16 else 16
        tie = near.view(np.uint32) & np.uint32((1 << dropped) - 1) == np.uint32(1 << (dropped - 1))
        towards = np.where(y > near, np.inf, -np.inf).astype(np.float32)
        near = np.where(tie & (y != near), np.nextafter(near, towards), near)
    return converted(near, to).reshape(shape)


def _of_conversion(format: PackedFormat, rule: Rule) -> Iterator[Mutant]:
    """Wrong conversions of the right FLOATs."""
    for output_dtype in (FLOAT16, BFLOAT16):
        name = TYPE_NAMES[output_dtype]
        ways = _conversions(output_dtype)
        if format.name in _EXACT[output_dtype]:
            # Nothing is rounded but what overflows: twice the largest FLOAT16 scales, in Q2_0 and TQ2_0.
            keep = {"sign of zero lost", "rounded twice"}
            if format.name not in ("NVFP4", "MXFP4"):
                keep |= {"NaN becomes 0", "subnormal results flushed"}
            if format.name in ("Q2_0", "TQ2_0"):
                keep |= {"saturated", "truncated"}
            if format.name == "MXFP4":
                keep |= {"subnormal results flushed"}
            ways = {way: convert for way, convert in ways.items() if way in keep}
        if rule.scale_table is not None:
            ways.pop("NaN becomes 0", None)  # there is none
        if format.name == "MXFP4" and output_dtype == BFLOAT16:
            ways.pop("sign of zero lost", None)  # there is no -0
        other = FLOAT16 if output_dtype == BFLOAT16 else BFLOAT16
        if format.name in _SAME_ARITHMETIC[other]:
            ways.pop("rounded twice", None)  # all values are numbers of the other type
        if output_dtype == BFLOAT16 and format.name not in ("Q8_K", "MXFP4"):
            # FLOAT16 scales give neither FLOATs beyond BFLOAT16's range nor subnormal ones.
            ways = {way: c for way, c in ways.items() if way not in ("saturated", "subnormal results flushed")}
        for way, convert in ways.items():

            def finish(
                y: Array, shape: tuple[int, ...], to: int, convert: Any = convert, only: int = output_dtype
            ) -> Array:
                return (convert(y) if to == only else converted(y, to)).reshape(shape)

            yield Mutant("conversion", f"to {name}: {way}", rule, finish=finish)

    def by_way_of(dtype: Any) -> Callable[[Array, tuple[int, ...], int], Array]:
        return lambda y, shape, to: (y.astype(dtype).astype(np.float64) if to == DOUBLE else converted(y, to)).reshape(
            shape
        )

    for output_dtype, dtype in ((FLOAT16, np.float16), (BFLOAT16, ml_dtypes.bfloat16)):
        if format.name not in _EXACT[output_dtype] or (format.name in ("Q2_0", "TQ2_0") and output_dtype == FLOAT16):
            name = f"to double by way of {TYPE_NAMES[output_dtype]}"
            yield Mutant("conversion", name, rule, finish=by_way_of(dtype))
    yield Mutant(
        "conversion", "output type ignored", rule, finish=lambda y, shape, _: converted(y, FLOAT).reshape(shape)
    )
    for output_dtype in (FLOAT, DOUBLE) if format.name != "MXFP4" else ():  # MXFP4 has no -0

        def zeros(y: Array, shape: tuple[int, ...], to: int, only: int = output_dtype) -> Array:
            out = converted(y, to).reshape(shape)
            return out + np.zeros((), out.dtype) if to == only else out

        yield Mutant("conversion", f"to {TYPE_NAMES[output_dtype]}: sign of zero lost", rule, finish=zeros)
    if format.name in ("Q8_K", "MXFP4"):  # the only ones with subnormal FLOATs
        yield Mutant(
            "conversion",
            "subnormal FLOATs flushed",
            rule,
            finish=lambda y, shape, to: converted(np.where(np.abs(y) < 2.0**-126, np.copysign(0, y), y), to).reshape(
                shape
            ),
        )


def _conversions(output_dtype: int) -> dict[str, Callable[[Array], Array]]:
    """Ways to get FLOAT16 or BFLOAT16 wrong."""
    dtype = OUTPUT_DTYPES[output_dtype]
    limits: Any = ml_dtypes.finfo
    largest, tiny = float(limits(dtype).max), float(limits(dtype).smallest_normal)
    other = ml_dtypes.bfloat16 if output_dtype == FLOAT16 else np.float16

    def neighbours(y: Array) -> tuple[Array, Array, Array, Array]:
        """The nearest value, the one below in magnitude and the one above, and the FLOAT's place between them."""
        near = y.astype(dtype)
        bits = near.view(np.uint16)
        beyond = np.abs(near.astype(np.float32)) > np.abs(y)
        low = np.where(beyond, bits - 1, bits).astype(np.uint16)
        high = (low + 1).astype(np.uint16)
        below, above = (np.abs(b.view(dtype).astype(np.float64)) for b in (low, high))
        above = np.where(np.isinf(above), 2 * largest - np.abs((low - 1).astype(np.uint16).view(dtype)), above)
        place = (np.abs(y.astype(np.float64)) - below) / (above - below)
        return bits, low, high, np.where(np.isfinite(y) & (np.abs(y) < 2 * largest), place, np.nan)

    def ties(up: bool) -> Callable[[Array], Array]:
        def convert(y: Array) -> Array:
            bits, low, high, place = neighbours(y)
            return np.where(place == 0.5, high if up else low, bits).view(dtype)

        return convert

    def truncate(y: Array) -> Array:
        bits, low, _, place = neighbours(y)
        return np.where(np.isnan(place), bits, low).view(dtype)

    def away(y: Array) -> Array:
        bits, _, high, place = neighbours(y)
        return np.where(place > 0, high, bits).view(dtype)

    def saturate(y: Array) -> Array:
        out = y.astype(dtype)
        finite = np.isinf(out.astype(np.float32)) & np.isfinite(y)
        return np.where(finite, np.copysign(largest, y).astype(dtype), out)

    def flush(y: Array) -> Array:
        out = y.astype(dtype)
        small = np.abs(out.astype(np.float32)) < tiny
        return np.where(small, np.copysign(0, y).astype(dtype), out)

    def unsigned_zero(y: Array) -> Array:
        out = y.astype(dtype)
        return np.where(out == 0, np.zeros((), dtype), out)

    def no_nan(y: Array) -> Array:
        out = y.astype(dtype)
        return np.where(np.isnan(out), np.zeros((), dtype), out)

    return {
        "truncated": truncate,
        "rounded away from zero": away,
        "ties away from zero": ties(up=True),
        "ties towards zero": ties(up=False),
        "saturated": saturate,
        "subnormal results flushed": flush,
        "sign of zero lost": unsigned_zero,
        "NaN becomes 0": no_nan,
        "rounded twice": lambda y: y.astype(other).astype(np.float32).astype(dtype),
    }


def _of_order(rule: Rule) -> Iterator[Mutant]:
    """Rows and blocks in another order, blocks left out, shapes that are not the case's."""

    def reordered(change: Callable[[Array, tuple[int, ...]], Array]) -> Callable[[Array, tuple[int, ...], int], Array]:
        return lambda y, shape, to: converted(change(y, shape), to).reshape(shape)

    def by_rows(y: Array, shape: tuple[int, ...]) -> Array:
        return y.reshape(-1, shape[-1]) if y.size else y

    def without_rest(by: int) -> Callable[[Array, tuple[int, ...]], Array]:
        def change(y: Array, shape: tuple[int, ...]) -> Array:  # noqa: ARG001
            kept = y.copy()
            kept[len(y) // by * by :] = 0
            return kept

        return change

    def columns_first(y: Array, shape: tuple[int, ...]) -> Array:
        if not y.size:
            return y
        blocks = y.reshape(-1, shape[-1] // rule.elements, rule.elements)
        return np.ascontiguousarray(blocks.reshape(blocks.shape[1], blocks.shape[0], -1).swapaxes(0, 1))

    def without_vector_rest(by: int) -> Callable[[Array, tuple[int, ...]], Array]:
        """Blocks that do not fill a vector of ``by`` are left out where there is a whole one."""
        return lambda y, shape: without_rest(by)(y, shape) if len(y) >= by else y

    def by_row(change: Callable[[Array], Array]) -> Callable[[Array, tuple[int, ...]], Array]:
        """A change of the blocks of each row: (rows, blocks, elements) to the same."""
        return lambda y, shape: change(y.reshape(-1, shape[-1] // rule.elements, rule.elements)) if y.size else y

    def row_rest(by: int) -> Callable[[Array], Array]:
        def change(rows: Array) -> Array:
            kept = rows.copy()
            if rows.shape[1] >= by:
                kept[:, rows.shape[1] // by * by :] = 0
            return kept

        return change

    def last_two_exchanged(rows: Array) -> Array:
        order = np.arange(rows.shape[1])
        if len(order) >= 4:
            order[-2:] = order[-2:][::-1]
        return rows[:, order]

    def axes_exchanged(y: Array, shape: tuple[int, ...]) -> Array:
        return y.reshape(shape).swapaxes(1, 2).copy() if len(shape) >= 4 else y

    for name, change in (
        ("blocks from 256 on left out", lambda y, _: np.where(np.arange(len(y))[:, np.newaxis] < 256, y, 0)),
        ("elements counted in 16 bits", lambda y, _: y.ravel()[np.arange(y.size) % (1 << 16)]),
        ("the last two blocks of a row exchanged", by_row(last_two_exchanged)),
        ("second and third axis exchanged", axes_exchanged),
        *((f"rest of a vector of {by} blocks left out", without_vector_rest(by)) for by in (4, 8, 16, 32, 64)),
        *((f"rest of a row after vectors of {by} blocks left out", by_row(row_rest(by))) for by in (2, 3, 4)),
        ("rows from the last", lambda y, shape: by_rows(y, shape)[::-1].copy()),
        ("blocks from the last", lambda y, _: y[::-1].copy()),
        ("elements from the last", lambda y, _: y[::-1, ::-1].copy()),
        ("blocks by columns", columns_first),
        ("first block for all", lambda y, _: y[np.zeros(len(y), int)]),
        ("the last block left out", lambda y, _: np.concatenate([y[:-1], np.zeros_like(y[-1:])])),
        *((f"blocks beyond a multiple of {by} left out", without_rest(by)) for by in (2, 4, 8, 16, 32, 64)),
    ):
        yield Mutant("order", name, rule, finish=reordered(change))
    for name, make in (
        ("shape reversed", lambda shape: shape[::-1]),
        ("shape flat", lambda _: (-1,)),
        (
            "leading ones dropped",
            lambda shape: shape[next((i for i, d in enumerate(shape[:-1]) if d != 1), len(shape) - 1) :],
        ),
        ("all ones dropped", lambda shape: tuple(d for d in shape if d != 1)),
        ("leading dimensions joined", lambda shape: (int(np.prod(shape[:-1], dtype=int)), shape[-1])),
    ):

        def finish(y: Array, shape: tuple[int, ...], to: int, make: Any = make) -> Array:
            return converted(y, to).reshape(make(shape) if y.size or make(shape) != (-1,) else (0,))

        yield Mutant("order", name, rule, finish=finish)
    yield Mutant(
        "order", "transposed data", rule, finish=lambda y, shape, to: converted(y, to).reshape(shape[::-1]).T.copy()
    )


def _of_rows(rule: Rule) -> Iterator[Mutant]:
    """Each row of the codebook changed in one value."""
    assert rule.rows is not None
    for row in range(len(rule.rows)):
        rows = rule.rows.copy()
        rows[row, row % rows.shape[1]] += 1
        yield Mutant("codebook row", f"row {row}", replace(rule, rows=rows))
