"""What the operator's contract demands of an identifier, a shape, a length and an output type, before any decoding.

Rule numbers are the contract's: R1 identifier, R2 shape, R3 last dimension, R4 length, R9 types.
Every function raises PackedTensorError with one line: what was found, what was expected. None allocates anything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from onnx_dqp.console import count
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import FORMATS, PackedFormat

OUTPUT_DTYPES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        int(TensorProto.FLOAT): np.dtype(np.float32),
        int(TensorProto.FLOAT16): np.dtype(np.float16),
        int(TensorProto.DOUBLE): np.dtype(np.float64),
        int(TensorProto.BFLOAT16): np.dtype(ml_dtypes.bfloat16),
    }
)
"""ONNX element type -> NumPy dtype, for the four types that the operator gives."""

MAX_INT64 = 2**63 - 1

TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {number: TensorProto.DataType.Name(number).lower() for number in OUTPUT_DTYPES}
)
"""ONNX element type -> the name that commands and functions have for it."""

_BY_GGML_TYPE = {format.ggml_type: format for format in FORMATS.values()}

_MOST_GGML_DIMENSIONS = 4  # GGML_MAX_DIMS

_MAX_RANK: int = getattr(np, "MAXDIMS", 64)  # NumPy 1 has the constant (32); NumPy 2 has 64 and no constant

_SHOWN_DIMENSIONS = 8
_SHOWN_CHARACTERS = 60
_MOST_DIMENSIONS = 1 << 16
"""Of a shape that is looked at; a larger rank is refused before its dimensions are."""


def show(dims: Sequence[int]) -> str:
    """A shape for a message: in ONNX's brackets, shortened where it is long."""
    shown = [_shown_integer(dim) for dim in dims[:_SHOWN_DIMENSIONS]]
    return f"[{', '.join(shown)}{', ...' if len(dims) > _SHOWN_DIMENSIONS else ''}]"


def shown(value: object) -> str:
    """Any value for a message, on one line and not long: an integer or string, or else its type."""
    if isinstance(value, (str, bytes)):
        return repr(value[:_SHOWN_CHARACTERS]) + ("..." if len(value) > _SHOWN_CHARACTERS else "")
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, int):
        return _shown_integer(value)
    return f"of type {type_name(value)}"


def type_name(value: object) -> str:
    """The name of a value's type, on one line and not long."""
    return " ".join(type(value).__name__.split())[:_SHOWN_CHARACTERS]


def _shown_integer(value: int) -> str:
    return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"


def find_format(identifier: object) -> PackedFormat:
    """R1: the format of an identifier, which is case-sensitive and takes no parameters; a format is its own."""
    if isinstance(identifier, PackedFormat) and FORMATS.get(identifier.identifier) is identifier:
        return identifier
    if not isinstance(identifier, str):
        raise PackedTensorError(f"format is of type {type_name(identifier)}", "a string", "R9")
    identifier = str(identifier)  # of a subclass: it may not be hashable
    if identifier in FORMATS:
        return FORMATS[identifier]
    import difflib  # noqa: PLC0415 - takes a while to import

    # A bound on the length: matching is quadratic, and identifiers come from models of any origin.
    lower = identifier[:64].lower()
    base = re.split("[:?]", lower.removeprefix("gguf:"))[0]
    near = [f"gguf:{base}"] if f"gguf:{base}" in FORMATS else difflib.get_close_matches(lower, FORMATS, n=3, cutoff=0.7)
    found = f"unknown format {shown(identifier)}"
    if near:
        raise PackedTensorError(found, f"{' or '.join(near)}?", "R1", link=": did you mean ")
    raise PackedTensorError(found, f"one of {', '.join(FORMATS)}", "R1", link=": expected ")


