"""GGUF files: their tensors, where these lie, and what is wrong with each; by way of the package ``gguf``.

What is worked around here of that package, as of 0.19.0:

- it has 40 bytes for a block of Q8_1, which has 36, and does not know Q2_0; a tensor of a type that it does not know
  makes it refuse the whole file. Sizes of blocks are this project's, and a type is an integer;
- what is read beyond the end of the file is silently shorter: a name that is cut off is taken as it is, and an array
  with a count of 2^63 is read for ever. Here that is an error;
- it makes an object of each element of an array, some hundred bytes for a byte. Here a numeric array is one view, and
  arrays of strings (vocabularies) are passed by;
- products of dimensions and sums of offsets wrap around at 64 bits; that data are in the file, where the alignment
  says, and not another tensor's, is not checked;
- packed tensors of big-endian files are given as they are, with fields of the other byte order.

Counts of tensors and keys, the length of strings and that of arrays of strings have limits, far over what files have,
so that a damaged file costs neither memory nor time.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnx_dqp.console import printable
from onnx_dqp.formats import PackedFormat
from onnx_dqp.models.files import GGUF_MAGIC, PART, ModelFileError
from onnx_dqp.rules import MAX_INT64, from_ggml_type, packed_size, shape_from_gguf, show

if TYPE_CHECKING:
    from gguf import GGUFReader

PLAIN_TYPES = {
    0: TensorProto.FLOAT,
    1: TensorProto.FLOAT16,
    24: TensorProto.INT8,
    25: TensorProto.INT16,
    26: TensorProto.INT32,
    27: TensorProto.INT64,
    28: TensorProto.DOUBLE,
    30: TensorProto.BFLOAT16,
}
"""ggml's number for a type without blocks -> ONNX's; from ``enum ggml_type`` in ``ggml.h``, as are all names here."""

_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 24: ("I8", 1), 25: ("I16", 2), 26: ("I32", 4), 27: ("I64", 8), 28: ("F64", 8),
          30: ("BF16", 2)}  # fmt: skip

_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
            38: "IQ4_NL_8_8"}  # fmt: skip

_VERSIONS = (2, 3)
_HEADER = 24  # magic, version, two counts

_MOST = 1 << 16
"""Tensors, and keys, of a file."""

_MOST_CHARACTERS = 1 << 30
"""Bytes of a string, as in ggml."""

_MOST_STRINGS = 1 << 22
"""Of an array: ten times the longest vocabularies' merges."""

_LONGEST_VALUE = 1 << 12
"""Bytes of a string, or numbers of an array, that are kept as metadata: a number for each layer, not for each token."""

