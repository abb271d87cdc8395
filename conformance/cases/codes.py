"""codes: every value of every integer field, at every position, with ordinary scales; as FLOAT.

Each case fixes some fields and leaves the others random, so that what is swept is seen through ordinary values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from conformance.cases.case import Case
from conformance.payloads import fields, ordinary_blocks, set_scale
from onnx_dqp.formats import FORMATS, PackedFormat
from onnx_dqp.formats.registry import Blocks

Fills = Mapping[str, Sequence[int]]
"""Field -> values of its items. A sweep has a block for each combination; all items of a field get the same value."""

_NIBBLE, _PAIR, _BIT, _BYTE = range(0, 256, 0x11), range(0, 256, 0x55), (0x00, 0xFF), range(256)
_BIT_32 = (0x00000000, 0xFFFFFFFF)
_SEVEN_BITS = [seven * 0x0204081 for seven in range(128)]  # one pattern in the four signs of a group, scale 0

# What code values depend on.
_CODES: Mapping[str, Fills] = MappingProxyType(
    {
        "Q4_0": {"qs": _NIBBLE},
        "Q4_1": {"qs": _NIBBLE},
        "Q5_0": {"qs": _NIBBLE, "qh": _BIT_32},
        "Q5_1": {"qs": _NIBBLE, "qh": _BIT_32},
        "Q8_0": {"qs": _BYTE},
        "Q8_1": {"qs": _BYTE},
        "Q2_K": {"qs": _PAIR},
        "Q3_K": {"qs": _PAIR, "hmask": _BIT},
        "Q4_K": {"qs": _NIBBLE},
        "Q5_K": {"qs": _NIBBLE, "qh": _BIT},
        "Q6_K": {"ql": _NIBBLE, "qh": _PAIR},
        "Q8_K": {"qs": _BYTE},
        "IQ4_NL": {"qs": _NIBBLE},
        "IQ4_XS": {"qs": _NIBBLE},
        "TQ1_0": {"qs": _BYTE, "qh": _BYTE},
        "TQ2_0": {"qs": _PAIR},
        "MXFP4": {"qs": _NIBBLE},
        "NVFP4": {"qs": _NIBBLE},
        "Q1_0": {"qs": _BIT},
        "Q2_0": {"qs": _PAIR},
    }
)

# Fields swept together instead of in all combinations.
_TOGETHER = frozenset({"TQ1_0"})

# What sub-scales and minima depend on.
_SUB_SCALES: Mapping[str, Fills] = MappingProxyType(
    {
        "Q2_K": {"scales": _BYTE},
        "Q6_K": {"scales": _BYTE},
        "IQ4_XS": {"scales_l": _NIBBLE, "scales_h": range(0, 1 << 16, 0x5555)},
        "IQ2_XS": {"scales": _NIBBLE},
        "IQ2_S": {"scales": _NIBBLE},
        "IQ3_S": {"scales": _NIBBLE},
        "IQ2_XXS": {"groups.signs_and_scale": range(0x0AAAAAA, 1 << 32, 1 << 28)},
        "IQ3_XXS": {"signs_and_scale": range(0x0AAAAAA, 1 << 32, 1 << 28)},
        "IQ1_S": {"qh": [scale << 12 | 0o1234 for scale in range(16)]},  # delta's sign is the bit above the scale
        "IQ1_M": {"scales": [scale * 0o1111 for scale in range(8)]},
    }
)

_SIGNS: Mapping[str, Fills] = MappingProxyType(
    {
        "IQ2_XXS": {"groups.signs_and_scale": _SEVEN_BITS},
        "IQ3_XXS": {"signs_and_scale": _SEVEN_BITS},
        "IQ2_XS": {"qs": [seven << 9 | seven * 3 for seven in range(128)]},
        "IQ2_S": {"signs": _BYTE},
        "IQ3_S": {"signs": _BYTE},
    }
)

_UNUSED: Mapping[str, Fills] = MappingProxyType(
    {
        "Q8_1": {"s": (0x0000, 0x0001, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0xFC00, 0xFFFF)},
        "Q8_K": {"bsums": (0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFF)},
    }
)


def cases() -> Iterator[Case]:
    """For each format the sweeps that it has."""
    for format in FORMATS.values():
        if format.name in _CODES:
            blocks = _sweep(format, "codes", _CODES[format.name], together=format.name in _TOGETHER)
            reason = "Every code value stands at every position of a block."
            yield _case(format, "codes", reason, "EveryCode", blocks)
        if format.name in _ROWS:
            blocks = _rows(format)
            reason = "Every row of the codebook is used; where a row's index has high bits, so is every combination."
            yield _case(format, "codebook_rows", reason, "EveryRow", blocks)
        if format.name in _SIGNS:
            blocks = _sweep(format, "signs", _SIGNS[format.name])
            reason = "Every pattern of stored sign bits stands at every position, its implied eighth bit included."
            yield _case(format, "signs", reason, "EverySign", blocks)
        if format.name in ("Q3_K", "Q4_K", "Q5_K"):
            blocks = _q3_k_scales(format) if format.name == "Q3_K" else _six_bit_scales_and_mins(format)
            reason = "Every six-bit scale, and every minimum where there are any, stands at every sub-block."
            yield _case(format, "sub_scales", reason, "EverySubScale", blocks)
        if format.name in _SUB_SCALES:
            blocks = _sweep(format, "sub_scales", _SUB_SCALES[format.name])
            if format.name == "IQ1_M":
                set_scale(format, blocks, 0x3555)  # the sweep has taken its place
            reason = "Every sub-scale, and every minimum where there are any, stands at every sub-block."
            yield _case(format, "sub_scales", reason, "EverySubScale", blocks)
        if format.name in _UNUSED:
            blocks = _sweep(format, "unused_field", _UNUSED[format.name])
            reason = "A field that takes no part in decoding holds garbage, NaN included."
            yield _case(format, "unused_field", reason, "UnusedField", blocks)


def _case(format: PackedFormat, what: str, reason: str, flag: str, blocks: Blocks) -> Case:
    flags = (flag, "BugHighBits") if format.name == "Q5_K" and what == "codes" else (flag,)
    shape = (len(blocks), format.elements)
    return Case("codes", format, int(TensorProto.FLOAT), what, reason, flags, shape, blocks.tobytes())


def _sweep(format: PackedFormat, what: str, fills: Fills, together: bool = False) -> Blocks:
    """A block for each combination of the fields' values."""
    combinations = np.array(list(zip(*fills.values(), strict=True) if together else product(*fills.values())), np.int64)
    blocks = ordinary_blocks(format, len(combinations), f"{format.identifier} {what}")
    for name, values in zip(fills, combinations.T, strict=True):
        view = fields(blocks)[name]
        unsigned = values.astype(f"<u{view.dtype.itemsize}").view(view.dtype)
        view[...] = unsigned.reshape(-1, *(1,) * (view.ndim - 1))
    return blocks


