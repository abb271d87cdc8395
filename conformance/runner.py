"""Runs many cases safely: each in a worker process, with a time limit; whatever happens costs that case a verdict."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from pebble import ProcessExpired, ProcessPool

from conformance.anatomy import locate
from conformance.backends import Answer, BackendError, CaseBackend, CommandBackend, one_line, read_tensor
from conformance.compare import Comparison, Difference
from conformance.testdata import Entry

PASSED = "passed"
VERDICTS = (PASSED, "wrong", "refused", "accepted invalid", "crashed", "timed out", "unsupported")

_GRACE = 10.0
"""Seconds beyond a case's time limit before a worker is ended that ends what it runs by itself: a command."""


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


@dataclass(frozen=True)
class Selection:
    """Which cases to run: globs on names, flags, formats and types; none selected means all.

    Attributes
    ----------
    select, skip
        Globs; a case must match one of ``select``, if there are any, and none of ``skip``.
    finite
        Leave out special scales (flag ``SpecialScale``).
    """

    select: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    finite: bool = False

    def takes(self, entry: Entry) -> bool:
        """Whether to run a case."""
        if self.finite and "SpecialScale" in entry.flags:
            return False
        return (not self.select or matches(entry, self.select)) and not matches(entry, self.skip)


def matches(entry: Entry, patterns: Iterable[str]) -> bool:
    """Whether a glob fits the case's name, category, a flag, its format (with or without ``gguf:``) or its type."""
    short = entry.format.removeprefix("gguf:")
    words = (entry.name, entry.category, entry.format, short, entry.type, *entry.flags)
    return any(fnmatchcase(word, pattern) for pattern in patterns for word in words)


def judge(root: Path, entry: Entry, answer: Answer, comparison: Comparison) -> Result:
    """Compare an answer with what the case demands."""
    if answer.kind != "output":
        refused_rightly = answer.kind == "refused" and not entry.valid
        return Result(entry, PASSED if refused_rightly else answer.kind, answer.detail)
    if not entry.valid:
        return Result(entry, "accepted invalid", f"{entry.rule}: {entry.reason}")
    if len(answer.outputs) != 1:
        return Result(entry, "wrong", answer.detail or f"{len(answer.outputs)} outputs, expected 1")
    if answer.detail:
        return Result(entry, "wrong", answer.detail)
    expected = read_tensor(root / entry.folder / "test_data_set_0" / "output_0.pb")
    difference = comparison.difference(answer.outputs[0], expected)
    if difference is None:
        return Result(entry, PASSED)
    location: tuple[str, ...] = ()
    if difference.first is not None and entry.category != "graph":
        payload = read_tensor(root / entry.folder / entry.inputs[0]).tobytes()
        location = tuple(locate(entry.packed_format, payload, difference.first))
    return Result(entry, "wrong", difference.summary, difference, location)


def _work(backend: CaseBackend, root: Path, entry: Entry, comparison: Comparison, timeout: float) -> Result:
    """One case, in a worker process."""
    with np.errstate(all="ignore"):
        return judge(root, entry, backend.run(root, entry, timeout), comparison)


def _quiet() -> None:
    """A worker's own output would garble the report."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def run(
    backend: CaseBackend,
    root: Path,
    entries: Sequence[Entry],
    selection: Selection,
    *,
    comparison: Comparison | None = None,
    jobs: int = 1,
    timeout: float = 60.0,
    expected_failures: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> list[Result]:
    """Run cases.

    Parameters
    ----------
    backend
        What runs them; it is sent to worker processes.
    root, entries
        The test data and the whole of its manifest.
    selection
        Which of them count.
    comparison
        What counts as equal; bits, if None.
    jobs, timeout
        Worker processes, and seconds a case may take.
    expected_failures
        Globs, as in a selection.
    progress
        Called with the number of cases done and of all.

    Returns
    -------
    A result for each selected case, in the order of the entries.

    Raises
    ------
    BackendError
        The backend cannot be used at all.
    """
    comparison = comparison or Comparison()
    chosen = [entry for entry in entries if selection.takes(entry)]
    cells = {(entry.format, entry.type) for entry in chosen}
    gates = [e for e in entries if e.category == "basic" and (e.format, e.type) in cells]
    rest = [entry for entry in chosen if entry.category != "basic"]
    results: dict[str, Result] = {}
    silent: dict[tuple[str, str], Result] = {}
    total, done = len(gates) + len(rest), 0

    def finish(result: Result) -> None:
        nonlocal done
        results[result.entry.name] = result
        done += 1
        progress(done, total)

    with ProcessPool(max_workers=jobs, initializer=_quiet, context=multiprocessing.get_context("spawn")) as pool:
        try:
            # The basic cases first: where one gets no answer, the format and type are not implemented.
            for result in _all(pool, backend, root, gates, comparison, timeout):
                finish(result)
                if not result.passed and result.verdict != "wrong":
                    silent[result.entry.format, result.entry.type] = result
            supported = [entry for entry in rest if (entry.format, entry.type) not in silent]
            for entry in rest:
                gate = silent.get((entry.format, entry.type))
                if gate is not None:
                    finish(Result(entry, "unsupported", f"{gate.entry.name} got no answer"))
            for result in _all(pool, backend, root, supported, comparison, timeout):
                finish(result)
        except BaseException:
            pool.stop()  # type: ignore[no-untyped-call]
            raise
    for gate in silent.values():
        if gate.verdict == "refused":
            results[gate.entry.name] = Result(gate.entry, "unsupported", gate.detail)
    return [replace(results[entry.name], expected_failure=matches(entry, expected_failures)) for entry in chosen]


def _all(
    pool: ProcessPool,
    backend: CaseBackend,
    root: Path,
    entries: Sequence[Entry],
    comparison: Comparison,
    timeout: float,
) -> Iterable[Result]:
    """The results of these cases as they come, in order; a worker's end is its case's verdict."""
    limit = timeout + (_GRACE if isinstance(backend, CommandBackend) else 0)
    futures = [pool.schedule(_work, args=[backend, root, e, comparison, timeout], timeout=limit) for e in entries]
    for entry, future in zip(entries, futures, strict=True):
        try:
            yield future.result()
        except BackendError:
            raise
        except (TimeoutError, FutureTimeoutError):
            yield Result(entry, "timed out", f"no answer in {timeout:g} s")
        except ProcessExpired as error:
            yield Result(entry, "crashed", _end(error.exitcode))
        except Exception as error:
            yield Result(entry, "crashed", one_line(error))


def _end(status: int | None) -> str:
    if status is not None and status < 0:
        return f"the process ended by signal {-status}"
    return f"the process ended with status {status}"
