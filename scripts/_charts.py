"""The charts of docs/performance.md, as SVG that is the same for the same figures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.rcParams.update({"svg.hashsalt": "onnx_dqp", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

BLUE, LIGHT_BLUE, ORANGE = "#1f5fa8", "#8db8e8", "#d9822b"
LINES = {
    "Q4_0": "#1f5fa8",
    "Q8_0": "#2a9d8f",
    "Q4_K": "#d9822b",
    "Q6_K": "#b23a48",
    "IQ2_XXS": "#6a4c93",
    "IQ4_NL": "#6b705c",
}


def _svg(figure: Figure) -> bytes:
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return "".join(f"{line.rstrip()}\n" for line in content.getvalue().splitlines()).encode()


def speeds(formats: Mapping[str, Any], threads: int) -> bytes:
    """For every format bars of each contender's speed, with ggml's C as 1."""
    names = [name for name, found in formats.items() if "ggml" in found["ms"]]
    contenders = [
        (f"onnx_dqp, {threads} threads", "all", BLUE),
        ("onnx_dqp, one thread", "one", LIGHT_BLUE),
        ("gguf-py, one thread", "gguf-py", ORANGE),
    ]
    figure = Figure(figsize=(7.5, 9.5), layout="constrained")
    axes = figure.add_subplot()
    for place, (label, key, colour) in enumerate(contenders):
        rows = [(row, formats[name]["ms"]) for row, name in enumerate(names) if key in formats[name]["ms"]]
        axes.barh(
            [row + 0.27 * (place - 1) for row, _ in rows],
            [ms["ggml"] / ms[key] for _, ms in rows],
            height=0.25,
            color=colour,
            label=label,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("speed; ggml's compiled C on one thread = 1 (log scale; longer is faster)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return _svg(figure)


def growth(found: Mapping[str, Any]) -> bytes:
    """Time an element over the tensor's size, a line for each of some formats."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, colour in LINES.items():
        if name in found:
            axes.plot(found["sizes"], found[name]["one"], color=colour, marker="o", markersize=3, label=name)
            axes.plot(found["sizes"], found[name]["default"], color=colour, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20, 50]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks(found["sizes"])
    axes.minorticks_off()
    axes.set_xlabel("elements in the tensor (log scale)")
    axes.set_ylabel("ns an element (log scale)")
    axes.set_title("into a given output; dashed: with as many threads as pay", fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False)
    return _svg(figure)
