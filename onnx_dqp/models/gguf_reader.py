"""Headers of GGUF files, by way of the package ``gguf``, and all that is worked around of it, as of 0.19.0.

- It has 40 bytes for a block of Q8_1, which has 36, and does not know Q2_0; a tensor of a type that it does not know
  makes it refuse the whole file. Here a type is an integer, and sizes are left to others.
- What is read beyond the end of the file is silently shorter: a name that is cut off is taken as it is, and an array
  with a count of 2^63 is read for ever. Here that is an error.
- It makes an object of each element of an array, some hundred bytes for a byte. Here a numeric array is one view, and
  arrays of strings (vocabularies) are passed by.
- Products of dimensions and sums of offsets wrap around at 64 bits; that data are in the file, where the alignment
  says, and not another tensor's, is not checked. Here dimensions and offsets are Python's integers, and nothing is
  made of data.
- Packed tensors of big-endian files are given as they are, with fields of the other byte order: see
  ``GgufTensor.parts``.

Counts of tensors, keys and dimensions, lengths of strings, and what is kept as metadata have limits, far over what
files have, so that a damaged file costs neither memory nor time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.console import printable
from onnx_dqp.models.files import GGUF_MAGIC, ModelFileError

if TYPE_CHECKING:
    from gguf import GGUFReader

_VERSIONS = (2, 3)
_FIXED = 24
"""Bytes that every file begins with: magic, version, two counts."""

_MOST = 1 << 16
"""Tensors, and keys, of a file: models have some thousands."""

_MOST_DIMENSIONS = 64
"""Of a tensor whose dimensions are looked at; ggml has four."""

_MOST_CHARACTERS = 1 << 30
"""Bytes of a string, as in ggml's ``gguf.cpp``."""

_MOST_STRINGS = 1 << 22
"""Of an array: vocabularies and their merges have some hundred thousand."""

_LONGEST_VALUE = 1 << 12
"""Bytes of a string, or numbers of an array, that are kept as metadata: a number for each layer, not for each token."""

_MOST_METADATA = 1 << 18
"""The same, of all that are kept."""


@dataclass(frozen=True)
class Described:
    """What a file says of a tensor, as it stands there; ``relative`` counts from the beginning of all tensors' data."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int
    relative: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself: ``data`` is where tensors' data begin, ``size`` how many bytes the file has."""

    metadata: dict[str, Any]
    tensors: tuple[Described, ...]
    big_endian: bool
    alignment: int
    data: int
    size: int


def read_header(path: Path) -> Header:
    """Read what stands before the data.

    Raises
    ------
    ImportError
        The package ``gguf`` is not installed, or has another reader than is known here.
    OSError
        The file cannot be read.
    ModelFileError
        It is no GGUF file of version 2 or 3, or is damaged.
    """
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is no ordinary file, expected a GGUF file")
    with path.open("rb") as file:
        head = file.read(_FIXED)
    if head[:4] != GGUF_MAGIC:
        raise ModelFileError(f"{path} is no GGUF file: it begins with {head[:4]!r}, expected {GGUF_MAGIC!r}")
    if len(head) < _FIXED:
        raise ModelFileError(f"{path} is cut off: it has {len(head)} bytes, expected a header of {_FIXED}")
    versions = [int.from_bytes(head[4:8], "little"), int.from_bytes(head[4:8], "big")]
    if not set(versions) & set(_VERSIONS):
        raise ModelFileError(f"{path} has version {min(versions)} of GGUF, expected 2 or 3")
    reader_class = _reader_class()
    try:
        reader = reader_class(path)
        metadata = dict(_values(reader))
    except (ValueError, KeyError) as error:  # gguf's, and those of this module
        raise ModelFileError(f"{path} is damaged: {printable(str(error.args[0]), 200)}") from None
    tensors = tuple(reader.described)
    return Header(
        metadata, tensors, _is_big_endian(reader), int(reader.alignment), int(reader.data_offset), len(reader.data)
    )


def _values(reader: GGUFReader) -> Iterator[tuple[str, Any]]:
    """Metadata that are kept, by key."""
    from gguf import GGUFValueType  # noqa: PLC0415 - an extra

    left = _MOST_METADATA
    for key, field in reader.fields.items():
        length = sum(len(field.parts[place]) for place in field.data)
        strings = GGUFValueType.STRING in field.types[1:]
        if key.startswith(("GGUF.", "tokenizer.")) or strings or length > min(left, _LONGEST_VALUE):
            continue
        left -= length
        try:
            yield key, field.contents()
        except UnicodeDecodeError:
            raise _DamagedError(f"the value of {key!r} is not UTF-8") from None


def _is_big_endian(reader: GGUFReader) -> bool:
    return (reader.byte_order == "S") == (sys.byteorder == "little")


_HOOKS = ("_get", "_get_str", "_get_field_parts", "_build_fields", "_build_tensor_info", "_get_tensor_info_field",
          "_build_tensors", "gguf_scalar_to_np")  # fmt: skip
"""What is overridden or used of the reader, most of it private there."""


class _DamagedError(ValueError):
    pass


@cache
def _reader_class() -> type[Any]:
    """``gguf.GGUFReader`` with what is worked around; made when it is needed, because ``gguf`` is an extra."""
    try:
        from gguf import GGUFReader, GGUFValueType  # noqa: PLC0415
    except ImportError:
        raise ImportError("the package gguf is not installed: pip install 'onnx_dqp[gguf]'") from None
    missing = [name for name in _HOOKS if not hasattr(GGUFReader, name)]
    if missing:
        raise ImportError(f"gguf {version('gguf')} has no GGUFReader.{missing[0]}, expected a version such as 0.19.0")

    class Reader(GGUFReader):
        described: list[Described]

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
            length = 8 + len(self._get_str(orig_offs)[1])
            rank = int(self._get(orig_offs + length, np.uint32)[0])
            if rank > _MOST_DIMENSIONS:
                raise _DamagedError(
                    f"the tensor described at byte {orig_offs} has {rank} dimensions, expected 4 at most"
                )
            try:
                return super()._get_tensor_info_field(orig_offs)
            except UnicodeDecodeError:
                raise _DamagedError(f"the name of the tensor described at byte {orig_offs} is not UTF-8") from None

        def _build_tensors(self, start_offs: int, fields: Any) -> None:  # noqa: ARG002 - known as data_offset
            self.described = []
            for field in fields:
                _, _, _, dims, kind, relative = field.parts
                ne = tuple(map(int, dims))
                self.described.append(Described(field.name, ne, int(kind[0]), int(relative[0])))

        @staticmethod
        def _demand_few(count: int, what: str) -> None:
            if count > _MOST:
                raise _DamagedError(f"it has {count} {what}, expected at most {_MOST}")

    return Reader
