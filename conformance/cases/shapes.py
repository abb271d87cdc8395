"""shapes: ranks 1 to 6, a 0 in each place, 1s, many rows, one long row."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from onnx import TensorProto

from conformance.cases.case import Case
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
    ("rank_4", (2, 1, 3, 1), "A convolution's rank.", "Rank"),
    ("rank_5", (1, 2, 1, 2, 1), "Rank 5.", "Rank"),
    ("rank_6", (2, 1, 2, 1, 1, 2), "Rank 6.", "Rank"),
    ("ones", (1, 1, 1, 1, 1, 1), "Dimensions of 1 change nothing.", "Rank"),
    ("column", (5, 1), "Blocks are rows: an order by columns would show.", "Rank"),
    ("zero_rank_1", (0,), "An empty tensor of rank 1.", "Empty"),
    ("zero_first", (0, 2), "No rows.", "Empty"),
    ("zero_middle", (2, 0, 1), "A 0 in the middle.", "Empty"),
    ("zero_last", (3, 0), "Rows without blocks.", "Empty"),
    ("zero_all", (0, 0, 0), "Nothing but zeros.", "Empty"),
    ("zero_large", (0, 1 << 20, 4), "A large dimension beside a 0 needs no memory.", "Empty"),
    ("many_rows", (257, 1), "More rows than a byte counts, one block each.", "ManyRows"),
    ("odd_rows", (7, 11), "A number of blocks that no unrolled loop divides.", "ManyRows"),
    ("long_row", (1, 129), "One row of many blocks.", "LongRow"),
)


_EVERY_FORMAT = ("leading_ones", (1, 3, 1, 1), "Leading 1s stay, and three blocks are no multiple of two.", "Rank")


def cases() -> Iterator[Case]:
    """All formats x one shape, and eight formats x 18 more, as FLOAT."""
    for format in FORMATS.values():
        yield _case(format, *_EVERY_FORMAT)
    for short in _FORMATS:
        format = FORMATS[f"gguf:{short}"]
        for what, in_blocks, reason, flag in _SHAPES:
            yield _case(format, what, in_blocks, reason, flag)


def _case(format: PackedFormat, what: str, in_blocks: tuple[int, ...], reason: str, flag: str) -> Case:
    shape = (*in_blocks[:-1], in_blocks[-1] * format.elements)
    payload = ordinary_blocks(format, prod(in_blocks), f"{format.identifier} {what}").tobytes()
    return Case("shapes", format, int(TensorProto.FLOAT), what, reason, (flag,), shape, payload)
