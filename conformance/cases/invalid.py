"""invalid: models that must be refused, one broken rule each.

Where the model itself tells, its payload is an initializer: it could run without inputs, so that nothing but the fault
stands in its way. Where only the data tell, the input's length is unknown and the data come as input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onnx import AttributeProto, NodeProto, TensorProto, helper

from conformance.cases.case import InvalidCase, model, tensor
from conformance.payloads import ordinary_blocks
from onnx_dqp.formats import FORMATS, PackedFormat

UINT8, FLOAT = int(TensorProto.UINT8), int(TensorProto.FLOAT)
_Q4_0 = FORMATS["gguf:q4_0"]
_LARGE = 2**62


def cases() -> Iterator[InvalidCase]:
    """By rule."""
    yield from _identifiers()
    yield from _shapes()
    yield from _lengths()
    yield from _types()
    yield from _attributes()
    yield from _arity()


def _payload(format: PackedFormat, count: int = 2) -> bytes:
    return ordinary_blocks(format, count, f"{format.identifier} invalid").tobytes()


def _x(payload: bytes, data_type: int = UINT8, dims: Sequence[int] | None = None) -> TensorProto:
    return tensor("x", data_type, [len(payload)] if dims is None else dims, payload)


def _y(rank: int | None = 2, elem_type: int = FLOAT) -> Any:
    """The output's declaration: only a rank, which every reading of the fault has in common."""
    return helper.make_tensor_value_info("y", elem_type, None if rank is None else [f"y{i}" for i in range(rank)])


