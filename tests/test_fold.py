"""onnx_dqp.fold, and what reads and writes models: right values, files whole or not at all, little memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import onnx
from helpers import calling, function, model, newest_opset, node, value
from onnx import TensorProto, helper, numpy_helper
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from conformance.expected import expected
from conformance.runtimes import OnnxRuntime
from onnx_dqp import FORMATS, PackedTensorError, ReferenceEvaluator, fold
from onnx_dqp.models.files import DataFile, ModelFileError, octets, read_model, write_model
from onnx_dqp.models.opsets import OpsetError

PAYLOAD = np.arange(36, dtype=np.uint8)
WANTED = expected("gguf:q4_0", PAYLOAD.tobytes()).reshape(2, 32)
Y = value("y", TensorProto.FLOAT, [2, 32])
C = value("c", TensorProto.BOOL, [])


def payload(name="x", content=PAYLOAD):
    return numpy_helper.from_array(content, name)


def run(folded, *inputs):
    onnx.checker.check_model(folded, full_check=True)
    return OnnxRuntime(folded).run(list(inputs))


class Constants(unittest.TestCase):
    @parameterized.expand(sorted(FORMATS))
    def test_every_format(self, identifier):
        format = FORMATS[identifier]
        content = payloads.random_blocks(format, 6, "fold").view(np.uint8).ravel()
        shape = [2, 3 * format.elements]
        made = model([node(format=identifier, shape=shape)], outputs=[value("y", 1, shape)],
                     initializers=[payload("x", content)])  # fmt: skip
        (tensor,) = fold(made, opset=newest_opset()).graph.initializer
        got = numpy_helper.to_array(tensor)
        self.assertFalse(differing(got, expected(identifier, content.tobytes()).reshape(shape)).any())

    def test_an_initializer(self):
        made = model([node()], outputs=[Y], initializers=[payload()])
        folded = fold(made, opset=newest_opset())
        self.assertEqual([t.name for t in folded.graph.initializer], ["y"])
        self.assertEqual(len(folded.graph.node), 0)
        np.testing.assert_array_equal(run(folded)[0], WANTED)
        self.assertEqual(len(made.graph.node), 1)

    def test_a_constant_node(self):
        constant = helper.make_node("Constant", [], ["x"], value=payload())
        folded = fold(model([constant, node()], outputs=[Y]), opset=newest_opset())
        self.assertEqual(len(folded.graph.node), 0)
        np.testing.assert_array_equal(run(folded)[0], WANTED)

    def test_a_payload_that_is_used_elsewhere_stays(self):
        other = helper.make_node("Identity", ["x"], ["z"])
        made = model([node(), other], outputs=[Y, value("z", TensorProto.UINT8, [36])], initializers=[payload()])
        folded = fold(made, opset=newest_opset())
        self.assertEqual({t.name for t in folded.graph.initializer}, {"x", "y"})
        np.testing.assert_array_equal(run(folded)[1], PAYLOAD)

    @parameterized.expand([(10, np.float16), (11, np.float64)])
    def test_another_type_is_cast_back(self, dtype, numpy_dtype):
        folded = fold(model([node()], outputs=[Y], initializers=[payload()]), dtype=dtype, opset=newest_opset())
        self.assertEqual([t.data_type for t in folded.graph.initializer], [dtype])
        self.assertEqual([n.op_type for n in folded.graph.node], ["Cast"])
        np.testing.assert_array_equal(run(folded)[0], WANTED.astype(numpy_dtype).astype(np.float32))

    def test_subgraphs(self):
        branches = [
            helper.make_graph([node("x", name)], name, [], [value(name, TensorProto.FLOAT, [2, 32])])
            for name in ("a", "b")
        ]
        chosen = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
        folded = fold(model([chosen], [C], [Y], initializers=[payload()]), opset=newest_opset())
        self.assertEqual(len(folded.graph.initializer), 0)
        np.testing.assert_array_equal(run(folded, np.array(True))[0], WANTED)

    def test_functions(self):
        constant = helper.make_node("Constant", [], ["p"], value=payload("p"))
        called = function("F", [constant, node("p", "w"), helper.make_node("Identity", ["w"], ["y"])])
        made = calling([called])
        del made.graph.output[:]
        made.graph.output.append(Y)
        folded = fold(made, opset=21)
        self.assertEqual([n.op_type for n in folded.functions[0].node], ["Constant", "Identity"])
        np.testing.assert_array_equal(run(folded, PAYLOAD)[0], WANTED)

    def test_a_new_name_is_new_everywhere(self):
        inner = helper.make_graph(
            [node("x", "t"), helper.make_node("Cast", ["t_as_float16"], ["u"], to=1),
             helper.make_node("Add", ["t", "u"], ["r"])], "inner", [], [value("r", 1, [2, 32])])  # fmt: skip
        other = helper.make_graph([helper.make_node("Identity", ["y"], ["o"])], "other", [], [value("o", 1, [2, 32])])
        nodes = [
            helper.make_node("Cast", ["c"], ["half"], to=10),
            helper.make_node("Identity", ["half"], ["t_as_float16"]),
            node(),
            helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=other),
        ]
        folded = fold(model(nodes, [C], [value("z", 1, [2, 32])], [payload()]), dtype=10, opset=newest_opset())
        np.testing.assert_array_equal(run(folded, np.array(True))[0], WANTED.astype("f2").astype("f4") + 1)

    def test_what_is_no_constant_stays_and_so_does_the_opset(self):
        made = model([node(), node("w", "z")], [value("x", TensorProto.UINT8, [36])], [Y, value("z", 1, [2, 32])],
                     initializers=[payload("w")])  # fmt: skip
        folded = fold(made)
        self.assertEqual([n.op_type for n in folded.graph.node], ["DequantizePacked"])
        self.assertEqual(folded.opset_import[0].version, 29)
        y, z = ReferenceEvaluator(folded).run(None, {"x": PAYLOAD})
        np.testing.assert_array_equal(y, z)
        with self.assertRaisesRegex(OpsetError, "1 DequantizePacked without a constant payload must stay, in opset 29"):
            fold(made, opset=21)

    @parameterized.expand([("type", {"dtype": 7}), ("opset", {"opset": 17})])
    def test_refused(self, _, options):
        with self.assertRaises(ValueError) as caught:
            fold(model([node()], outputs=[Y], initializers=[payload()]), **options)
        self.assertNotIn("\n", str(caught.exception))

    def test_a_payload_of_a_wrong_length_is_refused(self):
        with self.assertRaisesRegex(PackedTensorError, "node 'y': R4: gguf:q4_0: x has 35 bytes"):
            fold(model([node()], outputs=[Y], initializers=[payload("x", PAYLOAD[:35])]))


class Files(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)

    def write_external(self, blocks=4096, name="in.onnx"):
        """A model of one packed tensor of that many Q4_0 blocks in external data, and its payload."""
        content = payloads.random_blocks(FORMATS["gguf:q4_0"], blocks, "external").view(np.uint8).ravel()
        shape = [blocks, 32]
        made = model([node(shape=shape)], outputs=[value("y", 1, shape)], initializers=[payload("x", content)])
        onnx.save(made, self.folder / name, save_as_external_data=True, location=f"{name}.weights")
        return read_model(self.folder / name), expected("gguf:q4_0", content.tobytes()).reshape(shape)

    def test_external_payload_to_external_data(self):
        made, wanted = self.write_external()
        folded = fold(made, base_dir=self.folder, external_data=self.folder / "out.data", opset=newest_opset())
        onnx.save(folded, self.folder / "out.onnx")
        loaded = onnx.load(self.folder / "out.onnx")
        np.testing.assert_array_equal(numpy_helper.to_array(loaded.graph.initializer[0]), wanted)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()),
                         ["in.onnx", "in.onnx.weights", "out.data", "out.onnx"])  # fmt: skip

    @parameterized.expand([("missing", None), ("short", 100)])
    def test_external_data_that_are_not_as_stated(self, what, length):
        made, _ = self.write_external()
        file = self.folder / "in.onnx.weights"
        if length is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:length])
        with self.assertRaises(ModelFileError) as caught:
            fold(made, base_dir=self.folder, external_data=self.folder / "out.data")
        self.assertIn("in.onnx.weights", str(caught.exception), what)
        self.assertEqual([p.name for p in self.folder.glob("*out*")], [])
        self.assertEqual([p.name for p in self.folder.glob(".*")], [])

    @parameterized.expand(["../secret", "/etc/passwd", "a/../../b", ""])
    def test_external_data_outside_of_the_folder(self, location):
        made, _ = self.write_external()
        made.graph.initializer[0].external_data[0].value = location
        with self.assertRaisesRegex(ModelFileError, "expected a file in the model's folder"):
            octets(made.graph.initializer[0], self.folder)

    @parameterized.expand(
        [
            ("empty", b"", "is empty"),
            ("text", b"no model at all\n" * 9, "is no ONNX model"),
            ("zeros", bytes(100), "is no ONNX model"),
        ]
    )
    def test_files_that_are_no_models(self, _, content, message):
        path = self.folder / "bad.onnx"
        path.write_bytes(content)
        with self.assertRaisesRegex(ModelFileError, f"bad.onnx {message}"):
            read_model(path)

    def test_the_input_s_data_are_not_written_over(self):
        made, _ = self.write_external()
        with self.assertRaisesRegex(ModelFileError, "holds data of the input"):
            fold(made, base_dir=self.folder, external_data=self.folder / "in.onnx.weights")

    def test_names_that_are_no_text(self):
        content = model([node()], outputs=[Y], initializers=[payload()]).SerializeToString()
        path = self.folder / "bad.onnx"
        path.write_bytes(content.replace(b"DequantizePacked", b"Dequantize\xff\xfeaked"))
        with self.assertRaisesRegex(ModelFileError, "not UTF-8"):
            read_model(path)

    def test_every_truncation_is_refused_or_no_model_of_the_operator(self):
        content = model([node()], outputs=[Y], initializers=[payload()]).SerializeToString()
        path = self.folder / "cut.onnx"
        refused = 0
        for length in range(len(content)):
            path.write_bytes(content[:length])
            try:
                read_model(path)
            except ModelFileError as error:
                refused += 1
                self.assertNotIn("\n", str(error))
        self.assertGreater(refused, 0.9 * len(content))

    def test_a_failed_write_leaves_nothing(self):
        made, _ = self.write_external()
        before = sorted(p.name for p in self.folder.iterdir())
        with self.assertRaises(ZeroDivisionError), DataFile(self.folder / "out.onnx.data") as data:
            data.add(TensorProto(name="t"), np.zeros(5000, np.uint8))
            write_model(made, self.folder / "out.onnx", self.folder, data, everything=True, progress=lambda *_: 1 // 0)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), before)

    def test_memory_is_that_of_one_tensor(self):
        # 16 tensors of 32 MiB of FLOAT: folding them takes little more than one.
        blocks = 1 << 18
        content = payloads.random_blocks(FORMATS["gguf:q4_0"], 64, "memory").view(np.uint8).ravel()
        (self.folder / "w.bin").write_bytes(np.tile(content, blocks // 64).tobytes())
        size = blocks * 18
        tensors = []
        for i in range(16):
            tensor = TensorProto(name=f"x{i}", data_type=TensorProto.UINT8, dims=[size])
            tensor.data_location = TensorProto.EXTERNAL
            for key, stated in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
                tensor.external_data.add(key=key, value=stated)
            tensors.append(tensor)
        nodes = [node(f"x{i}", f"y{i}", shape=[blocks, 32]) for i in range(16)]
        outputs = [value(f"y{i}", 1, [blocks, 32]) for i in range(16)]
        onnx.save(model(nodes, outputs=outputs, initializers=tensors), self.folder / "in.onnx")
        script = (
            "import resource, sys, onnx_dqp\n"
            "from onnx_dqp.models.files import read_model\n"
            "from pathlib import Path\n"
            "f = Path(sys.argv[1]); m = read_model(f / 'in.onnx')\n"
            "onnx_dqp.fold(m, base_dir=f, external_data=f / 'warm', dtype=10) if len(sys.argv) > 2 else None\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)\n"
        )
        peaks = []
        for more in ([], ["fold"]):
            command = [sys.executable, "-c", script, str(self.folder), *more]
            peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        # One tensor is 16 MiB of FLOAT16, its mapped payload 4.5 MiB, scratch 22 MiB at most.
        self.assertLess(peaks[1] - peaks[0], 100)
        self.assertEqual((self.folder / "warm").stat().st_size, 16 * blocks * 64)
