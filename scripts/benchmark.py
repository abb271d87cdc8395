"""Time decoding beside ggml's C, gguf-py and PyTorch: every contender in the same process and run.

Repetitions of the contenders are interleaved, and a ratio is the median of the repetitions' ratios. Every contender
makes a fresh output, but in the columns that say "given". One that is not installed is named as not measured.
"""

from __future__ import annotations

from _command import require

require("dev", "rich")

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _command import add_results, positive, results_file
from _contenders import PACKAGES, decoder, installed
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance import ggml
from onnx_dqp import FORMATS, DequantizePacked, PackedFormat, dequantize
from onnx_dqp.ggml import NO_QUANTIZER, quantize
from onnx_dqp.rules import OUTPUT_DTYPES
from onnx_dqp.threads import processors

MEBI = 1 << 20
PAYLOADS = {
    "gaussian": "payloads quantized from Gaussian weights",
    "random": "random bytes, with NaN, infinities and subnormals among the scales",
}
RATIOS = {
    "gguf-py / one": "one thread: times as fast as gguf-py",
    "gguf-py / all": "all cores: times as fast as gguf-py",
    "one / ggml": "one thread: time over ggml's",
    "all / ggml": "all cores: time over ggml's, which has one thread",
    "one given / ggml given": "one thread, given outputs: time over ggml's",
    "PyTorch / all": "all cores: times as fast as PyTorch",
    "one / all": "all cores: times as fast as one thread",
}
"""Quotients of times, by the names of the contenders: onnx_dqp's are ``one`` and ``all``, for its threads."""

PARTS = ["formats", "types", "growth", "small"]

TYPE_COLUMNS = [(label, name) for label in ("one", "all") for name in ("FLOAT16", "BFLOAT16", "DOUBLE")]


def seconds(call: Callable[[], object]) -> float:
    """The time of one call; its result is freed after the clock stops."""
    start = time.perf_counter()
    kept = call()
    end = time.perf_counter()
    del kept
    return end - start


def interleaved(calls: Mapping[str, Callable[[], object]], repeat: int) -> list[dict[str, float]]:
    """Seconds of each call in each repetition, after one that does not count."""
    for call in calls.values():
        call()
    rounds = []
    for _ in range(repeat):
        if "PyTorch" in calls:
            time.sleep(0.01)  # its threads, the last to run, keep the cores busy for a while after they are done
        rounds.append({name: seconds(call) for name, call in calls.items()})
    return rounds


def ratio(rounds: Sequence[Mapping[str, float]], quotient: str) -> float | None:
    """The median of a quotient of two contenders' times, if both were measured."""
    above, below = quotient.split(" / ")
    if not {above, below} <= rounds[0].keys():
        return None
    return statistics.median(times[above] / times[below] for times in rounds)


