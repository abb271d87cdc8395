"""onnx_dqp.expand: standard operators that compute the same bits, in models of every shape and of older opsets."""

from __future__ import annotations

import unittest

import numpy as np
import onnx
import onnxruntime
from helpers import FORMAT_ROWS, TYPE_ROWS, by_reference, calling, function, model, newest_opset, node, reference, value
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from conformance.expected import expected
from conformance.runtimes import OnnxRuntime
from onnx_dqp import PackedTensorError, check, expand, fold
from onnx_dqp.models.opsets import CHANGES, OpsetError, known_opset

PAYLOAD = np.arange(36, dtype=np.uint8)
WANTED = expected("gguf:q4_0", PAYLOAD.tobytes()).reshape(2, 32)
X = value("x", TensorProto.UINT8, [36])
Y = value("y", TensorProto.FLOAT, [2, 32])
OPSETS = sorted({18, 21, newest_opset()})


def packed(*nodes, outputs=(Y,), inputs=(X,), **options):
    """A model of a packed node and further ones."""
    return model([node(), *nodes], list(inputs), list(outputs), **options)


def run(expanded, **inputs):
    """What ONNX Runtime and the plain reference evaluator give, which is the same."""
    onnx.checker.check_model(expanded, full_check=True)
    session = OnnxRuntime(expanded)
    found = session.run(list(inputs.values()))
    with np.errstate(all="ignore"):  # it lets NumPy warn of infinities and NaN
        plain = ReferenceEvaluator(expanded).run(None, inputs)
    for one, other in zip(found, plain, strict=True):
        assert not differing(one, np.asarray(other)).any()
    return found


