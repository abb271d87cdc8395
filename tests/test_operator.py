"""The node everywhere that ONNX lets it stand: graphs, subgraphs, functions, alone; x as input, initializer, result."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase

import numpy as np
import onnx
from helpers import (
    FORMAT_ROWS,
    TYPE_ROWS,
    by_reference,
    calling,
    function,
    model,
    node,
    one_node_model,
    reference,
    value,
)
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.model_container import make_large_tensor_proto
from onnx.reference import ReferenceEvaluator as PlainEvaluator
from onnx.reference.op_run import OpRun
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import FORMATS, DequantizePacked, PackedTensorError, ReferenceEvaluator
from onnx_dqp.rules import OUTPUT_DTYPES

X = np.frombuffer(payloads.finite_blocks(FORMATS["gguf:q4_0"], 2, "operator").tobytes(), np.uint8)
Y = expected("gguf:q4_0", X.tobytes()).reshape(2, 32)

BOTH = [
    ("plain_with_new_ops", lambda proto, **options: PlainEvaluator(proto, new_ops=[DequantizePacked], **options)),
    ("onnx_dqp", ReferenceEvaluator),
]


def onnx_scan_is_right():
    """Whether ONNX's Scan, over a body that only copies, gives its input back."""
    row = value("row", TensorProto.UINT8, [18])
    body = helper.make_graph([helper.make_node("Identity", ["row"], ["out"])], "b", [row], [value("out", 2, [18])])
    scan = helper.make_node("Scan", ["rows"], ["y"], body=body, num_scan_inputs=1)
    rows = X.reshape(2, 18)
    y = PlainEvaluator(model([scan], [value("rows", 2, [2, 18])], [value("y", 2)])).run(None, {"rows": rows})[0]
    return np.array_equal(y, rows)


ONNX_SCAN_IS_RIGHT = onnx_scan_is_right()


class Case(TestCase):
    def check(self, evaluator, feeds=None, y=Y):
        actual, *rest = evaluator.run(None, {"x": X} if feeds is None else feeds)
        self.assertEqual(rest, [])
        self.assertFalse(differing(actual, y).any())


