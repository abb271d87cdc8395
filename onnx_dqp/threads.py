"""How many threads to use, and how to run a loop's body in them."""

from __future__ import annotations

import os
import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from onnx_dqp.errors import PackedTensorError
from onnx_dqp.rules import integer, shown

Item = TypeVar("Item")

VARIABLE = "ONNX_DQP_THREADS"
"""The environment variable that says how many threads to use where a call does not."""

MOST_THREADS = 32
"""More are never used: all tiles together are bounded, and those of 32 threads are half of what a lone thread takes."""

_MOST_BY_DEFAULT = 4
"""NumPy gives up the interpreter's lock in its loops only, and tiles get smaller with more threads: they wait for one
another more and more. Two were measured; four is a guess on the safe side."""

_PAYS = 1 << 20
"""Elements a thread, below which a second thread costs as much as it gains."""


def thread_count(threads: int | None, elements: int) -> int:
    """Threads to use for a tensor.

    Parameters
    ----------
    threads
        As asked for; None leaves it to the environment variable, or else to the tensor's size and the processors.
    elements
        The tensor's size.

    Raises
    ------
    PackedTensorError
        ``threads``, or the variable where it counts, is not a positive integer.
    """
    if threads is None:
        text = os.environ.get(VARIABLE)
        if not text:
            paying = min(elements // _PAYS, _MOST_BY_DEFAULT)
            return min(paying, processors()) if paying > 1 else 1
        if not (text.isascii() and text.isdigit() and text.strip("0")):
            raise PackedTensorError(f"{VARIABLE} is {shown(text)}, expected a positive integer")
        threads = int(text.lstrip("0")[:20])
    try:
        number = integer(threads)
    except TypeError:
        number = 0
    if number < 1:
        raise PackedTensorError(f"threads is {shown(threads)}, expected a positive integer or None")
    return min(number, MOST_THREADS)


def processors() -> int:
    """Processors that this process may use."""
    count: Callable[[], int | None] | None = getattr(os, "process_cpu_count", None)  # from Python 3.13 on
    if count is None and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return (count or os.cpu_count)() or 1


def share(items: Iterable[Item], threads: int, work: Callable[[Iterator[Item]], None]) -> None:
    """Share out items, in order, among the calling thread and ``threads - 1`` others.

    Parameters
    ----------
    items
        Each goes to the next thread that is free.
    threads
        With 1 no thread is started. Where the system refuses to start one, those that started do.
    work
        Called once in each thread, with an iterator that gives this thread its items.

    Raises
    ------
    Exception
        The first that the work raised in any thread, or an interrupt of the calling one; all threads have ended by
        then, after the items that they were at.
    """
    rest = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[BaseException] = []

    def taken() -> Iterator[Item]:
        while not stop.is_set():
            with lock:
                try:
                    item = next(rest)
                except StopIteration:
                    return
            yield item

    def failed(error: BaseException) -> None:
        errors.append(error)
        stop.set()

    def help_out(done: threading.Event) -> None:
        try:
            work(taken())
        except BaseException as error:
            failed(error)
        finally:
            done.set()

    helpers: list[threading.Event] = []
    try:
        try:
            # At the interpreter's end a new thread would never run. Nor is threading.Thread used: an interrupt while
            # its start() or join() waits leaves it unknown whether it runs.
            while len(helpers) < threads - 1 and not sys.is_finalizing():
                done = threading.Event()
                start_new_thread(help_out, (done,))
                helpers.append(done)
        except RuntimeError:
            pass  # no more threads for this process
        except BaseException as error:
            failed(error)
        try:
            work(taken())
        except BaseException as error:
            failed(error)
        for done in helpers:
            while not done.is_set():
                try:
                    done.wait()
                except KeyboardInterrupt as error:  # ends the work, and still waits for that
                    failed(error)
        if errors:
            raise errors[0]
    finally:
        stop.set()
        errors.clear()  # or it would hold itself through its traceback, and all that these frames hold
