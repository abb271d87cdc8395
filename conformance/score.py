"""The suite's own score: how many of the mutants the committed cases kill."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from conformance.cases.case import TYPE_NAMES
from conformance.compare import same
from conformance.mutants import Array, Mutant, mutants
from conformance.table_decoder import Payload, decode
from conformance.testdata import read
from onnx_dqp.formats import FORMATS, PackedFormat
from onnx_dqp.formats.anatomy import RULES
from onnx_dqp.models.files import read_tensor


@dataclass(frozen=True, eq=False)
class Target:
    """What mutants of a format are tried on: a case's payload, shape and type, and the right output."""

    name: str
    flags: Sequence[str]
    octets: bytes
    payload: Payload
    shape: tuple[int, ...]
    output_dtype: int
    expected: Array


def run(mutant: Mutant, target: Target) -> Array:
    """The mutant's output."""
    payload = target.payload if mutant.octets is None else Payload(mutant.octets(target.octets), mutant.rule)
    with np.errstate(all="ignore"):
        dtype = mutant.dtype if mutant.only in (None, target.output_dtype) else np.float32
        y = np.ascontiguousarray(decode(mutant.rule, payload, dtype, mutant.stored))
        return mutant.finish(y, target.shape, target.output_dtype)


@dataclass(frozen=True)
class Score:
    """Mutants by kind, and those that no case kills.

    Attributes
    ----------
    total, killed
        Counts by kind.
    survivors
        "format: kind, name".
    """

    total: Counter[str]
    killed: Counter[str]
    survivors: list[str]

    def print(self, console: Console) -> None:
        """The kills by kind, and the survivors' names."""
        table = Table(title="Mutants killed by the committed cases")
        for heading in ("kind", "killed", "of"):
            table.add_column(heading, justify="left" if heading == "kind" else "right")
        for kind, total in self.total.items():
            table.add_row(kind, str(self.killed[kind]), str(total))
        table.add_section()
        table.add_row("all", str(self.killed.total()), str(self.total.total()))
        console.print(table)
        for name in self.survivors:
            console.print(f"[red]survived[/] {name}", highlight=False)
        console.print(f"{self.killed.total()} of {self.total.total()} mutants killed, {len(self.survivors)} survived")

    def as_json(self) -> dict[str, Any]:
        """Totals, kills and survivors."""
        return {"total": dict(self.total), "killed": dict(self.killed), "survivors": self.survivors}


def targets(root: Path, format: PackedFormat) -> list[Target]:
    """The cases that mutants of a format are tried on, smallest first: all valid ones of one node."""
    found = []
    numbers = {name: number for number, name in TYPE_NAMES.items()}
    for entry in read(root):
        if entry.format != format.identifier or not entry.valid or entry.category == "graph":
            continue
        octets = read_tensor(root / entry.path("input_0.pb")).tobytes()
        expected = read_tensor(root / entry.path("output_0.pb"))
        payload = Payload(octets, RULES[format.name])
        shape, number = tuple(entry.shape or ()), numbers[entry.type]
        found.append(Target(entry.name, entry.flags, octets, payload, shape, number, expected))
    return sorted(found, key=lambda target: (len(target.octets), target.name))


def killer(mutant: Mutant, cases: Sequence[Target]) -> str | None:
    """The name of the first case that the mutant fails, or None."""
    first = "EveryRow" if mutant.kind == "codebook row" else "Basic"
    for target in sorted(cases, key=lambda target: first not in target.flags):
        try:
            output = run(mutant, target)
        except ValueError:  # of another size than the case's shape
            return target.name
        if not same(output, target.expected):
            return target.name
    return None


def _score_format(root: Path, quarter: int | None, identifier: str) -> list[tuple[str, str, bool]]:
    """Kind, name and whether it is killed, of each mutant of a format; in a worker process."""
    format = FORMATS[identifier]
    cases = targets(root, format)
    found = []
    for mutant in mutants(format):
        name = f"{format.name}: {mutant.kind}, {mutant.name}"
        if quarter is None or hashlib.sha256(name.encode()).digest()[0] % 4 == quarter:
            found.append((mutant.kind, name, killer(mutant, cases) is not None))
    return found


def score(
    root: Path,
    jobs: int = 1,
    quarter: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Score:
    """Try all mutants, or a quarter of them, on the test data.

    Parameters
    ----------
    root
        The test data.
    jobs
        Worker processes.
    quarter
        0 to 3: only the mutants whose name's hash falls in this quarter.
    progress
        Called with the number of formats done and of all.
    """
    total: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    survivors = []
    with ProcessPoolExecutor(jobs) as pool:
        for done, found in enumerate(pool.map(partial(_score_format, root, quarter), FORMATS), 1):
            for kind, name, dead in found:
                total[kind] += 1
                killed[kind] += dead
                if not dead:
                    survivors.append(name)
            progress(done, len(FORMATS))
    return Score(total, killed, survivors)
