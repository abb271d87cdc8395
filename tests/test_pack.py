"""Floating-point weights of a model as packed ones: the quantizer's bytes, the same names, types and shapes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import gguf
import ml_dtypes
import numpy as np
import onnx
from helpers import FORMAT_ROWS, model, newest_opset, value
from onnx import TensorProto, helper, numpy_helper
from parameterized import parameterized

import onnx_dqp
from conformance.compare import differing
from conformance.expected import expected
from conformance.runtimes import OnnxRuntime
from onnx_dqp import FORMATS, PackedTensorError, ggml, pack
from onnx_dqp.models.files import octets
from onnx_dqp.models.opsets import OpsetError
from onnx_dqp.rules import OUTPUT_DTYPES

IN_GGUF = {"gguf:q4_0", "gguf:q4_1", "gguf:q5_0", "gguf:q5_1", "gguf:q8_0", "gguf:tq1_0", "gguf:tq2_0", "gguf:mxfp4"}


def weights(*shape, dtype=np.float32):
    """The same for the same shape, whatever test asks."""
    return np.random.default_rng(shape).standard_normal(shape, np.float32).astype(dtype)


def holding(opset=28, nodes=None, inputs=(), **arrays):
    """A model whose outputs are its initializers, or nodes' outputs."""
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = nodes or [helper.make_node("Identity", [name], [f"{name}_out"]) for name in arrays]
    outputs = [value(name) for node in nodes for name in node.output]
    for output in outputs:
        output.type.Clear()
    return model(nodes, inputs, outputs, initializers, opsets={"": opset})


def evaluated(made):
    """Outputs by name without ``_out``."""
    evaluator = onnx_dqp.ReferenceEvaluator(made)
    outputs = zip(evaluator.output_names, evaluator.run(None, {}), strict=True)
    return {name.removesuffix("_out"): output for name, output in outputs}


def nodes_of(made, kind="DequantizePacked"):
    return [node for node in made.graph.node if node.op_type == kind]


def payload_of(made, name):
    """What a DequantizePacked that leads to a name is given."""
    (node,) = [node for node in nodes_of(made) if node.name == name]
    (tensor,) = [tensor for tensor in made.graph.initializer if tensor.name == node.input[0]]
    return tensor.raw_data


class Payloads(unittest.TestCase):
    @parameterized.expand(row for row in FORMAT_ROWS if row[1].identifier not in ggml.NO_QUANTIZER)
    def test_are_ggmls(self, _, format):
        w = weights(16, 512)
        made = pack(holding(w=w), format, quantizer="ggml")
        payload = ggml.quantize(format, w)
        self.assertEqual(payload_of(made, "w"), payload.tobytes())
        wanted = expected(format.identifier, payload.tobytes()).reshape(16, 512)
        self.assertFalse(differing(evaluated(made)["w"], wanted).any())
        self.assertEqual(made.SerializeToString(), pack(holding(w=w), format.identifier).SerializeToString())

    @parameterized.expand(sorted(IN_GGUF))
    def test_are_ggufs(self, identifier):
        w = weights(16, 512)
        made = pack(holding(w=w), identifier, quantizer="gguf")
        wanted = gguf.quants.quantize(w, gguf.GGMLQuantizationType(FORMATS[identifier].ggml_type))
        self.assertEqual(payload_of(made, "w"), wanted.tobytes())

    @parameterized.expand(FORMAT_ROWS)
    def test_no_quantizer(self, _, format):
        if format.identifier not in IN_GGUF:
            with self.assertRaisesRegex(ValueError, f"^gguf has no quantizer for {format.identifier}$"):
                pack(holding(w=weights(16, 512)), format, quantizer="gguf")
        if format.name in ("Q8_1", "Q8_K"):
            with self.assertRaisesRegex(ValueError, f"^ggml and gguf have no quantizer for {format.identifier}$"):
                pack(holding(w=weights(16, 512)), format)

    def test_of_the_callers_own_quantizer(self):
        seen = []

        def quantizer(format, some):
            seen.append((format, some.shape, some.dtype, some.flags.c_contiguous))
            return np.zeros(some.size // 32 * 36, np.uint8)

        made = pack(holding(w=weights(200, 100, 32)), "gguf:q8_1", quantizer=quantizer)
        self.assertEqual(seen, [(FORMATS["gguf:q8_1"], (20000, 32), np.float32, True)])
        self.assertFalse(evaluated(made)["w"].any())

    @parameterized.expand([
        ("length", np.zeros(5, np.uint8), r"gave uint8\[5\]"), ("type", np.zeros(9216, np.int8), r"gave int8\[9216\]"),
        ("rank", np.zeros((1, 9216), np.uint8), r"gave uint8\[1, 9216\]"), ("list", [0], "gave list"),
    ])  # fmt: skip
    def test_that_are_wrong(self, _, payload, message):
        with self.assertRaisesRegex(ValueError, f"'w': the quantizer {message}, expected uint8.9216.$"):
            pack(holding(w=weights(512, 32)), "gguf:q4_0", quantizer=lambda *_: payload)

    def test_of_a_large_weight_made_in_parts(self):
        w = weights(4100, 2048)
        self.assertEqual(payload_of(pack(holding(w=w), "gguf:q8_0", quantizer="ggml"), "w"),
                         ggml.quantize(FORMATS["gguf:q8_0"], w).tobytes())  # fmt: skip

    def test_a_bad_choice(self):
        with self.assertRaisesRegex(ValueError, "^quantizer is 'mine', expected a function or one of ggml, gguf$"):
            pack(holding(w=weights(512, 32)), "gguf:q4_0", quantizer="mine")
        with self.assertRaisesRegex(ValueError, "^quantizer is of type list, expected"):
            pack(holding(w=weights(512, 32)), "gguf:q4_0", quantizer=[])
        with self.assertRaisesRegex(PackedTensorError, "did you mean gguf:q4_0"):
            pack(holding(w=weights(512, 32)), "q4_0")

    def test_without_packages(self):
        code = (
            "import importlib.util as u; find = u.find_spec;"
            "u.find_spec = lambda name, *a: None if name in ('gguf', 'libggml') else find(name, *a)\n"
            "import onnx, onnx_dqp\n"
            "for format in ('gguf:q4_0', 'gguf:q8_k'):\n"
            " try: onnx_dqp.pack(onnx.ModelProto(), format)\n"
            " except (ImportError, ValueError) as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.splitlines(), [
            "no quantizer for gguf:q4_0 is installed: pip install 'onnx_dqp[ggml]' or 'onnx_dqp[gguf]'",
            "ggml and gguf have no quantizer for gguf:q8_k",
        ])  # fmt: skip