_QUANTIZATION_VERSION = 2
"""The version of the layouts of all formats: ``GGML_QNT_VERSION`` in ``ggml.h``."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes
    ----------
    name
        As in the file.
    ggml_type
        ggml's number for its type.
    shape
        In ONNX's order.
    path, offset, size
        Where its bytes are; ``size`` is 0 where that cannot be told, and then there is a ``problem``.
    big_endian
        Whether numbers of several bytes, fields of blocks too, are big-endian.
    problem
        Why it cannot be used, or None.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int = 0
    big_endian: bool = False
    problem: str | None = None

    @property
    def format(self) -> PackedFormat | None:
        """Its block format, None for a type without blocks or an unknown one."""
        return from_ggml_type(self.ggml_type)

    @property
    def type_name(self) -> str:
        """A format's identifier, or ggml's name for the type, or its number."""
        if self.format is not None:
            return self.format.identifier
        if self.ggml_type in _PLAIN:
            return _PLAIN[self.ggml_type][0]
        return f"type {self.ggml_type}"

    @property
    def bits_per_element(self) -> float | None:
        """Bits of data per element, None for an unknown type."""
        if self.format is not None:
            return self.format.bits_per_element
        return 8.0 * _PLAIN[self.ggml_type][1] if self.ggml_type in _PLAIN else None

    def parts(self) -> Iterator[NDArray[np.uint8]]:
        """Its bytes, little-endian, a part at a time.

        In a big-endian file, each number of several bytes is turned round, in blocks each field by the format's layout.

        Raises
        ------
        ValueError
            The file is shorter than it was.
        """
        unit = np.dtype(f"u{_PLAIN[self.ggml_type][1]}") if self.format is None else self.format.layout
        length = PART // unit.itemsize * unit.itemsize
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.size, length):
                wanted = min(length, self.size - start)
                part = np.frombuffer(file.read(wanted), np.uint8)
                if len(part) < wanted:
                    raise ModelFileError(f"{self.path}: the file became shorter while it was read")
                yield part.view(unit).byteswap().view(np.uint8) if self.big_endian else part


@dataclass(frozen=True)
class Gguf:
    """What a GGUF file, or all files of a sharded one, hold.

    Attributes
    ----------
    paths
        The files, in order.
    metadata
        Values by key: strings, numbers, truth values, and lists of numbers, none longer than 4096. Those about the
        file itself (its alignment and shards) and the tokenizer's are left out.
    tensors
        In the files' order.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def is_gguf(path: Path) -> bool:
    """Whether a file is one by its name or its beginning; no ONNX model begins so."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Read what a GGUF file says; of a sharded one (``-00001-of-00003.gguf``), what all of its files say.

    Parameters
    ----------
    path
        The file, version 2 or 3, of either byte order; any of the files of a sharded one, which lie beside each other.

    Raises
    ------
    ImportError
        The package ``gguf`` is not installed.
    OSError
        A file cannot be read.
    ValueError
        A shard is missing, or a file is no GGUF file or damaged so that its tensors cannot be told. What is wrong with
        a single tensor is its ``problem``.
    """
    given = Path(path)
    first = _read_file(given)
    paths = _shards(given, first)
    files = [first if shard == given else _read_file(shard) for shard in paths]
    for number, (shard, file) in enumerate(zip(paths, files, strict=True)):
        found = (file.own.get("split.no", 0), file.own.get("split.count", 1))
        if found != (number, len(paths)) and len(paths) > 1:
            raise ModelFileError(f"{shard} says that it is shard {found[0]} of {found[1]}, counted from 0")
    tensors = [tensor for file in files for tensor in file.tensors]
    wanted = files[0].own.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and wanted != len(tensors):
        raise ModelFileError(f"{given}: the shards have {len(tensors)} tensors, expected {wanted}")
    counts = Counter(tensor.name for tensor in tensors)
    marked = (
        replace(tensor, problem="its name is used twice") if counts[tensor.name] > 1 else tensor for tensor in tensors
    )
    return Gguf(tuple(paths), files[0].metadata, tuple(marked))


