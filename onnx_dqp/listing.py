"""What models and GGUF files hold, as tables and as JSON, for the command ``onnx-dqp``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnx_dqp.attributes import examine
from onnx_dqp.console import count, printable, shortened
from onnx_dqp.formats import FORMATS
from onnx_dqp.formats.explain import layout_text
from onnx_dqp.models.files import read_model, stored_size, tensors
from onnx_dqp.models.gguf_file import json_ready, read_gguf
from onnx_dqp.models.scopes import packed_nodes
from onnx_dqp.rules import TYPE_NAMES, payload_size, show

Row = dict[str, Any]

_CELLS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("name", lambda name: shortened(name, 60)),
    "format": ("format", str),
    "shape": ("shape", show),
    "type": ("type", str),
    "elements": ("elements", str),
    "bytes": ("bytes", "{:,}".format),
    "bits_per_element": ("bits per\nelement", "{:.4g}".format),
    "share": ("share", "{:.1%}".format),
    "layout": ("layout", str),
    "place": ("place", lambda place: shortened(place, 120)),
    "file": ("file", lambda name: shortened(name, 120)),
}
"""Key of a row -> the column's heading, and its values as text; None is a question mark."""

_NUMBERS = ("elements", "bytes", "bits_per_element", "share")
_LONG = {"name": 16, "layout": 24, "place": 12, "file": 12}
"""Columns that are folded where a terminal is narrow -> characters that they have all the same."""


def print_table(rows: Sequence[Row], *columns: str) -> None:
    """Print rows; the whole of it where standard output is no terminal, and as narrow as it goes where one is."""
    from rich import box  # noqa: PLC0415 - of the extra cli
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    least, cells = 1, []
    for key in columns:
        heading, text = _CELLS[key]
        cells.append(["?" if row[key] is None else text(row[key]) for row in rows])
        width = _LONG.get(key, max(map(len, [*heading.split("\n"), *cells[-1]])))
        least += width + 2
        justify: Any = "right" if key in _NUMBERS else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=key not in _LONG, min_width=width)
    for row_cells in zip(*cells, strict=True):
        table.add_row(*row_cells)
    console.width = max(console.width if console.is_terminal else 200, least)
    console.print(table)


def list_formats() -> None:
    """Print the table of formats."""
    rows = [
        {
            "format": format.identifier,
            "elements": format.elements,
            "bytes": format.bytes,
            "bits_per_element": format.bits_per_element,
            "layout": layout_text(format),
        }
        for format in FORMATS.values()
    ]
    print_table(rows, "format", "elements", "bytes", "bits_per_element", "layout")


def _packed_rows(model: ModelProto) -> Iterator[Row]:
    """What is known of each DequantizePacked node."""
    for scope, node in packed_nodes(model):
        attributes, _ = examine(node.attribute)
        format, dims = attributes.format, attributes.dims
        size = payload_size(format, dims) if format and dims is not None else None
        elements = None if format is None or size is None else size // format.bytes * format.elements
        x = node.input[0] if node.input else ""
        yield {
            "name": x,
            "place": scope.where,
            "constant": scope.constant(x) is not None,
            "format": format.identifier if format else None,
            "shape": None if dims is None else list(dims),
            "type": None if attributes.output_dtype is None else TYPE_NAMES[attributes.output_dtype],
            "elements": elements,
            "bytes": size,
            "bits_per_element": format.bits_per_element if format else None,
        }


def _with_shares(rows: list[Row], total: int) -> list[Row]:
    """The rows with each one's share of all bytes; one with a problem has none."""
    return [
        {**row, "share": None if row.get("problem") else (row["bytes"] or 0) / total if total else 0.0} for row in rows
    ]


def _totals(packed: list[Row], in_all: int) -> dict[str, int]:
    elements = sum(row["elements"] or 0 for row in packed)
    return {
        "packed_tensors": len(packed),
        "elements": elements,
        "bytes": sum(row["bytes"] or 0 for row in packed),
        "bytes_as_float": 4 * elements,
        "bytes_as_float16": 2 * elements,
        "bytes_of_all_tensors": in_all,
    }


def _sizes(totals: dict[str, int]) -> str:
    as_float, as_float16 = totals["bytes_as_float"], totals["bytes_as_float16"]
    return f"{totals['bytes']:,} bytes; {as_float:,} as FLOAT, {as_float16:,} as FLOAT16"


def list_model(path: Path, as_json: bool) -> None:
    """Print a model's packed tensors, each one's share of their bytes, and their size as floating point."""
    model = read_model(path)
    found = list(_packed_rows(model))
    totals = _totals(found, sum(map(stored_size, tensors(model))))
    rows = _with_shares(found, totals["bytes"])
    if as_json:
        print(json.dumps({"tensors": rows, "totals": totals}, indent=1))
        return
    places = ["place"] if any(row["place"] != "graph" for row in rows) else []
    print_table(rows, "name", "format", "shape", "type", "bytes", "bits_per_element", "share", *places)
    print(f"{count(len(rows), 'packed tensor')}: {_sizes(totals)}")


def list_gguf(path: Path, as_json: bool) -> None:
    """Print a GGUF file's tensors, each one's share of their bytes, and what is wrong with any of them."""
    source = read_gguf(path)
    in_all = sum(tensor.size for tensor in source.tensors if tensor.problem is None)
    found: list[Row] = [
        {
            "name": tensor.name,
            "file": tensor.path.name,
            "offset": tensor.offset,
            "format": tensor.type_name,
            "ggml_type": tensor.ggml_type,
            "shape": list(tensor.shape),
            "elements": math.prod(tensor.shape),
            "bytes": tensor.size if tensor.size or not tensor.problem else None,
            "bits_per_element": tensor.bits_per_element,
            "problem": tensor.problem,
        }
        for tensor in source.tensors
    ]
    good = [(row, tensor) for row, tensor in zip(found, source.tensors, strict=True) if tensor.problem is None]
    packed = [row for row, tensor in good if tensor.format is not None]
    rows, totals = _with_shares(found, in_all), {"tensors": len(good), **_totals(packed, in_all)}
    if as_json:
        metadata = {key: json_ready(value) for key, value in source.metadata.items()}
        print(json.dumps({"tensors": rows, "totals": totals, "metadata": metadata}, indent=1))
        return
    files = ["file"] if len(source.paths) > 1 else []
    print_table(rows, "name", "format", "shape", "bytes", "bits_per_element", "share", *files)
    for row in rows:
        if row["problem"]:
            print(f"{shortened(row['name'], 60)!r} cannot be used: {printable(row['problem'], 300)}")
    known = [f"{key} {printable(str(source.metadata[key]), 60)}" for key in _SHOWN if key in source.metadata]
    if known:
        print(f"{', '.join(known)} (all {count(len(source.metadata), 'key')}: --json)")
    bad = f" ({len(rows) - len(good)} more cannot be used)" if len(rows) > len(good) else ""
    print(f"{count(len(good), 'tensor')}{bad}, {len(packed)} of them packed: {_sizes(totals)}")


_SHOWN = ("general.architecture", "general.name", "general.file_type")