class Models(unittest.TestCase):
    def assert_packed(self, made, name, array, rows):
        """A packed weight decodes to what its rows do, in its own type and shape."""
        format = FORMATS["gguf:q8_0"]
        payload = ggml.quantize(format, np.ascontiguousarray(rows, np.float32))
        self.assertEqual(payload_of(made, name), payload.tobytes())
        wanted = expected(format.identifier, payload.tobytes()).reshape(rows.shape)
        if rows.shape != array.shape:
            wanted = wanted.T if rows.shape == array.shape[::-1] else wanted.reshape(array.shape)
        found = evaluated(made)[name]
        self.assertEqual((found.dtype, found.shape), (array.dtype, array.shape))
        with np.errstate(over="ignore"):
            self.assertFalse(differing(found, wanted.astype(array.dtype)).any())

    @parameterized.expand([(np.dtype(dtype).name, dtype) for dtype in OUTPUT_DTYPES.values()])
    def test_types(self, _, dtype):
        w = weights(128, 32).astype(dtype)
        self.assert_packed(pack(holding(w=w), "gguf:q8_0"), "w", w, w.astype(np.float32))

    @parameterized.expand([
        ("as_it_is", (2, 40, 64), (80, 64), []), ("flat", (64, 16, 2, 3), (64, 96), ["Reshape", "Constant"]),
        ("transposed", (64, 100), (100, 64), ["Transpose"]), ("vector", (8192,), (1, 8192), []),
    ])  # fmt: skip
    def test_shapes(self, _, shape, rows, kinds):
        w = weights(*shape)
        made = pack(holding(w=w), "gguf:q8_0", select="w")
        self.assert_packed(made, "w", w, w.T if kinds == ["Transpose"] else w.reshape(rows))
        for kind in ("Reshape", "Transpose", "Constant"):
            self.assertEqual(len(nodes_of(made, kind)), kinds.count(kind))
        onnx_runtime = OnnxRuntime(onnx_dqp.expand(made, opset=newest_opset())).run([])[0]
        self.assertFalse(differing(onnx_runtime, evaluated(made)["w"]).any())

    def test_which_are_packed_by_default(self):
        arrays = {
            "large": weights(64, 64), "small": weights(127, 32), "vector": weights(8192), "unfit": weights(99, 99),
            "integers": np.zeros((64, 64), np.int32), "none": weights(0, 64),
        }  # fmt: skip
        made = pack(holding(**arrays), "gguf:q8_0")
        self.assertEqual([node.name for node in nodes_of(made)], ["large"])
        self.assertEqual({t.name for t in made.graph.initializer}, {*arrays, "large/packed"} - {"large"})

    @parameterized.expand(
        [
            ("glob", "b*"),
            ("several", ["b?", "ba*"]),
            ("function", lambda name: name[0] == "b"),
        ]
    )
    def test_select(self, _, select):
        made = pack(holding(a=weights(64, 64), ba=weights(32), bb=weights(1, 32)), "gguf:q8_0", select=select)
        self.assertEqual({node.name for node in nodes_of(made)}, {"ba", "bb"})

    def test_select_by_an_iterator(self):
        made = pack(holding(a=weights(64, 64), b=weights(32)), "gguf:q8_0", select=iter(["b"]))
        self.assertEqual([node.name for node in nodes_of(made)], ["b"])

    def test_nothing_selected(self):
        with self.assertRaisesRegex(ValueError, "^no floating-point initializer is selected, expected some$"):
            pack(holding(w=weights(64, 64)), "gguf:q8_0", select="none")
        self.assertEqual(nodes_of(pack(holding(w=weights(6, 6)), "gguf:q8_0")), [])

    @parameterized.expand([
        ("nan", np.nan), ("infinity", -np.inf), ("over_float16", 65505.0), ("double", 1e300),
    ])  # fmt: skip
    def test_values_that_stay(self, _, bad):
        w = weights(128, 32).astype(np.float64)
        w[100, 3] = bad
        made = pack(holding(w=w), "gguf:iq4_nl")
        self.assertEqual(made.graph.initializer[0].raw_data, w.tobytes())
        self.assertEqual(nodes_of(made), [])

    def test_scales_that_overflow(self):
        def quantizer(format, some):
            blocks = np.zeros(some.size // 32, format.layout)
            blocks["d"], blocks["qs"] = np.inf, 1
            return blocks.view(np.uint8)

        self.assertEqual(nodes_of(pack(holding(w=weights(128, 32)), "gguf:q8_0", quantizer=quantizer)), [])

    def test_inputs_stay(self):
        made = pack(holding(w=weights(128, 32), inputs=[value("w", 1, [128, 32])]), "gguf:q8_0", select="w")
        self.assertEqual(nodes_of(made), [])

    @parameterized.expand(["gguf:q8_0", "gguf:q5_1"])
    def test_float16_that_would_become_infinite(self, identifier):
        w = weights(128, 32).astype(np.float16)
        w[0, 0] = 65504
        made = pack(holding(w=w), identifier)
        self.assertEqual(made.graph.initializer[0].raw_data, w.tobytes())
        self.assertEqual(nodes_of(made), [])
        self.assertEqual(len(nodes_of(pack(holding(w=w.astype(np.float32)), identifier))), 1)

    def test_a_name_in_a_branch_and_a_sparse_initializer(self):
        branch = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["w/packed"])], "b", [], [value("w/packed", 1, None)]
        )
        choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        made = holding(nodes=[choice], c=np.array(True), w=weights(128, 32))
        values, indices = helper.make_tensor("w/packed_", 1, [1], [1.0]), helper.make_tensor("i", 7, [1], [0])
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
        made = pack(made, "gguf:q8_0")
        self.assertEqual(nodes_of(made)[0].input[0], "w/packed__")

    def test_an_initializer_without_a_name(self):
        made = holding(w=weights(128, 32))
        made.graph.initializer.append(numpy_helper.from_array(weights(128, 32), ""))
        self.assertEqual([node.name for node in nodes_of(pack(made, "gguf:q8_0"))], ["w"])

    def test_2_gib(self):
        made = holding(w=weights(128, 256))
        size = made.ByteSize() - 128 * 256 * 4 + 128 * 256 // 32 * 34
        with mock.patch("onnx_dqp.models.pack.MOST_INLINE", size + 1000):
            pack(made, "gguf:q8_0")
        message = "have over 2 GiB, expected less without external data"
        with mock.patch("onnx_dqp.models.pack.MOST_INLINE", size - 1000), self.assertRaisesRegex(ValueError, message):
            pack(made, "gguf:q8_0")

    def test_names_that_are_taken(self):
        w = weights(64, 16, 2, 3)
        identity = helper.make_node("Identity", ["w"], ["w/packed"])
        other = helper.make_node("Identity", ["w/flat"], ["w/shape"])
        made = holding(nodes=[identity, other], **{"w": w, "w/flat": np.zeros(1, np.float32)})
        made = pack(made, "gguf:q4_0")
        self.assertEqual(evaluated(made)["w/packed"].shape, w.shape)
        self.assertEqual(len({name for node in made.graph.node for name in node.output}), 5)

    def test_the_model_given_stays_as_it_is(self):
        given = holding(w=weights(128, 32))
        before = given.SerializeToString()
        pack(given, "gguf:q8_0")
        self.assertEqual(given.SerializeToString(), before)

    def test_in_subgraphs(self):
        w = weights(128, 32)
        branch = helper.make_graph([helper.make_node("Identity", ["w"], ["b"])], "b", [], [value("b", 1, [128, 32])],
                                   [numpy_helper.from_array(w, "w")])  # fmt: skip
        choice = helper.make_node("If", ["c"], ["w_out"], then_branch=branch, else_branch=branch)
        made = pack(holding(nodes=[choice], c=np.array(True)), "gguf:q8_0")
        graph = made.graph.node[0].attribute[0].g
        self.assertEqual([node.op_type for node in graph.node], ["DequantizePacked", "Identity"])
        wanted = expected("gguf:q8_0", ggml.quantize(FORMATS["gguf:q8_0"], w).tobytes()).reshape(128, 32)
        self.assertFalse(differing(evaluated(made)["w"], wanted).any())


