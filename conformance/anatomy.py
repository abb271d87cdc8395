"""Blocks taken apart: which bytes decide an element, and what the fields of a block hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.payloads import fields, scale_bits, scales
from conformance.table_decoder import Payload
from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.anatomy import RULES, Bits


def deciding_bytes(format: PackedFormat, element: int) -> list[int]:
    """The bytes of a block, by offset, that element ``element`` of it depends on."""
    rule = RULES[format.name]
    parts = (rule.scale, rule.code, rule.factor, rule.sign, rule.delta, rule.minimum, rule.minimum_factor)
    positions = {int(p) // 8 for bits in parts if bits is not None for p in _of(bits, element)}
    return sorted(positions - {rule.bytes})  # one past the block: a constant 0


def sub_block(format: PackedFormat, element: int) -> int | None:
    """The number of the element's sub-block, or None where the format has none."""
    rule = RULES[format.name]
    bits = rule.factor if rule.factor is not None else rule.scale
    if len(bits) == 1:
        return None
    before = bits[: element + 1]
    return int((before[1:] != before[:-1]).any(axis=1).sum())


def _of(bits: Bits, element: int) -> Any:
    return bits[element if len(bits) > 1 else 0]


def locate(format: PackedFormat, payload: bytes, index: int) -> list[str]:
    """Lines on element ``index`` of a payload: its block, its sub-block, and the bytes that decide it."""
    block, element = divmod(index, format.elements)
    lines = [f"block {block}, element {element} of {format.elements}"]
    number = sub_block(format, element)
    if number is not None:
        lines[0] += f", sub-block {number}"
    start = block * format.bytes
    octets = [f"{field_at(format, i)}={payload[start + i]:02X}" for i in deciding_bytes(format, element)]
    lines.append(f"the block starts at byte {start} of the payload; these bytes decide: {' '.join(octets)}")
    return lines


def field_at(format: PackedFormat, offset: int) -> str:
    """The name of the byte of a block: a field, the item in it, and for a multibyte item the byte of it."""

    def search(layout: np.dtype[np.void], rest: int, prefix: str) -> str:
        for name in layout.names or ():
            item, start = layout[name], layout.fields[name][1]  # type: ignore[index]
            if start <= rest < start + item.itemsize:
                number, inside = divmod(rest - start, item.base.itemsize)
                text = f"{prefix}{name}" + (f"[{number}]" if item.shape else "")
                if item.base.names:
                    return search(item.base, inside, f"{text}.")
                return text + (f".byte{inside}" if item.base.itemsize > 1 else "")
        raise ValueError(f"a block of {format.name} has no byte {offset}")

    return search(format.layout, offset, "")


def describe(format: PackedFormat, payload: bytes, first: int, count: int) -> Iterator[str]:
    """Lines on ``count`` blocks of a payload from block ``first`` on, field by field, and the sub-blocks' integers."""
    whole = len(payload) // format.bytes * format.bytes
    every = np.frombuffer(payload[:whole], format.layout)
    for number, block in enumerate(every[first : first + count], first):
        yield f"block {number}, payload bytes {number * format.bytes} to {(number + 1) * format.bytes - 1}"
        one = np.array([block], format.layout)
        for name, view in fields(one).items():
            raw = np.ascontiguousarray(view).tobytes().hex(" ").upper()
            kind = f"{view.dtype.kind}{8 * view.dtype.itemsize}"
            text = f"  {name}: {kind}{list(view.shape[1:]) or ''} = {raw}"
            if view.dtype.kind == "f":
                text += f"  ({float(view[0])!r})"
            yield text
        if format.name == "IQ1_M":
            bits = int(scale_bits(format, one, scales(format)[0])[0])
            yield f"  d, from the top nibbles of scales: 0x{bits:04X}  ({float(np.uint16(bits).view(np.float16))!r})"
        yield from _integers(format, one)
    if len(every) > first + count:
        yield f"... and {len(every) - first - count} more blocks"
    if whole < len(payload):
        yield f"and {len(payload) - whole} bytes that are no whole block"


def _integers(format: PackedFormat, block: Any) -> Iterator[str]:
    """What the sub-blocks' scales and minima, and the elements' codes, are as numbers."""
    rule = RULES[format.name]
    payload = Payload(block.tobytes(), rule)
    for what, bits, signed in (
        ("sub-block scales", rule.factor, rule.factor_signed),
        ("sub-block minima", rule.minimum_factor, False),
    ):
        if bits is not None:
            values = payload.integers(bits, signed)[0]
            changes = np.flatnonzero(np.append(True, (bits[1:] != bits[:-1]).any(axis=1)))
            yield f"  {what}, as stored: {' '.join(map(str, values[changes]))}"
    codes = payload.integers(rule.code, rule.code_signed)[0]
    what = "codebook rows, by element" if rule.rows is not None else "codes, by element"
    yield f"  {what}: {' '.join(map(str, codes[:32]))}{' ...' if len(codes) > 32 else ''}"
