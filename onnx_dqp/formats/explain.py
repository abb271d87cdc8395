"""One block taken apart: its fields, its sub-blocks' scales, and the bits that decide each element."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.dequantize import Payload, as_bytes, dequantize
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.anatomy import RULES, Bits, Rule
from onnx_dqp.rules import find_format


@dataclass(frozen=True)
class Field:
    """A field of a block.

    Attributes
    ----------
    name
        As in the format's ``layout``; ``groups[2].qs`` in a group of fields.
    type
        Of an item: ``f16``, ``u8``, ``i16`` and so on, little-endian.
    start, stop
        Its bytes in the block, ``stop`` not included.
    raw
        They.
    values
        Its items as Python numbers.
    """

    name: str
    type: str
    start: int
    stop: int
    raw: bytes
    values: tuple[float | int, ...]

    def __str__(self) -> str:
        place = f"byte {self.start}" if len(self.raw) == 1 else f"bytes {self.start} to {self.stop - 1}"
        count = f"[{len(self.values)}]" if len(self.values) > 1 else ""
        values = "" if self.type == "u8" else f" ({' '.join(map(repr, self.values))})"
        return f"{self.name}: {self.type}{count} = {self.raw.hex(' ').upper()}{values}, {place}"


@dataclass(frozen=True)
class Source:
    """Bits of one byte that decide something.

    Attributes
    ----------
    part
        What they belong to: ``code``, ``sign``, ``delta``, ``scale``, ``factor`` (the sub-block's stored scale),
        ``min`` or ``min factor``.
    byte
        The byte's offset in the block.
    bits
        Their numbers in the byte, from that of lowest value on.
    """

    part: str
    byte: int
    bits: tuple[int, ...]


@dataclass(frozen=True)
class SubBlock:
    """Elements that share a scale; the whole block where the format has no sub-blocks.

    Attributes
    ----------
    first, last
        Its elements.
    d
        The scale that is stored for the block (in NVFP4 for the sub-block), or put together from its bits (IQ1_M).
    scale, minimum
        What codes are multiplied with, in FLOAT; what is then added (Q4_1, Q5_1) or subtracted (Q2_K, Q4_K, Q5_K),
        None in other formats.
    factor, minimum_factor
        The stored integers that they are made of, None where there are none.
    sources
        The bits that decide them.
    """

    first: int
    last: int
    d: float
    scale: float
    factor: int | None
    minimum: float | None
    minimum_factor: int | None
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        text = f"elements {self.first} to {self.last}, scale {self.scale!r}"
        text += "" if self.factor is None else f" (d {self.d!r}, stored {self.factor})"
        text += "" if self.minimum is None else f", min {self.minimum!r}"
        text += "" if self.minimum_factor is None else f" (stored {self.minimum_factor})"
        return f"{text}; {_sources(self.sources)}"


@dataclass(frozen=True)
class Element:
    """One element.

    Attributes
    ----------
    value
        In FLOAT.
    code
        The stored integer; in formats with a codebook the number of its row.
    column
        The entry of the row, None in formats without codebook.
    sources
        The bits that decide its code, its sign and its delta; those of its scale are its sub-block's.
    """

    value: float
    code: int
    column: int | None
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        code = f"code {self.code}" if self.column is None else f"row {self.code}, entry {self.column}"
        return f"{self.value!r}, {code}; {_sources(self.sources)}"


@dataclass(frozen=True)
class Dissection:
    """A block taken apart; as text it has a line for each part.

    Attributes
    ----------
    format, rule
        The identifier, and how the format decodes.
    fields, sub_blocks, elements
        In order.
    """

    format: str
    rule: str
    fields: tuple[Field, ...]
    sub_blocks: tuple[SubBlock, ...]
    elements: tuple[Element, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts and lists, for JSON; bytes are hexadecimal."""
        found = asdict(self)
        for field in found["fields"]:
            field["raw"] = field["raw"].hex()
        return found

    def __str__(self) -> str:
        elements = [f"element {number}: {element}" for number, element in enumerate(self.elements)]
        return "\n".join([f"{self.format}: {self.rule}", *self.summary(), *elements])

    def summary(self) -> Iterator[str]:
        """Lines on the fields, the sub-blocks and the codes, without the elements' own."""
        yield from map(str, self.fields)
        for number, block in enumerate(self.sub_blocks):
            yield f"sub-block {number}: {block}" if len(self.sub_blocks) > 1 else str(block)
        what = "codes" if self.elements[0].column is None else "codebook rows"
        codes = [element.code for element in self.elements if element.column in (None, 0)]
        yield f"{what}: {' '.join(map(str, codes))}"


def explain(format: str | PackedFormat, block: Payload) -> str:
    """One block taken apart, as text: ``take_apart`` in lines."""
    return str(take_apart(format, block))


def take_apart(format: str | PackedFormat, block: Payload) -> Dissection:
    """Take one block apart.

    Parameters
    ----------
    format
        One of ``FORMATS``, or its identifier.
    block
        The bytes of one block, as ``dequantize`` takes a payload.

    Raises
    ------
    PackedTensorError
        The format is unknown, or ``block`` is no block of it.
    """
    found = find_format(format)
    octets = as_bytes(block)
    if octets.size != found.bytes:
        raise PackedTensorError(f"{found.identifier}: the block has {octets.size} bytes", str(found.bytes), "R4")
    return Dissection(
        found.identifier,
        " ".join((found.__doc__ or "").split()).replace("``", ""),
        tuple(_fields(found, octets)),
        tuple(_sub_blocks(RULES[found.name], octets)),
        tuple(_elements(found, octets)),
    )


def _layout(layout: np.dtype[Any], start: int, prefix: str) -> Iterator[tuple[str, np.dtype[Any], int, int]]:
    """Name, type, first byte and end of each field, those in groups of fields one by one."""
    for name in layout.names or ():
        item, at = layout[name], start + layout.fields[name][1]  # type: ignore[index]
        if item.base.names:
            for number in range(item.itemsize // item.base.itemsize):
                yield from _layout(item.base, at + number * item.base.itemsize, f"{prefix}{name}[{number}].")
        else:
            yield prefix + name, item, at, at + item.itemsize


def _fields(format: PackedFormat, octets: NDArray[np.uint8]) -> Iterator[Field]:
    for name, type, start, stop in _layout(format.layout, 0, ""):
        raw = octets[start:stop].tobytes()
        values = np.frombuffer(raw, type.base).tolist()
        yield Field(name, _type_text(type.base), start, stop, raw, tuple(values))


def integers(octets: NDArray[np.uint8], bits: Bits, signed: bool = False) -> list[int]:
    """The integers of a block that have these bits."""
    values = np.unpackbits(octets, bitorder="little")[bits].astype(np.int64) @ (1 << np.arange(bits.shape[1]))
    if signed:
        values -= (values >> (bits.shape[1] - 1)) << bits.shape[1]
    return [int(value) for value in values]


def _number(octets: NDArray[np.uint8], rule: Rule, bits: Bits, dtype: str) -> list[np.float32]:
    stored = integers(octets, bits)
    if dtype == "u1":
        assert rule.scale_table is not None
        return [rule.scale_table[i] for i in stored]
    return list(np.array(stored, f"u{dtype[1]}").view(dtype).astype(np.float32))


def _sub_blocks(rule: Rule, octets: NDArray[np.uint8]) -> Iterator[SubBlock]:
    shared = {"scale": rule.scale, "factor": rule.factor, "min": rule.minimum, "min factor": rule.minimum_factor}
    starts = sub_block_starts(rule)
    for first, stop in zip(starts, [*starts[1:], rule.elements], strict=True):
        own = {part: bits[[first % len(bits)]] for part, bits in shared.items() if bits is not None}
        with np.errstate(all="ignore"):
            (d,) = _number(octets, rule, own["scale"], rule.scale_dtype)
            scale: np.floating[Any] = d
            minimum: np.floating[Any] | None = None
            factor = minimum_factor = None
            if "factor" in own:
                (factor,) = integers(octets, own["factor"], rule.factor_signed)
                scale = scale * np.float32(rule.factor_slope * factor + rule.factor_offset)
            for constant in rule.constants:
                scale = scale * np.float32(constant)
            if "min" in own:
                (minimum,) = _number(octets, rule, own["min"], "f2")
            if "min factor" in own:
                (minimum_factor,) = integers(octets, own["min factor"])
                assert minimum is not None
                minimum = minimum * np.float32(minimum_factor)
        yield SubBlock(
            first,
            stop - 1,
            float(d),
            float(scale),
            factor,
            None if minimum is None else float(minimum),
            minimum_factor,
            tuple(source for part, bits in own.items() for source in _of(part, bits[0])),
        )


def sub_block_starts(rule: Rule) -> list[int]:
    """The first element of each sub-block; of the block where the format has none."""
    bits = rule.factor if rule.factor is not None else rule.scale
    return [0, *(int(i) + 1 for i in np.flatnonzero((bits[1:] != bits[:-1]).any(axis=1)))]


def _elements(format: PackedFormat, octets: NDArray[np.uint8]) -> Iterator[Element]:
    rule = RULES[format.name]
    codes = integers(octets, rule.code, rule.code_signed)
    values = dequantize(octets, format.identifier, [format.elements], threads=1)
    own = {"code": rule.code, "sign": rule.sign, "delta": rule.delta}
    for number, (value, code) in enumerate(zip(values, codes, strict=True)):
        sources = [s for part, bits in own.items() if bits is not None for s in _of(part, bits[number], 8 * rule.bytes)]
        column = None if rule.column is None else int(rule.column[number])
        yield Element(float(value), code, column, tuple(sources))


def _of(part: str, bits: NDArray[np.int64], most: int | None = None) -> Iterator[Source]:
    """The bits of a part, byte by byte in order; those past the block, which are constant, left out."""
    octets: dict[int, list[int]] = {}
    for position in bits.tolist():
        if most is None or position < most:
            octets.setdefault(position // 8, []).append(position % 8)
    for byte, numbers in octets.items():
        yield Source(part, byte, tuple(numbers))


def _sources(sources: tuple[Source, ...]) -> str:
    texts: dict[str, list[str]] = {}
    for source in sources:
        texts.setdefault(source.part, []).append(f"byte {source.byte}{_bits(source.bits)}")
    return "; ".join(f"{part}: {', '.join(places)}" for part, places in texts.items())


def _bits(bits: tuple[int, ...]) -> str:
    if bits == tuple(range(8)):
        return ""
    if len(bits) == 1:
        return f" bit {bits[0]}"
    consecutive = bits[-1] - bits[0] == len(bits) - 1
    return f" bits {bits[0]}-{bits[-1]}" if consecutive else f" bits {' '.join(map(str, bits))}"


def layout_text(format: PackedFormat) -> str:
    """The fields of a block in a line: ``d f16, qs u8[16]``."""

    def texts(layout: np.dtype[Any]) -> Iterator[str]:
        for name in layout.names or ():
            item = layout[name]
            kind = f"({', '.join(texts(item.base))})" if item.base.names else _type_text(item.base)
            yield f"{name} {kind}" + (f"[{item.shape[0]}]" if item.shape else "")

    return ", ".join(texts(format.layout))


def _type_text(type: np.dtype[Any]) -> str:
    return f"{type.kind}{8 * type.itemsize}"


def deciding_bytes(format: PackedFormat, element: int) -> list[int]:
    """The bytes of a block, by offset, that an element depends on."""
    rule = RULES[format.name]
    parts = (rule.scale, rule.code, rule.factor, rule.sign, rule.delta, rule.minimum, rule.minimum_factor)
    positions = (int(p) for bits in parts if bits is not None for p in bits[element % len(bits)])
    return sorted({position // 8 for position in positions} - {rule.bytes})  # one past the block: a constant 0


def sub_block(format: PackedFormat, element: int) -> int | None:
    """The number of the element's sub-block, or None where the format has none."""
    starts = sub_block_starts(RULES[format.name])
    return bisect_right(starts, element) - 1 if len(starts) > 1 else None


def field_at(format: PackedFormat, offset: int) -> str:
    """The name of a byte of a block: a field, the item in it, and for a multibyte item the byte of it."""
    for name, type, start, stop in _layout(format.layout, 0, ""):
        if start <= offset < stop:
            number, inside = divmod(offset - start, type.base.itemsize)
            text = name + (f"[{number}]" if type.shape else "")
            return text + (f".byte{inside}" if type.base.itemsize > 1 else "")
    raise ValueError(f"a block of {format.name} has no byte {offset}")