def from_ggml_type(id: int) -> PackedFormat | None:
    """The format of one of ggml's type numbers (``enum ggml_type`` in ``ggml.h``, as GGUF files have them).

    Parameters
    ----------
    id
        Any integer.

    Returns
    -------
    The format, or None where none of the 27 has that number: floating-point and integer types, removed ones, forks'.

    Raises
    ------
    TypeError
        ``id`` is no integer.
    """
    try:
        return _BY_GGML_TYPE.get(integer(id))
    except TypeError:
        raise TypeError(f"id is {shown(id)}, expected an integer") from None


def to_ggml_type(format: str | PackedFormat) -> int:
    """ggml's number for a format: the inverse of ``from_ggml_type``.

    Raises
    ------
    PackedTensorError
        The identifier breaks rule R1.
    """
    return find_format(format).ggml_type


def shape_from_gguf(ne: Sequence[int]) -> tuple[int, ...]:
    """Rule R8: a shape in ONNX's order from a GGUF tensor's dimensions, which are in the reverse order.

    GGUF drops trailing ones, which ONNX's order has in front: ``[64, 1, 3]`` gives ``(3, 1, 64)``, and a tensor that
    was ``(1, 3, 1, 64)`` gives the same.

    Parameters
    ----------
    ne
        One to four dimensions, the elements of a row first.

    Raises
    ------
    PackedTensorError
        There are fewer than one or more than four dimensions (``GGML_MAX_DIMS``), or one is negative, over 63 bits or
        no integer.
    """
    dims = check_dimensions(ne, "ne")
    if len(dims) > _MOST_GGML_DIMENSIONS:
        raise PackedTensorError(f"ne is {show(dims)}", f"at most {_MOST_GGML_DIMENSIONS} dimensions", "R8")
    return dims[::-1]


def check_dimensions(shape: object, what: str = "shape") -> tuple[int, ...]:
    """R2: a shape of any format as Python integers, its rank at least 1, no dimension negative or over 63 bits."""
    if isinstance(shape, (str, bytes, bytearray, memoryview)) or not isinstance(shape, (Sequence, np.ndarray)):
        raise PackedTensorError(f"{what} is of type {type_name(shape)}", "a list of integers", "R9")
    if isinstance(shape, np.ndarray) and shape.ndim != 1:
        raise PackedTensorError(f"{what} is an array of rank {shape.ndim}", "a list of integers", "R9")
    if not len(shape):
        raise PackedTensorError(f"{what} is []", "a rank of at least 1", "R2")
    if len(shape) > _MOST_DIMENSIONS:
        raise PackedTensorError(f"{what} has rank {len(shape)}", f"at most {_MOST_DIMENSIONS}")
    dims = tuple(_dimension(dim, what) for dim in shape)
    for dim in dims:
        if dim < 0:
            found = f"{what} {show(dims)} has dimension {_shown_integer(dim)}"
            raise PackedTensorError(found, "no negative dimension", "R2")
        if dim > MAX_INT64:
            raise PackedTensorError(f"{what} {show(dims)} has a dimension over 2^63 - 1", rule="R2")
    return dims


def check_shape(format: PackedFormat, shape: object) -> tuple[int, ...]:
    """R2 and R3: a shape of this format as Python integers."""
    try:
        dims = check_dimensions(shape)
    except PackedTensorError as error:
        raise error.within(format.identifier) from None
    if dims[-1] % format.elements:
        raise PackedTensorError(
            f"{format.identifier}: the last dimension of shape {show(dims)} is {dims[-1]}",
            f"a multiple of {format.elements}, the elements of a block",
            "R3",
        )
    return dims


