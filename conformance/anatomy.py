"""Blocks taken apart: which bytes decide an element, and what the fields of a block hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.payloads import fields, scale_bits, scales
from conformance.table_decoder import RULES, Bits
from onnx_dqp.formats import PackedFormat


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
    octets = [f"[{i}]={payload[start + i]:02X}" for i in deciding_bytes(format, element)]
    lines.append(f"decided by bytes of the block (from payload byte {start}): {' '.join(octets)}")
    return lines


def describe(format: PackedFormat, payload: bytes, blocks: int) -> Iterator[str]:
    """Lines on the first blocks of a payload, field by field."""
    every = np.frombuffer(payload, format.layout)
    for number, block in enumerate(every[:blocks]):
        yield f"block {number}, payload bytes {number * format.bytes} to {(number + 1) * format.bytes - 1}"
        one = np.array([block], format.layout)
        for name, view in fields(one).items():
            raw = np.ascontiguousarray(view).tobytes().hex(" ")
            text = f"  {name}: {view.dtype.str.lstrip('|')}{list(view.shape[1:]) or ''} = {raw}"
            if view.dtype.kind == "f":
                text += f"  ({float(view[0])!r})"
            yield text
        if format.name == "IQ1_M":
            bits = int(scale_bits(format, one, scales(format)[0])[0])
            yield f"  d, from the top nibbles of scales: 0x{bits:04X}  ({float(np.uint16(bits).view(np.float16))!r})"
    if len(every) > blocks:
        yield f"... and {len(every) - blocks} more blocks"
