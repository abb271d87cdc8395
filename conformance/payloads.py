"""Payloads made to reach every part of a format: each code at each position, each codebook row, each special scale.

All come from a format's layout, and their random bytes from SHAKE-128 of a name: no generator whose stream may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.registry import Blocks

__all__ = [
    "SPECIAL_FLOAT",
    "SPECIAL_FLOAT16",
    "field_sweeps",
    "fields",
    "finite_blocks",
    "ordinary_blocks",
    "random_blocks",
    "scale_bits",
    "scale_size",
    "scale_sweep",
    "scales",
    "set_scale",
]

SPECIAL_FLOAT16 = tuple(
    sign | bits
    for bits in (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF)
    for sign in (0x0000, 0x8000)
)
"""Bits: zero, smallest and largest subnormal, smallest normal, one, largest, infinity, signalling and quiet NaN."""

SPECIAL_FLOAT = tuple(
    sign | bits
    for bits in (
        *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF),
        *(0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF),
    )
    for sign in (0x00000000, 0x80000000)
)
"""The same for FLOAT."""


def random_blocks(format: PackedFormat, count: int, name: str) -> Blocks:
    """Blocks of bytes from SHAKE-128 of a name: all bits random, scales included. Writable, shape (count,)."""
    octets = hashlib.shake_128(name.encode()).digest(count * format.bytes)
    return np.frombuffer(bytearray(octets), format.layout)


def finite_blocks(format: PackedFormat, count: int, name: str) -> Blocks:
    """Random blocks whose floating-point scales are finite: with an exponent bit clear, it is not that of infinity."""
    blocks = random_blocks(format, count, name)
    for scale in scales(format):
        is_float = scale_size(format) == 4
        set_scale(format, blocks, scale_bits(format, blocks, scale) & (0xBFFFFFFF if is_float else 0xBFFF), scale)
    return blocks


def ordinary_blocks(format: PackedFormat, count: int, name: str, largest: int = 0, binades: int = 8) -> Blocks:
    """Random blocks whose scales are normal numbers of either sign, in some binades up to that of 2**largest.

    NVFP4's scale bytes, which have but 15 binades, stay random.
    """
    blocks = random_blocks(format, count, name)
    for scale in scales(format):
        fraction_bits, bias, sign = (23, 127, 0x80000000) if scale_size(format) == 4 else (10, 15, 0x8000)
        bits = scale_bits(format, blocks, scale)
        exponent = largest + bias - (bits >> fraction_bits) % binades
        fraction = bits & ((1 << fraction_bits) - 1)
        set_scale(format, blocks, bits & sign | exponent << fraction_bits | fraction, scale)
    if format.name == "MXFP4":
        blocks["e"] = 127 + largest - blocks["e"] % binades
    return blocks


def fields(blocks: Blocks) -> dict[str, NDArray[Any]]:
    """Writable views of all fields of blocks, those of nested structures included, by dotted name."""
    found: dict[str, NDArray[Any]] = {}
    for name in blocks.dtype.names or ():
        if blocks[name].dtype.names:
            found |= {f"{name}.{inner}": view for inner, view in fields(blocks[name]).items()}
        else:
            found[name] = blocks[name]
    return found


def scales(format: PackedFormat) -> list[str]:
    """Names of the floating-point fields (IQ1_M's d, which no field holds, included)."""
    if format.name == "IQ1_M":
        return ["d"]
    return [name for name, view in fields(random_blocks(format, 1, "")).items() if view.dtype.kind == "f"]


def scale_size(format: PackedFormat) -> int:
    """Bytes of a floating-point field: 4 in Q8_K, 2 in the others."""
    return 4 if format.name == "Q8_K" else 2


def scale_bits(format: PackedFormat, blocks: Blocks, scale: str = "d") -> NDArray[np.int64]:
    """The bits of each block's scale."""
    if format.name == "IQ1_M":
        return (blocks["scales"] >> 12).astype(np.int64) @ (1 << np.array([0, 4, 8, 12]))
    view = np.ascontiguousarray(blocks[scale])
    return view.view(f"<u{view.dtype.itemsize}").astype(np.int64)


def set_scale(format: PackedFormat, blocks: Blocks, bits: int | NDArray[np.int64], scale: str = "d") -> None:
    """Give all blocks one scale, or each its own, by bits; IQ1_M's is spread over the top nibbles of ``scales``."""
    bits = np.asarray(bits, np.int64)
    if format.name == "IQ1_M":
        nibbles = bits[..., np.newaxis] >> np.array([0, 4, 8, 12]) & 15
        blocks["scales"] = blocks["scales"] & 0x0FFF | (nibbles << 12).astype(np.uint16)
    else:
        dtype = format.layout[scale]
        blocks[scale] = bits.astype(f"<u{dtype.itemsize}").view(dtype)


def field_sweeps(format: PackedFormat) -> Iterator[Blocks]:
    """Blocks in which the integer fields take all their values, at all positions; floating-point scales are finite.

    - Each pair of fields: every byte of one is v, every byte of the other w, for all v and for w = 0x00, 0x11, …, 0xFF
      (which gives all combinations of a low index byte and up to four high index bits).
    - Each 16-bit field: every item is v, for all 65,536 v: all 9-bit rows with all 7-bit sign patterns. (IQ1_M's scales
      are such a field, so that its d takes values that are not finite.)
    - Each 32-bit field: every item has one 7-bit pattern four times, and each value of the top four bits.
    """
    integers = [name for name, view in fields(random_blocks(format, 1, "")).items() if view.dtype.kind in "iu"]
    for first, second in permutations(integers, 2) if len(integers) > 1 else [(integers[0], integers[0])]:
        values = list(product(range(256), range(0, 256, 0x11))) if first != second else [(v, v) for v in range(256)]
        blocks = finite_blocks(format, len(values), f"{format.identifier} {first} {second}")
        for name, octets in zip((first, second), zip(*values, strict=True), strict=True):
            _fill(blocks, name, [int.from_bytes(bytes([octet]) * 4, "little") for octet in octets])
        yield blocks
    for name in integers:
        size = fields(random_blocks(format, 1, ""))[name].dtype.itemsize
        if size > 1:
            values_16 = range(1 << 16)
            values_32 = [k << 28 | seven * 0x0204081 for seven in range(128) for k in range(16)]
            values_of_size = values_16 if size == 2 else values_32
            blocks = finite_blocks(format, len(values_of_size), f"{format.identifier} {name}")
            _fill(blocks, name, values_of_size)
            yield blocks


def _fill(blocks: Blocks, name: str, values: Any) -> None:
    """Set every item of a field in block i to ``values[i]``, cut to the field's size."""
    view = fields(blocks)[name]
    unsigned = np.asarray(values, np.uint64).astype(f"<u{view.dtype.itemsize}").view(view.dtype)
    view[...] = unsigned.reshape(-1, *(1,) * (view.ndim - 1))


def scale_sweep(format: PackedFormat, repeats: int = 4) -> Blocks:
    """Blocks with every special value of the floating-point scales (all pairs where there are two).

    MXFP4's and NVFP4's byte scales take all their values in ``field_sweeps``.
    """
    names = scales(format)
    if not names:
        return random_blocks(format, 0, "")
    special = SPECIAL_FLOAT if format.name == "Q8_K" else SPECIAL_FLOAT16
    values = list(product(special, repeat=len(names)))
    blocks = random_blocks(format, len(values) * repeats, f"{format.identifier} scales")
    for i, bits in enumerate(values):
        for name, scale in zip(names, bits, strict=True):
            set_scale(format, blocks[i * repeats : (i + 1) * repeats], scale, name)
    return blocks