def _node(attributes: dict[str, Any], inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",)) -> NodeProto:
    made = helper.make_node("DequantizePacked", inputs, outputs)
    for name, value in attributes.items():
        made.attribute.append(value if isinstance(value, AttributeProto) else helper.make_attribute(name, value))
    return made


def _at_load(what: str, rule: str, reason: str, node: NodeProto, x: TensorProto, **details: Any) -> InvalidCase:
    rank = next((len(a.ints) for a in node.attribute if a.name == "shape" and a.ints), None)
    made = model([node], [], [_y(rank)], [x])
    return InvalidCase(what, rule, reason, "load", made, [], **{"format": _Q4_0, **details})


def _at_run(what: str, rule: str, reason: str, node: NodeProto, x: TensorProto, **details: Any) -> InvalidCase:
    rank = len(next(a.ints for a in node.attribute if a.name == "shape"))
    declared = helper.make_tensor_value_info("x", UINT8, ["n"])
    made = model([node], [declared], [_y(rank, details.get("output_dtype", FLOAT))])
    return InvalidCase(what, rule, reason, "run", made, [x], **{"format": _Q4_0, **details})


def _identifiers() -> Iterator[InvalidCase]:
    for what, identifier, reason in (
        ("upper_case", "gguf:Q4_0", "The identifier is case-sensitive, and this one is in the wrong case."),
        ("upper_case_prefix", "GGUF:q4_0", "The identifier's prefix is in the wrong case."),
        ("no_prefix", "q4_0", "The identifier lacks its prefix."),
        ("parameter", "gguf:q4_0:block=32", "Identifiers take no parameters."),
        ("query", "gguf:q4_0?x=1", "Identifiers take no parameters."),
        ("empty", "", "The identifier is empty."),
        ("trailing_space", "gguf:q4_0 ", "The identifier ends in a space."),
        ("leading_space", " gguf:q4_0", "The identifier begins with a space."),
        ("trailing_nul", "gguf:q4_0\0", "The identifier ends in a NUL."),
        ("removed_type", "gguf:q4_2", "Q4_2 was removed from ggml and is not among the formats."),
        ("repacked_type", "gguf:q4_0_4_4", "Q4_0_4_4 was removed from GGUF and is not among the formats."),
        ("unpacked_type", "gguf:f16", "F16 is not a packed format."),
        ("other_namespace", "ggml:q4_0", "The identifier has another namespace."),
        ("mixture_name", "gguf:q4_k_m", "Q4_K_M names a mixture of formats in a file, not a format."),
    ):
        node = _node({"format": identifier, "shape": [2, 32]})
        yield _at_load(f"r1_{what}", "R1", reason, node, _x(_payload(_Q4_0)))


def _shapes() -> Iterator[InvalidCase]:
    def refused(
        what: str, rule: str, reason: str, shape: list[int], payload: bytes, format: PackedFormat = _Q4_0
    ) -> Any:
        ints = AttributeProto(name="shape", type=AttributeProto.INTS, ints=shape)
        node = _node({"format": format.identifier, "shape": ints})
        return _at_load(f"{rule.lower()}_{what}", rule, reason, node, _x(payload), format=format)

    one = _payload(_Q4_0, 1)
    yield refused("rank_0", "R2", "The shape has no dimension.", [], one)
    yield refused("negative", "R2", "A dimension is negative.", [-1, 32], one)
    yield refused("negative_last", "R2", "The last dimension is negative.", [1, -32], one)
    yield refused("two_negatives", "R2", "Two negative dimensions have a positive product.", [-1, -32], one)
    yield refused(
        "negative_beside_zero", "R2", "A dimension is negative, although the tensor would be empty.", [0, -32], b""
    )
    yield refused("smallest_integer", "R2", "A dimension is the smallest integer.", [-(2**63), 32], one)
    for short in ("q4_0", "q8_1", "mxfp4", "nvfp4", "q1_0", "q4_k", "iq2_xxs", "tq1_0"):
        format = FORMATS[f"gguf:{short}"]
        last = format.elements // 2
        reason = f"The last dimension is half a block of {format.name}, although two rows would fill a block."
        yield refused(f"half_block_{short}", "R3", reason, [2, last], _payload(format, 1), format)
    yield refused("one_more", "R3", "The last dimension is one more than a block.", [1, 33], one)
    yield refused(
        "empty",
        "R3",
        "The last dimension is not a multiple of the block, also where the tensor is empty.",
        [0, 33],
        b"",
    )
    yield refused(
        "empty_last_1", "R3", "A last dimension of 1 is no multiple, also where the tensor is empty.", [0, 1], b""
    )
    yield refused("wrong_axis", "R3", "The first dimension is a multiple of the block, the last is not.", [32, 1], one)
    yield refused("overflow", "R4", "The product of the dimensions does not fit in 63 bits.", [_LARGE, _LARGE, 32], one)
    yield refused("overflow_to_zero", "R4", "The product is 0 modulo 2^64.", [2**32, 2**32, 32], b"")
    yield refused("overflow_to_fit", "R4", "The product is the right one modulo 2^64.", [2**59 + 1, 32], one)
    q8_1 = FORMATS["gguf:q8_1"]
    reason = "The elements fit in 63 bits, the bytes do not."
    yield refused("overflow_bytes", "R4", reason, [2**58 - 1, 32], _payload(q8_1, 1), q8_1)
    q4_k = FORMATS["gguf:q4_k"]
    reason = "The length in bytes is the right one modulo 2^64."
    yield refused("overflow_bytes_to_fit", "R4", reason, [2**60 + 1, 256], _payload(q4_k, 1), q4_k)
    yield refused("huge", "R4", "The length that is needed is beyond any memory.", [2**40, 2**18], one)


def _lengths() -> Iterator[InvalidCase]:
    for format in FORMATS.values():
        payload = _payload(format)
        node = _node({"format": format.identifier, "shape": [2, format.elements]})
        short = format.name.lower()
        reason = f"The payload is a byte short of two {format.name} blocks."
        yield _at_run(f"r4_byte_short_{short}", "R4", reason, node, _x(payload[:-1]), format=format)
        reason = f"The payload is a byte longer than two {format.name} blocks."
        yield _at_run(f"r4_byte_long_{short}", "R4", reason, node, _x(payload + b"\0"), format=format)
    node = _node({"format": "gguf:q4_0", "shape": [2, 32]})
    payload = _payload(_Q4_0)
    yield _at_load("r4_initializer_short", "R4", "The initializer is a byte short.", node, _x(payload[:-1]))
    yield _at_load("r4_initializer_long", "R4", "The initializer is a byte too long.", node, _x(payload + b"\0"))
    yield _at_run("r4_no_bytes", "R4", "The payload is empty, the tensor is not.", node, _x(b""))
    yield _at_run("r4_block_short", "R4", "The payload is a block short.", node, _x(payload[:18]))
    yield _at_run("r4_block_long", "R4", "The payload is a block too long.", node, _x(payload + payload[:18]))
    empty = _node({"format": "gguf:q4_0", "shape": [0, 32]})
    yield _at_run("r4_empty_with_bytes", "R4", "The tensor is empty, the payload is not.", empty, _x(payload))
    q6_k = FORMATS["gguf:q6_k"]
    for short, number in (
        ("float16", TensorProto.FLOAT16),
        ("bfloat16", TensorProto.BFLOAT16),
        ("double", TensorProto.DOUBLE),
    ):
        attributes = {"format": "gguf:q6_k", "shape": [2, 256], "output_dtype": int(number)}
        reason = f"The payload of a {short.upper()} tensor is a byte short."
        x = _x(_payload(q6_k)[:-1])
        yield _at_run(
            f"r4_byte_short_{short}", "R4", reason, _node(attributes), x, format=q6_k, output_dtype=int(number)
        )
    node = _node({"format": "gguf:q6_k", "shape": [2, 256]})
    yield _at_run(
        "r4_block_long_q6_k", "R4", "The payload is a block too long.", node, _x(_payload(q6_k, 3)), format=q6_k
    )
    node = _node({"format": "gguf:q6_k", "shape": [2, 0]})
    reason = "The last dimension is 0, the payload is not empty."
    yield _at_run("r4_empty_rows_with_bytes", "R4", reason, node, _x(_payload(q6_k)), format=q6_k)
    q8_1 = FORMATS["gguf:q8_1"]
    wrong = _payload(q8_1) + bytes(8)
    node = _node({"format": "gguf:q8_1", "shape": [2, 32]})
    reason = "The payload has 40 bytes a block, as a public package has it; a Q8_1 block has 36."
    yield _at_run("r4_q8_1_of_40_bytes", "R4", reason, node, _x(wrong), format=q8_1)


def _types() -> Iterator[InvalidCase]:
    node = _node({"format": "gguf:q4_0", "shape": [2, 32]})
    payload = _payload(_Q4_0)
    for what, data_type, size in (
        ("int8", TensorProto.INT8, 1),
        ("bool", TensorProto.BOOL, 1),
        ("uint16", TensorProto.UINT16, 2),
        ("int32", TensorProto.INT32, 4),
        ("float", TensorProto.FLOAT, 4),
    ):
        raw = bytes(len(payload) * size) if what in ("bool", "float") else payload * size
        x = _x(raw, int(data_type), [len(payload)])
        yield _at_load(f"r9_x_is_{what}", "R9", f"x is a tensor of {what.upper()}, not of UINT8.", node, x)
    for what, dims in (("rank_2", [2, 18]), ("rank_3", [1, 36, 1])):
        yield _at_load(f"r9_x_of_{what}", "R9", "x is not of rank 1.", node, _x(payload, dims=dims))
    scalar = _node({"format": "gguf:q4_0", "shape": [0]})
    yield _at_load("r9_x_of_rank_0", "R9", "x is a scalar.", scalar, _x(b"\0", dims=[]))
    for number in (0, 2, 6, 7, 9, 16 + 1, 22, -1, 2**31 + 1, 2**32 + 1):
        name = str(number).replace("-", "minus_")
        attributes = {"format": "gguf:q4_0", "shape": [2, 32], "output_dtype": number}
        reason = f"output_dtype is {number}, which is none of FLOAT, FLOAT16, DOUBLE and BFLOAT16."
        yield _at_load(f"r9_output_dtype_{name}", "R9", reason, _node(attributes), _x(payload))


def _attributes() -> Iterator[InvalidCase]:
    good = {"format": "gguf:q4_0", "shape": [2, 32]}
    text, ints = AttributeProto.STRING, AttributeProto.INTS
    for what, attributes, reason in (
        ("no_format", {"shape": [2, 32]}, "The required attribute format is missing."),
        ("no_shape", {"format": "gguf:q4_0"}, "The required attribute shape is missing."),
        ("no_attributes", {}, "Both required attributes are missing."),
        ("format_is_int", {**good, "format": 2}, "format is an INT."),
        ("format_is_strings", {**good, "format": ["gguf:q4_0"]}, "format is a list of strings."),
        ("shape_is_int", {**good, "shape": 64}, "shape is an INT, not INTS."),
        ("shape_is_floats", {**good, "shape": [2.0, 32.0]}, "shape is a list of floats."),
        ("shape_is_string", {**good, "shape": "2,32"}, "shape is a string."),
        ("output_dtype_is_float", {**good, "output_dtype": 1.0}, "output_dtype is a FLOAT."),
        ("output_dtype_is_string", {**good, "output_dtype": "FLOAT"}, "output_dtype is a string."),
        ("output_dtype_is_ints", {**good, "output_dtype": [1]}, "output_dtype is a list."),
        ("unknown_attribute", {**good, "axis": 1}, "The operator has no attribute axis."),
        (
            "format_not_utf_8",
            {**good, "format": AttributeProto(name="format", type=text, s=b"gguf:\xff")},
            "format is not UTF-8.",
        ),
        (
            "format_without_type",
            {**good, "format": AttributeProto(name="format", s=b"gguf:q4_0")},
            "The attribute format does not say its type.",
        ),
        (
            "shape_twice",
            {**good, "again": AttributeProto(name="shape", type=ints, ints=[2, 32])},
            "The attribute shape is given twice.",
        ),
    ):
        yield _at_load(f"r9_{what}", "R9", reason, _node(attributes), _x(_payload(_Q4_0)))


def _arity() -> Iterator[InvalidCase]:
    good = {"format": "gguf:q4_0", "shape": [2, 32]}
    for what, inputs, outputs, reason in (
        ("no_input", (), ("y",), "The node has no input."),
        ("empty_input", ("",), ("y",), "The node's input is left out."),
        ("two_inputs", ("x", "x"), ("y",), "The node has two inputs."),
        ("two_outputs", ("x",), ("y", "z"), "The node has two outputs."),
    ):
        yield _at_load(f"r9_{what}", "R9", reason, _node(good, inputs, outputs), _x(_payload(_Q4_0)))
