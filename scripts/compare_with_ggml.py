"""Count the elements compared with ggml's compiled library, format by format, and those that differ in a bit."""

from __future__ import annotations

from _command import require

require("test", "libggml", "rich")

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance import ggml, payloads
from conformance.cases import valid_cases
from conformance.compare import differing
from onnx_dqp import FORMATS, PackedFormat, dequantize
from onnx_dqp.formats.registry import Blocks

RANDOM_ELEMENTS = 1 << 20


def payload_groups(format: PackedFormat) -> Iterator[tuple[str, Blocks]]:
    """What to compare: random bytes; all pairs of fields; the suite's cases; all pairs of special scales."""
    yield "random", payloads.random_blocks(format, RANDOM_ELEMENTS // format.elements, "random")
    for blocks in payloads.field_sweeps(format):
        yield "constructed", blocks
    for payload in sorted({case.payload for case in valid_cases() if case.format is format and case.payload}):
        yield "constructed", np.frombuffer(payload, format.layout)
    if payloads.scales(format):
        yield "constructed", payloads.scale_sweep(format)


def by_ggml(format: PackedFormat, blocks: Blocks) -> np.ndarray:
    """ggml's FLOATs; for Q8_1, which it cannot decode, those of Q8_0 with the unused field cut out."""
    octets = np.frombuffer(blocks.tobytes(), np.uint8)
    if format.name == "Q8_1":
        cut = np.delete(octets.reshape(-1, format.bytes), [2, 3], axis=1)
        return ggml.dequantize(FORMATS["gguf:q8_0"], np.ascontiguousarray(cut).ravel())
    return ggml.dequantize(format, octets)


def main() -> int:
    """Print the table; the exit status is 1 where an element differs."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    table = Table(title="FLOAT elements compared bit for bit with ggml's library (any NaN equals any NaN)")
    for heading in ("format", "random", "constructed", "mismatches"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    wrong = 0
    for format in FORMATS.values():
        compared, differ = {"random": 0, "constructed": 0}, 0
        for group, blocks in payload_groups(format):
            actual = dequantize(blocks.tobytes(), format.identifier, [len(blocks) * format.elements])
            differ += int(differing(actual, by_ggml(format, blocks)).sum())
            compared[group] += actual.size
        table.add_row(format.name, *(f"{n:,}" for n in compared.values()), str(differ))
        wrong += differ
    Console().print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