class Opsets(unittest.TestCase):
    """A packed model is of opset 29: its other nodes must mean there what they meant."""

    def packed(self, opset, *nodes, functions=(), **arrays):
        made = holding(opset, [*nodes], w=weights(128, 32), **arrays)
        made.functions.extend(functions)
        return pack(made, "gguf:q8_0")

    @parameterized.expand([(str(opset), opset) for opset in (13, 17, 18, 21, 24, 28, 29)])
    def test_what_means_the_same(self, _, opset):
        made = self.packed(opset, helper.make_node("Reshape", ["w", "s"], ["y"]),
                           helper.make_node("Cast", ["y"], ["z"], to=11),
                           s=np.array([32, 128]))  # fmt: skip
        self.assertEqual([(i.domain, i.version) for i in made.opset_import], [("", 29)])
        self.assertEqual(evaluated(made)["z"].shape, (32, 128))

    def test_what_the_converter_changes(self):
        made = self.packed(11, helper.make_node("ReduceSum", ["w"], ["y"], axes=[1], keepdims=0))
        (node,) = nodes_of(made, "ReduceSum")
        self.assertEqual(len(node.input), 2)
        self.assertEqual(evaluated(made)["y"].shape, (128,))

    def test_what_changed_its_meaning(self):
        x = np.zeros((1, 4, 2, 2), np.float32)
        node = helper.make_node("GroupNormalization", ["x", "s", "s"], ["y"], "norm", num_groups=2)
        with self.assertRaisesRegex(
            OpsetError, "'norm' .graph. of opset 18 cannot be expressed in opset 29: its meaning changed in opset 21"
        ):
            self.packed(18, node, x=x, s=np.ones(2, np.float32))

    @parameterized.expand([("newer", 30), ("old", 10), ("none", 0)])
    def test_other_opsets(self, _, opset):
        made = holding(28, w=weights(128, 32))
        made.opset_import[0].version = opset
        with self.assertRaisesRegex(OpsetError, f"the model declares opset {opset}, expected 11 to 29"):
            pack(made, "gguf:q8_0")

    def test_functions(self):
        body = [helper.make_node("ReduceSum", ["x"], ["y"], axes=[1])]
        for opset, inner in ((11, body), (28, [helper.make_node("Relu", ["x"], ["y"])])):
            function = helper.make_function("local", "F", ["x"], ["y"], inner, [helper.make_opsetid("", opset)])
            made = holding(opset, [helper.make_node("F", ["w"], ["y"], domain="local")], w=weights(128, 32))
            made.opset_import.append(helper.make_opsetid("local", 1))
            made.functions.append(function)
            made = pack(made, "gguf:q8_0")
            self.assertEqual(
                {i.version for f in made.functions for i in f.opset_import}, {29} if opset == 28 else set()
            )
            self.assertEqual(evaluated(made)["y"].shape, (128, 1) if opset == 11 else (128, 32))

    def test_a_function_of_another_opset(self):
        inner = [helper.make_node("ReduceSum", ["x"], ["y"], axes=[1])]
        function = helper.make_function("local", "F", ["x"], ["y"], inner, [helper.make_opsetid("", 11)])
        made = holding(28, [helper.make_node("F", ["w"], ["y"], domain="local")], w=weights(128, 32))
        made.opset_import.append(helper.make_opsetid("local", 1))
        made.functions.append(function)
        with self.assertRaisesRegex(OpsetError, "ReduceSum node 'y' .function local.F. of opset 11 cannot"):
            pack(made, "gguf:q8_0")

    def test_a_graph_without_the_main_domain(self):
        inner = [helper.make_node("Relu", ["x"], ["y"])]
        function = helper.make_function("local", "F", ["x"], ["y"], inner, [helper.make_opsetid("", 21)])
        made = holding(28, [helper.make_node("F", ["w"], ["y"], domain="local")], w=weights(128, 32))
        made.opset_import[0].domain, made.opset_import[0].version = "local", 1
        made.functions.append(function)
        made = pack(made, "gguf:q8_0")
        self.assertIn(("", 29), [(i.domain, i.version) for i in made.opset_import])
        self.assertEqual(evaluated(made)["y"].shape, (128, 32))

    @parameterized.expand([
        ("softmax", 11, "Softmax", {"axis": 1}), ("softmax_default", 11, "Softmax", {}),
        ("last", 11, "Hardmax", {"axis": -1}),
        ("log", 12, "LogSoftmax", {"axis": 1}), ("reduce", 11, "ReduceSum", {"axes": [1], "keepdims": 0}),
        ("clip", 11, "Clip", {}), ("unsqueeze", 11, "Unsqueeze", {"axes": [0]}), ("dft", 18, "DFT", {}),
        ("dft_axis", 18, "DFT", {"axis": 2}), ("dft_default", 18, "DFT", {"axis": 1}),
        ("mean", 13, "ReduceMean", {"axes": [-1]}), ("split", 11, "Split", {"axis": 1}),
        ("split_13", 13, "Split", {"axis": 1}),
    ])  # fmt: skip
    def test_values_stay(self, _, opset, kind, attributes):
        x = weights(1, 6, 4, 2)
        node = helper.make_node(kind, ["x"], ["y"], **attributes)
        given = holding(opset, [node], x=x, w=weights(128, 32))
        before = OnnxRuntime(given).run([])[0]
        after = OnnxRuntime(onnx_dqp.expand(pack(given, "gguf:q8_0"), opset=newest_opset())).run([])[0]
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)

    @parameterized.expand([
        ("hardmax", 11, "Hardmax", {"axis": 1}, "its meaning changed in opset 13"),
        ("hardmax_default", 11, "Hardmax", {}, "the default of attribute 'axis' is another there"),
    ])  # fmt: skip
    def test_values_that_would_not(self, _, opset, kind, attributes, message):
        with self.assertRaisesRegex(OpsetError, message):
            self.packed(opset, helper.make_node(kind, ["x"], ["y"], **attributes), x=weights(1, 6, 4))

    def test_in_a_branch(self):
        branch = helper.make_graph([helper.make_node("Hardmax", ["w"], ["b"], axis=0)], "b", [], [value("b", 1, None)])
        choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
        with self.assertRaisesRegex(OpsetError, "then_branch. of opset 11 cannot be expressed in opset 29"):
            self.packed(11, choice, c=np.array(True))

    def test_more_outputs_than_there_are_now(self):
        s = np.ones(3, np.float32)
        node = helper.make_node("BatchNormalization", ["x", "s", "s", "s", "s"], ["y", "a", "b", "c", "d"], "bn")
        with self.assertRaisesRegex(OpsetError, "'bn'.*it has 5 outputs, where the operator has 1 to 3 there"):
            self.packed(11, node, x=weights(1, 3, 4), s=s)

    def test_grid_sample(self):
        x, grid = weights(1, 1, 4, 4), weights(1, 3, 3, 2)
        node = helper.make_node("GridSample", ["x", "g"], ["y"], "grid", mode="bilinear")
        given = holding(18, [node], x=x, g=grid, w=weights(128, 32))
        (made,) = nodes_of(pack(given, "gguf:q8_0"), "GridSample")
        self.assertEqual(helper.get_attribute_value(made.attribute[0]), b"linear")


