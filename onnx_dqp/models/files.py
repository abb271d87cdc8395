"""Models and their external data as files: read without loading data, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import google.protobuf.message
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_dqp.console import one_line
from onnx_dqp.models.scopes import scopes
from onnx_dqp.rules import OUTPUT_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 4096
"""Of tensors in external data: a page, so that runtimes can map them."""

MOST_INLINE = 2**31 - 2**20
"""Bytes of a message that protobuf can write, with something to spare."""

_LARGE = 1024
"""Bytes from which on a tensor goes to external data, as in ``onnx.save``."""

_PART = 1 << 24

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


class ModelFileError(ValueError):
    """A file that cannot be read as a model or as its data: one line with its name and why."""


def read_model(path: Path) -> ModelProto:
    """Read a model without its external data.

    Raises
    ------
    ModelFileError
        The file is missing, empty, cut off or no ONNX model.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    if not content:
        raise ModelFileError(f"{path} is empty, expected an ONNX model")
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except (google.protobuf.message.DecodeError, RuntimeError):
        raise ModelFileError(f"{path} is no ONNX model, or cut off: protobuf cannot parse it") from None
    if not (model.ir_version and model.HasField("graph") and model.opset_import):
        raise ModelFileError(f"{path} is no ONNX model: it has no IR version, graph or opset")
    return model


def stored_size(tensor: TensorProto) -> int:
    """About how many bytes a tensor takes, in the model or outside."""
    length = external(tensor).get("length", "")
    return int(length) if length.isdecimal() else tensor.ByteSize()


def external(tensor: TensorProto) -> dict[str, str]:
    """What a tensor says of its external data; empty where it has none."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return {}
    return {entry.key: entry.value for entry in tensor.external_data}


def octets(tensor: TensorProto, base: Path) -> NDArray[np.uint8]:
    """A tensor's bytes, little-endian; those in an external file are mapped.

    Raises
    ------
    ModelFileError
        The external file is missing, too short, or outside the model's folder.
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        if tensor.HasField("raw_data"):
            return np.frombuffer(tensor.raw_data, np.uint8)
        return np.frombuffer(np.ascontiguousarray(numpy_helper.to_array(tensor)).tobytes(), np.uint8)
    stated = external(tensor)
    name = stated.get("location", "")
    path = data_path(tensor, base)
    try:
        size = path.stat().st_size
        offset = int(stated.get("offset", "0"))
        length = int(stated["length"]) if "length" in stated else size - offset
        if min(offset, length) < 0 or offset + length > size:
            raise ModelFileError(
                f"tensor {tensor.name!r}: {name} has {size} bytes, expected {length} from byte {offset} on"
            )
        if length == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r", offset, (length,))
    except OSError as error:
        raise ModelFileError(f"tensor {tensor.name!r}: {path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"tensor {tensor.name!r}: offset or length of its external data is no number") from None


def data_path(tensor: TensorProto, base: Path) -> Path:
    """The file of a tensor's external data, which must lie in the model's folder or below."""
    name = external(tensor).get("location", "")
    inside = PurePosixPath(name)
    if not name or inside.is_absolute() or ".." in inside.parts or "\0" in name:
        raise ModelFileError(f"tensor {tensor.name!r}: location {name[:60]!r}, expected a file in the model's folder")
    return base / name


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All initializers and the tensors of attributes, in functions too."""
    for scope in scopes(model):
        yield from getattr(scope.proto, "initializer", ())
        for node in scope.proto.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def read_tensor(path: Path) -> NDArray[Any]:
    """A TensorProto file as an array.

    Raises
    ------
    ValueError
        The file is no TensorProto, or its data do not fit its type and shape.
    """
    tensor = TensorProto()
    try:
        tensor.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no public name in all versions
        raise ValueError(f"the file is no TensorProto ({one_line(error)})") from None
    if any(dim < 0 for dim in tensor.dims):
        raise ValueError(f"the TensorProto has dims {list(tensor.dims)[:8]}, expected none negative")
    if tensor.data_type in OUTPUT_DTYPES and tensor.HasField("raw_data"):
        dtype = OUTPUT_DTYPES[tensor.data_type]
        # By way of unsigned integers, as older versions of onnx do not read BFLOAT16 into ml_dtypes' type.
        try:
            bits = np.frombuffer(tensor.raw_data, f"<u{dtype.itemsize}").astype(f"u{dtype.itemsize}")
            return bits.view(dtype).reshape(tuple(tensor.dims))
        except ValueError as error:
            raise ValueError(f"the TensorProto cannot be read ({one_line(error)})") from None
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:
        raise ValueError(f"the TensorProto cannot be read ({one_line(error)})") from None


class NewFile:
    """A file that appears under its name when it is complete: in a ``with``, then ``commit()``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Self:
        self.file: IO[bytes] = self._temporary.open("wb")
        return self

    def commit(self) -> None:
        """Give it its name."""
        self.file.flush()
        self.file.close()
        self._temporary.replace(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self._temporary.unlink(missing_ok=True)


class DataFile(NewFile):
    """A file of external data."""

    def add(self, tensor: TensorProto, content: NDArray[Any]) -> None:
        """Write a tensor's bytes, and let the tensor refer to them."""
        self.file.write(b"\0" * (-self.file.tell() % ALIGNMENT))
        offset = self.file.tell()
        flat = content.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _PART):
            self.file.write(flat[start : start + _PART].data)
        for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            tensor.ClearField(field)
        del tensor.external_data[:]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.path.name), ("offset", str(offset)), ("length", str(len(flat)))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value


def move_out(model: ModelProto, base: Path, data: DataFile, everything: bool, progress: Progress = no_progress) -> None:
    """Write a model's tensors to a file of external data: large ones and those that lie outside of its folder.

    Parameters
    ----------
    model
        Its tensors are changed to refer to the file.
    base
        The folder that tensors' locations are relative to.
    data
        Tensors that refer to it already stay as they are.
    everything
        Also tensors that are in the model; else those in external files only.
    progress
        Told of bytes.
    """
    moved = [t for t in tensors(model) if external(t).get("location") != data.path.name and _moves(t, everything)]
    total, done = sum(stored_size(tensor) for tensor in moved), 0
    for tensor in moved:
        data.add(tensor, octets(tensor, base))
        done += stored_size(tensor)
        progress(done, total)


def _moves(tensor: TensorProto, everything: bool) -> bool:
    if tensor.data_location == TensorProto.EXTERNAL:
        return True
    return everything and tensor.data_type != TensorProto.STRING and stored_size(tensor) >= _LARGE


def write_model(
    model: ModelProto, path: Path, base: Path, data: DataFile, *, everything: bool, progress: Progress = no_progress
) -> None:
    """Write a model, and the file of external data before it, whole or not at all.

    Parameters
    ----------
    model
        Its tensors are changed to refer to the file.
    path
        The model's file.
    base
        The folder that tensors' locations are relative to. Where it is another than the model's, what they refer to is
        copied.
    data
        An open file beside the model's; it is kept if something was written to it.
    everything
        Write large tensors that are in the model to the file of external data too.
    progress
        Told of bytes that are copied.
    """
    if everything or not base.samefile(path.parent):
        move_out(model, base, data, everything, progress)
    try:
        content = model.SerializeToString()
    except Exception as error:  # protobuf's, of several types
        raise ModelFileError(
            f"{path}: the model cannot be written ({one_line(error)}), expected at most 2 GiB"
        ) from None
    with NewFile(path) as new:
        new.file.write(content)
        if data.file.tell():
            data.commit()
        new.commit()