def mean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are known."""
    known = [found for found in ratios if found is not None]
    return statistics.geometric_mean(known) if known else None


def payload_of(format: PackedFormat, elements: int, kind: str) -> np.ndarray:
    """A payload, uint8 of rank 1, of at least that many elements in whole blocks."""
    rng = np.random.default_rng(0)
    blocks = max(1, elements // format.elements)
    if kind == "random":
        return rng.integers(0, 256, blocks * format.bytes, np.uint8)
    if format.identifier in NO_QUANTIZER or not installed("ggml"):  # codes of all sizes, and an ordinary scale
        some = rng.integers(0, 256, blocks * format.bytes, np.uint8).view(format.layout)
        for name in {"d", "dmin", "m"} & set(format.layout.names or ()):
            if format.layout[name].kind == "f":
                some[name] = 0.01
        return some.view(np.uint8)
    weights = quantize(format, rng.standard_normal((16, 1 << 12), np.float32))
    return np.resize(weights, blocks * format.bytes)


def measure_formats(
    formats: Sequence[PackedFormat], kind: str, elements: int, threads: int, repeat: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Milliseconds and ratios of every contender in every format."""
    found: dict[str, Any] = {}
    for format in formats:
        payload = payload_of(format, elements, kind)
        shape = [payload.size // format.bytes * format.elements]
        given = np.empty(shape, np.float32)
        ours = partial(dequantize, payload, format.identifier, shape)
        calls: dict[str, Callable[[], object]] = {
            "one": partial(ours, threads=1),
            "all": partial(ours, threads=threads),
        }
        calls |= {f"{name} given": partial(call, out=given) for name, call in calls.items()}
        others = {name: decoder(name, format) for name in PACKAGES if installed(name)}
        if others.get("ggml") is not None:
            calls["ggml given"] = partial(ggml.dequantize, format, payload, given)
        for contender, other in others.items():
            if other is not None:
                calls[contender] = partial(other, payload)
                check_equal(format, contender, ours(), calls[contender]())
        rounds = interleaved(calls, repeat)
        found[format.name] = {
            "ms": {name: statistics.median(times[name] for times in rounds) * 1e3 for name in calls},
            "ratios": {quotient: ratio(rounds, quotient) for quotient in RATIOS},
        }
        step()
    return found


def check_equal(format: PackedFormat, contender: str, ours: Any, theirs: Any) -> None:
    """End the run where a contender computes something else: its time would mean nothing."""
    theirs = np.asarray(theirs).reshape(-1)
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    if not same.all():
        sys.exit(f"{contender} differs in {format.name}: {np.count_nonzero(~same)} elements")


def measure_types(
    formats: Sequence[PackedFormat], elements: int, threads: int, repeat: int, step: Callable[[], None]
) -> dict[str, Any]:
    """The time of each output type over that of FLOAT, with one thread and with all."""
    names = {number: TensorProto.DataType.Name(number) for number in OUTPUT_DTYPES}
    found: dict[str, Any] = {}
    for format in formats:
        payload = payload_of(format, elements, "gaussian")
        shape = [payload.size // format.bytes * format.elements]
        found[format.name] = {}
        for label, count in (("one", 1), ("all", threads)):
            ours = partial(dequantize, payload, format.identifier, shape, threads=count)
            calls = {name: partial(ours, output_dtype=number) for number, name in names.items()}
            rounds = interleaved(calls, repeat)
            found[format.name][label] = {name: ratio(rounds, f"{name} / FLOAT") for name in names.values()}
        step()
    return found


def measure_growth(
    formats: Sequence[PackedFormat], sizes: Sequence[int], repeat: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Nanoseconds an element, into a given output, at every size, with one thread and with as many as pay."""
    found: dict[str, Any] = {"sizes": list(sizes)}
    out = np.empty(max(sizes), np.float32)
    out.fill(0)
    for format in formats:
        payload = payload_of(format, max(sizes), "gaussian")
        times: dict[str, list[float]] = {"one": [], "default": []}
        for size in sizes:
            blocks = size // format.elements
            given = out[: blocks * format.elements]
            ours = partial(dequantize, payload[: blocks * format.bytes], format.identifier, given.shape, out=given)
            # Small tensors many times, so that a median means something; large ones are their own average.
            count = max(3, min(20 * repeat, repeat * 16 * MEBI // size))
            rounds = interleaved({"one": partial(ours, threads=1), "default": ours}, count)
            for label, found_times in times.items():
                found_times.append(statistics.median(each[label] for each in rounds) * 1e9 / given.size)
        found[format.name] = times
        step()
    return found


def measure_small(formats: Sequence[PackedFormat], repeat: int) -> dict[str, Any]:
    """One block through ``ReferenceEvaluator.run``, over ONNX's own DequantizeLinear on 32 elements; and the import."""
    linear = helper.make_node("DequantizeLinear", ["x", "scale", "zero_point"], ["y"])
    inputs = [("x", TensorProto.INT8, [32]), ("scale", TensorProto.FLOAT, []), ("zero_point", TensorProto.INT8, [])]
    feed = {"x": np.arange(32, dtype=np.int8), "scale": np.float32(0.5), "zero_point": np.int8(1)}
    evaluators = {"DequantizeLinear": (evaluator(linear, inputs, [32], 21), feed)}
    for format in formats:
        attributes = {"format": format.identifier, "shape": [format.elements], "output_dtype": TensorProto.FLOAT}
        node = helper.make_node("DequantizePacked", ["x"], ["y"], **attributes)
        built = evaluator(node, [("x", TensorProto.UINT8, [format.bytes])], [format.elements], 29)
        evaluators[format.name] = (built, {"x": payload_of(format, format.elements, "gaussian")})
    calls = {name: partial(built.run, None, x) for name, (built, x) in evaluators.items()}
    rounds = interleaved(calls, 50 * repeat)
    ratios = {name: ratio(rounds, f"{name} / DequantizeLinear") for name in calls}
    base, whole = "import onnx, numpy, ml_dtypes", "import onnx, numpy, ml_dtypes, onnx_dqp"
    programs = {code: [sys.executable, "-c", code] for code in (base, whole)}
    imports = interleaved(
        {code: partial(subprocess.run, words, check=True) for code, words in programs.items()}, repeat
    )
    return {
        "DequantizeLinear us": statistics.median(times["DequantizeLinear"] for times in rounds) * 1e6,
        "ratios": ratios,
        "import ms": statistics.median(times[whole] - times[base] for times in imports) * 1e3,
    }


def evaluator(
    node: onnx.NodeProto, inputs: Sequence[tuple[str, int, list[int]]], shape: list[int], opset: int
) -> ReferenceEvaluator:
    """A model of one node, ready to run."""
    declared = [helper.make_tensor_value_info(*each) for each in inputs]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "one_node", declared, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model, new_ops=[DequantizePacked])


def machine() -> dict[str, str]:
    """What the figures depend on."""
    found = {"processor": platform.processor() or platform.machine(), "system": platform.system()}
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                found["processor"] = line.partition(":")[2].strip()
    found["processors"] = str(processors())
    found["Python"] = platform.python_version()
    for package in ("numpy", "onnx", "gguf", "libggml-python", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def formatted(value: float | None, digits: int = 2) -> str:
    """A number for a table, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_formats(console: Console, title: str, found: Mapping[str, Any]) -> None:
    """Times and ratios, a row for each format."""
    shown = ["one", "all", *filter(installed, PACKAGES)]
    times = Table(title=f"{title}\nmilliseconds")
    ratios = Table(title=f"{title}\nratios", caption="\n".join(f"{key}: {text}" for key, text in RATIOS.items()))
    for table, columns in ((times, shown), (ratios, list(RATIOS))):
        table.add_column("format")
        for column in columns:
            table.add_column(column, justify="right")
    for name, result in found.items():
        times.add_row(name, *(formatted(result["ms"].get(key), 1) for key in shown))
        ratios.add_row(name, *(formatted(result["ratios"][key]) for key in RATIOS))
    ratios.add_section()
    means = (mean(result["ratios"][key] for result in found.values()) for key in RATIOS)
    ratios.add_row("geometric mean", *map(formatted, means))
    console.print(times, ratios)


def print_types(console: Console, found: Mapping[str, Any]) -> None:
    """The time of every type over FLOAT's."""
    table = Table(title="Time over that of FLOAT")
    table.add_column("format")
    for label, name in TYPE_COLUMNS:
        table.add_column(f"{label} {name}", justify="right")
    for format, result in found.items():
        table.add_row(format, *(formatted(result[label][name]) for label, name in TYPE_COLUMNS))
    table.add_section()
    means = (mean(result[label][name] for result in found.values()) for label, name in TYPE_COLUMNS)
    table.add_row("geometric mean", *map(formatted, means))
    console.print(table)


def print_growth(console: Console, found: Mapping[str, Any]) -> None:
    """Nanoseconds an element, a row for each format."""
    for label, threads in (("one", "one thread"), ("default", "as many threads as pay")):
        console.print(f"Nanoseconds an element by the tensor's size; given outputs, {threads}")
        table = Table()
        table.add_column("format")
        for size in found["sizes"]:
            table.add_column(f"{size:,}", justify="right")
        for format, times in found.items():
            if format != "sizes":
                table.add_row(format, *(formatted(each) for each in times[label]))
        console.print(table)


def print_small(console: Console, found: Mapping[str, Any]) -> None:
    """One block through the evaluator."""
    table = Table(title=f"One block, over DequantizeLinear's {found['DequantizeLinear us']:.0f} us on 32 elements")
    table.add_column("format")
    table.add_column("ratio", justify="right")
    for name, each in found["ratios"].items():
        table.add_row(name, formatted(each))
    console.print(table)
    console.print(f"import onnx_dqp adds {found['import ms']:.0f} ms to onnx, numpy and ml_dtypes")


def main() -> None:
    """Measure and print; with --json, write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--elements", type=positive, default=16 * MEBI, help="size of the tensor beside others (16 Mi)")
    sizes = [1 << power for power in range(12, 30, 2)]
    parser.add_argument("--sizes", nargs="+", type=positive, default=sizes, help="elements, for growth (2^12 to 2^28)")
    parser.add_argument("--threads", type=positive, default=processors(), help='what "all" is (the processors)')
    parser.add_argument("--repeat", type=positive, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--json", type=results_file, metavar="FILE", help="add the results to this file, for write_performance.py"
    )
    arguments = parser.parse_args()
    formats = [FORMATS[identifier] for identifier in arguments.formats]
    if min(arguments.elements, *arguments.sizes) < max(format.elements for format in formats):
        parser.error("--elements and --sizes are expected to be at least a block of 256 elements")
    for contender in PACKAGES:
        if not installed(contender):
            print(f"{contender} is not measured: {PACKAGES[contender]} is not installed", file=sys.stderr)
    if not installed("ggml"):
        print("without ggml's quantizers, weights are random codes with one scale", file=sys.stderr)
    rest = (arguments.threads, arguments.repeat)
    results: dict[str, Any] = {"machine": machine()}
    results["settings"] = {"elements": arguments.elements, "threads": arguments.threads, "repeat": arguments.repeat}
    with (
        np.errstate(all="ignore"),
        Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress,
    ):
        lengths = {"formats": len(PAYLOADS), "types": 1, "growth": 1, "small": 0}
        task = progress.add_task(
            "measuring", total=len(formats) * sum(lengths[part] for part in arguments.parts) or None
        )

        def step() -> None:
            progress.update(task, advance=1, refresh=True)  # not by a thread, which would disturb the measurement

        if "formats" in arguments.parts:
            results["formats"] = {
                kind: measure_formats(formats, kind, arguments.elements, *rest, step) for kind in PAYLOADS
            }
        if "types" in arguments.parts:
            results["types"] = measure_types(formats, arguments.elements, *rest, step)
        if "growth" in arguments.parts:
            results["growth"] = measure_growth(formats, arguments.sizes, arguments.repeat, step)
        if "small" in arguments.parts:
            results["small"] = measure_small(formats, arguments.repeat)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for kind, found in results.get("formats", {}).items():
        print_formats(console, f"{arguments.elements:,} elements to FLOAT; {PAYLOADS[kind]}", found)
    for part, show in (("types", print_types), ("growth", print_growth), ("small", print_small)):
        if part in results:
            show(console, results[part])
    if arguments.json is not None:
        add_results(arguments.json, results)


if __name__ == "__main__":
    main()