class Graphs(Case):
    @parameterized.expand([(f"{f}_{t}", f_, t_) for f, f_ in FORMAT_ROWS for t, t_ in TYPE_ROWS])
    def test_every_format_and_type(self, _, format, output_dtype):
        blocks = payloads.finite_blocks(format, 2, "operator")
        y = expected(format.identifier, blocks.tobytes(), output_dtype).reshape(2, 1, -1)
        proto = one_node_model(len(blocks.tobytes()), y.shape, output_dtype, format=format.identifier)
        x = np.frombuffer(blocks.tobytes(), np.uint8)
        for _, evaluator in BOTH:
            self.check(evaluator(proto), {"x": x}, y)

    @parameterized.expand(BOTH)
    def test_output_dtype_left_out_is_float(self, _, evaluator):
        self.check(evaluator(one_node_model()))

    @parameterized.expand(BOTH)
    def test_x_as_initializer(self, _, evaluator):
        raw = numpy_helper.from_array(X, "x")
        numbers = helper.make_tensor("x", TensorProto.UINT8, [36], X.tolist())
        self.assertTrue(raw.HasField("raw_data") and numbers.int32_data)
        for initializer in (raw, numbers):
            self.check(evaluator(model([node()], outputs=[value("y")], initializers=[initializer])), {})

    @parameterized.expand(BOTH)
    def test_x_as_external_data(self, _, evaluator):
        with TemporaryDirectory() as directory:
            proto = model([node()], outputs=[value("y")], initializers=[numpy_helper.from_array(X, "x")])
            path = str(Path(directory, "model.onnx"))
            onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
            self.assertEqual(Path(directory, "weights").read_bytes()[:36], X.tobytes())
            self.check(evaluator(onnx.load(path)), {})
            self.check(evaluator(path), {})

    @parameterized.expand(BOTH)
    def test_x_in_a_model_container(self, _, evaluator):
        tensor = make_large_tensor_proto("#x", "x", TensorProto.UINT8, (36,))
        proto = model([node()], outputs=[value("y")], initializers=[tensor])
        container = onnx.model_container.make_large_model(proto.graph, {"#x": X})
        container.model_proto.opset_import[0].version = 29
        self.check(evaluator(container), {})

    def test_a_model_container_with_functions(self):
        tensor = make_large_tensor_proto("#x", "x", TensorProto.UINT8, (36,))
        call = helper.make_node("F", ["x"], ["y"], domain="local")
        proto = model([call], outputs=[value("y")], initializers=[tensor], functions=[function("F", [node()])])
        proto.opset_import.append(helper.make_opsetid("local", 1))
        container = onnx.model_container.ModelContainer()
        container.model_proto = proto
        container.set_large_initializers({"#x": X})
        self.check(ReferenceEvaluator(container), {})

    @parameterized.expand(BOTH)
    def test_x_computed_by_earlier_nodes(self, _, evaluator):
        proto = model(
            [helper.make_node("Concat", ["a", "b"], ["x"], axis=0), node()],
            [value("a", TensorProto.UINT8, [18]), value("b", TensorProto.UINT8, [18])],
            [value("y")],
        )
        self.check(evaluator(proto), {"a": X[:18], "b": X[18:]})

    @parameterized.expand(BOTH)
    def test_several_nodes_that_share_x(self, _, evaluator):
        nodes = [node(y="a", shape=[2, 32]), node(y="b", shape=[64]), helper.make_node("Reshape", ["b", "s"], ["c"])]
        proto = model(
            [*nodes, helper.make_node("Sub", ["a", "c"], ["y"])],
            [value("x", TensorProto.UINT8, [36])],
            [value("y")],
            [numpy_helper.from_array(np.array([2, 32]), "s")],
        )
        self.check(evaluator(proto), y=np.zeros((2, 32), np.float32))

    def test_other_forms_of_a_model(self):
        proto = one_node_model()
        with TemporaryDirectory() as directory:
            path = Path(directory, "model.onnx")
            onnx.save(proto, path)
            for form in (proto.SerializeToString(), str(path), path):
                self.check(ReferenceEvaluator(form))
        self.check(ReferenceEvaluator(proto.graph, opsets={"": 29}))

    def test_the_base_classs_own_demands_stay(self):
        with self.assertRaisesRegex(ValueError, "opsets must be None"):
            ReferenceEvaluator(one_node_model(), opsets={"": 29})


class Alone(Case):
    @parameterized.expand(BOTH)
    def test_node(self, _, evaluator):
        self.check(evaluator(node()))

    def test_eval(self):
        self.assertFalse(differing(DequantizePacked.eval(X, format="gguf:q4_0", shape=[2, 32]), Y).any())


class Subgraphs(Case):
    @parameterized.expand(BOTH)
    def test_if(self, _, evaluator):
        then_branch = helper.make_graph([node()], "then", [], [value("y")])
        else_branch = helper.make_graph([node(shape=[64])], "else", [], [value("y")])
        branches = {"then_branch": then_branch, "else_branch": else_branch}
        proto = model(
            [helper.make_node("If", ["c"], ["z"], **branches)],
            [value("c", TensorProto.BOOL, []), value("x", TensorProto.UINT8, [36])],
            [value("z")],
        )
        for condition, y in ((True, Y), (False, Y.ravel())):
            self.check(evaluator(proto), {"c": np.array(condition), "x": X}, y)

    @parameterized.expand(BOTH)
    def test_loop(self, _, evaluator):
        body = helper.make_graph(
            [node(y="w"), helper.make_node("Add", ["s", "w"], ["t"]), helper.make_node("Identity", ["c"], ["d"])],
            "body",
            [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, []), value("s")],
            [value("d", TensorProto.BOOL, []), value("t")],
        )
        proto = model(
            # The condition is given: where it is left out, ONNX's own Loop does not start.
            [helper.make_node("Loop", ["n", "true", "zero"], ["y"], body=body)],
            [value("n", TensorProto.INT64, []), value("x", TensorProto.UINT8, [36]), value("zero")],
            [value("y")],
            [numpy_helper.from_array(np.array(True), "true")],
        )
        minus_zero = np.full((2, 32), -0.0, np.float32)  # which keeps the sign of any zero added to it
        self.check(evaluator(proto), {"n": np.array(2), "x": X, "zero": minus_zero}, Y + Y)

    @parameterized.expand(BOTH)
    def test_scan(self, _, evaluator):
        if tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 22):
            # Known: ONNX's own Scan is wrong there, whatever its body; see also the README.
            self.assertEqual(ONNX_SCAN_IS_RIGHT, False)
        else:
            self.assertEqual(ONNX_SCAN_IS_RIGHT, True)
            self.scan(evaluator)

    def scan(self, evaluator):
        body = helper.make_graph(
            [node(x="row", y="out", shape=[32])],
            "body",
            [value("row", TensorProto.UINT8, [18])],
            [value("out", TensorProto.FLOAT, [32])],
        )
        proto = model(
            [helper.make_node("Scan", ["rows"], ["y"], body=body, num_scan_inputs=1)],
            [value("rows", TensorProto.UINT8, [2, 18])],
            [value("y")],
        )
        self.check(evaluator(proto), {"rows": X.reshape(2, 18)})


