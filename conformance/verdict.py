"""What an answer is worth: a verdict on a case, and for a wrong output where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from conformance.anatomy import locate
from conformance.backends import Answer
from conformance.cases.flags import FLAGS
from conformance.compare import Comparison, Difference
from conformance.testdata import Entry
from onnx_dqp.models.files import read_tensor

PASSED = "passed"
VERDICTS = (PASSED, "wrong", "refused", "accepted invalid", "crashed", "timed out", "unsupported")


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes
    ----------
    entry
        The case.
    verdict
        One of ``VERDICTS``.
    detail
        Why, in a line; empty for a pass.
    difference
        For a wrong output of the right type and shape: where and by how much.
    location
        For the first wrong element: its block, sub-block and deciding bytes, in lines.
    expected_failure
        The case was expected to fail.
    """

    entry: Entry
    verdict: str
    detail: str = ""
    difference: Difference | None = None
    location: tuple[str, ...] = ()
    expected_failure: bool = False

    @property
    def passed(self) -> bool:
        """The right answer was given."""
        return self.verdict == PASSED

    def as_expected(self, allow_unsupported: bool) -> bool:
        """Whether the run may succeed with this result."""
        if self.expected_failure:
            return not self.passed
        return self.passed or (allow_unsupported and self.verdict == "unsupported")

    def details(self) -> list[str]:
        """Lines on a wrong output: the first wrong element, its place, and the largest distance."""
        found = self.difference
        if found is None or found.first is None:
            return list(self.location)
        place = f"element {found.first} in row-major order"
        if self.entry.category != "graph":
            index = np.unravel_index(found.first, self.entry.shape or ())
            place = f"[{', '.join(str(int(i)) for i in index)}]"
        far = 1_000_000
        ulp = "NaN on one side only" if found.ulp is None else f"at most {found.ulp} ULP apart"
        if found.ulp is not None and found.ulp > far:
            ulp = "over a million ULP apart"
        return [
            f"{ulp}; first at {place}:",
            f"expected {found.expected_value} ({found.expected_bits}), "
            f"found {found.actual_value} ({found.actual_bits})",
            *self.location,
            f"the case: {self.entry.reason}",
            *(f"it is after: {FLAGS[flag]}" for flag in self.entry.flags if flag.startswith("Bug")),
        ]


def judge(root: Path, entry: Entry, answer: Answer, comparison: Comparison) -> Result:
    """Compare an answer with what a case of the test data in ``root`` demands."""
    if answer.kind != "output":
        refused_rightly = answer.kind == "refused" and not entry.valid
        return Result(entry, PASSED if refused_rightly else answer.kind, answer.detail, location=answer.lines)
    if not entry.valid:
        return Result(entry, "accepted invalid", f"{entry.rule}: {entry.reason}")
    if answer.detail:
        return Result(entry, "wrong", answer.detail)
    if len(answer.outputs) != 1:
        return Result(entry, "wrong", f"{len(answer.outputs)} outputs, expected 1")
    expected = read_tensor(root / entry.path("output_0.pb"))
    difference = comparison.difference(answer.outputs[0], expected)
    if difference is None:
        return Result(entry, PASSED)
    location: tuple[str, ...] = ()
    payload = decoded_payload(root, entry)
    if difference.first is not None and payload is not None:
        location = tuple(locate(entry.packed_format, payload, difference.first))
    return Result(entry, "wrong", difference.summary, difference, location)


def decoded_payload(root: Path, entry: Entry) -> bytes | None:
    """The payload whose decoded elements are the case's output; None where the model is more than that one node."""
    folder = root / entry.folder
    graph = onnx.load(folder / "model.onnx").graph
    if len(graph.node) != 1 or graph.node[0].op_type != "DequantizePacked" or graph.node[0].domain:
        return None
    names: list[Any] = [value.name for value in graph.input]
    for x in graph.node[0].input[:1]:
        if x in names:
            return read_tensor(root / entry.path(entry.inputs[names.index(x)])).tobytes()
        for initializer in graph.initializer:
            if initializer.name == x:
                return bytes(initializer.raw_data)
    return None
