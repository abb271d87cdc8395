"""Time FLOAT decoding of every format beside gguf-py and ggml's C, on one thread, in one process and run.

Repetitions of the contenders are interleaved; each column of ratios is the median of a repetition's ratios.
"""

from __future__ import annotations

from _command import require

require("dev", "gguf", "libggml", "rich")

import argparse
import statistics
import time
from collections.abc import Callable

import gguf
import numpy as np
from _command import positive
from rich.console import Console
from rich.table import Table

from conformance import ggml
from onnx_dqp import FORMATS, PackedFormat, dequantize

MIB = 1 << 20


def contenders(format: PackedFormat, payload: np.ndarray, elements: int) -> dict[str, Callable[[], object]]:
    """What to time, by name; each makes a fresh output."""
    found: dict[str, Callable[[], object]] = {
        "onnx_dqp": lambda: dequantize(payload, format.identifier, [elements], threads=1)
    }
    if hasattr(gguf.quants, format.name):
        kind = gguf.GGMLQuantizationType[format.name]
        found["gguf-py"] = lambda: gguf.quants.dequantize(payload, kind)
    if format.identifier not in ggml.NO_DECODER:
        found["ggml"] = lambda: ggml.dequantize(format, payload)
    return found


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def payload_of(format: PackedFormat, elements: int) -> np.ndarray:
    """A payload with ordinary scales: Gaussian weights quantized by ggml, or random codes where it cannot."""
    rng = np.random.default_rng(0)
    if format.identifier in ggml.NO_QUANTIZER:
        blocks = rng.integers(0, 256, elements // format.elements * format.bytes, np.uint8).view(format.layout)
        blocks["d"] = 0.01
        return blocks.view(np.uint8)
    some = ggml.quantize(format, rng.standard_normal((16, 1 << 12), np.float32))
    return np.tile(some, elements // (16 << 12))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--mebi-elements", type=positive, default=16, help="size of the tensor, in Mi elements")
    parser.add_argument("--repeat", type=positive, default=7)
    arguments = parser.parse_args()
    elements = arguments.mebi_elements * MIB
    table = Table(title=f"{arguments.mebi_elements} Mi elements to FLOAT, one thread")
    table.add_column("format")
    for heading in ("onnx_dqp ms", "gguf-py ms", "ggml ms", "times as fast as gguf-py", "time over ggml's"):
        table.add_column(heading, justify="right")
    faster, slower = [], []
    with np.errstate(all="ignore"):
        for format in (FORMATS[identifier] for identifier in arguments.formats):
            calls = contenders(format, payload_of(format, elements), elements)
            for call in calls.values():
                call()
            rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(arguments.repeat)]
            cells = [
                f"{statistics.median(r[name] for r in rounds) * 1e3:.1f}" if name in calls else "-"
                for name in ("onnx_dqp", "gguf-py", "ggml")
            ]
            for name, invert, ratios in (("gguf-py", True, faster), ("ggml", False, slower)):
                if name not in calls:
                    cells.append("-")
                    continue
                ratio = statistics.median(r["onnx_dqp"] / r[name] for r in rounds)
                ratios.append(1 / ratio if invert else ratio)
                cells.append(f"{ratios[-1]:.2f}")
            table.add_row(format.name, *cells)
    if faster and slower:
        means = [f"{statistics.geometric_mean(ratios):.2f}" for ratios in (faster, slower)]
        table.add_section()
        table.add_row("geometric mean", "", "", "", *means)
    Console().print(table)


if __name__ == "__main__":
    main()