class EveryFormat(unittest.TestCase):
    """The suite does this for all cases; here the payloads are larger, and reach every scale."""

    @parameterized.expand(FORMAT_ROWS)
    def test_bits(self, _, format):
        blocks = [payloads.random_blocks(format, 40, "expand"), payloads.scale_sweep(format)]
        payload = np.frombuffer(b"".join(np.asarray(b).tobytes() for b in blocks), np.uint8)
        shape = [len(payload) // format.bytes, format.elements]
        for _name, dtype in TYPE_ROWS:
            made = model(
                [node(format=format.identifier, shape=shape, output_dtype=dtype)],
                [value("x", TensorProto.UINT8, ["n"])],
                [value("y", dtype, shape)],
            )
            (y,) = run(expand(made, opset=newest_opset()), x=payload)
            wanted = expected(format.identifier, payload.tobytes(), dtype).reshape(shape)
            self.assertEqual(y.dtype, wanted.dtype)
            self.assertFalse(differing(y, wanted).any())

    @parameterized.expand(FORMAT_ROWS)
    def test_a_wrong_length_or_rank_is_refused_when_it_runs(self, _, format):
        shape = [2, format.elements]
        made = model(
            [node(format=format.identifier, shape=shape)],
            [value("x", TensorProto.UINT8)],
            [value("y", TensorProto.FLOAT, shape)],
        )
        made.graph.input[0].type.tensor_type.ClearField("shape")
        session = OnnxRuntime(expand(made, opset=newest_opset()))
        right = np.zeros(2 * format.bytes, np.uint8)
        self.assertEqual(session.run([right])[0].shape, tuple(shape))
        for wrong in (right[:-1], right[: format.bytes], np.tile(right, 2), right.reshape(2, -1), right[:0]):
            with self.assertRaisesRegex(Exception, "Reshape|Transpose|rank", msg=wrong.shape):
                session.run([wrong])


class Models(unittest.TestCase):
    @parameterized.expand([(f"opset_{opset}", opset) for opset in OPSETS])
    def test_one_function_for_each_format_and_type(self, _, opset):
        made = packed(
            node("x", "half", output_dtype=TensorProto.FLOAT16),
            node("x", "again"),
            outputs=[Y, value("half", TensorProto.FLOAT16, [2, 32]), value("again", TensorProto.FLOAT, [2, 32])],
        )
        expanded = expand(made, opset=opset)
        names = ["dequantize_packed_q4_0_float", "dequantize_packed_q4_0_float16"]
        self.assertEqual([(f.domain, f.name) for f in expanded.functions], [("onnx_dqp", name) for name in names])
        self.assertEqual([n.op_type for n in expanded.graph.node], [names[0], names[1], names[0]])
        self.assertEqual({o.domain: o.version for o in expanded.opset_import}, {"": opset, "onnx_dqp": 1})
        self.assertEqual(list(expanded.functions[0].attribute), ["shape"])
        y, half, again = run(expanded, x=PAYLOAD)
        np.testing.assert_array_equal(y, WANTED)
        np.testing.assert_array_equal(again, WANTED)
        np.testing.assert_array_equal(half, WANTED.astype(np.float16))
        self.assertEqual([n.op_type for n in made.graph.node], ["DequantizePacked"] * 3)  # the input stays as it is

    def test_inline(self):
        expanded = expand(packed(), opset=newest_opset(), inline=True)
        self.assertEqual(len(expanded.functions), 0)
        self.assertEqual([o.domain for o in expanded.opset_import], [""])
        np.testing.assert_array_equal(run(expanded, x=PAYLOAD)[0], WANTED)

    @parameterized.expand([("zero_rows", [0, 32]), ("zero_last", [3, 0]), ("zero_inside", [2, 0, 64])])
    def test_empty(self, _, shape):
        made = model([node(shape=shape)], [value("x", TensorProto.UINT8, [0])], [value("y", TensorProto.FLOAT, shape)])
        (y,) = run(expand(made, opset=newest_opset()), x=PAYLOAD[:0])
        self.assertEqual(y.shape, tuple(shape))

    def test_subgraphs(self):
        branch = [
            helper.make_graph([node("x", name)], name, [], [value(name, TensorProto.FLOAT, [2, 32])])
            for name in ("a", "b")
        ]
        chosen = helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1])
        made = model([chosen], [X, value("c", TensorProto.BOOL, [])], [Y])
        for inline in (False, True):
            (y,) = run(expand(made, opset=newest_opset(), inline=inline), x=PAYLOAD, c=np.array(True))
            np.testing.assert_array_equal(y, WANTED)

    def test_functions(self):
        made = calling([function("F", [node()])])
        del made.graph.output[:]
        made.graph.output.append(Y)
        expanded = expand(made, opset=21)
        self.assertEqual({f.name for f in expanded.functions}, {"F", "dequantize_packed_q4_0_float"})
        np.testing.assert_array_equal(run(expanded, x=PAYLOAD)[0], WANTED)

    @parameterized.expand(
        [
            ("shape", ["shape"], {"shape": [2, 32]}),
            ("format", ["format"], {"format": "gguf:q4_0"}),
            ("all", ["format", "shape", "output_dtype"], {"format": "gguf:q4_0", "shape": [2, 32], "output_dtype": 1}),
        ]
    )
    def test_attributes_by_reference(self, _, names, values):
        call = helper.make_node("F", ["x"], ["y"], domain="local", **values)
        made = calling([function("F", [by_reference(*names)], names)], call)
        del made.graph.output[:]
        made.graph.output.append(Y)
        np.testing.assert_array_equal(run(expand(made, opset=21), x=PAYLOAD)[0], WANTED)

    def test_expanding_twice_changes_nothing(self):
        once = expand(packed(), opset=21)
        self.assertEqual(expand(once, opset=21), once)

    def test_a_model_without_the_operator_is_only_lowered(self):
        made = model([helper.make_node("Relu", ["a"], ["b"])], [value("a", 1, [2])], [value("b", 1, [2])])
        lowered = expand(made, opset=18)
        self.assertEqual(lowered.opset_import[0].version, 18)
        self.assertEqual(list(lowered.graph.node), list(made.graph.node))

    def test_a_function_of_the_same_name_is_refused(self):
        made = expand(packed(), opset=21)
        made.functions[0].node.pop()
        made.opset_import[0].version = 29
        made.graph.node.append(node("x", "z"))
        with self.assertRaisesRegex(OpsetError, "another function onnx_dqp.dequantize_packed_q4_0_float"):
            expand(made, opset=21)

    def test_a_node_that_breaks_a_rule_is_refused(self):
        with self.assertRaisesRegex(PackedTensorError, r"graph: node 'y': R3: gguf:q4_0: the last dimension.* 33"):
            expand(model([node(shape=[2, 33])], [X], [value("y")]))

    @parameterized.expand([(17,), (30,), ("21",), (True,), (2.5,)])
    def test_an_opset_that_it_cannot_give_is_refused(self, opset):
        with self.assertRaisesRegex(ValueError, "^opset is .*, expected 18 to 29$"):
            expand(packed(), opset=opset)

    def test_metadata_and_names_stay(self):
        made = packed()
        made.graph.node[0].name, made.doc_string = "weights", "a model"
        made.metadata_props.add(key="k", value="v")
        expanded = expand(made, opset=21)
        self.assertEqual(expanded.graph.node[0].name, "weights")
        self.assertEqual((expanded.doc_string, expanded.metadata_props[0].value), ("a model", "v"))


