"""Measure what decoding needs beside input and output: the peak of resident memory, a fresh process per format."""

from __future__ import annotations

from _command import require

require("dev", "rich")

import argparse
import resource
import subprocess
import sys

import numpy as np
from _command import positive
from rich.console import Console
from rich.table import Table

from onnx_dqp import FORMATS, dequantize
from onnx_dqp.rules import OUTPUT_DTYPES

MIB = 1 << 20


def peak() -> int:
    """The peak of this process's resident memory so far, in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(identifier: str, output_dtype: int, elements: int) -> int:
    """Bytes beside input and output that decoding ``elements`` elements needs at its peak, in this process."""
    format = FORMATS[identifier]
    dequantize(bytes(format.bytes), identifier, [format.elements], output_dtype)  # reads the codebook
    payload = np.frombuffer(bytes(range(1, 101)) * (elements // format.elements * format.bytes // 100 + 1), np.uint8)
    payload = payload[: elements // format.elements * format.bytes]
    before = peak()
    decoded = dequantize(payload, identifier, [elements], output_dtype)
    return max(0, peak() - before - decoded.nbytes)


def main() -> None:
    """Print a table: formats down, output types across, MiB in the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebi-elements", type=positive, default=256, help="size of the tensor, in Mi elements")
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "TYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        identifier, output_dtype = arguments.one
        print(measure(identifier, int(output_dtype), arguments.mebi_elements * MIB))
        return
    table = Table(title=f"MiB beside input and output at the peak, {arguments.mebi_elements} Mi elements")
    table.add_column("format")
    for dtype in OUTPUT_DTYPES.values():
        table.add_column(dtype.name, justify="right")
    largest = 0
    for format in FORMATS.values():
        cells = []
        for output_dtype in OUTPUT_DTYPES:
            command = [sys.executable, __file__, "--mebi-elements", str(arguments.mebi_elements)]
            command += ["--one", format.identifier, str(int(output_dtype))]
            used = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            largest = max(largest, used)
            cells.append(f"{used / MIB:.1f}")
        table.add_row(format.name, *cells)
    Console().print(table)
    print(f"largest: {largest / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
