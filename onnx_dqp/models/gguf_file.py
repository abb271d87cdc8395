"""GGUF files, sharded or not: their tensors, where these lie, and what is wrong with each."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnx_dqp.console import printable
from onnx_dqp.formats import PackedFormat
from onnx_dqp.models.files import GGUF_MAGIC, PART, ModelFileError
from onnx_dqp.models.gguf_reader import Header, read_header
from onnx_dqp.rules import MAX_INT64, from_ggml_type, packed_size, product, shape_from_gguf, show, shown


class PlainType(NamedTuple):
    """A type without blocks: ggml's name, ONNX's number, and bytes of an element."""

    name: str
    elem_type: int
    bytes: int


PLAIN_TYPES = {
    0: PlainType("F32", TensorProto.FLOAT, 4),
    1: PlainType("F16", TensorProto.FLOAT16, 2),
    24: PlainType("I8", TensorProto.INT8, 1),
    25: PlainType("I16", TensorProto.INT16, 2),
    26: PlainType("I32", TensorProto.INT32, 4),
    27: PlainType("I64", TensorProto.INT64, 8),
    28: PlainType("F64", TensorProto.DOUBLE, 8),
    30: PlainType("BF16", TensorProto.BFLOAT16, 2),
}
"""By ggml's number for the type, from ``enum ggml_type`` in ``ggml.h``, as are all names here."""

_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
            38: "IQ4_NL_8_8"}  # fmt: skip

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
        plain = PLAIN_TYPES.get(self.ggml_type)
        return f"type {self.ggml_type}" if plain is None else plain.name

    @property
    def bits_per_element(self) -> float | None:
        """Bits of data per element, None for an unknown type."""
        if self.format is not None:
            return self.format.bits_per_element
        plain = PLAIN_TYPES.get(self.ggml_type)
        return None if plain is None else 8.0 * plain.bytes

    def parts(self) -> Iterator[NDArray[np.uint8]]:
        """Its bytes, little-endian, a part at a time.

        In a big-endian file, each number of several bytes is turned round, in blocks each field by the format's layout.

        Raises
        ------
        ValueError
            The file is shorter than it was.
        """
        unit = np.dtype(f"u{PLAIN_TYPES[self.ggml_type].bytes}") if self.format is None else self.format.layout
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
    own = read_header(given)
    paths = _shards(given, own)
    headers = [own if shard == given else read_header(shard) for shard in paths]
    for number, (shard, header) in enumerate(zip(paths, headers, strict=True)):
        found = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 1))
        if found != (number, len(paths)) and len(paths) > 1:
            raise ModelFileError(f"{shard} says that it is shard {found[0]} of {found[1]}, counted from 0")
    tensors = [tensor for shard, header in zip(paths, headers, strict=True) for tensor in _tensors(shard, header)]
    metadata = headers[0].metadata
    wanted = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and wanted != len(tensors):
        raise ModelFileError(f"{given}: the shards have {len(tensors)} tensors, expected {wanted}")
    counts = Counter(tensor.name for tensor in tensors)
    quantization = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    for place, tensor in enumerate(tensors):
        problem = tensor.problem or _name_problem(tensor.name)
        if counts[tensor.name] > 1:
            problem = "its name is used twice"
        elif problem is None and tensor.format is not None and quantization != _QUANTIZATION_VERSION:
            problem = f"the file has quantization version {quantization!r}, expected {_QUANTIZATION_VERSION}"
        tensors[place] = replace(tensor, problem=problem)
    about_file = ("split.", "general.alignment")
    kept = {key: value for key, value in metadata.items() if not key.startswith(about_file)}
    return Gguf(tuple(paths), kept, tuple(tensors))


def _shards(path: Path, header: Header) -> list[Path]:
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool):
        raise ModelFileError(f"{path} is damaged: split.count is {shown(count)}, expected an integer")
    if count <= 1:
        return [path]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(f"{path} is one of {count} shards, expected a name that ends in -00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for shard in paths:
        if not shard.exists():
            raise ModelFileError(f"{shard} is missing, expected all {count} shards beside each other")
    return paths


def _tensors(path: Path, header: Header) -> list[GgufTensor]:
    """A file's tensors, with what is wrong with their shapes and places."""
    found = []
    for described in header.tensors:
        relative, offset = described.relative, header.data + described.relative
        shape, size, problem = described.ne[::-1], 0, None
        try:
            shape = shape_from_gguf(described.ne) if described.ne else ()
            size = _size(described.ggml_type, shape)
        except ValueError as error:
            problem = str(error)
        if problem is None and relative % header.alignment:
            at = f"its data are at byte {relative} of all data"
            problem = f"{at}, expected a multiple of the alignment, {header.alignment}"
        elif problem is None and offset + size > header.size:
            problem = f"its data end at byte {offset + size}, but the file has {header.size}"
        big_endian = header.big_endian
        found.append(GgufTensor(described.name, described.ggml_type, shape, path, offset, size, big_endian, problem))
    return _without_overlaps(found)


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
        return packed_size(format, shape)
    if ggml_type not in PLAIN_TYPES:
        removed = f" ({_REMOVED[ggml_type]}, which ggml has removed)" if ggml_type in _REMOVED else ""
        raise ValueError(f"its type is {ggml_type}{removed}, expected one that ggml has")
    size = product(shape) * PLAIN_TYPES[ggml_type].bytes
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
