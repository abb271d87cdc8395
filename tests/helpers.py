"""What several test modules need: names for parameterized tables, models of one node."""

from __future__ import annotations

import contextlib

import onnx
import onnxruntime
from onnx import AttributeProto, TensorProto, helper

from conformance.expected import BINARIES
from onnx_dqp import FORMATS

FORMAT_ROWS = [(format.name, format) for format in FORMATS.values()]
"""For ``parameterized.expand``: a name, and the format."""

TYPE_ROWS = [(TensorProto.DataType.Name(number), number) for number in BINARIES]


def newest_opset() -> int:
    """The newest opset that ONNX Runtime takes, of those that models can be expanded to."""
    relu = helper.make_node("Relu", ["a"], ["b"])
    for opset in range(28, 17, -1):
        made = model([relu], [value("a", shape=[1])], [value("b", shape=[1])], opsets={"": opset})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        with contextlib.suppress(Exception):
            onnxruntime.InferenceSession(made.SerializeToString(), options)
            return opset
    raise AssertionError("ONNX Runtime takes no opset from 18 on")


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


def reference(name, kind):
    """An attribute given by reference to a function's attribute of the same name."""
    return AttributeProto(name=name, type=kind, ref_attr_name=name)


def by_reference(*names):
    """A node whose attributes of these names are references."""
    made = node()
    for name in names:
        kinds = {"format": "STRING", "shape": "INTS", "output_dtype": "INT"}
        for i, attribute in enumerate(made.attribute):
            if attribute.name == name:
                del made.attribute[i]
        made.attribute.append(reference(name, AttributeProto.AttributeType.Value(kinds[name])))
    return made


def function(name, nodes, attributes=(), defaults=()):
    return helper.make_function(
        "local",
        name,
        ["x"],
        ["y"],
        nodes,
        [helper.make_opsetid("", 29), helper.make_opsetid("local", 1)],
        list(attributes),
        list(defaults),
    )


def calling(functions, call=None):
    call = call or helper.make_node("F", ["x"], ["y"], domain="local")
    opsets = {"": 29, "local": 1}
    return model([call], [value("x", TensorProto.UINT8, ["n"])], [value("y")], functions=functions, opsets=opsets)


HUGE = 2**62


def attribute(name, kind, **fields):
    made = AttributeProto(name=name, type=kind)
    for key, content in fields.items():
        (getattr(made, key).extend if isinstance(content, list) else lambda v, k=key: setattr(made, k, v))(content)
    return made


def bad_node(*attributes, inputs=("x",), outputs=("y",)):
    made = helper.make_node("DequantizePacked", inputs, outputs, name="dq")
    made.attribute.extend(attributes)
    return made


FORMAT = attribute("format", AttributeProto.STRING, s=b"gguf:q4_0")
SHAPE = attribute("shape", AttributeProto.INTS, ints=[2, 32])

NODES = [
    # What is wrong, the node, and the beginning of the message.
    ("no_format", bad_node(SHAPE), "attribute 'format' is missing, and has no default"),
    ("no_shape", bad_node(FORMAT), "attribute 'shape' is missing, and has no default"),
    (
        "unknown",
        bad_node(FORMAT, SHAPE, attribute("axis", AttributeProto.INT, i=1)),
        "unknown attribute 'axis', expected format, shape, output_dtype",
    ),
    ("twice", bad_node(FORMAT, SHAPE, SHAPE), "attribute 'shape' is given twice, expected once"),
    (
        "shape_is_int",
        bad_node(FORMAT, attribute("shape", AttributeProto.INT, i=64)),
        "attribute 'shape' has type INT, expected INTS",
    ),
    (
        "shape_is_floats",
        bad_node(FORMAT, attribute("shape", AttributeProto.FLOATS, floats=[64.0])),
        "attribute 'shape' has type FLOATS, expected INTS",
    ),
    (
        "format_is_int",
        bad_node(attribute("format", AttributeProto.INT, i=2), SHAPE),
        "attribute 'format' has type INT, expected STRING",
    ),
    (
        "format_has_no_type",
        bad_node(attribute("format", AttributeProto.UNDEFINED, s=b"gguf:q4_0"), SHAPE),
        "attribute 'format' has type UNDEFINED, expected STRING",
    ),
    (
        "format_is_not_utf_8",
        bad_node(attribute("format", AttributeProto.STRING, s=b"\xff\xfe"), SHAPE),
        "attribute 'format' is b'\\xff\\xfe', expected UTF-8",
    ),
    (
        "output_dtype_is_float",
        bad_node(FORMAT, SHAPE, attribute("output_dtype", AttributeProto.FLOAT, f=1.0)),
        "attribute 'output_dtype' has type FLOAT, expected INT",
    ),
    (
        "output_dtype_is_string",
        bad_node(FORMAT, SHAPE, attribute("output_dtype", AttributeProto.STRING, s=b"FLOAT")),
        "attribute 'output_dtype' has type STRING, expected INT",
    ),
    (
        "output_dtype_is_uint8",
        bad_node(FORMAT, SHAPE, attribute("output_dtype", AttributeProto.INT, i=2)),
        "output_dtype is 2, expected the number of one of FLOAT (1), FLOAT16 (10), DOUBLE (11), BFLOAT16 (16)",
    ),
    ("R1", node(name="dq", format="gguf:Q4_0"), "unknown format 'gguf:Q4_0': did you mean gguf:q4_0?"),
    ("R2", bad_node(FORMAT, attribute("shape", AttributeProto.INTS)), "gguf:q4_0: shape is [], expected a rank of at"),
    ("R2_negative", node(name="dq", shape=[2, -32]), "gguf:q4_0: shape [2, -32] has dimension -32"),
    ("R3", node(name="dq", shape=[2, 31]), "gguf:q4_0: the last dimension of shape [2, 31] is 31"),
    ("R4", node(name="dq", shape=[HUGE, 32]), f"gguf:q4_0: shape [{HUGE}, 32] has more elements or bytes than fit"),
    ("no_input", bad_node(FORMAT, SHAPE, inputs=()), "the node has 0 inputs, expected 1"),
    ("empty_input", bad_node(FORMAT, SHAPE, inputs=("",)), "the node's input is left out, expected 1"),
    ("two_inputs", bad_node(FORMAT, SHAPE, inputs=("x", "x")), "the node has 2 inputs, expected 1"),
    ("two_outputs", bad_node(FORMAT, SHAPE, outputs=("y", "z")), "the node has 2 outputs, expected 1"),
]
