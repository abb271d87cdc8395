"""The schema, what the checker and shape inference do with it, and its registration."""

from __future__ import annotations

import subprocess
import sys
from unittest import TestCase

import numpy as np
import onnx
from helpers import (
    FORMAT_ROWS,
    NODES,
    TYPE_ROWS,
    by_reference,
    calling,
    function,
    model,
    node,
    one_node_model,
    value,
)
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference
from onnx.shape_inference import InferenceError
from parameterized import parameterized

import onnx_dqp
from onnx_dqp import FORMATS, packed_size


def inferred(proto, **options):
    """The type and shape of ``y`` after inference: (type, dimensions), None for what is unknown."""
    result = shape_inference.infer_shapes(proto, strict_mode=True, **options)
    y = next(o for o in result.graph.output if o.name == "y").type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else None for d in y.shape.dim] if y.HasField("shape") else None
    return y.elem_type, dims


# Rows of NODES that shape inference is not told of.
UNSEEN = {"unknown", "twice", "empty_input"}


class Registered(TestCase):
    @classmethod
    def setUpClass(cls):
        onnx_dqp.register_schema()

    @classmethod
    def tearDownClass(cls):
        defs.deregister_schema("DequantizePacked", 29, "")


class Schema(TestCase):
    def test_is_the_contracts(self):
        schema = onnx_dqp.schema()
        self.assertEqual((schema.name, schema.domain, schema.since_version), ("DequantizePacked", "", 29))
        self.assertEqual(schema.support_level, defs.OpSchema.SupportType.COMMON)
        self.assertFalse(schema.has_function or schema.deprecated)
        self.assertTrue(schema.has_type_and_shape_inference_function)
        self.assertEqual([(i.name, i.type_str) for i in schema.inputs], [("x", "tensor(uint8)")])
        self.assertEqual([(o.name, o.type_str) for o in schema.outputs], [("y", "T")])
        (constraint,) = schema.type_constraints
        self.assertEqual(constraint.type_param_str, "T")
        self.assertEqual(
            sorted(constraint.allowed_type_strs),
            ["tensor(bfloat16)", "tensor(double)", "tensor(float)", "tensor(float16)"],
        )
        kinds = {name: (a.type.name, a.required) for name, a in schema.attributes.items()}
        self.assertEqual(kinds, {"format": ("STRING", True), "shape": ("INTS", True), "output_dtype": ("INT", False)})
        self.assertEqual(schema.attributes["output_dtype"].default_value.i, TensorProto.FLOAT)

    def test_its_text_has_the_rules_and_the_table(self):
        text = onnx_dqp.schema().doc
        for rule in range(1, 10):
            self.assertIn(f"R{rule}: ", text)
        for format in FORMATS.values():
            self.assertIn(f"| `{format.identifier}` | {format.elements} | {format.bytes} |", text)
        self.assertIn("docs/decoding.md", text)


