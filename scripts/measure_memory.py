"""Measure what decoding needs beside input and output: the peak of resident memory, a fresh process per format."""

from __future__ import annotations

from _command import require

require("dev", "rich")

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from _command import add_results, positive, results_file
from onnx import TensorProto
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from onnx_dqp import FORMATS, dequantize
from onnx_dqp.rules import OUTPUT_DTYPES

MIB = 1 << 20


def resident(field: str) -> int:
    """Bytes of this process in memory, now (``VmRSS``) or at the peak (``VmHWM``); Linux tells."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def measure(identifier: str, output_dtype: int, threads: int, elements: int) -> int:
    """Bytes beside input and output that decoding ``elements`` elements needs at its peak, in this process."""
    format = FORMATS[identifier]
    dequantize(bytes(format.bytes), identifier, [format.elements], output_dtype)  # reads the codebook
    payload = np.frombuffer(bytes(range(1, 101)) * (elements // format.elements * format.bytes // 100 + 1), np.uint8)
    payload = payload[: elements // format.elements * format.bytes]
    payload.sum()  # all of it is in memory before
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = resident("VmRSS")
    decoded = dequantize(payload, identifier, [elements], output_dtype, threads=threads)
    return max(0, resident("VmHWM") - before - decoded.nbytes)


def main() -> None:
    """Print a table: formats down, threads and output types across, MiB in the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--mebi-elements", type=positive, default=256, help="size of the tensor, in Mi elements")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2, 32], help="numbers of threads (1 2 32)")
    parser.add_argument(
        "--json", type=results_file, metavar="FILE", help="add the results to this file of benchmark.py's"
    )
    parser.add_argument("--one", nargs=3, metavar=("FORMAT", "TYPE", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        parser.error("Linux's /proc is needed")
    if arguments.one:
        identifier, output_dtype, threads = arguments.one
        print(measure(identifier, int(output_dtype), int(threads), arguments.mebi_elements * MIB))
        return
    columns = [(threads, number) for threads in arguments.threads for number in OUTPUT_DTYPES]
    titles = [f"{threads}: {TensorProto.DataType.Name(number)}" for threads, number in columns]
    used: dict[str, list[float]] = {}
    formats = [FORMATS[identifier] for identifier in arguments.formats]
    for format in track(formats, "measuring", console=Console(stderr=True), transient=True):
        used[format.name] = []
        for threads, number in columns:
            command = [sys.executable, __file__, "--mebi-elements", str(arguments.mebi_elements)]
            command += ["--one", format.identifier, str(number), str(threads)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                why = (done.stderr.strip() or f"it ended with status {done.returncode}").splitlines()[-1]
                sys.exit(f"measure_memory.py: {format.identifier} was not measured: {why}")
            octets = int(done.stdout)
            used[format.name].append(octets / MIB)
    title = f"MiB beside input and output at the peak, {arguments.mebi_elements} Mi elements, by threads and type"
    table = Table("format", *(Column(title, justify="right") for title in titles), title=title)
    for name, row in used.items():
        table.add_row(name, *(f"{each:.1f}" for each in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"largest: {max(max(row) for row in used.values()):.1f} MiB")
    if arguments.json is not None:
        add_results(arguments.json, {"memory": {"columns": titles, "MiB": used}})


if __name__ == "__main__":
    main()
