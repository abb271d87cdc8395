"""rounding: ties to even, overflow, subnormal results, and values that show where a decoder rounds.

Blocks are taken, in order, from random candidates, where they have elements with the wanted property; the table decoder
finds them. (Expected outputs are the exact decoder's, as everywhere.) A format that cannot have a property, whatever
its payload, has no case for it: values of Q1_0 or of the ternary formats never need rounding in FLOAT16, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from conformance.cases.case import TYPE_NAMES, Case
from conformance.compare import differing
from conformance.payloads import ordinary_blocks
from conformance.table_decoder import Payload, decode
from onnx_dqp.formats import FORMATS, PackedFormat
from onnx_dqp.formats.anatomy import RULES, Rule
from onnx_dqp.formats.registry import Blocks
from onnx_dqp.rules import OUTPUT_DTYPES

FLOAT16, BFLOAT16, DOUBLE = int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16), int(TensorProto.DOUBLE)

_DROPPED_BITS = {FLOAT16: 13, BFLOAT16: 16}
"""Fraction bits of FLOAT that the type does not have (for its normal numbers)."""

_OVERFLOW = {FLOAT16: 65520.0, BFLOAT16: 2.0**128 - 2.0**119}
"""The smallest FLOATs that become infinite: ties too, between the largest number and infinity."""

_SMALLEST_NORMAL = {FLOAT16: 2.0**-14, BFLOAT16: 2.0**-126}

_ROUNDED_SUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "Q8_K")
"""Formats whose decoding rounds, without overflow."""


@dataclass(frozen=True)
class _Candidates:
    """Decoded candidates, elements by block: in FLOAT, and exactly (all that these formats give fits a DOUBLE)."""

    float: NDArray[np.float32]
    exact: NDArray[np.float64]
    payload: Payload
    rule: Rule

    def differs_in(self, output_dtype: int) -> NDArray[np.bool_]:
        """Decoding in the type's arithmetic gives another number than decoding in FLOAT and converting."""
        dtype = OUTPUT_DTYPES[output_dtype]
        own = np.ascontiguousarray(decode(self.rule, self.payload, dtype))
        return differing(own, self.float.astype(dtype))

    def is_tie(self, output_dtype: int) -> NDArray[np.bool_]:
        """Half-way between two normal numbers of the type."""
        dropped = _DROPPED_BITS[output_dtype]
        half = self.bits & ((1 << dropped) - 1) == 1 << (dropped - 1)
        magnitude = np.abs(self.float)
        normal = (magnitude >= _SMALLEST_NORMAL[output_dtype]) & (magnitude <= _OVERFLOW[output_dtype])
        tie: NDArray[np.bool_] = half & normal
        return tie

    def goes_up(self, output_dtype: int) -> NDArray[np.bool_]:
        """Of ties: the even neighbour is the larger in magnitude."""
        return (self.bits >> _DROPPED_BITS[output_dtype] & 1).astype(bool)

    def float_first(self, output_dtype: int) -> NDArray[np.bool_]:
        """The FLOAT is a tie that goes away from the exact value."""
        excess = np.abs(self.exact) - np.abs(self.float.astype(np.float64))
        away = np.where(self.goes_up(output_dtype), excess < 0, excess > 0)
        return self.is_tie(output_dtype) & away

    @property
    def bits(self) -> NDArray[np.uint32]:
        """The FLOATs' bits."""
        return self.float.view(np.uint32)


Property = Callable[[_Candidates], NDArray[np.bool_]]


def cases() -> Iterator[Case]:
    """Per format and type what its values can show."""
    for format in FORMATS.values():
        for output_dtype in (FLOAT16, BFLOAT16):
            yield from _ties(format, output_dtype)
            yield from _type_arithmetic(format, output_dtype)
        yield from _overflow(format)
        yield from _subnormal(format)
        if format.name in _ROUNDED_SUMS:
            for output_dtype in (FLOAT16, BFLOAT16):
                yield from _float_first(format, output_dtype)
        if format.name in (*_ROUNDED_SUMS, "MXFP4"):
            yield from _float_arithmetic(format)
    yield from _conversion()


def _found(
    format: PackedFormat,
    what: str,
    wanted: Property,
    count: int,
    candidates: int = 128,
    chunks: int = 1,
    **recipe: int,
) -> Blocks:
    """The first ``count`` candidates that have a wanted element; candidates come in chunks."""
    found: list[Any] = []
    for chunk in range(chunks):
        blocks = ordinary_blocks(format, candidates, f"{format.identifier} {what} {chunk}", **recipe)
        rule = RULES[format.name]
        payload = Payload(blocks.tobytes(), rule)
        with np.errstate(all="ignore"):
            in_float = np.ascontiguousarray(decode(rule, payload))
            decoded = _Candidates(in_float, decode(rule, payload, np.float64), payload, rule)
            found.extend(blocks[wanted(decoded).any(axis=1)][: count - len(found)])
        if len(found) == count:
            break
    return np.array(found, format.layout)


def _case(
    format: PackedFormat, output_dtype: int, what: str, reason: str, flags: tuple[str, ...], blocks: Blocks
) -> Case:
    shape = (len(blocks), format.elements)
    return Case("rounding", format, output_dtype, what, reason, flags, shape, blocks.tobytes())


