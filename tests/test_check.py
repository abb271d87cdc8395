"""onnx_dqp.check: every problem of a model's nodes, with its place and rule, without loading external data."""

from __future__ import annotations

import unittest

import numpy as np
import onnx
from helpers import NODES, calling, function, model, node, value
from onnx import TensorProto, helper, numpy_helper
from parameterized import parameterized

from conformance.folder import REPOSITORY
from conformance.testdata import read
from onnx_dqp import PackedTensorError, ReferenceEvaluator, check
from onnx_dqp.models.scopes import is_packed, scopes

X = value("x", TensorProto.UINT8, [36])


class OneNode(unittest.TestCase):
    def test_nothing_to_find(self):
        self.assertEqual(check(model([node()], [X], [value("y")])), [])

    @parameterized.expand(NODES)
    def test_a_bad_node(self, name, bad, message):
        rule = name.partition("_")[0] if name.startswith("R") else "R9"
        found = {str(problem).partition(f": {rule}: ")[2] for problem in check(model([bad], [X], [value("y")]))}
        self.assertTrue(any(text.startswith(message) for text in found), found)

    def test_all_at_once(self):
        bad = node(shape=[2, -32], output_dtype=7, extra=1, name="dq")
        problems = check(model([bad, node("x", "z", format="q4_0")], [value("x", TensorProto.INT8, [2, 2])]))
        found = [(problem.node, problem.rule, problem.found, problem.expected) for problem in problems]
        self.assertEqual(
            found,
            [
                ("dq", "R9", "unknown attribute 'extra'", "format, shape, output_dtype"),
                ("dq", "R2", "gguf:q4_0: shape [2, -32] has dimension -32", "no negative dimension"),
                ("dq", "R9", "output_dtype is 7", found[2][3]),
                ("dq", "R9", "x has element type INT8", "UINT8"),
                ("z", "R1", "unknown format 'q4_0'", "gguf:q4_0?"),
                ("z", "R9", "x has element type INT8", "UINT8"),
            ],
        )
        self.assertEqual(str(problems[3]), "graph: node 'dq': R9: x has element type INT8, expected UINT8")

    def test_an_opset_without_the_operator(self):
        (problem,) = check(model([node()], [X], opsets={"": 28}))
        self.assertEqual((problem.rule, problem.expected), ("opset", "29 or later"))

    def test_another_domain_is_not_looked_at(self):
        other = node(shape=[5])
        other.domain = "mine"
        self.assertEqual(check(model([other], [X], opsets={"": 29, "mine": 1})), [])


class Places(unittest.TestCase):
    def test_subgraphs_and_functions(self):
        inner = helper.make_graph([node("x", "t", name="inner", shape=[5])], "t", [], [value("t")])
        other = helper.make_graph([node("x", "e", shape=[2, 32])], "e", [], [value("e")])
        branch = helper.make_node("If", ["c"], ["i"], "choose", then_branch=inner, else_branch=other)
        made = calling([function("F", [node(format="nothing")])])
        made.graph.node.append(branch)
        made.graph.input.append(value("c", TensorProto.BOOL, []))
        self.assertEqual(
            [(problem.place, problem.node, problem.rule) for problem in check(made)],
            [("graph / 'choose' then_branch", "inner", "R3"), ("function local.F", "y", "R1")],
        )

    def test_a_type_that_is_inferred(self):
        cast = helper.make_node("Cast", ["a"], ["x"], to=TensorProto.INT32)
        (problem,) = check(model([cast, node()], [value("a", TensorProto.FLOAT, [36])]))
        self.assertEqual((problem.rule, problem.found), ("R9", "x has element type INT32"))

    def test_a_length_that_is_inferred(self):
        split = helper.make_node("Split", ["a"], ["x", "b"], num_outputs=2)
        (problem,) = check(model([split, node()], [value("a", TensorProto.UINT8, [70])]))
        self.assertEqual(problem.rule, "R4")
        self.assertIn("35 bytes", problem.found)

    def test_the_output_of_another_node(self):
        (problem,) = check(model([node("x", "y"), node("y", "z")], [X]))
        self.assertEqual((problem.node, problem.found), ("z", "x has element type FLOAT"))


class Payloads(unittest.TestCase):
    def test_initializers(self):
        for length, rules in ((36, []), (35, ["R4"])):
            payload = numpy_helper.from_array(np.zeros(length, np.uint8), "x")
            self.assertEqual([p.rule for p in check(model([node()], initializers=[payload]))], rules)

    def test_external_data_are_not_loaded(self):
        for dims, length, found in ((36, 36, []), (35, 35, ["R4"]), (36, 30, ["R4"])):
            payload = TensorProto(name="x", data_type=TensorProto.UINT8, dims=[dims])
            payload.data_location = TensorProto.EXTERNAL
            for key, stated in (("location", "nowhere.bin"), ("offset", "4096"), ("length", str(length))):
                payload.external_data.add(key=key, value=stated)
            self.assertEqual([p.rule for p in check(model([node()], initializers=[payload]))], found)

    def test_a_tensor_that_holds_less_than_it_says(self):
        payload = TensorProto(name="x", data_type=TensorProto.UINT8, dims=[36], raw_data=bytes(20))
        (problem,) = check(model([node()], initializers=[payload]))
        self.assertEqual((problem.rule, problem.found), ("R4", "the tensor 'x' of 36 bytes holds 20"))


class TheSuite(unittest.TestCase):
    def test_valid_cases_have_no_problem_and_nodes_that_are_refused_when_loaded_have(self):
        counts = {True: 0, False: 0}
        for entry in read(REPOSITORY):
            made = onnx.load(REPOSITORY / entry.folder / "model.onnx")
            problems = check(made)
            if entry.valid:
                self.assertEqual(problems, [], entry.name)
            elif entry.stage == "load":
                self.assertNotEqual(problems, [], entry.name)
                self.assertIn(entry.rule, {problem.rule for problem in problems}, entry.name)
            counts[entry.valid] += 1
        self.assertGreater(min(counts.values()), 100)

    def test_an_evaluator_raises_the_first(self):
        bad = node(name="dq", shape=[2, 33])
        (problem,) = check(model([bad], [X], [value("y")]))
        with self.assertRaises(PackedTensorError) as caught:
            ReferenceEvaluator(model([bad], [X], [value("y")]))
        self.assertIn(problem.found, str(caught.exception))
        self.assertEqual(caught.exception.rule, problem.rule)


class Scopes(unittest.TestCase):
    def test_a_shadowed_name_is_the_inner_one(self):
        payload = numpy_helper.from_array(np.zeros(36, np.uint8), "x")
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["x2"]), node("x2", "t")], "t", [], [value("t")])
        other = helper.make_graph([node("x", "e")], "e", [], [value("e")])
        branch = helper.make_node("If", ["c"], ["i"], then_branch=inner, else_branch=other)
        made = model([branch], [value("c", TensorProto.BOOL, []), value("w", TensorProto.UINT8, [36])],
                     initializers=[payload])  # fmt: skip
        constants = [
            scope.constant(n.input[0]) is not None for scope in scopes(made) for n in scope.proto.node if is_packed(n)
        ]
        self.assertEqual(constants, [True, False])  # else_branch comes first

    def test_an_initializer_that_is_an_input_is_no_constant(self):
        payload = numpy_helper.from_array(np.zeros(36, np.uint8), "x")
        made = model([node()], [X], initializers=[payload])
        (scope,) = scopes(made)
        self.assertIsNone(scope.constant("x"))
