"""What a DequantizePacked node says in its attributes, checked as far as it can be without an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    values, problems = examine(attributes)
    if problems:
        raise problems[0]
    return values


def examine(attributes: Iterable[AttributeProto]) -> tuple[Attributes, list[PackedTensorError]]:
    """The values that can be told, and all that is wrong: the first is what ``read_attributes`` raises."""
    problems: list[PackedTensorError] = []
    given: dict[str, AttributeProto] = {}
    for attribute in attributes:
        name = attribute.name
        if name not in ATTRIBUTE_TYPES:
            problems.append(PackedTensorError(f"unknown attribute {name[:60]!r}", ", ".join(ATTRIBUTE_TYPES), "R9"))
        elif name in given:
            problems.append(PackedTensorError(f"attribute {name!r} is given twice", "once", "R9"))
        else:
            given[name] = attribute
            if attribute.type != ATTRIBUTE_TYPES[name]:
                found, wanted = (AttributeProto.AttributeType.Name(t) for t in (attribute.type, ATTRIBUTE_TYPES[name]))
                problems.append(PackedTensorError(f"attribute {name!r} has type {found}", wanted, "R9"))
    problems.extend(
        PackedTensorError(f"attribute {name!r} is missing, and has no default", rule="R9")
        for name in ("format", "shape")
        if name not in given
    )

    values: dict[str, Any] = dict.fromkeys(ATTRIBUTE_TYPES)
    if "output_dtype" not in given:
        values["output_dtype"] = DEFAULT_OUTPUT_DTYPE
    checks: dict[str, Callable[[Any], Any]] = {
        "format": find_format,
        "shape": check_dimensions,
        "output_dtype": check_output_dtype,
    }
    for name, check in checks.items():
        one = given.get(name)
        if one is None or one.type != ATTRIBUTE_TYPES[name] or one.ref_attr_name:
            continue
        try:
            value = _value(one)
            checked = check(value)
            values[name] = value if name == "output_dtype" else checked
        except PackedTensorError as error:
            known = name == "shape" and values["format"]
            problems.append(error.within(values["format"].identifier) if known else error)
    format, dims = values["format"], values["shape"]
    if dims is not None and format is not None:
        try:
            payload_size(format, check_shape(format, dims))
        except PackedTensorError as error:
            problems.append(error)
            dims = None
    return Attributes(format, dims, values["output_dtype"]), problems


def _value(attribute: AttributeProto) -> str | tuple[int, ...] | int:
    if attribute.type == AttributeProto.INTS:
        return tuple(attribute.ints)
    if attribute.type == AttributeProto.INT:
        return int(attribute.i)
    try:
        return attribute.s.decode("utf-8")
    except UnicodeDecodeError:
        raise PackedTensorError(f"attribute {attribute.name!r} is {attribute.s[:60]!r}", "UTF-8", "R9") from None