class Files(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)
        self.w = weights(256, 96)
        self.b = weights(8000, dtype=ml_dtypes.bfloat16)
        self.path = self.folder / "in.onnx"
        made = holding(w=self.w, unfit=weights(101, 99))
        made.graph.initializer.append(helper.make_tensor("b", TensorProto.BFLOAT16, [8000], self.b.tobytes(), raw=True))
        onnx.save(made, self.path, save_as_external_data=True, location="in.data")
        self.wanted = ggml.quantize(FORMATS["gguf:q8_0"], self.w)

    def command(self, *arguments):
        done = subprocess.run([sys.executable, "-m", "onnx_dqp", "pack", *map(str, arguments)],
                              capture_output=True, text=True, check=False)  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    @parameterized.expand([("inline", []), ("external", ["--external-data"])])
    def test_the_command(self, _, options):
        output = self.folder / "out.onnx"
        status, text, errors = self.command(self.path, output, "--format", "gguf:q8_0", *options)
        self.assertEqual((status, errors), (0, ""))
        self.assertEqual(text, (
            "'unfit' stays: shape [101, 99] has no rows of whole blocks of 32 elements\n"
            f"{output}: 1 initializer of 98,304 bytes packed as gguf:q8_0, 26,112 bytes\n"
        ))  # fmt: skip
        made = onnx.load(output, load_external_data=False)
        (payload,) = [tensor for tensor in made.graph.initializer if tensor.name == "w/packed"]
        self.assertEqual(payload.data_location == TensorProto.EXTERNAL, bool(options))
        self.assertEqual(octets(payload, self.folder).tobytes(), self.wanted.tobytes())
        self.assertEqual(evaluated(onnx.load(output))["unfit"].shape, (101, 99))

    def test_the_function_with_external_data(self):
        given = onnx.load(self.path, load_external_data=False)
        made = pack(given, "gguf:q8_0", base_dir=self.folder, external_data=self.folder / "new.data")
        self.assertEqual(self.folder.joinpath("new.data").read_bytes(), self.wanted.tobytes())
        onnx.save(made, self.folder / "new.onnx")
        self.assertEqual(onnx.load(self.folder / "new.onnx", load_external_data=False), made)
        other = self.folder / "other"
        other.mkdir()
        with self.assertRaisesRegex(ValueError, "other/new.data is not in .*, where other data of the model are"):
            pack(given, "gguf:q8_0", base_dir=self.folder, external_data=other / "new.data")
        pack(holding(w=weights(6, 6)), "gguf:q8_0", external_data=other / "new.data")
        self.assertEqual(list(other.iterdir()), [])
        with self.assertRaisesRegex(ValueError, "in.data holds data of the input"):
            pack(given, "gguf:q8_0", base_dir=self.folder, external_data=self.folder / "in.data")

    def test_selected_by_the_command(self):
        status, text, _ = self.command(self.path, self.folder / "out.onnx", "--format=gguf:q4_0", "--select=b",
                                       "--select=none", "--quantizer=gguf")  # fmt: skip
        self.assertEqual(status, 0)
        self.assertIn("1 initializer of 16,000 bytes packed as gguf:q4_0, 4,500 bytes\n", text)
        made = onnx.load(self.folder / "out.onnx")
        found = evaluated(made)
        self.assertEqual(set(found), {"w", "unfit"})
        payload = gguf.quants.quantize(self.b.astype(np.float32).reshape(1, -1), gguf.GGMLQuantizationType.Q4_0)
        self.assertEqual(payload_of(made, "b"), payload.tobytes())

    @parameterized.expand([
        ("format", ["--format=q4_0"], "did you mean gguf:q4_0"),
        ("quantizer", ["--format=gguf:q8_k"], "ggml and gguf have no quantizer for gguf:q8_k"),
        ("gguf", ["--format=gguf:q4_k", "--quantizer=gguf"], "gguf has no quantizer for gguf:q4_k"),
        ("missing", [], "required: --format"),
    ])  # fmt: skip
    def test_refusals(self, _, options, message):
        before = sorted(self.folder.iterdir())
        status, text, errors = self.command(self.path, self.folder / "out.onnx", *options)
        self.assertEqual((status, text), (2, ""))
        self.assertRegex(errors, rf"^onnx-dqp: [^\n]*{message}[^\n]*\n$")
        self.assertEqual(sorted(self.folder.iterdir()), before)

    def test_data_of_another_length(self):
        made = onnx.load(self.path, load_external_data=False)
        made.graph.initializer[0].dims[0] += 1
        with self.assertRaisesRegex(ValueError, "initializer 'w' has 98304 bytes, expected 98688 for its shape"):
            pack(made, "gguf:q8_0", base_dir=self.folder)
