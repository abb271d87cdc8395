"""Blocks of a payload for a report: which bytes decide an element, and what is in a block."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.explain import deciding_bytes, field_at, sub_block, take_apart


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


def describe(format: PackedFormat, payload: bytes, first: int, count: int) -> Iterator[str]:
    """Lines on ``count`` blocks of a payload from block ``first`` on, field by field and sub-block by sub-block."""
    whole, rest = divmod(len(payload), format.bytes)
    for number in range(first, min(first + count, whole)):
        start = number * format.bytes
        yield f"block {number}, payload bytes {start} to {start + format.bytes - 1}"
        block = take_apart(format.identifier, payload[start : start + format.bytes])
        yield from (f"  {line}" for line in block.summary())
    if whole > first + count:
        yield f"... and {whole - first - count} more blocks"
    if rest:
        yield f"and {rest} bytes that are no whole block"
