"""graph: the node where users put it, between other operators, in subgraphs and functions; its payload from anywhere.

What stands around the node moves values, or works on them so that every partial result is exact: no library's order of
summation, and no rounding, can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, StringStringEntryProto, TensorProto, helper

from conformance.cases.case import Case, Content, array_tensor, model, node, tensor, value_info
from conformance.payloads import random_blocks, scales, set_scale
from onnx_dqp.formats import FORMATS, PackedFormat

FLOAT = int(TensorProto.FLOAT)

_FORMATS = ("q4_0", "q5_1", "q6_k", "iq3_s", "iq1_m", "tq2_0", "mxfp4", "nvfp4")
_ROWS = 4
_DOMAIN = "conformance"

Arrays = NDArray[Any]


def cases() -> Iterator[Case]:
    """Eight formats x all that stands around the node, as FLOAT."""
    for short in _FORMATS:
        format = FORMATS[f"gguf:{short}"]
        shape = (_ROWS, 2 * format.elements)
        for around, what, reason, flags in _AROUND:
            payload = _small_numbers(format, 2 * _ROWS, what)
            yield Case("graph", format, FLOAT, what, reason, flags, shape, payload, around)


def _small_numbers(format: PackedFormat, count: int, what: str) -> bytes:
    """Random codes with scales of 1 (NVFP4: 1/2), so that values are small multiples of 1/8."""
    blocks = random_blocks(format, count, f"{format.identifier} {what}")
    for scale in scales(format):
        set_scale(format, blocks, 0x3C00, scale)
    if format.name == "MXFP4":
        blocks["e"] = 128
    if format.name == "NVFP4":
        blocks["d"] = 0x38
    return blocks.tobytes()


def _x(case: Case) -> TensorProto:
    return tensor("x", TensorProto.UINT8, [len(case.payload)], case.payload)


def _float(name: str, array: Arrays) -> TensorProto:
    return array_tensor(name, FLOAT, array)


def _integers(name: str, values: list[int]) -> TensorProto:
    return array_tensor(name, int(TensorProto.INT64), np.array(values, np.int64))


def _initializer(case: Case) -> Content:
    y = _float("y", case.decoded())
    return Content(model([node(case)], [], [y], [_x(case)]), [], y)


def _external_data(case: Case) -> Content:
    """The payload lies at an offset in a file, as it does in a GGUF file."""
    offset, file = 96, "payload.bin"
    x = TensorProto(name="x", data_type=TensorProto.UINT8, dims=[len(case.payload)])
    x.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(len(case.payload)))):
        x.external_data.append(StringStringEntryProto(key=key, value=value))
    y = _float("y", case.decoded())
    surrounded = b"\xa5" * offset + case.payload + b"\x5a" * 32
    return Content(model([node(case)], [], [y], [x]), [], y, {file: surrounded})


def _default_type(case: Case) -> Content:
    y = _float("y", case.decoded())
    return Content(model([node(case, output_dtype=None)], [_x(case)], [y]), [_x(case)], y)


def _after(case: Case, op_type: str, expected: Arrays, extra: list[TensorProto], **attributes: Any) -> Content:
    """The node, and an operator on its result and on some initializers."""
    y = _float("y", expected)
    consumer = helper.make_node(op_type, ["w", *(t.name for t in extra)], ["y"], **attributes)
    return Content(model([node(case, y="w"), consumer], [_x(case)], [y], extra), [_x(case)], y)


def _transpose(case: Case) -> Content:
    return _after(case, "Transpose", case.decoded().T, [], perm=[1, 0])


def _reshape(case: Case) -> Content:
    shape = [case.shape[1] // 8, 2, _ROWS * 4]
    return _after(case, "Reshape", case.decoded().reshape(shape), [_integers("s", shape)])


def _gather(case: Case) -> Content:
    rows = [3, 0, 0, 2]
    return _after(case, "Gather", case.decoded()[rows], [_integers("rows", rows)], axis=0)


def _matmul(case: Case) -> Content:
    """``a @ w`` with w the decoded weights."""
    a = _small_operand(3, _ROWS)
    nodes = [node(case, y="w"), helper.make_node("MatMul", ["a", "w"], ["y"])]
    inputs = [_float("a", a), _x(case)]
    y = _float("y", _exact_product(a, case.decoded()))
    return Content(model(nodes, inputs, [y]), inputs, y)


def _matmul_transposed(case: Case) -> Content:
    """``a @ w.T``: each sum runs along a row of blocks."""
    a = _small_operand(3, case.shape[1])
    nodes = [
        node(case, y="w"),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["a", "t"], ["y"]),
    ]
    inputs = [_float("a", a), _x(case)]
    y = _float("y", _exact_product(a, case.decoded().T))
    return Content(model(nodes, inputs, [y]), inputs, y)


def _small_operand(rows: int, columns: int) -> Arrays:
    """Integers from -1 to 1."""
    return (np.arange(rows * columns).reshape(rows, columns) * 7 // 3 % 3 - 1).astype(np.float32)


def _exact_product(a: Arrays, b: Arrays) -> Arrays:
    """The matrix product in rationals; all its partial sums, in any order, are FLOATs."""
    left = [[Fraction(float(v)) for v in row] for row in a]
    columns = [[Fraction(float(v)) for v in column] for column in b.T]
    unit = Fraction(1, 8)
    for row in left:
        for column in columns:
            bound = sum(abs(v * w) for v, w in zip(row, column, strict=True)) / unit
            assert bound < 1 << 24, "a partial sum might not be exact"
            assert all((v * w / unit).denominator == 1 for v, w in zip(row, column, strict=True))
    product = [[float(sum(v * w for v, w in zip(row, column, strict=True))) for column in columns] for row in left]
    # Where all products are -0 their sum is -0, or +0 for those who start from +0.
    products = a[:, :, np.newaxis] * b[np.newaxis]
    assert not ((products == 0) & np.signbit(products)).all(axis=1).any()
    return np.array(product, np.float32)


def _shared_payload(case: Case) -> Content:
    y = _float("y", np.concatenate([case.decoded(), case.decoded()], axis=0))
    flat = [_ROWS * case.shape[1]]
    nodes = [
        node(case, y="a"),
        node(case, y="b", shape=flat),
        helper.make_node("Reshape", ["b", "s"], ["c"]),
        helper.make_node("Concat", ["a", "c"], ["y"], axis=0),
    ]
    return Content(model(nodes, [_x(case)], [y], [_integers("s", list(case.shape))]), [_x(case)], y)


def _computed_payload(case: Case) -> Content:
    """The payload arrives in two pieces, cut inside a block."""
    cut = len(case.payload) // 2 + 1
    inputs = [
        tensor(name, TensorProto.UINT8, [len(piece)], piece)
        for name, piece in (("head", case.payload[:cut]), ("tail", case.payload[cut:]))
    ]
    y = _float("y", case.decoded())
    nodes = [helper.make_node("Concat", ["head", "tail"], ["x"], axis=0), node(case)]
    return Content(model(nodes, inputs, [y]), inputs, y)


def _two_formats(case: Case) -> Content:
    """A second node of another format in the same model."""
    other = FORMATS["gguf:q8_0"]
    second = Case(
        *(case.category, other, case.output_dtype, case.what, case.reason, case.flags),
        case.shape,
        _small_numbers(other, case.shape[0] * case.shape[1] // other.elements, f"{case.format.identifier} second"),
    )
    inputs = [_x(case), tensor("z", TensorProto.UINT8, [len(second.payload)], second.payload)]
    nodes = [node(case, y="a"), node(second, x="z", y="b"), helper.make_node("Concat", ["a", "b"], ["y"], axis=0)]
    y = _float("y", np.concatenate([case.decoded(), second.decoded()], axis=0))
    return Content(model(nodes, inputs, [y]), inputs, y)


def _if_body(case: Case) -> Content:
    """The branch that is taken decodes; the other one gives another result."""
    y = _float("y", case.decoded())
    output = value_info(y)
    then_branch = helper.make_graph([node(case)], "then", [], [output])
    negated = [node(case, y="w"), helper.make_node("Neg", ["w"], ["y"])]
    else_branch = helper.make_graph(negated, "else", [], [output])
    taken = tensor("taken", TensorProto.BOOL, [], b"\x01")
    choice = helper.make_node("If", ["taken"], ["y"], then_branch=then_branch, else_branch=else_branch)
    return Content(model([choice], [taken, _x(case)], [y]), [taken, _x(case)], y)


def _function(case: Case) -> Content:
    """All three attributes are the function's, by reference."""
    inner = helper.make_node("DequantizePacked", ["x"], ["y"])
    kinds = {"format": AttributeProto.STRING, "shape": AttributeProto.INTS, "output_dtype": AttributeProto.INT}
    inner.attribute.extend(AttributeProto(name=n, type=kind, ref_attr_name=n) for n, kind in kinds.items())
    opset = [helper.make_opsetid("", 29)]
    function = helper.make_function(_DOMAIN, "Decode", ["x"], ["y"], [inner], opset, list(kinds))
    call = node(case)
    call.op_type, call.domain = "Decode", _DOMAIN
    y = _float("y", case.decoded())
    return Content(model([call], [_x(case)], [y], functions=[function], domains=[_DOMAIN]), [_x(case)], y)