def beside(*nodes, shape=(2, 32), dtype=TensorProto.FLOAT, inputs=(), initializers=()):
    """A packed node, and others that make z of its output."""
    return packed(*nodes, outputs=[value("z", dtype, shape)], inputs=[X, *inputs], initializers=list(initializers))


class Lowering(unittest.TestCase):
    """A node stays where it means the same, is converted where ONNX can, and else the model is refused."""

    @parameterized.expand(
        [
            (
                "Reshape",
                helper.make_node("Reshape", ["y", "s"], ["z"]),
                [numpy_helper.from_array(np.array([2, 32]), "s")],
            ),
            ("Cast", helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT), []),
            ("Transpose", helper.make_node("Transpose", ["y"], ["z"], perm=[0, 1]), []),
            ("Identity", helper.make_node("Identity", ["y"], ["z"]), []),
            ("Tan", helper.make_node("Tan", ["y"], ["z"]), []),
            ("Dropout", helper.make_node("Dropout", ["y"], ["z"]), []),
        ]
    )
    def test_stays(self, _, other, initializers):
        made = beside(other, initializers=initializers)
        lowered = expand(made, opset=18)
        self.assertEqual(lowered.graph.node[1], other)
        self.assertEqual(run(lowered, x=PAYLOAD)[0].shape, (2, 32))

    @parameterized.expand(
        [
            (
                "new_operator",
                [helper.make_node("Gelu", ["y"], ["z"])],
                18,
                "Gelu node 'z' .graph. of opset 29 .* 18: .* 20",
            ),
            (
                "new_attribute",
                [helper.make_node("Cast", ["y"], ["z"], to=1, round_mode="down")],
                21,
                "'round_mode' does not exist there",
            ),
            (
                "new_type",
                [helper.make_node("Cast", ["y"], ["b"], to=16), helper.make_node("Tan", ["b"], ["tan"]),
                 helper.make_node("Cast", ["tan"], ["z"], to=1)],
                21,
                "Tan node 'tan'.*'b' is a tensor.bfloat16., which it does not take there",
            ),
            (
                "new_meaning",
                [helper.make_node("Pad", ["y", "p"], ["z"], mode="wrap")],
                18,
                "Pad node 'z'.*its meaning changed in opset 19",
            ),
            (
                "in_a_subgraph",
                [
                    helper.make_node(
                        "If", ["c"], ["z"], "if",
                        then_branch=helper.make_graph([helper.make_node("Gelu", ["y"], ["t"])], "t", [], [value("t")]),
                        else_branch=helper.make_graph([helper.make_node("Relu", ["y"], ["e"])], "e", [], [value("e")]),
                    )
                ],
                18,
                "Gelu node 't' .graph / 'if' then_branch.",
            ),
        ]
    )  # fmt: skip
    def test_refused(self, _, nodes, opset, message):
        pads = numpy_helper.from_array(np.zeros(4, np.int64), "p")
        made = beside(*nodes, inputs=[value("c", TensorProto.BOOL, [])], initializers=[pads])
        with self.assertRaisesRegex(OpsetError, message) as caught:
            expand(made, opset=opset)
        self.assertNotIn("\n", str(caught.exception))

    def with_dft(self):
        """Its axis is an input from opset 20 on, and an attribute before."""
        return beside(
            helper.make_node("Unsqueeze", ["y", "a"], ["u"]),
            helper.make_node("Constant", [], ["axis"], value=numpy_helper.from_array(np.array(1))),
            helper.make_node("DFT", ["u", "", "axis"], ["z"]),
            shape=(2, 32, 2),
            initializers=[numpy_helper.from_array(np.array([2]), "a")],
        )

    def test_converted(self):
        made = self.with_dft()
        self.assertEqual(expand(made, opset=20).graph.node[-1].input[2], "axis")
        lowered = expand(made, opset=19)
        self.assertEqual([a.name for a in lowered.graph.node[-1].attribute], ["axis"])
        np.testing.assert_allclose(OnnxRuntime(lowered).run([PAYLOAD])[0][..., 0], np.fft.fft(WANTED).real, atol=1e-6)

    def test_the_version_of_functions_is_lowered_too(self):
        made = calling([function("F", [node("x", "t"), helper.make_node("Tan", ["t"], ["y"])])])
        lowered = expand(made, opset=18)
        for each in lowered.functions:
            self.assertEqual([o.version for o in each.opset_import if not o.domain], [18], each.name)

    def test_a_default_that_came_later_is_dropped(self):
        lowered = expand(beside(helper.make_node("Cast", ["y"], ["z"], to=1, saturate=1)), opset=18)
        self.assertEqual([a.name for a in lowered.graph.node[1].attribute], ["to"])

    @parameterized.expand(
        [
            ("AveragePool", 21, {"kernel_shape": [2], "ceil_mode": 1}, {"kernel_shape": [2], "ceil_mode": 0}),
            ("MaxPool", 21, {"kernel_shape": [2], "ceil_mode": 1}, {"kernel_shape": [2]}),
            ("Pad", 18, {"mode": "wrap"}, {"mode": "edge"}),
            ("Resize", 18, {"coordinate_transformation_mode": "half_pixel_symmetric"}, {"mode": "cubic"}),
            ("GridSample", 19, {"mode": "linear"}, {"mode": "nearest"}),
            ("GroupNormalization", 20, {"num_groups": 2}, None),
            ("Cast", 23, {"to": TensorProto.FLOAT8E4M3FNUZ}, {"to": TensorProto.FLOAT}),
            ("CastLike", 23, {}, None),
            ("Attention", 23, {"is_causal": 1}, {"is_causal": 0}),
            ("Mod", 21, {"fmod": 0}, {"fmod": 1}),
        ]
    )
    def test_a_meaning_that_changed(self, name, opset, changed, same):
        """The same whatever onnx is installed: an older one does not know what changed."""
        inputs = {
            "Attention": 3,
            "GroupNormalization": 3,
            "GridSample": 2,
            "Pad": 2,
            "Resize": 3,
            "Mod": 2,
            "CastLike": 2,
        }
        if name == "Attention" and known_opset() < 23:
            self.skipTest("onnx does not have the operator")
        for attributes, refused in ((changed, True), (same, False)):
            if attributes is None:
                continue
            names = ["y", *(f"i{n}" for n in range(1, inputs.get(name, 1)))]
            made = beside(helper.make_node(name, names, ["z"], **attributes))
            del made.graph.output[:]
            if refused:
                with self.assertRaisesRegex(OpsetError, f"{name} node 'z'.*its meaning changed"):
                    expand(made, opset=opset)
            else:
                self.assertEqual(expand(made, opset=opset).graph.node[1], made.graph.node[1])

    def test_every_change_has_a_case(self):
        tests = [name.rpartition("_")[2] for name in dir(self) if name.startswith("test_a_meaning_that_changed_")]
        self.assertEqual(sorted(tests), sorted(CHANGES))

    def test_metadata_of_the_model_survive_a_conversion_once(self):
        made = self.with_dft()
        made.metadata_props.add(key="k", value="v")
        self.assertEqual([(p.key, p.value) for p in expand(made, opset=19).metadata_props], [("k", "v")])

    def test_a_function_of_an_older_opset_stays(self):
        # Its attribute "axes" is an input in opset 18 and later.
        nodes = [helper.make_node("ReduceMax", ["x"], ["y"], axes=[0], keepdims=0)]
        old = helper.make_function("local", "G", ["x"], ["y"], nodes, [helper.make_opsetid("", 17)])
        call = helper.make_node("G", ["y"], ["z"], domain="local")
        made = model([node(), call], [X], [value("z", 1, [2, 32])], functions=[old], opsets={"": 29, "local": 1})
        lowered = expand(made, opset=21)
        self.assertIn(old, list(lowered.functions))  # its attribute too

    def test_a_function_of_a_newer_opset_than_the_model_is_lowered(self):
        made = calling([function("F", [node()])])
        made.opset_import[0].version = 21
        del made.graph.output[:]
        made.graph.output.append(Y)
        np.testing.assert_array_equal(run(expand(made, opset=21), x=PAYLOAD)[0], WANTED)

    def test_a_reference_in_another_node_of_a_function(self):
        cast = helper.make_node("Cast", ["t"], ["y"])
        cast.attribute.append(reference("to", onnx.AttributeProto.INT))
        call = helper.make_node("F", ["x"], ["y"], domain="local", to=TensorProto.FLOAT)
        made = calling([function("F", [node("x", "t"), cast], ["to"])], call)
        del made.graph.output[:]
        made.graph.output.append(Y)
        np.testing.assert_array_equal(run(expand(made, opset=21), x=PAYLOAD)[0], WANTED)


