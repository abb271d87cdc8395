"""Ways to run a case: a Python backend, an external command, results that are already there.

Each gives an :class:`Answer` or raises; the runner calls it in a process of its own, so that it may crash or hang.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray

from conformance.testdata import Entry
from onnx_dqp import ReferenceEvaluator
from onnx_dqp.console import one_line, printable
from onnx_dqp.models.files import read_tensor


class BackendError(Exception):
    """The backend itself cannot be used: no such module or program. The run stops."""


@dataclass(frozen=True)
class Answer:
    """What a backend made of a case.

    Attributes
    ----------
    kind
        ``output``; ``refused``, the model or its data; ``unsupported``; ``crashed``; ``timed out``.
    outputs
        For ``output``: what it returned.
    detail
        One line, where there is something to say.
    lines
        More of it: the end of what a crashed program wrote to standard error.
    """

    kind: str
    outputs: Sequence[Any] = ()
    detail: str = ""
    lines: tuple[str, ...] = ()


class CaseBackend(Protocol):
    """What the runner needs. Objects of such a class travel to worker processes."""

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:
        """Run a case of the test data in ``root``. May raise, crash and hang; after ``timeout`` seconds it is ended."""
        ...


class Reference:
    """``onnx_dqp.ReferenceEvaluator`` as an ONNX backend."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> Reference:  # noqa: ARG003
        """Build the evaluator."""
        made = cls()
        made._evaluator = ReferenceEvaluator(model)
        return made

    def run(self, inputs: Sequence[NDArray[Any]]) -> Sequence[Any]:
        """Run it."""
        return list(self._evaluator.run(None, dict(zip(self._evaluator.input_names, inputs, strict=True))))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """The CPU."""
        return device == "CPU"

    _evaluator: ReferenceEvaluator


def _built_in(name: str, opset: int | None) -> Any:
    """A backend of the suite's own, or None."""
    if name == "reference":
        return Reference
    if name not in ("onnxruntime", "onnxruntime-expanded", "reference-expanded"):
        return None
    from conformance import runtimes  # noqa: PLC0415 - of the extra test

    if name == "reference-expanded":
        return runtimes.Expanded(runtimes.PlainReference, opset)
    return runtimes.OnnxRuntime if name == "onnxruntime" else runtimes.Expanded(runtimes.OnnxRuntime, opset)


