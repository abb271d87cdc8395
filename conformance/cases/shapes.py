"""shapes: ranks 1 to 6, a 0 in each place, 1s, many rows, one long row."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onnx import TensorProto

from conformance.cases.case import TYPE_NAMES, Case
from conformance.payloads import ordinary_blocks
from onnx_dqp.formats import FORMATS, PackedFormat

# One format of each block size, and of each family, has all shapes.
_FORMATS = ("q4_0", "q8_1", "nvfp4", "q1_0", "q4_k", "iq2_xs", "iq1_m", "tq1_0")

# Name, the shape with its last dimension in blocks, why, flag.
_SHAPES = (
    ("rank_1_one_block", (1,), "The smallest shape, one block.", "Rank"),
    ("rank_1", (3,), "A shape of rank 1 is one row.", "Rank"),
    ("rank_2", (3, 2), "Rows follow one another.", "Rank"),
    ("rank_3", (2, 3, 1), "Leading dimensions are in row-major order.", "Rank"),
    ("rank_5", (1, 2, 1, 2, 1), "Rank 5.", "Rank"),
    ("rank_6", (2, 1, 2, 1, 1, 2), "Rank 6.", "Rank"),
    ("ones", (1, 1, 1, 1, 1, 1), "Dimensions of 1 change nothing.", "Rank"),
    ("column", (5, 1), "Blocks are rows: an order by columns would show.", "Rank"),
    ("zero_rank_1", (0,), "An empty tensor of rank 1.", "Empty"),
    ("zero_middle", (2, 0, 1), "A 0 in the middle.", "Empty"),
    ("zero_last", (3, 0), "Rows without blocks.", "Empty"),
    ("zero_all", (0, 0, 0), "Nothing but zeros.", "Empty"),
    ("zero_large", (0, 1 << 20, 4), "A large dimension beside a 0 needs no memory.", "Empty"),
    ("many_rows", (257, 1), "More rows than a byte counts, one block each.", "ManyRows"),
    ("odd_rows", (7, 11), "A number of blocks that no unrolled loop divides.", "ManyRows"),
)


# Shapes that every format has. Blocks in a row, by elements in a block: the smallest prime that makes more than 65,536
# elements, which is more than 16 bits count, and no multiple of any vector's width.
_LONG = {32: 2053, 64: 1031, 128: 521, 256: 263}


def _of_every_format(elements: int) -> tuple[tuple[str, tuple[int, ...], str, str], ...]:
    return (
        ("rank_4", (1, 2, 3, 5), "Different dimensions, none a multiple of the others, behind a leading 1.", "Rank"),
        ("zero_first", (0, 2), "No rows.", "Empty"),
        ("long_row", (1, _LONG[elements]), "One row of more elements than 16 bits count.", "LongRow"),
    )


def cases() -> Iterator[Case]:
    """All formats x three shapes as FLOAT, and eight formats x 15 more, small ones in the four types in turn."""
    for format in FORMATS.values():
        for row in _of_every_format(format.elements):
            yield _case(format, int(TensorProto.FLOAT), *row)
    types = list(TYPE_NAMES)
    for i, short in enumerate(_FORMATS):
        for j, row in enumerate(_SHAPES):
            output_dtype = int(TensorProto.FLOAT) if row[3] == "ManyRows" else types[(i + j) % len(types)]
            yield _case(FORMATS[f"gguf:{short}"], output_dtype, *row)


def _case(
    format: PackedFormat, output_dtype: int, what: str, in_blocks: tuple[int, ...], reason: str, flag: str
) -> Case:
    shape = (*in_blocks[:-1], in_blocks[-1] * format.elements)
    payload = ordinary_blocks(format, prod(in_blocks), f"{format.identifier} {what}").tobytes()
    return Case("shapes", format, output_dtype, what, reason, (flag,), shape, payload)