class Callers(unittest.TestCase):
    """What a function's caller gives by reference is held to the rules too."""

    @parameterized.expand(
        [
            ("R1", "format", "gguf:Q4_0"),
            ("R2", "shape", [-1, 32]),
            ("R3", "shape", [4, 16]),
            ("R4", "shape", [3, 32]),
            ("R9", "output_dtype", 7),
        ]
    )
    def test_refused(self, rule, name, given):
        call = helper.make_node("F", ["x"], ["y"], domain="local", **{name: given})
        made = calling([function("F", [by_reference(name)], [name])], call)
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 36
        for convert in (expand, fold):
            with self.assertRaises(PackedTensorError) as caught:
                convert(made)
            self.assertEqual(caught.exception.rule, rule)

    def test_a_function_that_cannot_be_inlined(self):
        made = calling([function("F", [by_reference("output_dtype")], ["output_dtype"])])
        made.graph.node[0].attribute.append(helper.make_attribute("output_dtype", 1))
        made.opset_import[0].version = 21
        with self.assertRaisesRegex(OpsetError, "attributes by reference"):
            expand(made)


class Versions(unittest.TestCase):
    def test_ir_version_is_one_of_the_opset(self):
        made = packed()
        made.ir_version = 14
        self.assertEqual(expand(made, opset=18).ir_version, 8)
        self.assertEqual(made.ir_version, 14)