def _ties(format: PackedFormat, output_dtype: int) -> Iterator[Case]:
    what = f"{TYPE_NAMES[output_dtype]} ties"
    up = _found(format, what, lambda c: c.is_tie(output_dtype) & c.goes_up(output_dtype), 4)
    down = _found(format, what, lambda c: c.is_tie(output_dtype) & ~c.goes_up(output_dtype), 4)
    if len(up) and len(down):
        reason = "Values half-way between two of the type go to the even one: some up, some down."
        flags = ("TiesToEven", *(["BugTruncation"] if output_dtype == BFLOAT16 else []))
        yield _case(format, output_dtype, "ties_to_even", reason, flags, np.concatenate([up, down]))


def _overflow(format: PackedFormat) -> Iterator[Case]:
    """FLOAT16 only: BFLOAT16 has FLOAT's range, which only Q8_K and MXFP4 reach (``scales`` and ``_conversion``)."""
    blocks = _found(format, "overflow", lambda c: np.abs(c.float) >= 65520, 6, largest=15, binades=3)
    if len(blocks):
        reason = "Large values become infinite in FLOAT16, those below 65520 do not."
        yield _case(format, FLOAT16, "overflow", reason, ("Overflow",), blocks)


def _type_arithmetic(format: PackedFormat, output_dtype: int) -> Iterator[Case]:
    """Only where it differs: one product of numbers of the type is the same in its arithmetic (see ``mutants``)."""
    largest, binades = (30, 20) if format.name == "MXFP4" else (0, 8)  # whose scales must be no FLOAT16 numbers
    what = f"{TYPE_NAMES[output_dtype]} arithmetic"
    blocks = _found(format, what, lambda c: c.differs_in(output_dtype), 4, largest=largest, binades=binades)
    if len(blocks):
        reason = "Decoding in the output type instead of FLOAT gives other bits."
        flags = ("FloatArithmetic", "BugTypeArithmetic")
        yield _case(format, output_dtype, "float_arithmetic", reason, flags, blocks)


def _subnormal(format: PackedFormat) -> Iterator[Case]:
    """FLOAT16 only, and with normal scales; ``scales`` has the subnormal ones."""
    # FLOAT16 scales are normal from 2^-14 up; the others can be small enough for any code.
    largest, binades = (-17, 8) if format.name in ("Q8_K", "MXFP4") else (-13, 2)
    blocks = _found(
        format,
        "subnormal",
        lambda c: (c.float != 0) & (np.abs(c.float) < _SMALLEST_NORMAL[FLOAT16]),
        6,
        largest=largest,
        binades=binades,
    )
    if len(blocks):
        reason = "Small values are subnormal in FLOAT16, rounded to its coarser spacing there, and not flushed to zero."
        yield _case(format, FLOAT16, "subnormal_results", reason, ("SubnormalResult",), blocks)


def _float_first(format: PackedFormat, output_dtype: int) -> Iterator[Case]:
    what = f"{TYPE_NAMES[output_dtype]} float_first"
    candidates = (1 << 18) // format.elements
    blocks = _found(
        format, what, lambda c: c.float_first(output_dtype), 2, candidates=candidates, chunks=64, largest=15, binades=28
    )
    assert len(blocks), f"no {format.name} block found where rounding to FLOAT first shows"
    reason = "The FLOAT value is a tie that the exact value is not: rounding to FLOAT first, as demanded, differs."
    yield _case(format, output_dtype, "float_first", reason, ("FloatFirst",), blocks)


def _float_arithmetic(format: PackedFormat) -> Iterator[Case]:
    """For DOUBLE; MXFP4 rounds nothing, but overflows."""
    largest = 127 if format.name == "MXFP4" else 0
    blocks = _found(format, "double float_arithmetic", lambda c: c.float != c.exact, 8, largest=largest, binades=12)
    assert len(blocks)
    reason = "Decoding rounds in FLOAT: a DOUBLE output is the rounded value, not the exact one."
    yield _case(format, DOUBLE, "float_arithmetic", reason, ("FloatArithmetic", "BugTypeArithmetic"), blocks)


def _conversion() -> Iterator[Case]:
    """Q8_K, whose FLOAT scale can be anything: chosen values, times powers of two and their negatives."""
    format = FORMATS["gguf:q8_k"]
    halfway16 = [
        2.0**e * (1 + (2 * k + 1) / 2048) for e in (-14, -13, -1, 0, 9, 15) for k in (0, 1, 510, 511, 1022, 1023)
    ]
    halfway16 += [2.0**-25 * k for k in (1, 2, 3, 5, 7, 1023, 2045, 2047)]
    halfway_b = [
        2.0**e * (1 + (2 * k + 1) / 256) for e in (-126, -1, 0, 64, 126, 127) for k in (0, 1, 62, 63, 126, 127)
    ]
    halfway_b += [2.0**-134 * k for k in (1, 2, 3, 5, 127, 253, 255)]
    for output_dtype, halfway in ((FLOAT16, halfway16), (BFLOAT16, halfway_b)):
        at = np.array(halfway, np.float32)
        values = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))])
        normal = np.abs(values) >= np.finfo(np.float32).tiny
        for what, some, flags in (
            ("conversion", values[normal], ("TiesToEven", "Overflow", "SubnormalResult")),
            ("conversion_subnormal_scale", values[~normal], ("TiesToEven", "SubnormalResult", "SpecialScale")),
        ):
            if len(some):
                blocks = ordinary_blocks(format, len(some), f"{format.identifier} {TYPE_NAMES[output_dtype]} {what}")
                blocks["d"] = some
                blocks["qs"][:, :16] = [1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, -128, 0]
                reason = (
                    "Values at, just below and just above ties, in all kinds of binades, convert to the right bits."
                )
                yield _case(format, output_dtype, what, reason, flags, blocks)
