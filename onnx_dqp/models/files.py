"""Models and their external data as files: read without loading data, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import google.protobuf.message
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_dqp.console import one_line
from onnx_dqp.models.scopes import clear_data, external, scopes, stated_length
from onnx_dqp.rules import OUTPUT_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 4096
"""Of tensors in external data: a page, so that runtimes can map them."""

MOST_INLINE = 2**31 - 2**20
"""Bytes of a message that protobuf can write, with something to spare."""

_LARGE = 1024
"""Bytes from which on a tensor goes to external data, as in ``onnx.save``."""

GGUF_MAGIC = b"GGUF"
"""How a GGUF file begins, and no model does."""

PART = 1 << 24
"""Bytes that are read or written at a time."""

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
    if content.startswith(GGUF_MAGIC):
        raise ModelFileError(f"{path} is a GGUF file, expected an ONNX model: onnx-dqp from-gguf makes one")
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except (google.protobuf.message.DecodeError, RuntimeError):
        raise ModelFileError(f"{path} is no ONNX model, or cut off: protobuf cannot parse it") from None
    if not (model.ir_version and model.HasField("graph") and model.opset_import):
        raise ModelFileError(f"{path} is no ONNX model: it has no IR version, graph or opset")
    if not _texts_are_text(model):
        raise ModelFileError(f"{path} is damaged: it has names that are not UTF-8")
    return model


def _texts_are_text(message: Any) -> bool:
    """Whether all strings of a message are UTF-8: protobuf gives bytes for those that are not."""
    for field, value in message.ListFields():
        many = value if not isinstance(value, (str, bytes, int, float)) and hasattr(value, "__len__") else [value]
        if field.type == field.TYPE_STRING and not all(isinstance(text, str) for text in many):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_texts_are_text, many)):
            return False
    return True


def stored_size(tensor: TensorProto) -> int:
    """About how many bytes a tensor takes, in the model or outside."""
    stated = stated_length(tensor)
    return tensor.ByteSize() if stated is None else stated


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
        # By way of a tensor with raw data, which packs types of less than eight bits.
        return np.frombuffer(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data, np.uint8)
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


def refer(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Let a tensor's data be bytes of an external file."""
    clear_data(tensor)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


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
    except Exception as error:  # protobuf's, of several types
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
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ModelFileError(f"{path} is a symbolic link in a circle, expected a file to write") from None
        target = path.resolve()  # where a link leads to
        if path.exists() and not path.is_file():
            raise ModelFileError(f"{path} is no ordinary file, expected one to write or to replace")
        self.path = path
        self._target, self._temporary = target, target.with_name(f".{target.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Self:
        self.file: IO[bytes] = self._temporary.open("wb")
        return self

    def finish(self) -> None:
        """Write what is still to be written: after this, giving it its name needs no room on the disk."""
        if not self.file.closed:
            self.file.flush()
            self.file.close()

    def commit(self) -> None:
        """Give it its name."""
        self.finish()
        self._temporary.replace(self._target)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(OSError):  # a full disk, which is known already
                self.file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let no other process that does the same be here at the same time, where the system has locks of folders."""
    try:
        import fcntl  # noqa: PLC0415 - not on Windows
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def demand_location(path: Path) -> None:
    """Refuse a file whose name or kind ``onnx`` refuses as external data.

    Raises
    ------
    ModelFileError
        It is a symbolic link, or its name has two dots in a row or is not UTF-8.
    """
    if path.is_symlink():
        raise ModelFileError(f"{path} is a symbolic link, which onnx refuses as external data")
    if ".." in path.name:
        raise ModelFileError(f"{path} has two dots in a row, which onnx refuses in the name of external data")
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{path}: its name is not UTF-8, as a location of external data must be") from None


class DataFile(NewFile):
    """A file of external data.

    Tensors refer to it by a provisional name, which no other tensor has, until ``settle()``.
    """

    def add(self, tensor: TensorProto, content: NDArray[Any]) -> None:
        """Write a tensor's elements, and let the tensor refer to them; an empty one has none and stays in the model."""
        if sys.byteorder == "big":
            content = content.byteswap()
        flat = content.reshape(-1).view(np.uint8)
        self.add_parts(tensor, (flat[start : start + PART] for start in range(0, len(flat), PART)))

    def add_parts(
        self, tensor: TensorProto, parts: Iterable[NDArray[np.uint8]], update: Callable[[int], None] | None = None
    ) -> None:
        """As ``add``, with the tensor's bytes part by part; ``update`` is told how many are written."""
        end = self.file.tell()
        offset = end + -end % ALIGNMENT
        written = 0
        for part in parts:
            if not written:
                demand_location(self.path)
                self.file.write(b"\0" * (offset - end))
            self.file.write(part.data)
            written += len(part)
            if update is not None:
                update(written)
        if written:
            refer(tensor, self._temporary.name, offset, written)
        else:
            clear_data(tensor)
            del tensor.external_data[:]
            tensor.data_location, tensor.raw_data = TensorProto.DEFAULT, b""

    def holds(self, tensor: TensorProto) -> bool:
        """Whether a tensor refers to what was written to it."""
        return external(tensor).get("location") == self._temporary.name

    def settle(self, model: ModelProto) -> bool:
        """Give the file's own name to the tensors that refer to it; whether there are any."""
        held = [tensor for tensor in tensors(model) if self.holds(tensor)]
        for tensor in held:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = self.path.name
        return bool(held)


def keep_data(model: ModelProto, base: Path, data: DataFile) -> None:
    """Keep a file of external data of a model that stays in memory, if anything was written to it.

    Raises
    ------
    ModelFileError
        The model also refers to files in another folder, from where it could not be loaded.
    """
    if not data.settle(model):
        return
    others = (tensor for tensor in tensors(model) if external(tensor).get("location", data.path.name) != data.path.name)
    if not base.samefile(data.path.parent) and next(others, None) is not None:
        raise ModelFileError(f"{data.path} is not in {base}, where other data of the model are, expected it there")
    data.commit()


def demand_other_files(model: ModelProto, base: Path, *new: Path) -> None:
    """Refuse to write over external data of a model."""
    for tensor in tensors(model):
        if external(tensor):
            path = data_path(tensor, base)
            for written in new:
                if written.exists() and path.exists() and written.samefile(path):
                    raise ModelFileError(f"{written} holds data of the input, expected another file to write")


def move_out(model: ModelProto, base: Path, data: DataFile, everything: bool, progress: Progress = no_progress) -> None:
    """Write a model's tensors to a file of external data: large ones and those that lie outside of its folder.

    Parameters
    ----------
    model
        Its tensors are changed to refer to the file.
    base
        The folder that tensors' locations are relative to.
    data
        Tensors that it holds already stay as they are.
    everything
        Also tensors that are in the model; else those in external files only.
    progress
        Told of bytes.
    """
    moved = [tensor for tensor in tensors(model) if not data.holds(tensor) and _moves(tensor, everything)]
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
    """Write a model, and the file of external data just before it, each whole or not at all.

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
    has_data = data.settle(model)
    try:
        content = model.SerializeToString()
    except Exception as error:  # protobuf's, of several types
        raise ModelFileError(
            f"{path}: the model cannot be written ({one_line(error)}), expected at most 2 GiB"
        ) from None
    with NewFile(path) as new:
        new.file.write(content)
        new.finish()
        if has_data:
            data.finish()
        with _alone(path.parent):
            if has_data:
                data.commit()
            new.commit()