@dataclass(frozen=True)
class _File:
    own: dict[str, Any]
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def _shards(path: Path, file: _File) -> list[Path]:
    count = file.own.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [path]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(f"{path} is one of {count} shards, expected a name that ends in -00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for shard in paths:
        if not shard.exists():
            raise ModelFileError(f"{shard} is missing, expected all {count} shards beside each other")
    return paths


def _read_file(path: Path) -> _File:
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is no ordinary file, expected a GGUF file")
    with path.open("rb") as file:
        head, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    if head[:4] != GGUF_MAGIC:
        raise ModelFileError(f"{path} is no GGUF file: it begins with {head[:4]!r}, expected {GGUF_MAGIC!r}")
    if len(head) < _HEADER:
        raise ModelFileError(f"{path} is cut off: it has {len(head)} bytes, expected a header of {_HEADER}")
    versions = [int.from_bytes(head[4:8], "little"), int.from_bytes(head[4:8], "big")]
    if not set(versions) & set(_VERSIONS):
        raise ModelFileError(f"{path} has version {min(versions)} of GGUF, expected 2 or 3")
    reader_class = _reader_class()
    try:
        reader = reader_class(path)
        metadata = dict(_values(reader))
    except (MemoryError, OSError):
        raise
    except Exception as error:  # gguf's, of many types
        reason = str(error.args[0]) if error.args else type(error).__name__
        raise ModelFileError(f"{path} is damaged: {printable(reason, 200)}") from None
    own = {key: value for key, value in metadata.items() if key.startswith("split.")}
    hidden = (*own, "general.alignment")
    quantization = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    tensors = [
        _examined(entry, path, _is_big_endian(reader), int(reader.alignment), size, quantization)
        for entry in reader.entries
    ]
    kept = {key: value for key, value in metadata.items() if key not in hidden}
    return _File(own, kept, _without_overlaps(tensors))


def _values(reader: GGUFReader) -> Iterator[tuple[str, Any]]:
    for key, field in reader.fields.items():
        length = sum(len(field.parts[place]) for place in field.data)
        if key.startswith(("GGUF.", "tokenizer.")) or not 0 < length <= _LONGEST_VALUE:
            continue
        try:
            yield key, field.contents()
        except UnicodeDecodeError:
            raise ValueError(f"the value of {key!r} is not UTF-8") from None


@dataclass(frozen=True)
class _Entry:
    """What a file says of a tensor, as it stands there; the offset counts from the file's beginning."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int
    offset: int
    relative: int


def _examined(
    entry: _Entry, path: Path, big_endian: bool, alignment: int, file_size: int, quantization: Any
) -> GgufTensor:
    """A tensor, with what is wrong with it, overlaps left aside."""
    tensor = GgufTensor(entry.name, entry.ggml_type, entry.ne[::-1], path, entry.offset, big_endian=big_endian)
    try:
        shape = shape_from_gguf(entry.ne)
        size = _size(entry.ggml_type, shape)
    except ValueError as error:
        return replace(tensor, problem=str(error))
    problem = _name_problem(entry.name)
    if problem is not None:
        return replace(tensor, shape=shape, size=size, problem=problem)
    if entry.relative % alignment:
        problem = (
            f"its data are at byte {entry.relative} of all data, expected a multiple of the alignment, {alignment}"
        )
    elif entry.offset + size > file_size:
        problem = f"its data end at byte {entry.offset + size}, but the file has {file_size}"
    elif tensor.format is not None and quantization != _QUANTIZATION_VERSION:
        problem = f"the file has quantization version {quantization}, expected {_QUANTIZATION_VERSION}"
    return replace(tensor, shape=shape, size=size, problem=problem)


def json_ready(value: Any) -> Any:
    """A metadata value for JSON, which has no infinities and NaN: these become strings."""
    if isinstance(value, list):
        return [json_ready(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name_problem(name: str) -> str | None:
    if not name:
        return "its name is empty"
    if "/" in name or "\\" in name:
        return "its name holds a path separator"
    if not name.isprintable():
        return "its name holds characters that cannot be printed"
    return None


def _size(ggml_type: int, shape: tuple[int, ...]) -> int:
    format = from_ggml_type(ggml_type)
    if format is not None:
        return packed_size(format.identifier, shape)
    if ggml_type not in _PLAIN:
        removed = f" ({_REMOVED[ggml_type]}, which ggml has removed)" if ggml_type in _REMOVED else ""
        raise ValueError(f"its type is {ggml_type}{removed}, expected one that ggml has")
    size = _PLAIN[ggml_type][1]
    for dim in shape:
        size *= dim
    if size > MAX_INT64:
        raise ValueError(f"shape {show(shape)} has more bytes than fit in 63 bits")
    return size


def _without_overlaps(tensors: list[GgufTensor]) -> list[GgufTensor]:
    """Mark tensors that share bytes with others."""
    order = sorted((t.offset, t.offset + t.size, i) for i, t in enumerate(tensors) if t.size and t.problem is None)
    overlaps: dict[int, int] = {}
    last_end, last = 0, -1
    for start, end, place in order:
        if start < last_end:
            overlaps[place] = last
            overlaps.setdefault(last, place)
        if end > last_end:
            last_end, last = end, place
    return [
        replace(tensor, problem=f"its data overlap those of {printable(tensors[overlaps[i]].name, 60)!r}")
        if i in overlaps
        else tensor
        for i, tensor in enumerate(tensors)
    ]


def _is_big_endian(reader: GGUFReader) -> bool:
    return (reader.byte_order == "S") == (sys.byteorder == "little")


class _DamagedError(ValueError):
    pass


@cache
def _reader_class() -> type[Any]:
    """``gguf.GGUFReader`` with what is worked around; made when it is needed, because ``gguf`` is an extra."""
    try:
        from gguf import GGUFReader, GGUFValueType  # noqa: PLC0415
    except ImportError:
        raise ImportError("the package gguf is not installed: pip install 'onnx_dqp[gguf]'") from None

    class Reader(GGUFReader):
        entries: list[_Entry]

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
            end = offset + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise _DamagedError(f"what is at byte {offset} ends at byte {end}, but the file has {len(self.data)}")
            return super()._get(offset, dtype, count, override_order)

        def _get_str(self, offset: int) -> Any:
            (length,) = self._get(offset, np.uint64)
            if length > _MOST_CHARACTERS:
                found = f"the string at byte {offset} has {length} bytes"
                raise _DamagedError(f"{found}, expected at most {_MOST_CHARACTERS}")
            return super()._get_str(offset)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            kind, count, start = GGUFValueType(int(head[0][0])), int(head[1][0]), orig_offs + 12
            if kind in self.gguf_scalar_to_np:
                values = self._get(start, self.gguf_scalar_to_np[kind], count)
                return 12 + int(values.nbytes), [*head, values], [2], [GGUFValueType.ARRAY, kind]
            if kind != GGUFValueType.STRING or count > _MOST_STRINGS:
                what = f"{count} strings" if kind == GGUFValueType.STRING else "arrays"
                raise _DamagedError(
                    f"the array at byte {orig_offs} is of {what}, expected at most {_MOST_STRINGS} strings"
                )
            return self._end_of_strings(start, count) - orig_offs, head, [], [GGUFValueType.ARRAY, kind]

        def _end_of_strings(self, start: int, count: int) -> int:
            # Without _get(), of which each call takes as long as a hundred of these steps.
            view = memoryview(self.data.data)
            order: Literal["big", "little"] = "big" if _is_big_endian(self) else "little"
            end = start
            for _ in range(count):
                end += 8 + int.from_bytes(view[end : end + 8], order)
                if end > len(view):
                    raise _DamagedError(
                        f"the array of strings at byte {start} goes on beyond the file's {len(view)} bytes"
                    )
            return end

        def _build_fields(self, offs: int, count: int) -> int:
            self._demand_few(count, "keys")
            try:
                return super()._build_fields(offs, count)
            except UnicodeDecodeError:
                raise _DamagedError("a key is not UTF-8") from None

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            self._demand_few(count, "tensors")
            return super()._build_tensor_info(offs, count)

        def _get_tensor_info_field(self, orig_offs: int) -> Any:
            try:
                return super()._get_tensor_info_field(orig_offs)
            except UnicodeDecodeError:
                raise _DamagedError(f"the name of the tensor described at byte {orig_offs} is not UTF-8") from None

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            self.entries = []
            for field in fields:
                _, _, _, dims, kind, (relative,) = field.parts
                ne, offset = tuple(map(int, dims)), int(start_offs) + int(relative)
                self.entries.append(_Entry(field.name, ne, int(kind[0]), offset, int(relative)))

        @staticmethod
        def _demand_few(count: int, what: str) -> None:
            if count > _MOST:
                raise _DamagedError(f"it has {count} {what}, expected at most {_MOST}")

    return Reader
