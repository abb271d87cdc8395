"""Runs many cases safely: each in a worker process, with a time limit; whatever happens costs that case a verdict."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
from pebble import ProcessExpired, ProcessPool

from conformance.backends import BackendError, CaseBackend, CommandBackend, PythonBackend, signal_name
from conformance.compare import Comparison
from conformance.testdata import Entry
from conformance.verdict import Result, judge
from onnx_dqp.console import one_line

_GRACE = 10.0
"""Seconds beyond a case's time limit before a worker is ended that ends what it runs by itself: a command."""

_WAITING = 8
"""Cases handed to the pool beyond one a worker: enough that no worker idles, and few enough to fit in its pipe, since
a pool that is stopped while it waits to write there leaves noise at exit (Python 3.13)."""


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


def _work(backend: CaseBackend, root: Path, entry: Entry, comparison: Comparison, timeout: float) -> Result:
    """One case, in a worker process."""
    try:
        with np.errstate(all="ignore"):
            return judge(root, entry, backend.run(root, entry, timeout), comparison)
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the run
        return Result(entry, "crashed", one_line(error))


def _quiet() -> None:
    """A worker's own output would garble the report, and an interrupt is for the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    A result for each selected case, in the order of the entries; also for a basic case that was not selected, but run
    because it tells whether its format and type are implemented, and crashed or timed out.

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

    if isinstance(backend, PythonBackend):
        _probe(backend, timeout)
    jobs = max(1, min(jobs, total))
    with _pool(jobs) as pool:
        try:
            # The basic cases first: where one gets no answer, the format and type are not implemented.
            for result in _all(pool, jobs + _WAITING, backend, root, gates, comparison, timeout):
                finish(result)
                if not result.passed and result.verdict != "wrong":
                    silent[result.entry.format, result.entry.type] = result
            supported = [entry for entry in rest if (entry.format, entry.type) not in silent]
            for entry in rest:
                gate = silent.get((entry.format, entry.type))
                if gate is not None:
                    finish(Result(entry, "unsupported", f"{gate.entry.name} got no answer"))
            for result in _all(pool, jobs + _WAITING, backend, root, supported, comparison, timeout):
                finish(result)
        except BaseException:
            pool.stop()  # type: ignore[no-untyped-call]
            raise
    for gate in silent.values():
        if gate.verdict == "refused":
            results[gate.entry.name] = Result(gate.entry, "unsupported", gate.detail)
    return [replace(results[entry.name], expected_failure=matches(entry, expected_failures)) for entry in chosen]


def _import(backend: PythonBackend) -> str:
    """In a worker process: why the backend cannot be used, or nothing."""
    try:
        backend.load()
    except BackendError as error:
        return str(error)
    return ""


def _pool(jobs: int) -> ProcessPool:
    """Worker processes, started; an interrupt meanwhile comes after."""
    pool = ProcessPool(max_workers=jobs, initializer=_quiet, context=multiprocessing.get_context("spawn"))
    try:
        with _interrupts_deferred():
            _ = pool.active  # starts it
    except BaseException:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
        raise
    return pool


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Processes started here are not hit by interrupts, not even before they can say so, nor is their start.

    They would say at length where they were interrupted, or that nobody told them what to do.
    """
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # or the first process starts it, which lets interrupts through again
    seen: list[int] = []
    # The mask is for what is started, which inherits it; another thread may still get the signal for this one.
    handler = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
    if seen:
        raise KeyboardInterrupt


def _probe(backend: PythonBackend, timeout: float) -> None:
    """Import the backend where it may crash and hang: in a worker.

    It is the only one of its pool: others might be about to start when the pool is stopped, and complain.
    """
    with _pool(1) as pool:
        try:
            problem = pool.schedule(_import, args=[backend], timeout=timeout).result()
        except (TimeoutError, FutureTimeoutError):
            problem = f"backend {backend.name!r} is not imported in {timeout:g} s"
        except ProcessExpired as error:
            problem = f"backend {backend.name!r} cannot be imported: {_end(error.exitcode)}"
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
    if problem:
        raise BackendError(problem)


def _all(
    pool: ProcessPool,
    most: int,
    backend: CaseBackend,
    root: Path,
    entries: Sequence[Entry],
    comparison: Comparison,
    timeout: float,
) -> Iterator[Result]:
    """The results of these cases as they come, at most ``most`` in the pool at a time."""
    limit = timeout + (_GRACE if isinstance(backend, CommandBackend) else 0)
    rest = iter(entries)
    pending: dict[Future[Result], Entry] = {}
    while True:
        for entry in islice(rest, most - len(pending)):
            pending[pool.schedule(_work, args=[backend, root, entry, comparison, timeout], timeout=limit)] = entry
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            yield _result(future, pending.pop(future), timeout)


def _result(future: Future[Result], entry: Entry, timeout: float) -> Result:
    """What a worker found; its end is its case's verdict."""
    try:
        return future.result()
    except BackendError:
        raise
    except (TimeoutError, FutureTimeoutError):
        return Result(entry, "timed out", f"no answer in {timeout:g} s")
    except ProcessExpired as error:
        return Result(entry, "crashed", _end(error.exitcode))
    except Exception as error:
        return Result(entry, "crashed", one_line(error))


def _end(status: int | None) -> str:
    if status is not None and status < 0:
        return f"the process ended by signal {signal_name(-status)}"
    return f"the process ended with status {status}"