def payload_size(format: PackedFormat, dims: tuple[int, ...]) -> int:
    """R4: the length in bytes that ``x`` must have for a shape that was checked."""
    rows = product(dims[:-1])
    size = rows * (dims[-1] // format.elements) * format.bytes
    if max(size, rows * dims[-1]) > MAX_INT64:
        raise PackedTensorError(
            f"{format.identifier}: shape {show(dims)} has more elements or bytes than fit in 63 bits",
            rule="R4",
        )
    return size


def packed_size(format: str | PackedFormat, shape: Sequence[int]) -> int:
    """Length of a packed tensor's payload.

    Parameters
    ----------
    format
        One of ``FORMATS``, or its identifier.
    shape
        The tensor's dimensions, in ONNX (row-major) order.

    Returns
    -------
    The number of bytes that the operator's input ``x`` must have (rule R4), 0 where a dimension is 0.

    Raises
    ------
    PackedTensorError
        The identifier or the shape breaks rule R1, R2 or R3, or the length does not fit in 63 bits.
    """
    found = find_format(format)
    return payload_size(found, check_shape(found, shape))


def check_payload_size(format: PackedFormat, dims: tuple[int, ...], size: int) -> None:
    """R4: refuse a payload whose length is not exactly what a checked shape needs."""
    needed = payload_size(format, dims)
    if size != needed:
        rows, blocks = product(dims[:-1]), dims[-1] // format.elements
        raise PackedTensorError(
            f"{format.identifier}: x has {count(size, 'byte')}",
            f"{needed} ({count(rows, 'row')} x {count(blocks, 'block')} x {format.bytes} bytes)",
            "R4",
            link=f", but shape {show(dims)} needs ",
        )


def check_output_dtype(output_dtype: object) -> np.dtype[Any]:
    """R9: the NumPy dtype of an ONNX element type, one of the four that the operator gives."""
    try:
        return OUTPUT_DTYPES[integer(output_dtype)]
    except (TypeError, KeyError):
        allowed = ", ".join(f"{TensorProto.DataType.Name(number)} ({number})" for number in OUTPUT_DTYPES)
        raise PackedTensorError(
            f"output_dtype is {shown(output_dtype)}", f"the number of one of {allowed}", "R9"
        ) from None


def check_out(format: PackedFormat, dims: tuple[int, ...], dtype: np.dtype[Any], out: object) -> np.ndarray[Any, Any]:
    """An array to fill, as NumPy's own class; one that cannot be filled in place is refused."""
    if not isinstance(out, np.ndarray):
        raise PackedTensorError(f"out is of type {type_name(out)}, expected a NumPy array")
    out = np.asarray(out)
    if out.dtype != dtype:
        order = "" if out.dtype.isnative else " in foreign byte order"
        raise PackedTensorError(f"out has element type {out.dtype.name[:20]}{order}, expected {dtype.name}")
    if out.shape != dims:
        raise PackedTensorError(f"{format.identifier}: out has shape {show(out.shape)}, expected {show(dims)}")
    if not out.flags.c_contiguous:
        raise PackedTensorError(f"out has strides {show(out.strides)}, expected a C-contiguous array")
    if not out.flags.writeable:
        raise PackedTensorError("out is read-only, expected a writable array")
    return out


def check_array_fits(format: PackedFormat, dims: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse what the contract allows but a NumPy array cannot have: too high a rank, or an empty shape too large."""
    if len(dims) > _MAX_RANK:
        raise PackedTensorError(
            f"{format.identifier}: shape {show(dims)} has rank {len(dims)}, NumPy's arrays have at most {_MAX_RANK}"
        )
    if product([dim for dim in dims if dim]) * dtype.itemsize > np.iinfo(np.intp).max:
        raise PackedTensorError(
            f"{format.identifier}: shape {show(dims)} is too large for a NumPy array, even where it is empty"
        )


def product(dims: Sequence[int]) -> int:
    """The product, cut off once it passes 2^63 - 1: that of many large dimensions would take a minute."""
    if 0 in dims:
        return 0
    product = 1
    for dim in dims:
        product *= dim
        if product > MAX_INT64:
            break
    return product


def _dimension(value: object, what: str) -> int:
    try:
        return integer(value)
    except TypeError:
        raise PackedTensorError(f"{what} has an item that is {shown(value)}", "a list of integers", "R9") from None


def integer(value: object) -> int:
    """Any integer but a bool, NumPy's included, as a Python int; anything else is a TypeError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # whatever an __index__ of any object raises
        raise TypeError from None