_AROUND: tuple[tuple[Callable[[Case], Content], str, str, tuple[str, ...]], ...] = (
    (
        _initializer,
        "initializer",
        "The payload is an initializer, as weights are; the model has no input.",
        ("Initializer",),
    ),
    (_external_data, "external_data", "The payload lies at an offset in a file beside the model.", ("ExternalData",)),
    (_default_type, "default_type", "Without output_dtype the result is FLOAT.", ("DefaultType",)),
    (_transpose, "transpose", "A Transpose follows.", ("Consumer",)),
    (_reshape, "reshape", "A Reshape follows.", ("Consumer",)),
    (_gather, "gather", "An embedding: rows are gathered from the decoded table.", ("Consumer",)),
    (_matmul, "matmul", "The decoded weights are the right operand of a MatMul whose sums are exact.", ("Consumer",)),
    (
        _matmul_transposed,
        "matmul_transposed",
        "A MatMul with the transposed weights, whose sums are exact.",
        ("Consumer",),
    ),
    (_shared_payload, "shared_payload", "Two nodes decode one payload to two shapes.", ("SharedPayload",)),
    (_computed_payload, "computed_payload", "The payload is the result of a Concat.", ("ComputedPayload",)),
    (_two_formats, "two_formats", "Another node of another format stands in the same model.", ("Consumer",)),
    (
        _if_body,
        "if_body",
        "The node stands in the branches of an If and takes its payload from outside.",
        ("Subgraph",),
    ),
    (_function, "function", "The node stands in a model-local function, its attributes by reference.", ("Function",)),
)
