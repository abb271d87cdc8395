"""What a DequantizePacked node says in its attributes, checked as far as it can be without an input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onnx import AttributeProto, TensorProto

from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import PackedFormat
from onnx_dqp.rules import check_dimensions, check_output_dtype, check_shape, find_format, payload_size

ATTRIBUTE_TYPES = {"format": AttributeProto.STRING, "shape": AttributeProto.INTS, "output_dtype": AttributeProto.INT}
"""The operator's attributes and their types."""

DEFAULT_OUTPUT_DTYPE = int(TensorProto.FLOAT)


@dataclass(frozen=True)
class Attributes:
    """The values of a node's attributes; None where one is given by reference to a function's attribute."""

    format: PackedFormat | None
    dims: tuple[int, ...] | None
    output_dtype: int | None


def read_attributes(attributes: Iterable[AttributeProto]) -> Attributes:
    """Check a node's attributes and return their values.

    Raises
    ------
    PackedTensorError
        An attribute is missing, unknown, given twice, of another type, or not UTF-8; or its value breaks rule
        R1, R2, R3 or R9, or gives a payload whose length (R4) does not fit in 63 bits.
    """
    given: dict[str, AttributeProto] = {}
    for attribute in attributes:
        name = attribute.name
        if name not in ATTRIBUTE_TYPES:
            raise PackedTensorError(f"unknown attribute {name[:60]!r}, expected {', '.join(ATTRIBUTE_TYPES)}")
        if name in given:
            raise PackedTensorError(f"attribute {name!r} is given twice, expected once")
        if attribute.type != ATTRIBUTE_TYPES[name]:
            found, wanted = (AttributeProto.AttributeType.Name(t) for t in (attribute.type, ATTRIBUTE_TYPES[name]))
            raise PackedTensorError(f"attribute {name!r} has type {found}, expected {wanted}")
        given[name] = attribute
    for name in ("format", "shape"):
        if name not in given:
            raise PackedTensorError(f"attribute {name!r} is missing, and has no default")

    values: dict[str, Any] = {"output_dtype": DEFAULT_OUTPUT_DTYPE}
    for name, attribute in given.items():
        values[name] = None if attribute.ref_attr_name else _value(attribute)

    format = None if values["format"] is None else find_format(values["format"])
    if values["output_dtype"] is not None:
        check_output_dtype(values["output_dtype"])
    dims = values["shape"]
    if dims is not None and format is None:
        dims = check_dimensions(dims)
    elif dims is not None and format is not None:
        dims = check_shape(format, dims)
        payload_size(format, dims)
    return Attributes(format, dims, values["output_dtype"])


def _value(attribute: AttributeProto) -> str | tuple[int, ...] | int:
    if attribute.type == AttributeProto.INTS:
        return tuple(attribute.ints)
    if attribute.type == AttributeProto.INT:
        return int(attribute.i)
    try:
        return attribute.s.decode("utf-8")
    except UnicodeDecodeError:
        raise PackedTensorError(f"attribute {attribute.name!r} is {attribute.s[:60]!r}, expected UTF-8") from None
