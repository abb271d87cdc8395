"""Write the tables and charts of docs/performance.md from what benchmark.py and measure_memory.py measured."""

from __future__ import annotations

from _command import require

require("dev", "matplotlib", "rich")

import json
from collections.abc import Sequence
from typing import Any

import _charts
from _generated import ROOT, Generated, main, with_table
from benchmark import RATIOS, TYPE_COLUMNS, formatted, mean

DOCUMENT, RESULTS = "docs/performance.md", "docs/performance.json"


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def generate() -> Generated:
    """The document with its tables filled in, and two charts."""
    results = json.loads((ROOT / RESULTS).read_text(encoding="utf-8"))
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    for name, kind, contenders in (
        ("weights", "gaussian", ["one", "all", "gguf-py", "ggml", "PyTorch"]),
        ("random bytes", "random", ["one", "all", "gguf-py", "ggml"]),
    ):
        formats = results["formats"][kind]
        ratios = [key for key in RATIOS if set(key.split(" / ")) <= {*contenders, "one given", "ggml given"}]
        rows = [
            row(
                format,
                *(formatted(found["ms"].get(key), 1) for key in contenders),
                *(formatted(found["ratios"][key]) for key in ratios),
            )
            for format, found in formats.items()
        ]
        means = [formatted(mean(found["ratios"][key] for found in formats.values())) for key in ratios]
        rows.append(row("geometric mean", *("" for _ in contenders), *means))
        titles = [f"{key} ms" for key in contenders]
        text = with_table(text, row(name, *titles, *ratios), rows)
    types = results["types"]
    text = with_table(text, row("in short", "one thread", "all cores"), summary(results))
    rows = [
        row(format, *(formatted(found[label][name]) for label, name in TYPE_COLUMNS)) for format, found in types.items()
    ]
    means = [formatted(mean(found[label][name] for found in types.values())) for label, name in TYPE_COLUMNS]
    rows.append(row("geometric mean", *means))
    text = with_table(text, row("over FLOAT", *(f"{label} {name}" for label, name in TYPE_COLUMNS)), rows)
    text = with_table(text, row("ns an element", *growth_titles(results["growth"]["sizes"])), growth_rows(results))
    small = results["small"]
    rows = [row(name, formatted(found)) for name, found in small["ratios"].items()]
    rows[0] = row("DequantizeLinear", f"1, which is {formatted(small['DequantizeLinear us'], 1)} µs")
    rows.append(row("`import onnx_dqp`", f"{formatted(small['import ms'], 0)} ms"))
    text = with_table(text, row("one block", "over DequantizeLinear"), rows)
    rows = [row(name, *(formatted(each, 1) for each in found)) for name, found in results["memory"]["MiB"].items()]
    text = with_table(text, row("MiB at the peak", *results["memory"]["columns"]), rows)
    text = with_table(text, row("machine", ""), [row(*each) for each in results["machine"].items()])
    return {
        DOCUMENT: text.encode(),
        "docs/performance-speed.svg": _charts.speeds(results["formats"]["gaussian"], results["settings"]["threads"]),
        "docs/performance-growth.svg": _charts.growth(results["growth"]),
    }


def summary(results: dict[str, Any]) -> list[str]:
    """Geometric means over the formats."""
    formats = results["formats"]["gaussian"].values()
    lines = {
        "times as fast as gguf-py": ("gguf-py / one", "gguf-py / all"),
        "time over that of ggml's C, which has one thread": ("one / ggml", "all / ggml"),
        "times as fast as PyTorch, which has all cores": (None, "PyTorch / all"),
        "times as fast as one thread": (None, "one / all"),
    }
    rows = []
    for title, keys in lines.items():
        means = [mean(found["ratios"][key] for found in formats) if key else None for key in keys]
        rows.append(row(title, *map(formatted, means)))
    for name in ("FLOAT16", "BFLOAT16", "DOUBLE"):
        means = [mean(found[label][name] for found in results["types"].values()) for label in ("one", "all")]
        rows.append(row(f"{name}: time over FLOAT's", *map(formatted, means)))
    return rows


def growth_titles(sizes: Sequence[int]) -> list[str]:
    """Sizes as powers of two."""
    return [f"2^{size.bit_length() - 1}" for size in sizes]


def growth_rows(results: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    """Nanoseconds an element with one thread."""
    return [
        row(format, *(formatted(each) for each in found["one"]))
        for format, found in results["growth"].items()
        if format != "sizes"
    ]


if __name__ == "__main__":
    main(__doc__, generate)
