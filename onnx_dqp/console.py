"""What the project's commands share: how they end, what they print, and progress bars."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UsageError(Exception):
    """Bad usage, in one line."""


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run a command; returns its exit status.

    130 after an interrupt; 2, with one line on standard error, for a UsageError, and where the system refuses to read
    or write or has no memory.
    """
    _open_standard_files()
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter must not find that out again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return fail(program, f"{error.filename or 'input or output'}: {error.strerror or error}")
    except UsageError as error:
        return fail(program, str(error))
    except MemoryError as error:
        return fail(program, f"not enough memory: {error}" if str(error) else "not enough memory")
    return status


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let a request to end the process (SIGTERM) run what cleans up, here, in the main thread."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # in another thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(program: str, text: str) -> int:
    """Say in one line what is wrong; returns exit status 2."""
    print(f"{program}: {printable(text, 1000)}", file=sys.stderr)
    return 2


def _open_standard_files() -> None:
    """Workers' pipes must not get the numbers of standard files that are closed; text must not fail to be printed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def progress(what: str, total: int | None = None, *, bytes: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, if that is a terminal; yields what to call with (done) or (done, total)."""
    from rich.console import Console  # noqa: PLC0415 - of the extras conformance and cli
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    count = DownloadColumn(binary_units=True) if bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, visible=total is not None)

        def update(done: int, of: int | None = None) -> None:
            bar.update(task, completed=done, total=of if of is not None else total, visible=True)

        yield update


def printable(text: str, most: int = 300) -> str:
    """Text of any origin for a message: on one line, not long, without control characters and lone surrogates."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split())[:most])


def shortened(text: str, most: int) -> str:
    """Text of any origin for a table, with a mark in the middle where something is left out."""
    text = printable(text, len(text))
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}\u2026{text[-half:]}"


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural but for 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """An exception for a message."""
    text = printable(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
