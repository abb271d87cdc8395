"""A real model, packed: does it give the same labels, and is it the same whichever way it is run?

Over a few hundred files of many types, for each format: how often the packed model's label is the original's, and how
far the logits of ONNX Runtime on the expanded and on the folded model, and of ReferenceEvaluator on the packed one,
are apart. Also sizes, and the time that ONNX Runtime needs to make a session and to run. With --json, the results are
written to a file; scripts/write_magika.py makes docs/magika.md of docs/magika.json.
"""

from __future__ import annotations

from _command import require

require("data", "libggml", "magika", "rich")

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
from _command import add_results, results_file
from _corpus import files
from numpy.typing import NDArray
from onnx import ModelProto
from onnx.reference.op_run import OpRun
from pack_magika import original, stable

from onnx_dqp import ReferenceEvaluator, expand, fold, pack

NAMES = ("Q8_0", "Q6_K", "Q4_K", "IQ4_NL", "MXFP4")
BEGINNING = END = 1024
BLOCK, PADDING = 4096, 256
"""What the model takes of a file: from the package's config.min.json."""


def features(content: bytes) -> list[int]:
    """The first and the last bytes of a file without white space, as the package extracts them."""
    first, last = content[:BLOCK].lstrip(), content[-BLOCK:].rstrip()
    if len(content) <= BLOCK:
        first = last = content.strip()
    first, last = first[:BEGINNING], last[-END:]
    return [*first, *[PADDING] * (BEGINNING - len(first)), *[PADDING] * (END - len(last)), *last]


def corpus() -> tuple[NDArray[np.int32], set[str]]:
    """The features of all files, and their types."""
    found = list(files())
    return np.array([features(content) for _, content in found], np.int32), {name for name, _ in found}


def newest_opset() -> int:
    """The newest opset that ONNX Runtime and ``expand`` take."""
    for opset in range(28, 17, -1):
        try:
            session(
                onnx.version_converter.convert_version(_IDENTITY, min(opset, onnx.defs.onnx_opset_version())), opset
            )
        except Exception:
            continue
        return opset
    raise RuntimeError("ONNX Runtime takes no opset from 18 on")


_IDENTITY = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) { y = Identity(x) }'
)


def session(model: ModelProto, opset: int | None = None) -> onnxruntime.InferenceSession:
    """A session on the CPU, silent."""
    if opset is not None:
        model.opset_import[0].version = opset
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class GlobalMaxPool(OpRun):
    """GlobalMaxPool of the main domain; that of onnx up to 1.23 is right for two spatial dimensions only."""

    op_domain = ""

    def _run(self, x: NDArray[Any]) -> tuple[NDArray[Any]]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class ReduceSum(OpRun):
    """ReduceSum of the main domain, added in DOUBLE: that of onnx adds a column's FLOATs one after the other."""

    op_domain = ""

    def _run(self, data: NDArray[Any], axes: Any, keepdims: int, noop_with_empty_axes: int) -> tuple[NDArray[Any]]:
        assert len(axes) or noop_with_empty_axes  # no model here reduces all axes
        return (np.sum(data, axis=tuple(axes), keepdims=bool(keepdims), dtype=np.float64).astype(data.dtype),)


OPERATORS = [GlobalMaxPool, ReduceSum]
"""For ReferenceEvaluator, instead of onnx's own."""


@dataclass(frozen=True)
class Outcome:
    """What a model gave: labels by number, and logits (files, labels)."""

    labels: NDArray[np.int64]
    logits: NDArray[np.float32]


def outcome(outputs: list[Any]) -> Outcome:
    """Of the model's two outputs."""
    return Outcome(np.argmax(outputs[0], axis=1), outputs[1])


def median_of(times: int, work: Callable[[], Any]) -> float:
    """Seconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


def timed(model: ModelProto, x: NDArray[np.int32], times: int) -> tuple[float, float]:
    """Milliseconds to make a session, and to run it on one file."""
    made = 1e3 * median_of(times, lambda: session(model))
    one = session(model)
    return made, 1e3 * median_of(5 * times, lambda: one.run(None, {"bytes": x[:1]}))


def compare(name: str, wanted: Outcome, x: NDArray[np.int32], opset: int, times: int = 0) -> dict[str, Any]:
    """One format's figures beside what the original model gives; times are measured ``times`` times."""
    model = original()
    stable(model)
    packed = pack(model, f"gguf:{name.lower()}", quantizer="ggml")
    models = {"expanded": expand(packed, opset=opset), "folded": fold(packed, opset=opset)}
    sessions = {kind: session(each) for kind, each in models.items()}
    given = {kind: outcome(each.run(None, {"bytes": x})) for kind, each in sessions.items()}
    given["packed"] = outcome(ReferenceEvaluator(packed, new_ops=OPERATORS).run(None, {"bytes": x}))
    logits = np.stack([each.logits for each in given.values()])
    labels = np.stack([each.labels for each in given.values()])
    figures: dict[str, Any] = {
        "agree": int((labels[0] == wanted.labels).sum()),
        "files": len(x),
        "same_labels": bool((labels == labels[0]).all()),
        "logit_difference": float(np.ptp(logits, axis=0).max()),
        "bytes": {"packed": packed.ByteSize(), **{kind: each.ByteSize() for kind, each in models.items()}},
    }
    del sessions  # their threads would wait beside those that are timed
    if times:
        figures["make_ms"] = {
            "expanded": 1e3 * median_of(times, lambda: expand(packed, opset=opset)),
            "folded": 1e3 * median_of(times, lambda: fold(packed, opset=opset)),
        }
        for kind, each in models.items():
            figures.setdefault("session_ms", {})[kind], figures.setdefault("run_ms", {})[kind] = timed(each, x, times)
    return figures


def main() -> None:
    """Print the table."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=results_file, metavar="FILE", help="add the results to this file")
    parsed = parser.parse_args()
    x, types = corpus()
    model, opset = original(), newest_opset()
    wanted = outcome(session(model).run(None, {"bytes": x}))
    made, ran = timed(model, x, times=5)
    few = slice(None, None, 12)
    same = outcome(ReferenceEvaluator(model, new_ops=[GlobalMaxPool]).run(None, {"bytes": x[few]}))
    results: dict[str, Any] = {
        "files": len(x),
        "types": len(types),
        "onnxruntime": onnxruntime.__version__,
        "opset": opset,
        "original": {
            "bytes": model.ByteSize(),
            "session_ms": made,
            "logit_difference": float(np.abs(same.logits - wanted.logits[few]).max()),
            "run_ms": ran,
        },
        "formats": {name: compare(name, wanted, x, opset, times=5) for name in NAMES},
    }
    table = Table("format", "label as the original's", "logits apart", "packed", "expanded", "folded")
    for name, row in results["formats"].items():
        sizes = [f"{row['bytes'][kind]:,}" for kind in ("packed", "expanded", "folded")]
        table.add_row(name, f"{row['agree']} of {row['files']}", f"{row['logit_difference']:.2g}", *sizes)
    Console().print(table)
    if parsed.json is not None:
        add_results(parsed.json, results)


if __name__ == "__main__":
    main()