class OnnxRuntimeFindings(unittest.TestCase):
    def test_where_loses_the_sign_of_zero(self):
        # Why functions look numbers up instead. If this fails, ONNX Runtime was mended: see docs/runtimes.md.
        graph = onnx.parser.parse_graph("g (bool[1] c, float[1] a, float[1] b) => (float[1] y) { y = Where(c, a, b) }")
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        session = onnxruntime.InferenceSession(made.SerializeToString())
        one = np.ones(1, np.float32)
        zero = np.array([-0.0], np.float32)
        self.assertTrue(np.signbit(zero[0]))
        (y,) = session.run(None, {"c": np.array([True]), "a": zero, "b": one})
        self.assertEqual((float(y[0]), bool(np.signbit(y[0]))), (0, False))

    def test_own_operators_of_the_domain_keep_their_import(self):
        made = packed(helper.make_node("Mine", ["y"], ["z"], domain="onnx_dqp"))
        made.opset_import.append(helper.make_opsetid("onnx_dqp", 1))
        inlined = expand(made, opset=21, inline=True)
        self.assertEqual(sorted(o.domain for o in inlined.opset_import), ["", "onnx_dqp"])
        self.assertEqual(len(inlined.functions), 0)


class Spellings(unittest.TestCase):
    def test_the_main_domain_by_its_name(self):
        made = packed(helper.make_node("Relu", ["y"], ["z"], domain="ai.onnx"), outputs=[value("z", 1, [2, 32])])
        made.opset_import[0].domain = made.graph.node[0].domain = "ai.onnx"
        for inline in (False, True):
            np.testing.assert_array_equal(run(expand(made, opset=21, inline=inline), x=PAYLOAD)[0], WANTED.clip(0))

    def test_an_overload_is_dropped(self):
        made = packed()
        made.graph.node[0].overload = "v"
        np.testing.assert_array_equal(run(expand(made, opset=21), x=PAYLOAD)[0], WANTED)

    def test_functions_that_call_twice_thirty_levels_deep_are_no_trap(self):
        functions = [function("D0", [node()])]
        for k in range(1, 31):
            calls = [helper.make_node(f"D{k - 1}", ["x"], [y], domain="local") for y in ("a", "y")]
            functions.append(function(f"D{k}", calls))
        made = calling(functions, helper.make_node("D30", ["x"], ["y"], domain="local"))
        self.assertEqual(check(made), [])