def _q3_k_scales(format: PackedFormat) -> Blocks:
    """Low nibbles and high bit pairs in all combinations; they are in one field."""
    low, high = np.array(list(product(_NIBBLE, _PAIR)), np.uint8).T
    blocks = ordinary_blocks(format, len(low), f"{format.identifier} sub_scales")
    blocks["scales"][:, :8] = low[:, np.newaxis]
    blocks["scales"][:, 8:] = high[:, np.newaxis]
    return blocks


def _six_bit_scales_and_mins(format: PackedFormat) -> Blocks:
    """Q4_K and Q5_K: each scale n with the minimum n, then with 63 - n, at all sub-blocks."""
    scale = np.tile(np.arange(64), 2)[:, np.newaxis]
    minimum = np.concatenate([np.arange(64), np.arange(64)[::-1]])[:, np.newaxis]
    blocks = ordinary_blocks(format, len(scale), f"{format.identifier} sub_scales")
    blocks["scales"][:, :4] = scale | scale >> 4 << 6
    blocks["scales"][:, 4:8] = minimum | minimum >> 4 << 6
    blocks["scales"][:, 8:] = scale & 15 | (minimum & 15) << 4
    return blocks


# Codebook formats: rows of the codebook, and rows in a block.
_ROWS = MappingProxyType(
    {
        "IQ2_XXS": (256, 32),
        "IQ2_XS": (512, 32),
        "IQ2_S": (1024, 32),
        "IQ3_XXS": (256, 64),
        "IQ3_S": (512, 64),
        "IQ1_S": (2048, 32),
        "IQ1_M": (2048, 32),
    }
)


def _rows(format: PackedFormat) -> Blocks:
    """Blocks that use each row of the codebook once, in an order that mixes high and low index bits."""
    rows, per_block = _ROWS[format.name]
    blocks = ordinary_blocks(format, rows // per_block, f"{format.identifier} codebook_rows")
    index: NDArray[np.int64] = (np.arange(rows) * 5 + 3) % rows  # 5 is odd: each index once
    index = index.reshape(-1, per_block)
    high = index >> 8
    match format.name:
        case "IQ2_XXS":
            blocks["groups"]["qs"] = index.reshape(-1, 8, 4)
        case "IQ2_XS":
            blocks["qs"] = blocks["qs"] & 0xFE00 | index
        case "IQ3_XXS":
            blocks["qs"] = index
        case "IQ2_S":
            blocks["qs"] = index & 255
            blocks["qh"] = high.reshape(-1, 8, 4) @ (1 << np.array([0, 2, 4, 6]))
        case "IQ3_S":
            blocks["qs"] = index & 255
            blocks["qh"] = high.reshape(-1, 8, 8) @ (1 << np.arange(8))
        case "IQ1_S":
            blocks["qs"] = index & 255
            blocks["qh"] = blocks["qh"] & 0xF000 | high.reshape(-1, 8, 4) @ (1 << np.array([0, 3, 6, 9]))
        case "IQ1_M":
            blocks["qs"] = index & 255
            blocks["qh"] = blocks["qh"] & 0x88 | high.reshape(-1, 16, 2) @ np.array([1, 16])
    return blocks
