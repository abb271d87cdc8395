"""The command onnx-dqp: what it prints and writes, and that bad input gives one line and exit status 2."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from helpers import model, newest_opset, node, value
from onnx import TensorProto, helper, numpy_helper
from parameterized import parameterized

from conformance import payloads
from conformance.expected import expected
from conformance.runtimes import OnnxRuntime
from onnx_dqp import FORMATS
from onnx_dqp.models.files import read_tensor

OPSET = ["--opset", str(newest_opset())]


def run(*arguments, **options):
    """Exit status, standard output and error."""
    command = [sys.executable, "-m", "onnx_dqp", *map(str, arguments)]
    done = subprocess.run(command, check=False, **{"capture_output": True, "text": True, **options})
    return done.returncode, done.stdout, done.stderr


class Command(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)
        block = payloads.ordinary_blocks(FORMATS["gguf:q4_0"], 1, "cli").view(np.uint8).ravel()
        content = np.tile(block, 200)
        self.payload = content
        self.wanted = expected("gguf:q4_0", content.tobytes()).reshape(200, 32)
        packed = node("w", "y", shape=[200, 32], name="weights")
        add = helper.make_node("Add", ["a", "y"], ["z"])
        self.model = model([packed, add], [value("a", 1, [200, 32])], [value("z", 1, [200, 32])],
                           initializers=[numpy_helper.from_array(content, "w")])  # fmt: skip
        self.path = self.folder / "in.onnx"
        onnx.save(self.model, self.path)
        self.a = np.ones([200, 32], np.float32)

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def assert_refused(self, arguments, message, **options):
        """Exit status 2, one line that has the message, and nothing new in the folder."""
        before = self.names()
        status, output, errors = run(*arguments, **options)
        self.assertEqual((status, output), (2, ""), errors)
        self.assertRegex(errors, rf"^onnx-dqp: [^\n]*{message}[^\n]*\n$")
        self.assertEqual(self.names(), before)

    def session_output(self, path):
        return OnnxRuntime(onnx.load(path)).run([self.a])[0]


class Looking(Command):
    def test_formats(self):
        status, output, _ = run("formats")
        self.assertEqual(status, 0)
        self.assertRegex(
            output, r"gguf:iq2_xxs +256 +66 +2.062 +d f16, groups \(qs u8\[4\], signs_and_scale u32\)\[8\]"
        )
        for identifier in FORMATS:
            self.assertIn(f" {identifier} ", output)

    def test_inspect(self):
        status, output, _ = run("inspect", self.path)
        self.assertEqual(status, 0)
        self.assertRegex(output, r"w +gguf:q4_0 +\[200, 32\] +float +3,600 +4.5 +100.0%")
        self.assertIn("1 packed tensor: 3,600 bytes; 25,600 as FLOAT, 12,800 as FLOAT16", output)

    def test_inspect_json(self):
        found = json.loads(run("inspect", self.path, "--json")[1])
        (row,) = found["tensors"]
        self.assertEqual((row["name"], row["format"], row["shape"], row["bytes"]), ("w", "gguf:q4_0", [200, 32], 3600))
        self.assertEqual(found["totals"]["bytes_as_float"], 25600)

    def test_check(self):
        self.assertEqual(run("check", self.path)[:2], (0, "no problem in 1 node\n"))
        self.model.graph.node[0].attribute[1].ints[1] = 33
        self.model.graph.node.append(node("a", "b", name="other"))
        onnx.save(self.model, self.path)
        status, output, errors = run("check", self.path)
        self.assertEqual((status, errors), (1, ""))
        lines = output.splitlines()
        self.assertEqual(len(lines), 2, output)
        self.assertTrue(lines[0].startswith("graph: node 'weights': R3: "))
        self.assertTrue(lines[1].startswith("graph: node 'other': R9: x has element type FLOAT"))

    def test_explain(self):
        file = self.folder / "payload.bin"
        file.write_bytes(self.payload.tobytes())
        status, output, _ = run("explain", "gguf:q4_0", file, "--block", 199)
        self.assertEqual(status, 0)
        self.assertIn("d: f16 = ", output)
        self.assertIn("element 31: ", output)
        found = json.loads(run("explain", "gguf:q4_0", "-", "--json", text=False, input=self.payload[:18].tobytes())[1])
        self.assertEqual([e["value"] for e in found["elements"]], self.wanted[0].tolist())

    @parameterized.expand(
        ["formats", "inspect", "check", "from-gguf", "pack", "expand", "fold", "run", "decode", "explain"]
    )  # fmt: skip
    def test_help_has_an_example(self, name):
        status, output, _ = run(name, "--help")
        self.assertEqual(status, 0)
        self.assertIn(f"example:\n  onnx-dqp {name}", output)


class Converting(Command):
    def test_expand(self):
        out = self.folder / "out.onnx"
        status, output, errors = run("expand", self.path, out, *OPSET)
        self.assertEqual((status, errors), (0, ""))
        self.assertEqual(output, f"{out}: 1 node expanded, opset {newest_opset()}\n")
        np.testing.assert_array_equal(self.session_output(out), self.a + self.wanted)
        self.assertEqual(self.names(), ["in.onnx", "out.onnx"])

    def test_expand_inline(self):
        out = self.folder / "out.onnx"
        self.assertEqual(run("expand", self.path, out, "--inline", *OPSET)[0], 0)
        self.assertEqual(len(onnx.load(out).functions), 0)
        np.testing.assert_array_equal(self.session_output(out), self.a + self.wanted)

    @parameterized.expand([("fold", []), ("fold", ["--dtype", "float"]), ("expand", [])])
    def test_external_data(self, command, more):
        out = self.folder / "out.onnx"
        self.assertEqual(run(command, self.path, out, "--external-data", *OPSET, *more)[0], 0)
        self.assertEqual(self.names(), ["in.onnx", "out.onnx", "out.onnx.data"])
        self.assertLess(out.stat().st_size, 8000)
        np.testing.assert_array_equal(self.session_output(out), self.a + self.wanted)

    def test_fold_float16(self):
        out = self.folder / "out.onnx"
        self.assertEqual(run("fold", self.path, out, "--dtype", "float16", *OPSET)[0], 0)
        half = self.wanted.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(self.session_output(out), self.a + half)

    @parameterized.expand(["expand", "fold"])
    def test_to_another_folder(self, command):
        onnx.save(self.model, self.path, save_as_external_data=True, location="w.bin", size_threshold=0)
        other = self.folder / "other"
        other.mkdir()
        out = other / "out.onnx"
        self.assertEqual(run(command, self.path, out, *OPSET)[0], 0)
        np.testing.assert_array_equal(self.session_output(out), self.a + self.wanted)
        same = self.folder / "same.onnx"
        self.assertEqual(run(command, self.path, same, *OPSET)[0], 0)
        np.testing.assert_array_equal(self.session_output(same), self.a + self.wanted)
        self.assertEqual(self.names(), ["in.onnx", "other", "same.onnx", "w.bin"])

    @parameterized.expand(
        [("expand", []), ("fold", []), ("expand", ["--external-data"]), ("fold", ["--external-data"])]
    )
    def test_data_of_the_same_name_in_another_folder(self, command, more):
        other = self.folder / "other"
        other.mkdir()
        b = np.full([200, 32], 7, np.float32)
        self.model.graph.node.append(helper.make_node("Add", ["z", "b"], ["s"]))
        self.model.graph.initializer.append(numpy_helper.from_array(b, "b"))
        self.model.graph.output[0].name = "s"
        onnx.save(self.model, self.path, save_as_external_data=True, location="in.onnx.data", size_threshold=0)
        out = other / "in.onnx"
        self.assertEqual(run(command, self.path, out, *OPSET, *more)[0], 0)
        for tensor in onnx.load(out, load_external_data=False).graph.initializer:
            stated = {entry.key: entry.value for entry in tensor.external_data}
            self.assertEqual(int(stated.get("offset", 0)) % 4096, 0)
        session = onnx.load(out)
        np.testing.assert_array_equal(OnnxRuntime(session).run([self.a])[0], self.a + self.wanted + b)

    def test_four_bit_tensors_and_empty_ones(self):
        four = helper.make_tensor("q", TensorProto.INT4, [4000], [-3, 5] * 2000)
        cast = helper.make_node("Cast", ["q"], ["f"], to=1)
        empty = [node("e", "y0", shape=[0, 32])]
        made = model([cast, *empty], outputs=[value("f", 1, [4000]), value("y0", 1, [0, 32])],
                     initializers=[four, numpy_helper.from_array(np.zeros(0, np.uint8), "e")])  # fmt: skip
        onnx.save(made, self.path)
        for command in ("expand", "fold"):
            out = self.folder / f"{command}.onnx"
            self.assertEqual(run(command, self.path, out, "--opset", "21", "--external-data")[0], 0)
            f, y0 = OnnxRuntime(onnx.load(out)).run([])
            np.testing.assert_array_equal(f, [-3, 5] * 2000)
            self.assertEqual(y0.shape, (0, 32))

    def test_two_at_once(self):
        out = self.folder / "out.onnx"
        command = [sys.executable, "-m", "onnx_dqp", "fold", self.path, out, "--external-data", *OPSET]
        running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
        self.assertEqual([process.wait() for process in running], [0, 0])
        np.testing.assert_array_equal(self.session_output(out), self.a + self.wanted)
        self.assertEqual(self.names(), ["in.onnx", "out.onnx", "out.onnx.data"])

    def test_an_interrupt_leaves_nothing(self):
        blocks = 1 << 20
        packed = node("w", "y", shape=[blocks, 32])
        tensor = numpy_helper.from_array(np.zeros(blocks * 18, np.uint8), "w")
        many = [node("w", f"y{i}", shape=[blocks, 32]) for i in range(12)]
        onnx.save(model([packed, *many], outputs=[value("y", 1, [blocks, 32])], initializers=[tensor]), self.path)
        command = [sys.executable, "-m", "onnx_dqp", "fold", self.path, self.folder / "out.onnx", "--external-data"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for _ in range(200):
            if any(path.name.endswith(".tmp") and path.stat().st_size for path in self.folder.iterdir()):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        self.assertEqual((process.returncode, errors), (130, "interrupted\n"))
        self.assertEqual(self.names(), ["in.onnx"])

    def test_a_full_disk_leaves_nothing(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))

        for more in ([], ["--external-data"]):
            out = self.folder / "out.onnx"
            self.assert_refused(["fold", self.path, out, *OPSET, *more], "File too large", preexec_fn=limit)


class Arrays(Command):
    def write(self, name, array):
        path = self.folder / name
        if name.endswith(".npy"):
            np.save(path, array)
        else:
            path.write_bytes(numpy_helper.from_array(array, "a").SerializeToString())
        return path

    @parameterized.expand(["a.npy", "a.pb"])
    def test_run(self, name):
        file = self.write(name, self.a)
        status, output, _ = run("run", self.path, "--input", f"a={file}", "--output-dir", self.folder)
        self.assertEqual((status, output), (0, "z: float32[200, 32]\n"))
        np.testing.assert_array_equal(read_tensor(self.folder / "z.pb"), self.a + self.wanted)
        run("run", self.path, "--input", f"a={file}", "--output-dir", self.folder, "--output-format", "npy")
        np.testing.assert_array_equal(np.load(self.folder / "z.npy"), self.a + self.wanted)

    def test_names_of_outputs_are_no_paths(self):
        made = model([node("w", "../evil/y", shape=[200, 32])], outputs=[value("../evil/y", 1, [200, 32])],
                     initializers=self.model.graph.initializer)  # fmt: skip
        onnx.save(made, self.path)
        self.assertEqual(run("run", self.path, "--output-dir", self.folder)[0], 0)
        self.assertEqual(self.names(), ["_evil_y.pb", "in.onnx"])

    @parameterized.expand(["float", "float16", "bfloat16", "double"])
    def test_decode(self, dtype):
        number = TensorProto.DataType.Value(dtype.upper())
        file = self.folder / "p.bin"
        file.write_bytes(self.payload.tobytes())
        wanted = expected("gguf:q4_0", self.payload.tobytes(), number).reshape(100, 2, 32)
        for out in ("y.pb", "y.npy"):
            arguments = ["decode", "gguf:q4_0", "--shape", "100,2,32", "--dtype", dtype, file, "-o", self.folder / out]
            if (dtype, out) == ("bfloat16", "y.npy"):
                self.assert_refused(arguments, "npy cannot hold BFLOAT16, expected .pb")
                continue
            self.assertEqual(run(*arguments)[0], 0)
            path = self.folder / out
            np.testing.assert_array_equal(read_tensor(path) if out == "y.pb" else np.load(path), wanted)
        self.assertEqual(wanted.dtype, np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else wanted.dtype)

    def test_decode_standard_input(self):
        out = self.folder / "y.npy"
        arguments = ["decode", "gguf:q4_0", "--shape", "200,32", "-", "-o", out]
        self.assertEqual(run(*arguments, input=self.payload.tobytes(), text=False)[0], 0)
        np.testing.assert_array_equal(np.load(out), self.wanted)


class Refusals(Command):
    @parameterized.expand(
        [
            (command, what)
            for command in ("inspect", "check", "expand", "fold", "run")
            for what in ("missing", "empty", "text", "folder", "cut", "unreadable")
        ]
    )
    def test_a_model_that_cannot_be_read(self, command, what):
        path = self.folder / "bad.onnx"
        messages = {"missing": "No such file", "empty": "is empty", "folder": "Is a directory"}
        content = {"empty": b"", "text": b"not a model\n", "cut": self.path.read_bytes()[:1000]}.get(what)
        if content is not None:
            path.write_bytes(content)
        elif what == "folder":
            path.mkdir()
        elif what == "unreadable":
            path.symlink_to(path)
            messages[what] = "symbolic links"
        arguments = [command, path, *([self.folder / "out.onnx"] if command in ("expand", "fold") else [])]
        self.assert_refused(arguments, f"bad.onnx.*{messages.get(what, 'is no ONNX model')}")

    @parameterized.expand(["expand", "fold"])
    def test_outputs(self, command):
        link = self.folder / "link.onnx"
        os.link(self.path, link)
        onnx.save(self.model, self.folder / "x.onnx", save_as_external_data=True, location="y.onnx.data",
                  size_threshold=0)  # fmt: skip
        for source, target, message in (
            (self.path, self.path, "is the input"),
            (self.path, link, "is the input"),
            (self.path, self.folder, "is a folder"),
            (self.path, self.folder / "no" / "out.onnx", "is no folder"),
            (self.folder / "x.onnx", self.folder / "y.onnx.data", "holds data of the input"),
            (self.folder / "x.onnx", self.folder / "y.onnx", "y.onnx.data holds data of the input"),
        ):
            self.assert_refused([command, source, target, *OPSET], message)
        os.rename(self.path, self.folder / "out.data")
        self.assert_refused([command, self.folder / "out.data", self.folder / "out", *OPSET], "out.data is the input")
        os.rename(self.folder / "out.data", self.path)
        os.mkfifo(self.folder / "pipe")
        self.assert_refused([command, self.path, self.folder / "pipe", *OPSET], "pipe is no ordinary file")
        (self.folder / "y.onnx.data").unlink()
        self.assert_refused([command, self.folder / "x.onnx", self.folder / "z.onnx", *OPSET], "y.onnx.data: No such")
        for opset in ("17", "30"):
            self.assert_refused([command, self.path, self.folder / "o.onnx", "--opset", opset], "expected 18 to 29")

    @parameterized.expand(["expand", "fold"])
    def test_a_model_with_problems(self, command):
        self.model.graph.node[0].attribute[1].ints[1] = 33
        onnx.save(self.model, self.path)
        self.assert_refused([command, self.path, self.folder / "o.onnx"], "graph: node 'weights': R3: ")

    def test_run(self):
        file = self.folder / "a.npy"
        np.save(file, self.a)
        (self.folder / "bad.npy").write_bytes(b"\x93NUMPY")
        (self.folder / "bad.pb").write_bytes(b"\x0a\xff")
        np.save(self.folder / "object.npy", np.array([None]), allow_pickle=True)
        np.save(self.folder / "shape.npy", self.a[:3, :3])
        for inputs, message in (
            ([], "input 'a' is missing: --input a=FILE"),
            ([f"b={file}"], "no input 'b', expected 'a'"),
            (["a"], "expected NAME=FILE"),
            ([f"a={self.folder / 'no.npy'}"], "No such file"),
            ([f"a={self.path}"], "expected a file .npy or .pb"),
            ([f"a={self.folder / 'bad.npy'}"], "bad.npy"),
            ([f"a={self.folder / 'bad.pb'}"], "bad.pb.*no TensorProto"),
            ([f"a={self.folder / 'object.npy'}"], "object.npy"),
            ([f"a={self.folder / 'shape.npy'}"], "in.onnx: "),
        ):
            flags = [word for each in inputs for word in ("--input", each)]
            self.assert_refused(["run", self.path, *flags], message)
        self.assert_refused(["run", self.path, "--output-dir", self.folder / "no"], "is no folder")

    def test_decode_and_explain(self):
        file = self.folder / "p.bin"
        file.write_bytes(self.payload.tobytes())
        out, copy = self.folder / "y.npy", self.folder / "p.npy"
        os.link(file, copy)
        for arguments, message in (
            (["decode", "gguf:q4_0", "--shape", "3,32", file, "-o", out], "3600 bytes, but shape .3, 32. needs 54"),
            (["decode", "gguf:q4_0", "--shape", "3,33", file, "-o", out], "a multiple of 32"),
            (["decode", "Q4_0", "--shape", "200,32", file, "-o", out], "did you mean gguf:q4_0"),
            (["decode", "gguf:q4_0", "--shape", "200,32", file, "-o", self.folder / "y.txt"], "ends in .npy or .pb"),
            (["decode", "gguf:q4_0", "--shape", "200,32", self.folder / "no", "-o", out], "No such file"),
            (["decode", "gguf:q4_0", "--shape", f"{2**50},32", file, "-o", out], "needs"),
            (["explain", "gguf:q4_0", file, "--block", "200"], "block 200, but .* hold 200 whole blocks"),
            (["explain", "gguf:q4_0", file, "--block", "-1"], "block -1"),
            (["explain", "nothing", file], "unknown format"),
            (["decode", "gguf:q4_0", "--shape", "1,99999968", "/dev/zero", "-o", out], "but shape"),
            (["decode", "gguf:q4_0", "--shape", "2,x", file, "-o", out], "'2,x', expected dimensions such as 2,32"),
            (["decode", "gguf:q4_0", "--shape", "200,32", file, "-o", copy], "is the input"),
        ):
            self.assert_refused(arguments, message)

    def test_usage(self):
        for arguments in ([], ["nothing"], ["decode", "gguf:q4_0"], ["fold", "a", "b", "--dtype", "int8"]):
            self.assert_refused(arguments, "--help")

    def test_a_closed_pipe_is_no_traceback(self):
        command = f"{sys.executable} -m onnx_dqp formats | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        self.assertEqual(done.stderr, "")
