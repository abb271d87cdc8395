"""What several test modules need: names for parameterized tables, arrays from exact bits, models of one node."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from conformance import exact
from onnx_dqp import FORMATS, PackedFormat
from onnx_dqp.rules import OUTPUT_DTYPES

FORMAT_ROWS = [(format.name, format) for format in FORMATS.values()]
"""For ``parameterized.expand``: a name, and the format."""

TYPES = {
    TensorProto.FLOAT: exact.FLOAT,
    TensorProto.FLOAT16: exact.FLOAT16,
    TensorProto.BFLOAT16: exact.BFLOAT16,
    TensorProto.DOUBLE: exact.DOUBLE,
}

TYPE_ROWS = [(TensorProto.DataType.Name(number), number) for number in TYPES]


def expected(format: PackedFormat, payload: bytes, output_dtype: int = TensorProto.FLOAT) -> np.ndarray:
    """The exact decoder's result as an array of rank 1."""
    dtype = OUTPUT_DTYPES[output_dtype]
    bits = exact.decode(format.identifier, payload, TYPES[output_dtype])
    return np.fromiter(bits, f"u{dtype.itemsize}").view(dtype)


def node(x="x", y="y", name="", **attributes) -> onnx.NodeProto:
    """A node: two Q4_0 blocks as [2, 32], unless attributes say otherwise; one that is None is left out."""
    attributes = {"format": "gguf:q4_0", "shape": [2, 32], **attributes}
    return helper.make_node("DequantizePacked", [x], [y], name=name, **attributes)


def model(nodes, inputs=(), outputs=(), initializers=(), functions=(), opsets=None) -> onnx.ModelProto:
    """A model of opset 29."""
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    imports = [helper.make_opsetid(domain, version) for domain, version in (opsets or {"": 29}).items()]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def value(name, elem_type=TensorProto.FLOAT, shape=None) -> onnx.ValueInfoProto:
    """A graph's input or output."""
    return helper.make_tensor_value_info(name, elem_type, shape)


def one_node_model(length=36, shape=(2, 32), output_dtype=None, elem_type=TensorProto.UINT8, **attributes):
    """A model of one node between an input and an output."""
    if output_dtype is not None:
        attributes["output_dtype"] = output_dtype
    x_shape = length if isinstance(length, (list, tuple)) or length is None else [length]
    y = value("y", TensorProto.UNDEFINED)
    return model([node(shape=list(shape), **attributes)], [value("x", elem_type, x_shape)], [y])
