"""scales: every special value of a floating-point scale, every value of a one-byte scale, in all four types.

Each format has a case with scales that are finite and not subnormal, and one with the others, which --profile finite
leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from onnx import TensorProto

from conformance.cases.case import TYPE_NAMES, Case
from conformance.payloads import ordinary_blocks, random_blocks, scale_size, scales, set_scale
from onnx_dqp.formats import FORMATS, PackedFormat
from onnx_dqp.formats.registry import Blocks

FLOAT = int(TensorProto.FLOAT)

_SIGNS = (0, 1)

# Bits without a sign: FLOAT16 and FLOAT.
_EXTREME = {2: (0x0000, 0x0400, 0x3C00, 0x7BFF), 4: (0x00000000, 0x00800000, 0x3F800000, 0x7F7FFFFF)}
_SPECIAL = {
    2: (0x0001, 0x0155, 0x03FF, 0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF),
    4: (0x00000001, 0x00155555, 0x007FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF),
}

_SUBNORMAL_E8M0 = (0, 1)  # 2**-128 and 2**-127


def cases() -> Iterator[Case]:
    """For each format extreme and special scales, or all scale bytes, in all four types."""
    for format in FORMATS.values():
        for what, flags, reason, blocks in _sweeps(format):
            for output_dtype in TYPE_NAMES:
                shape = (len(blocks), format.elements)
                yield Case("scales", format, output_dtype, what, reason, flags, shape, blocks.tobytes())
        if scales(format):
            blocks = _every_bit(format)
            reason = "Scales of every exponent with a fraction, and subnormal ones with each leading bit."
            shape = (len(blocks), format.elements)
            flags = ("SpecialScale", "BugSanitizedScale")
            yield Case("scales", format, FLOAT, "scale_bits", reason, flags, shape, blocks.tobytes())


def _sweeps(format: PackedFormat) -> Iterator[tuple[str, tuple[str, ...], str, Blocks]]:
    if format.name == "NVFP4":
        reason = "Every scale byte: 0x00 and 0x7F are 0, the others follow the rule with bit 7 ignored."
        blocks = random_blocks(format, 256, f"{format.identifier} scale_bytes")
        # The four sub-blocks have different bytes, so that one taken for another shows.
        blocks["d"] = (np.arange(256)[:, np.newaxis] + np.array([0, 64, 128, 192])) % 256
        yield "scale_bytes", ("ScaleBytes", "BugExponentBias"), reason, blocks
        return
    if format.name == "MXFP4":
        normal = [e for e in range(256) if e not in _SUBNORMAL_E8M0]
        reason = "Every scale byte that is a normal FLOAT: 255 is 2^127, not NaN; from 253 up products overflow."
        yield "scale_bytes", ("ScaleBytes", "Overflow", "BugFactorOfTwo"), reason, _mxfp4(format, normal)
        reason = "The scale bytes 0 and 1 are the subnormals 2^-128 and 2^-127."
        blocks = _mxfp4(format, list(_SUBNORMAL_E8M0) * 4)
        yield "special_scales", ("SpecialScale", "SubnormalResult", "BugSanitizedScale"), reason, blocks
        return
    size = scale_size(format)
    extreme = [bits | sign << (8 * size - 1) for bits in _EXTREME[size] for sign in _SIGNS]
    special = [bits | sign << (8 * size - 1) for bits in _SPECIAL[size] for sign in _SIGNS]
    reason = "Zero, smallest and largest normal scales, of either sign."
    yield "extreme_scales", ("ExtremeScale",), reason, _with_scales(format, extreme, [], "extreme_scales")
    reason = "Subnormal, infinite and NaN scales are decoded as what they are."
    blocks = _with_scales(format, special, extreme, "special_scales")
    yield "special_scales", ("SpecialScale", "BugSanitizedScale"), reason, blocks


def _every_bit(format: PackedFormat) -> Blocks:
    """FLOAT16 scales of all exponents; Q8_K's of every eighth. A second scale takes them in reverse."""
    if scale_size(format) == 4:
        values = [exponent << 23 | 0x2AAAAA ^ exponent << 16 for exponent in range(1, 255, 8)]
        values += [3 << bit for bit in range(0, 22, 3)]
    else:
        values = [exponent << 10 | (0x2AA if exponent % 2 else 0x155) for exponent in range(1, 31)]
        values += [1 << bit for bit in range(10)]
    blocks = ordinary_blocks(format, len(values), f"{format.identifier} scale_bits")
    for name, column in zip(_used_scales(format), (values, values[::-1]), strict=False):
        set_scale(format, blocks, np.array(column, np.int64), name)
    return blocks


def _used_scales(format: PackedFormat) -> list[str]:
    """Q8_1's second one takes no part."""
    return ["d"] if format.name == "Q8_1" else scales(format)


def _mxfp4(format: PackedFormat, scale_bytes: list[int]) -> Blocks:
    blocks = random_blocks(format, len(scale_bytes), f"{format.identifier} scale_bytes {len(scale_bytes)}")
    blocks["e"] = scale_bytes
    # All sixteen codes in each block: where a large scale overflows depends on the code.
    blocks["qs"][:, :8] = [low | (low + 1) << 4 for low in range(0, 16, 2)]
    return blocks


def _with_scales(format: PackedFormat, values: list[int], others: list[int], what: str) -> Blocks:
    """A block for each value of a format's scale; for each pair where it has two, of which one may be another value."""
    names = _used_scales(format)
    pairs = [(v,) for v in values] if len(names) == 1 else _pairs(values, others)
    blocks = ordinary_blocks(format, len(pairs), f"{format.identifier} {what}")
    for name, column in zip(names, np.array(pairs, np.int64).T, strict=True):
        set_scale(format, blocks, column, name)
    return blocks


def _pairs(values: list[int], others: list[int]) -> list[tuple[int, int]]:
    """All pairs of values, and of a value with another; special values by rotation, which gives each pair of kinds."""
    if not others:
        return list(product(values, values))
    rotated = [(v, values[(i + step) % len(values)]) for step in (0, 1, 6, 9) for i, v in enumerate(values)]
    mixed = [(v, o) for i, v in enumerate(values) for o in (others[i % len(others)], others[(i + 3) % len(others)])]
    return rotated + mixed + [(o, v) for v, o in mixed]