class Functions(Case):
    def test_attributes_by_reference(self):
        names = ["format", "shape", "output_dtype"]
        functions = [function("F", [by_reference(*names)], names)]
        for output_dtype, dtype in OUTPUT_DTYPES.items():
            given = {"format": "gguf:q4_0", "shape": [2, 32], "output_dtype": output_dtype}
            call = helper.make_node("F", ["x"], ["y"], domain="local", **given)
            self.check(ReferenceEvaluator(calling(functions, call)), y=Y.astype(dtype))

    def test_two_calls_with_other_attributes(self):
        functions = [function("F", [by_reference("shape")], ["shape"])]
        proto = calling(functions, helper.make_node("F", ["x"], ["a"], domain="local", shape=[64]))
        proto.graph.node.extend(
            [
                helper.make_node("F", ["x"], ["b"], domain="local", shape=[2, 32]),
                helper.make_node("Flatten", ["a"], ["c"], axis=0),
                helper.make_node("Flatten", ["b"], ["d"], axis=0),
                helper.make_node("Concat", ["c", "d"], ["y"], axis=0),
            ]
        )
        self.check(ReferenceEvaluator(proto), y=np.stack([Y.ravel(), Y.ravel()]))

    def test_the_plain_evaluator_fails_as_the_readme_says(self):
        with self.assertRaisesRegex(NotImplementedError, "DequantizePacked"):
            PlainEvaluator(calling([function("F", [node()])]), new_ops=[DequantizePacked])

    def test_nested_calls_in_any_order(self):
        inner = function("G", [by_reference("shape")], ["shape"])
        outer_node = helper.make_node("G", ["x"], ["y"], domain="local")
        outer_node.attribute.append(reference("shape", onnx.AttributeProto.INTS))
        outer = function("F", [outer_node], ["shape"])
        call = helper.make_node("F", ["x"], ["y"], domain="local", shape=[2, 32])
        for functions in ([inner, outer], [outer, inner]):
            self.check(ReferenceEvaluator(calling(functions, call)))

    def test_a_function_in_a_subgraph_and_a_subgraph_in_a_function(self):
        def branches(name, inside):
            graph = helper.make_graph([inside], name, [], [value("z")])
            return helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph)

        dequantize_node = by_reference("shape")
        dequantize_node.output[0] = "z"
        condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True), "true"))
        functions = [function("F", [condition, branches("inner", dequantize_node)], ["shape"])]
        proto = calling(functions, condition)
        call = helper.make_node("F", ["x"], ["z"], domain="local", shape=[2, 32])
        proto.graph.node.append(branches("outer", call))
        self.check(ReferenceEvaluator(proto))

    def test_default_values_of_a_functions_attributes(self):
        defaults = [helper.make_attribute("shape", [64]), helper.make_attribute("format", "gguf:q4_0")]
        functions = [function("F", [by_reference("shape", "format")], defaults=defaults)]
        self.check(ReferenceEvaluator(calling(functions)), y=Y.ravel())
        call = helper.make_node("F", ["x"], ["y"], domain="local", shape=[2, 32])
        self.check(ReferenceEvaluator(calling(functions, call)))

    def test_functions_that_call_one_another(self):
        def calls(name, other):
            return function(name, [helper.make_node(other, ["x"], ["y"], domain="local")])

        with self.assertRaisesRegex(ValueError, "functions call one another in a circle: "):
            ReferenceEvaluator(calling([calls("F", "G"), calls("G", "F")]))

    def test_overloads(self):
        functions = [function("F", [node(shape=[64])]), function("F", [node()])]
        functions[0].overload, functions[1].overload = "a", "b"
        for overload, y in (("a", Y.ravel()), ("b", Y)):
            call = helper.make_node("F", ["x"], ["y"], domain="local", overload=overload)
            self.check(ReferenceEvaluator(calling(functions, call)), y=y)

    def test_default_and_missing_attributes_of_nested_functions(self):
        """G's node has them by reference, from F, which has a default for one and is not given the other."""
        names = ["shape", "output_dtype"]
        inner = function("G", [by_reference(*names)], names)
        call = helper.make_node("G", ["x"], ["y"], domain="local")
        call.attribute.extend(a for a in by_reference(*names).attribute if a.ref_attr_name)
        outer = function("F", [call], ["output_dtype"], [helper.make_attribute("shape", [2, 32])])
        self.check(ReferenceEvaluator(calling([outer, inner])))

    def test_a_function_of_another_opset(self):
        local = function("F", [node()])
        local.opset_import[0].version = 30
        self.check(ReferenceEvaluator(calling([local])))

    def test_an_attribute_that_the_caller_leaves_out(self):
        names = ["shape", "output_dtype"]
        functions = [function("F", [by_reference(*names)], names)]
        call = helper.make_node("F", ["x"], ["y"], domain="local", shape=[2, 32])
        self.check(ReferenceEvaluator(calling(functions, call)))
        with self.assertRaisesRegex(PackedTensorError, "attribute 'shape' is missing, and has no default"):
            ReferenceEvaluator(calling(functions)).run(None, {"x": X})

    def test_a_wrong_attribute_from_the_caller(self):
        functions = [function("F", [by_reference("shape")], ["shape"])]
        for shape, message in ((64, "has type INT, expected INTS"), ([2, 33], "last dimension of shape")):
            call = helper.make_node("F", ["x"], ["y"], domain="local", shape=shape)
            with self.assertRaisesRegex(PackedTensorError, message):
                ReferenceEvaluator(calling(functions, call))

    def test_new_ops_are_handed_on(self):
        class Twice(OpRun):
            op_domain = "custom"

            def _run(self, x):
                return (x + x,)

        nodes = [node(y="w"), helper.make_node("Twice", ["w"], ["y"], domain="custom")]
        local = function("F", nodes)
        local.opset_import.append(helper.make_opsetid("custom", 1))
        self.check(ReferenceEvaluator(calling([local]), new_ops=[Twice]), y=Y + Y)

    def test_new_ops_come_first(self):
        class Zero(OpRun):
            op_domain = ""

            def _run(self, _, **__):
                return (np.zeros(3, np.float32),)

        Zero.__name__ = "DequantizePacked"
        self.check(ReferenceEvaluator(one_node_model(), new_ops=[Zero]), y=np.zeros(3, np.float32))

    def test_a_lone_function(self):
        evaluator = ReferenceEvaluator(function("F", [by_reference("shape")], ["shape"]))
        actual = evaluator.run(None, {"x": X}, attributes={"shape": [2, 32]})[0]
        self.assertFalse(differing(actual, Y).any())

    def test_onnx_text(self):
        proto = parser.parse_model("""
            <ir_version: 10, opset_import: ["": 29, "local": 1]>
            g (uint8[36] x) => (float[2, 32] y) { y = local.F <rows = [2, 32]> (x) }
            <domain: "local", opset_import: ["": 29]>
            F <rows> (x) => (y) { y = DequantizePacked <format = "gguf:q4_0", shape: ints = @rows> (x) }
        """)
        self.check(ReferenceEvaluator(proto))