def says_unsupported(error: BaseException) -> bool:
    """Whether an exception of a backend means that it does not support the model, and not that it refuses it."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"NotImplementedError", "BackendIsNotSupposedToImplementIt", "SkipTest"})


@dataclass(frozen=True)
class PythonBackend:
    """An ONNX backend (``onnx.backend.base``) by name: a module, or ``module:Class`` or ``module.Class``.

    Names of the suite's own: ``reference``, which is ``onnx_dqp.ReferenceEvaluator``; ``onnxruntime``;
    ``onnxruntime-expanded`` and ``reference-expanded``, ONNX Runtime and ONNX's plain ReferenceEvaluator on models that
    ``onnx_dqp.expand`` made, of the opset ``opset`` (None for its default).
    """

    name: str
    opset: int | None = None

    def load(self) -> Any:
        """Import it.

        Raises
        ------
        BackendError
            There is no such module or class, or it has no ``prepare``.
        """
        try:
            built_in = _built_in(self.name, self.opset)
        except ModuleNotFoundError as error:
            raise BackendError(f"backend {self.name!r} needs the package {error.name}") from None
        if built_in is not None:
            return built_in
        module, _, attribute = self.name.partition(":")
        try:
            try:
                found: Any = importlib.import_module(module)
            except ModuleNotFoundError as error:
                head, _, tail = module.rpartition(".")
                if attribute or not head or error.name != module:
                    raise
                found, attribute = importlib.import_module(head), tail
            if attribute:
                found = getattr(found, attribute)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may exit
            raise BackendError(f"backend {self.name!r} cannot be imported: {one_line(error)}") from None
        if not hasattr(found, "prepare"):
            raise BackendError(f"backend {self.name!r} has no prepare(), expected an ONNX backend")
        return found

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:  # noqa: ARG002
        """Prepare the model and run it; an exception is a refusal."""
        backend = self.load()
        folder = root / entry.folder
        inputs = [read_tensor(root / entry.path(name)) for name in entry.inputs]
        model = onnx.load(folder / "model.onnx")
        try:
            prepared = backend.prepare(model, "CPU")
            if prepared is None:
                return Answer("unsupported", detail="prepare() gave None")
            outputs = prepared.run(inputs)
        except Exception as error:
            return Answer("unsupported" if says_unsupported(error) else "refused", detail=one_line(error))
        except BaseException as error:  # sys.exit(), or an interrupt of the backend's own
            return Answer("crashed", detail=one_line(error))
        if not isinstance(outputs, (list, tuple)):
            return Answer("output", [outputs], f"run() returned a {type(outputs).__name__}, not a list")
        return Answer("output", list(outputs))


REFUSED, UNSUPPORTED, NO_PROGRAM = 3, 4, (126, 127)
"""Exit statuses of a command."""


@dataclass(frozen=True)
class CommandBackend:
    """An external program, once for each case.

    Attributes
    ----------
    words
        The program and its arguments, with ``{model}``, ``{inputs}`` (alone in an argument: one argument for each
        input, or none) and ``{output}``.
    """

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> CommandBackend:
        """Split a command line as a shell would; a ValueError says what is wrong with it."""
        words = tuple(shlex.split(text))
        if not words:
            raise ValueError("the command is empty")
        for placeholder in ("{model}", "{output}"):
            if not any(placeholder in word for word in words):
                raise ValueError(f"the command has no {placeholder}")
        inside = next((word for word in words if "{inputs}" in word and word != "{inputs}"), None)
        if inside is not None:
            raise ValueError(f"{{inputs}} stands inside of {inside!r}, expected it to be an argument of its own")
        return cls(words)

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:
        """Run the program; its exit status and its output file are the answer."""
        folder = root / entry.folder
        with TemporaryDirectory() as directory:
            output = Path(directory, "output_0.pb")
            names = {"{model}": str(folder / "model.onnx"), "{output}": str(output)}
            arguments: list[str] = []
            for word in self.words:
                if word == "{inputs}":
                    arguments.extend(str(root / entry.path(name)) for name in entry.inputs)
                else:
                    arguments.append(re.sub("{model}|{output}", lambda found: names[found[0]], word))
            status, errors = _execute(arguments, timeout, Path(directory, "stderr"))
            lines = tuple(printable(line) for line in errors.decode(errors="replace").splitlines() if line.strip())
            last = lines[-1] if lines else ""
            if status is None:
                return Answer("timed out", detail=f"no answer in {timeout:g} s")
            if status in NO_PROGRAM:
                raise BackendError(f"{self.words[0]}: exit status {status}: the program cannot be run {last}".strip())
            if status == REFUSED:
                return Answer("refused", detail=last)
            if status == UNSUPPORTED:
                return Answer("unsupported", detail=last)
            if status != 0:
                what = f"signal {signal_name(-status)}" if status < 0 else f"exit status {status}"
                return Answer("crashed", detail=what, lines=tuple(f"stderr: {line}" for line in lines[-10:]))
            if not output.is_file():
                return Answer("crashed", detail="exit status 0, but no output file")
            try:
                return Answer("output", [read_tensor(output)])
            except ValueError as error:
                return Answer("output", [], str(error))


def _execute(arguments: Sequence[str], timeout: float, stderr: Path) -> tuple[int | None, bytes]:
    """Run a program in a session of its own, which is ended with all its children; None for one that took too long.

    Standard error goes through a file: a pipe would stay open as long as a child lives.
    """
    with stderr.open("wb") as errors:
        try:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise BackendError(f"{arguments[0]}: {error.strerror}") from None
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None, b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, stderr.read_bytes()[-_MOST_STDERR:]


_MOST_STDERR = 1 << 16


@dataclass(frozen=True)
class ResultsBackend:
    """Outputs that were written elsewhere, as ``<folder>/<case>/output_0.pb``; a case without one was not answered."""

    folder: Path

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:  # noqa: ARG002
        """Read the case's output."""
        path = self.folder / entry.name / "output_0.pb"
        if not path.is_file():
            return Answer("refused", detail="no output file")
        try:
            return Answer("output", [read_tensor(path)])
        except ValueError as error:
            return Answer("output", [], str(error))


def signal_name(number: int) -> str:
    """A signal's name, or its number where it has none, as real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