class Inference(Registered):
    @parameterized.expand([(f"{f}_{t}", f_, t_) for f, f_ in FORMAT_ROWS for t, t_ in TYPE_ROWS])
    def test_type_and_shape(self, _, format, output_dtype):
        shape = [3, 2 * format.elements]
        size = packed_size(format.identifier, shape)
        proto = one_node_model(size, shape, output_dtype, format=format.identifier)
        self.assertEqual(inferred(proto), (output_dtype, shape))

    @parameterized.expand([("length", ["n"]), ("negative_length", [-1]), ("shape", None)])
    def test_of_x_unknown(self, _, length):
        self.assertEqual(inferred(one_node_model(length)), (TensorProto.FLOAT, [2, 32]))

    def test_a_shape_that_only_numpy_cannot_hold(self):
        self.assertEqual(inferred(one_node_model(0, [0, 2**62, 32])), (TensorProto.FLOAT, [0, 2**62, 32]))

    @parameterized.expand(
        [
            ("length", one_node_model(35), "x has 35 bytes, but shape"),
            ("rank", one_node_model([2, 18]), "x has rank 2, expected rank 1"),
            ("type", one_node_model(elem_type=TensorProto.INT8), "x has element type INT8, expected UINT8"),
            ("unknown_type", one_node_model(elem_type=999), "x has element type 999, expected UINT8"),
            ("rank_0", one_node_model([]), "x has rank 0, expected rank 1"),
            (
                "initializer",
                model(
                    [node()], outputs=[value("y")], initializers=[numpy_helper.from_array(np.zeros(37, np.uint8), "x")]
                ),
                "x has 37 bytes, but shape",
            ),
            (
                "sequence",
                model([node()], [helper.make_tensor_sequence_value_info("x", TensorProto.UINT8, [36])], [value("y")]),
                "x is of kind sequence, expected a tensor",
            ),
        ]
    )
    def test_what_the_type_of_x_tells_is_refused(self, _, proto, message):
        for strict_mode in (True, False):
            with self.assertRaisesRegex(InferenceError, message):
                shape_inference.infer_shapes(proto, strict_mode=strict_mode)

    @parameterized.expand([row for row in NODES if row[0] not in UNSEEN])
    def test_what_the_node_tells_is_refused(self, _, made, message):
        proto = one_node_model()
        proto.graph.node[0].CopyFrom(made)
        for strict_mode in (True, False):
            with self.assertRaises(InferenceError) as caught:
                shape_inference.infer_shapes(proto, strict_mode=strict_mode)
            self.assertIn(message, str(caught.exception))

    @parameterized.expand([row for row in NODES if row[0] in UNSEEN])
    def test_what_inference_cannot_see_the_checker_refuses(self, _, made, __):
        proto = one_node_model()
        proto.graph.node[0].CopyFrom(made)
        with self.assertRaises(onnx.checker.ValidationError):
            onnx.checker.check_model(proto)

    def test_in_a_function(self):
        names = ["format", "shape", "output_dtype"]
        functions = [function("F", [by_reference(*names)], names)]
        given = {"format": "gguf:q4_0", "shape": [2, 32], "output_dtype": TensorProto.FLOAT16}
        call = helper.make_node("F", ["x"], ["y"], domain="local", **given)
        proto = calling(functions, call)
        proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
        self.assertEqual(inferred(proto), (TensorProto.FLOAT16, [2, 32]))
        next(a for a in proto.graph.node[0].attribute if a.name == "shape").ints[:] = [2, 33]
        with self.assertRaisesRegex(InferenceError, "the last dimension of shape"):
            inferred(proto)

    @parameterized.expand(
        [
            ("format", ["format"], (TensorProto.FLOAT, [2, 32])),
            ("shape", ["shape"], (TensorProto.FLOAT, None)),
            ("output_dtype", ["output_dtype"], None),
            ("all", ["format", "shape", "output_dtype"], None),
        ]
    )
    def test_attributes_by_reference_leave_the_rest(self, _, names, known):
        x = helper.make_tensor_type_proto(TensorProto.UINT8, [36])
        opsets = [helper.make_opsetid("", 29)]
        found = shape_inference.infer_node_outputs(
            onnx_dqp.schema(), by_reference(*names), {"x": x}, opset_imports=opsets
        )
        y = found["y"].tensor_type
        dims = [d.dim_value for d in y.shape.dim] if y.HasField("shape") else None
        self.assertEqual((y.elem_type, dims), known or (TensorProto.UNDEFINED, None))

    def test_an_output_declared_otherwise_is_refused(self):
        proto = one_node_model()
        proto.graph.output[0].CopyFrom(value("y", TensorProto.FLOAT16, [2, 32]))
        with self.assertRaises(InferenceError):
            inferred(proto)

    @parameterized.expand(FORMAT_ROWS)
    def test_the_checker_accepts(self, _, format):
        proto = one_node_model(format.bytes, [format.elements], format=format.identifier)
        proto.graph.output[0].CopyFrom(value("y", TensorProto.FLOAT, [format.elements]))
        onnx.checker.check_model(proto, full_check=True)


def python(code):
    """A fresh interpreter's exit status and output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


HAS = "from onnx import defs; has = lambda: defs.has('DequantizePacked', 29, '')\n"


class Registration(TestCase):
    """In fresh interpreters: what is registered, and the exit status, which a schema left registered makes 139."""

    def test_importing_registers_nothing(self):
        self.assertEqual(python(HAS + "before = has(); import onnx_dqp; print(has() == before)"), (0, "True", ""))

    def test_twice_is_once(self):
        code = "import onnx_dqp; onnx_dqp.register_schema(); onnx_dqp.register_schema(); print(has())"
        self.assertEqual(python(HAS + code), (0, "True", ""))

    def test_where_onnx_has_it(self):
        code = """
import onnx_dqp
defs.register_schema(defs.OpSchema("DequantizePacked", "", 29, doc="its own"))
onnx_dqp.register_schema()
print(defs.get_schema("DequantizePacked", 29, "").doc)
"""
        self.assertEqual(python(HAS + code), (0, "its own", ""))

    def test_deregistered_by_the_user(self):
        code = """
import onnx_dqp
for _ in range(2):
    onnx_dqp.register_schema()
    defs.deregister_schema("DequantizePacked", 29, "")
print(has())
"""
        self.assertEqual(python(HAS + code), (0, "False", ""))

    def test_onnx_takes_its_opset_from_it(self):
        code = "import onnx_dqp; onnx_dqp.register_schema(); print(defs.onnx_opset_version() >= 29)"
        self.assertEqual(python(HAS + code), (0, "True", ""))

    def test_exit_after_use(self):
        code = """
import onnx, onnx_dqp, sys
onnx_dqp.register_schema()
node = onnx.helper.make_node("DequantizePacked", ["x"], ["y"], format="gguf:q4_0", shape=[32])
x = onnx.helper.make_tensor_value_info("x", 2, [18])
y = onnx.helper.make_tensor_value_info("y", 1, [32])
graph = onnx.helper.make_graph([node], "g", [x], [y])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 29)], ir_version=10)
onnx.checker.check_model(model, full_check=True)
sys.exit(3)
"""
        self.assertEqual(python(code), (3, "", ""))
