"""Ways to run a case: a Python backend, an external command, results that are already there.

Each gives an :class:`Answer` or raises; the runner calls it in a process of its own, so that it may crash or hang.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from conformance.testdata import Entry
from onnx_dqp import ReferenceEvaluator
from onnx_dqp.rules import OUTPUT_DTYPES


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
    """

    kind: str
    outputs: Sequence[Any] = ()
    detail: str = ""


class CaseBackend(Protocol):
    """What the runner needs. Objects of such a class travel to worker processes."""

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:
        """Run a case of the test data in ``root``. May raise, crash and hang; after ``timeout`` seconds it is ended."""
        ...


def read_tensor(path: Path) -> NDArray[Any]:
    """A TensorProto file of the test data as an array.

    Raises
    ------
    ValueError
        The file is no TensorProto, or its data do not fit its type and shape.
    """
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no public name in all versions
        raise ValueError(f"the file is no TensorProto ({one_line(error)})") from None
    if tensor.data_type in OUTPUT_DTYPES and tensor.HasField("raw_data"):
        dtype = OUTPUT_DTYPES[tensor.data_type]
        # By way of unsigned integers, as older versions of onnx do not read BFLOAT16 into ml_dtypes' type.
        bits = np.frombuffer(tensor.raw_data, f"<u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
        return bits.view(dtype).reshape(tuple(tensor.dims))
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except Exception as error:
        raise ValueError(f"the TensorProto cannot be read ({one_line(error)})") from None


def one_line(error: BaseException) -> str:
    """An exception for a report."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


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


_UNSUPPORTED = ("BackendIsNotSupposedToImplementIt", "SkipTest")


@dataclass(frozen=True)
class PythonBackend:
    """An ONNX backend (``onnx.backend.base``) by name: a module, or ``module:Class`` or ``module.Class``."""

    name: str

    def load(self) -> Any:
        """Import it.

        Raises
        ------
        BackendError
            There is no such module or class, or it has no ``prepare``.
        """
        if self.name == "reference":
            return Reference
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
        except Exception as error:
            raise BackendError(f"backend {self.name!r} cannot be imported: {one_line(error)}") from None
        if not hasattr(found, "prepare"):
            raise BackendError(f"backend {self.name!r} has no prepare(), expected an ONNX backend")
        return found

    def run(self, root: Path, entry: Entry, timeout: float) -> Answer:  # noqa: ARG002
        """Prepare the model and run it; an exception is a refusal."""
        backend = self.load()
        folder = root / entry.folder
        inputs = [read_tensor(folder / name) for name in entry.inputs]
        model = onnx.load(folder / "model.onnx")
        try:
            prepared = backend.prepare(model, "CPU")
            if prepared is None:
                return Answer("unsupported", detail="prepare() gave None")
            outputs = prepared.run(inputs)
        except NotImplementedError as error:
            return Answer("unsupported", detail=one_line(error))
        except Exception as error:
            unsupported = any(cls.__name__ in _UNSUPPORTED for cls in type(error).__mro__)
            return Answer("unsupported" if unsupported else "refused", detail=one_line(error))
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
                    arguments.extend(str(folder / name) for name in entry.inputs)
                else:
                    for placeholder, path in names.items():
                        word = word.replace(placeholder, path)  # noqa: PLW2901
                    arguments.append(word)
            status, errors = _execute(arguments, timeout)
            detail = errors.decode(errors="replace").strip().splitlines()
            last = detail[-1][:300] if detail else ""
            if status is None:
                return Answer("timed out")
            if status in NO_PROGRAM:
                raise BackendError(f"{self.words[0]}: exit status {status}: the program cannot be run {last}".strip())
            if status == REFUSED:
                return Answer("refused", detail=last)
            if status == UNSUPPORTED:
                return Answer("unsupported", detail=last)
            if status < 0:
                return Answer("crashed", detail=f"signal {signal.Signals(-status).name} {last}".strip())
            if status > 0:
                return Answer("crashed", detail=f"exit status {status} {last}".strip())
            if not output.is_file():
                return Answer("crashed", detail="exit status 0, but no output file")
            try:
                return Answer("output", [read_tensor(output)])
            except ValueError as error:
                return Answer("output", [], str(error))


def _execute(arguments: Sequence[str], timeout: float) -> tuple[int | None, bytes]:
    """Run a program in a session of its own, which is ended with all its children; None for one that took too long."""
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise BackendError(f"{arguments[0]}: {error.strerror}") from None
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, errors


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
