"""GGUF files as ONNX models: the same bits as ggml decodes, and one line for what is wrong with a file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import unittest
from pathlib import Path
from unittest import mock

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from gguf_files import PLAIN, REAL, SHAPES, Parser, big_endian, by_ggml, decoded, packed, real_tensors, write
from helpers import FORMAT_ROWS, TYPE_ROWS, newest_opset
from measure_gguf import measure
from onnx import TensorProto
from parameterized import parameterized

import onnx_dqp
from conformance.compare import differing
from onnx_dqp import FORMATS, PackedTensorError, from_ggml_type, from_gguf, read_gguf, shape_from_gguf, to_ggml_type
from onnx_dqp.__main__ import main
from onnx_dqp.models.files import DataFile, NewFile, octets
from onnx_dqp.models.from_gguf import copying
from onnx_dqp.rules import OUTPUT_DTYPES

# ggml.h's enum ggml_type.
NUMBERS = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q8_1": 9, "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13,
    "q6_k": 14, "q8_k": 15, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21,
    "iq2_s": 22, "iq4_xs": 23, "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}  # fmt: skip

NAMES = {identifier: f"blk.{n}.{identifier.removeprefix('gguf:')}" for n, identifier in enumerate(FORMATS)}

ONE = {"w": packed("gguf:q4_0")}


class Types(unittest.TestCase):
    def test_numbers_are_ggmls(self):
        self.assertEqual({f"gguf:{name}" for name in NUMBERS}, set(FORMATS))
        for name, number in NUMBERS.items():
            format = FORMATS[f"gguf:{name}"]
            self.assertIs(from_ggml_type(number), format)
            self.assertIs(from_ggml_type(np.uint32(number)), format)
            self.assertEqual((to_ggml_type(format), to_ggml_type(format.identifier)), (number, number))

    def test_other_numbers_are_no_format(self):
        for number in {*range(-3, 80), 2**31, 2**63, 2**64} - set(NUMBERS.values()):
            self.assertIsNone(from_ggml_type(number))

    @parameterized.expand([("text", "2"), ("float", 2.0), ("none", None), ("bool", True)])
    def test_what_is_no_integer(self, _, value):
        with self.assertRaisesRegex(TypeError, "^id is .*, expected an integer$"):
            from_ggml_type(value)

    def test_an_unknown_identifier(self):
        with self.assertRaisesRegex(PackedTensorError, "did you mean gguf:q4_0"):
            to_ggml_type("gguf:Q4_0")

    def test_shapes_are_reversed(self):
        self.assertEqual(shape_from_gguf([64, 1, 3]), (3, 1, 64))
        self.assertEqual(shape_from_gguf(np.array([64], np.uint64)), (64,))
        self.assertEqual(shape_from_gguf((1, 2, 3, 0)), (0, 3, 2, 1))

    @parameterized.expand([
        ("none", [], "rank of at least 1"), ("five", [1] * 5, r"ne is \[1, 1, 1, 1, 1\], expected at most 4 dim"),
        ("negative", [32, -1], "negative"), ("64_bits", [2**63], "over 2.63 - 1"), ("text", "32", "expected a list"),
    ])  # fmt: skip
    def test_shapes_that_gguf_does_not_have(self, _, ne, message):
        with self.assertRaisesRegex(PackedTensorError, message):
            shape_from_gguf(ne)


class Folder(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)
        self.path = self.folder / "in.gguf"
        self.onnx = self.folder / "out.onnx"

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def command(self, *arguments):
        """Exit status, standard output and error, in this process."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as error:
                status = error.code
        return status, output.getvalue(), errors.getvalue()

    def assert_refused(self, message, *arguments):
        """Exit status 2, one line that has the message, and nothing new in the folder."""
        before = self.names()
        status, output, errors = self.command(*(arguments or ("from-gguf", self.path, self.onnx)))
        self.assertEqual((status, output), (2, ""), errors)
        self.assertRegex(errors, rf"^onnx-dqp: [^\n]*{message}[^\n]*\n$")
        self.assertEqual(self.names(), before)

    def convert(self, *options, path=None):
        status, output, errors = self.command("from-gguf", path or self.path, self.onnx, *options)
        self.assertEqual((status, errors), (0, ""))
        return output

    def evaluated(self, model=None):
        """Outputs by name, from the reference evaluator."""
        evaluator = onnx_dqp.ReferenceEvaluator(model or onnx.load(self.onnx))
        with np.errstate(over="ignore"):
            return dict(zip(evaluator.output_names, evaluator.run(None, {}), strict=True))

    def in_onnx_runtime(self):
        """Outputs by name, from ONNX Runtime on the expanded model, whose data stay where they are."""
        expanded = self.folder / "expanded.onnx"
        status, _, errors = self.command("expand", self.onnx, expanded, "--opset", newest_opset())
        self.assertEqual((status, errors), (0, ""))
        session = onnxruntime.InferenceSession(expanded)
        return dict(zip([output.name for output in session.get_outputs()], session.run(None, {}), strict=True))

    def assert_real(self, outputs, dtype=np.float32):
        """What ``real_tensors`` are, in a type."""
        self.assertEqual(set(outputs), set(real_tensors()))
        dtype = np.dtype(dtype)
        for number, (identifier, name) in enumerate(NAMES.items()):
            shape = SHAPES[number % len(SHAPES)]
            self.assert_same(outputs[name], decoded(identifier, shape).astype(dtype), name)
        for name, (_, array) in PLAIN.items():
            with np.errstate(over="ignore"):
                wanted = array.astype(dtype) if name.startswith(("f", "b")) else array
            self.assert_same(outputs[name], wanted, name)

    def assert_same(self, found, wanted, name):
        self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape), name)
        if wanted.dtype.kind == "i":
            self.assertTrue((found == wanted).all(), name)
        else:
            self.assertFalse(differing(found, wanted).any(), name)


class Models(Folder):
    def test_places_are_what_ggmls_reader_says(self):
        write(self.path, real_tensors(), alignment=64)
        tensors = read_gguf(self.path).tensors
        self.assertEqual([(t.name, t.ggml_type, t.offset) for t in tensors], by_ggml(self.path))
        found = Parser(self.path.read_bytes()).read().tensors
        self.assertEqual([(t.name, t.ggml_type, t.shape[::-1], t.offset) for t in tensors], found)
        self.assertEqual([t.problem for t in tensors], [None] * len(tensors))

    @parameterized.expand([
        (f"{way}_{alignment}", options, alignment)
        for way, options in (("linked", []), ("copied", ["--copy"])) for alignment in (32, 4096)
    ])  # fmt: skip
    def test_every_type_decodes_to_the_same_bits(self, _, options, alignment):
        write(self.path, real_tensors(), alignment=alignment)
        self.convert(*options)
        self.assert_real(self.evaluated())
        self.assert_real(self.in_onnx_runtime())

    @parameterized.expand([(name, number) for name, number in TYPE_ROWS])
    def test_output_types(self, name, number):
        write(self.path, real_tensors())
        self.convert("--dtype", name.lower())
        self.assert_real(self.evaluated(), OUTPUT_DTYPES[number])

    def test_in_memory(self):
        write(self.path, real_tensors())
        model = from_gguf(self.path, link=False)
        self.path.unlink()
        onnx.checker.check_model(onnx_dqp.expand(model, opset=21), full_check=True)
        self.assert_real(self.evaluated(model))

    @parameterized.expand([("little", False), ("big", True)])
    def test_read_in_parts_of_whole_blocks(self, _, big):
        write(self.path, real_tensors(), big=big)
        with mock.patch("onnx_dqp.models.gguf_file.PART", 1000):
            for tensor in read_gguf(self.path).tensors:
                parts = [part.tobytes() for part in tensor.parts()]
                self.assertEqual(b"".join(parts), real_tensors()[tensor.name][2])
                self.assertEqual(len(parts) > 1, tensor.size > 1000)
            self.convert("--copy")
        self.assert_real(self.evaluated())

    def test_a_file_that_becomes_shorter(self):
        write(self.path, ONE)
        (tensor,) = read_gguf(self.path).tensors
        with self.path.open("r+b") as file:
            file.truncate(tensor.offset + 100)
        with self.assertRaisesRegex(ValueError, "in.gguf: the file became shorter while it was read"):
            list(tensor.parts())

    def test_progress(self):
        write(self.path, real_tensors())
        tensors = read_gguf(self.path).tensors
        told = []
        with mock.patch("onnx_dqp.models.gguf_file.PART", 500), DataFile(self.folder / "data") as data:
            store = copying(data, tensors, lambda *numbers: told.append(numbers))
            for tensor in tensors:
                store(TensorProto(), tensor)
        total = sum(len(content) for _, _, content in real_tensors().values())
        self.assertEqual(told[-1], (total, total))
        self.assertEqual(sorted(set(told)), told)
        self.assertGreater(len(told), len(tensors))

    def test_version_2_and_scalars(self):
        scalar = struct.pack("<f", 1.5)
        self.path.write_bytes(file_of([described("s", 0, [], 0)], data=scalar, version=2))
        self.convert()
        self.assertEqual(self.evaluated()["s"].tolist(), 1.5)
        self.assertEqual(self.evaluated()["s"].shape, ())

    def test_linked_bytes_are_the_files_own(self):
        write(self.path, real_tensors())
        before = self.path.read_bytes()
        message = self.convert()
        size = sum(len(content) for _, _, content in real_tensors().values())
        self.assertEqual(message, f"{self.onnx}: 35 tensors, 27 of them packed; {size:,} bytes of in.gguf\n")
        self.assertEqual(self.path.read_bytes(), before)
        self.assertEqual(self.names(), ["in.gguf", "out.onnx"])
        self.assertLess(self.onnx.stat().st_size, 9000)
        model = onnx.load(self.onnx, load_external_data=False)
        self.assertEqual(model.SerializeToString(), from_gguf(self.path).SerializeToString())
        nodes = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizePacked"}
        self.assertEqual(set(nodes), set(NAMES.values()))
        initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        tensors = Parser(before).read().tensors
        for name, _, _, offset in tensors:
            content = real_tensors()[name][2]
            inputs = [node.input[0] for node in model.graph.node if node.output[0] == name] or [name]
            tensor = initializers[inputs[0]]
            stated = {entry.key: entry.value for entry in tensor.external_data}
            wanted = {"location": "in.gguf", "offset": str(offset), "length": str(len(content))}
            self.assertEqual(stated, wanted)
            self.assertEqual(before[offset : offset + len(content)], content)

    def test_copied_bytes_are_aligned(self):
        write(self.path, real_tensors())
        message = self.convert("--copy")
        self.assertIn("bytes copied to out.onnx.data\n", message)
        self.path.unlink()
        model = onnx.load(self.onnx, load_external_data=False)
        for tensor in model.graph.initializer:
            stated = {entry.key: entry.value for entry in tensor.external_data}
            self.assertEqual((stated["location"], int(stated["offset"]) % 4096), ("out.onnx.data", 0))
            name = tensor.name.removesuffix("/packed") if tensor.name not in PLAIN else tensor.name
            name = name.split("/")[0]
            self.assertEqual(octets(tensor, self.folder).tobytes(), real_tensors()[name][2])
        self.assertEqual(self.names(), ["out.onnx", "out.onnx.data"])

    def test_metadata(self):
        write(self.path, ONE, metadata=[
            lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "b"]),
            lambda w: w.add_string("tokenizer.chat_template", "x"),
            lambda w: w.add_uint32("llama.block_count", 32),
            lambda w: w.add_bool("llama.x", True),
            lambda w: w.add_float32("llama.eps", 0.5),
            lambda w: w.add_array("llama.heads", [1, 2]),
            lambda w: w.add_array("general.tags", ["left out"]),
            lambda w: w.add_array("llama.long", [1] * 5000),
            lambda w: w.add_string("general.too_long", "x" * 4097),
            lambda w: w.add_array("llama.too_long", [1] * 4097),
            lambda w: w.add_string("general.longest", "x" * 4096),
            lambda w: w.add_key_value("general.empty", "", gguf.GGUFValueType.STRING),
        ])  # fmt: skip
        found = {entry.key: entry.value for entry in from_gguf(self.path).metadata_props}
        self.assertEqual(found, {
            "general.architecture": "llama", "general.name": "a test", "general.file_type": "15",
            "llama.block_count": "32", "llama.x": "true", "llama.eps": "0.5", "llama.heads": "[1, 2]",
            "general.longest": "x" * 4096, "general.empty": "",
        })  # fmt: skip

    def test_all_metadata_have_a_limit(self):
        keys = [key(f"k{n}", 9, struct.pack("<IQ", 0, 4000) + b"\1" * 4000) for n in range(100)]
        self.path.write_bytes(file_of([GOOD], keys=keys))
        self.assertEqual(len(read_gguf(self.path).metadata), 2**18 // 4000)

    @parameterized.expand([("glob", "blk.*.q?_k", 6), ("several", ["f*", "i32"], 4), ("function", len, 35)])
    def test_select(self, _, select, count):
        write(self.path, real_tensors())
        self.assertEqual(len(from_gguf(self.path, select=select).graph.output), count)
        if not callable(select):
            globs = [select] if isinstance(select, str) else select
            self.convert(*(f"--select={glob}" for glob in globs))
            self.assertEqual(len(onnx.load(self.onnx).graph.output), count)

    def test_an_empty_tensor(self):
        write(self.path, {"none": (2, [0, 32], b""), "f": (0, [3, 0], b""), **ONE})
        for options in ([], ["--copy"]):
            self.convert(*options)
            outputs = self.evaluated()
            self.assertEqual((outputs["none"].shape, outputs["f"].shape), ((0, 32), (3, 0)))

    def test_check_looks_whether_the_data_are_there(self):
        write(self.path, real_tensors())
        self.convert()
        with self.path.open("r+b") as file:
            file.truncate(20000)
        status, output, errors = self.command("check", self.onnx)
        self.assertEqual((status, errors), (1, ""))
        self.assertRegex(output, r"^(tensor '[^']*': in.gguf has 20000 bytes, expected [0-9]+ from byte [0-9]+ on\n)+$")
        self.assert_refused("in.gguf is a GGUF file, expected an ONNX model", "check", self.path)

    def test_a_bad_output_type(self):
        with self.assertRaisesRegex(PackedTensorError, "output_dtype is 2, expected"):
            from_gguf(self.path, output_dtype=2)

    def test_fold_and_check_take_linked_models(self):
        write(self.path, real_tensors())
        self.convert()
        self.assertEqual(self.command("check", self.onnx), (0, "no problem in 27 nodes\n", ""))
        folded = self.folder / "folded.onnx"
        self.assertEqual(self.command("fold", self.onnx, folded, "--opset", newest_opset())[0], 0)
        session = onnxruntime.InferenceSession(folded)
        self.assert_real(dict(zip([o.name for o in session.get_outputs()], session.run(None, {}), strict=True)))


class Shards(Folder):
    def shards(self, count=2):
        write(self.path, real_tensors(), split=35 // count + 1)
        return [self.folder / f"in-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]

    @parameterized.expand([("linked", []), ("copied", ["--copy"])])
    def test_a_pair(self, _, options):
        paths = self.shards()
        self.assertEqual(self.names(), [path.name for path in paths])
        self.convert(*options, path=paths[0])
        self.assert_real(self.evaluated())
        self.assert_real(self.in_onnx_runtime())
        locations = {e.value for t in onnx.load(self.onnx, load_external_data=False).graph.initializer
                     for e in t.external_data if e.key == "location"}  # fmt: skip
        self.assertEqual(locations, {"out.onnx.data"} if options else {path.name for path in paths})

    def test_any_shard_will_do(self):
        paths = self.shards(3)
        models = {from_gguf(path).SerializeToString() for path in paths}
        self.assertEqual(len(models), 1)
        self.assertEqual({entry.key for entry in from_gguf(paths[1]).metadata_props},
                         {"general.architecture", "general.name", "general.file_type"})  # fmt: skip

    def test_a_missing_shard(self):
        paths = self.shards()
        paths[1].unlink()
        self.assert_refused(
            "in-00002-of-00002.gguf is missing, expected all 2 shards", "from-gguf", paths[0], self.onnx
        )

    def test_a_renamed_shard(self):
        paths = self.shards()
        paths[0].rename(self.path)
        self.assert_refused(r"in.gguf is one of 2 shards, expected a name that ends in -00001-of-00002.gguf")

    def test_shards_in_another_order(self):
        paths = self.shards()
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)
        self.assert_refused("00001-of-00002.gguf says that it is shard 1 of 2", "from-gguf", paths[0], self.onnx)

    def test_a_name_in_both_shards(self):
        for number in range(2):
            write(self.folder / f"in-{number + 1:05}-of-00002.gguf", {"w": ONE["w"], f"w{number}": ONE["w"]}, metadata=[
                lambda w, number=number: w.add_uint16("split.no", number),
                lambda w: w.add_uint16("split.count", 2),
                lambda w: w.add_int32("split.tensors.count", 4),
            ])  # fmt: skip
        tensors = read_gguf(self.folder / "in-00001-of-00002.gguf").tensors
        twice = "its name is used twice"
        self.assertEqual(
            [(t.name, t.problem) for t in tensors], [("w", twice), ("w0", None), ("w", twice), ("w1", None)]
        )

    def test_another_number_of_tensors(self):
        paths = self.shards()
        for path in paths:
            key = b"split.tensors.count" + struct.pack("<I", 5)
            self.assertIn(key + struct.pack("<i", 35), path.read_bytes())
            path.write_bytes(path.read_bytes().replace(key + struct.pack("<i", 35), key + struct.pack("<i", 36)))
        self.assert_refused("the shards have 35 tensors, expected 36", "from-gguf", paths[0], self.onnx)

    def hand_made(self, *metadata):
        for number, adds in enumerate(metadata, 1):
            write(self.folder / f"in-{number:05}-of-00002.gguf", {f"w{number}": ONE["w"]}, metadata=adds)
        return self.folder / "in-00001-of-00002.gguf"

    def test_a_shard_of_another_count(self):
        counted = [lambda w: w.add_uint16("split.count", 2)]
        path = self.hand_made(
            counted, [lambda w: w.add_uint16("split.no", 1), lambda w: w.add_uint16("split.count", 3)]
        )
        self.assert_refused("00002-of-00002.gguf says that it is shard 1 of 3", "from-gguf", path, self.onnx)
        path = self.hand_made([lambda w: w.add_string("split.count", "2")], [])
        self.assert_refused("split.count is '2', expected an integer", "from-gguf", path, self.onnx)

    def test_what_the_first_shard_says_holds_for_all(self):
        path = self.hand_made(
            [lambda w: w.add_uint16("split.count", 2), lambda w: w.add_uint32("general.quantization_version", 3)],
            [lambda w: w.add_uint16("split.no", 1), lambda w: w.add_uint16("split.count", 2)],
        )
        problem = "the file has quantization version 3, expected 2"
        self.assertEqual([tensor.problem for tensor in read_gguf(path).tensors], [problem] * 2)

    def test_a_shard_is_not_written_over(self):
        paths = self.shards()
        self.assert_refused("00002.gguf is the input", "from-gguf", paths[0], paths[1])


class BigEndian(Folder):
    def test_every_type_decodes_to_the_same_bits(self):
        write(self.path, real_tensors(), big=True)
        message = self.convert()
        self.assertIn("bytes copied to out.onnx.data", message)
        self.assert_real(self.evaluated())
        self.assert_real(self.in_onnx_runtime())
        self.assert_real(self.evaluated(from_gguf(self.path)))
        self.assert_real(self.evaluated(from_gguf(self.path, link=False)))

    @parameterized.expand(FORMAT_ROWS)
    def test_payloads_are_normalized(self, _, format):
        write(self.path, {"w": packed(format.identifier)}, big=True)
        (tensor,) = from_gguf(self.path).graph.initializer
        self.assertEqual(tensor.raw_data, REAL.payloads[format.identifier])
        swapped = big_endian(format.identifier, tensor.raw_data).tobytes()
        self.assertEqual(swapped in self.path.read_bytes(), True)
        self.assertEqual(swapped == tensor.raw_data, format.name in ("MXFP4", "NVFP4"))

    def test_a_symbolic_link_is_no_matter(self):
        write(self.path, ONE, big=True)
        link = self.folder / "link.gguf"
        link.symlink_to(self.path)
        self.assertFalse(differing(self.evaluated(from_gguf(link))["w"], decoded("gguf:q4_0", [4, 512])).any())

    def test_over_2_gib_in_the_model(self):
        head = file_of([], data=b"", counts=(1, 0))[:24]
        head = head[:4] + struct.pack(">IQQ", 3, 1, 0) + struct.pack(">Q1sIQIQ", 1, b"w", 1, 2**31, 24, 0)
        with self.path.open("wb") as file:
            file.write(head)
            file.truncate(2**31 + 4096)
        with self.assertRaisesRegex(ValueError, "2147483648 bytes in the model, expected at most 2 GiB"):
            from_gguf(self.path)

    def test_metadata(self):
        write(self.path, ONE, big=True, metadata=[lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "bc"]),
                                                  lambda w: w.add_array("llama.heads", [1, 2])])  # fmt: skip
        found = {entry.key: entry.value for entry in from_gguf(self.path).metadata_props}
        self.assertEqual((found["general.file_type"], found["llama.heads"]), ("15", "[1, 2]"))


def described(name, kind, ne, offset):
    """A tensor's description in a file."""
    name = name.encode() if isinstance(name, str) else name
    return struct.pack(f"<Q{len(name)}sI{len(ne)}QIQ", len(name), name, len(ne), *ne, kind, offset)


def file_of(descriptions, data=b"\0" * 4096, keys=(), version=3, counts=None):
    """A file's bytes, with an alignment of 32."""
    counts = counts or (len(descriptions), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(descriptions)
    return head + b"\0" * (-len(head) % 32) + data


def key(name, kind, content):
    name = name if isinstance(name, bytes) else name.encode()
    return struct.pack(f"<Q{len(name)}sI", len(name), name, kind) + content


GOOD = described("good", 2, [32, 2], 2048)

UNUSABLE = [
    # What is wrong, descriptions beside a good one, and the reason.
    ("removed", [described("bad", 31, [32], 0)], r"type is 31 \(Q4_0_4_4, which ggml has removed\), expected one that"),
    ("fork", [described("bad", 99, [32], 0)], "type is 99, expected one that ggml has"),
    ("R3", [described("bad", 2, [31, 2], 0)], r"last dimension of shape \[2, 31\] is 31, expected a multiple of 32"),
    ("R3_k", [described("bad", 12, [32, 8], 0)], r"gguf:q4_k: the last dimension of shape \[8, 32\] is 32"),
    ("R4", [described("bad", 2, [32, 2**62, 4], 0)], "more elements or bytes than fit in 63 bits"),
    ("wraps", [described("bad", 0, [2**32, 2**32], 0)], "more bytes than fit in 63 bits"),
    ("64_bits", [described("bad", 0, [2**63], 0)], "dimension over 2.63 - 1"),
    ("no_rank", [described("bad", 2, [], 0)], r"shape is \[\], expected a rank of at least 1"),
    ("rank_5", [described("bad", 0, [1] * 5, 0)], "at most 4 dimensions"),
    ("outside", [described("bad", 0, [8192], 64)], "its data end at byte [0-9]+, but the file has [0-9]+"),
    ("far_outside", [described("bad", 0, [1], 2**63)], "its data end at byte 9223372036854775..., but the file has"),
    ("unaligned", [described("bad", 0, [8], 8)], "at byte 8 of all data, expected a multiple of the alignment, 32"),
    ("overlap", [described("bad", 0, [513], 0)], "overlap those of 'good'"),
    ("inside", [described("bad", 0, [1024], 0), described("in", 0, [1], 1024)], "overlap those of 'in'"),
    ("twice", [described("bad", 0, [8], 0), described("bad", 0, [8], 64)], "name is used twice, and 1 more"),
    ("slash", [described("../bad", 0, [8], 0)], "name holds a path separator"),
    ("backslash", [described("c:\\bad", 0, [8], 0)], "name holds a path separator"),
    ("no_name", [described("", 0, [8], 0)], "name is empty"),
    ("newline", [described("a\nb", 0, [8], 0)], "name holds characters that cannot be printed"),
    ("nul", [described("a\0b", 0, [8], 0)], "name holds characters that cannot be printed"),
]

MANY = 2**63 - 1

DAMAGED = [
    ("empty", b"", "begins with b''"),
    ("other", b"\x08\x07" + b"x" * 100, "is no GGUF file: it begins with"),
    ("magic_only", b"GGUF", "is cut off: it has 4 bytes, expected a header of 24"),
    ("version", file_of([GOOD], version=1), "has version 1 of GGUF, expected 2 or 3"),
    ("version_99", file_of([GOOD], version=99), "has version 99 of GGUF, expected 2 or 3"),
    ("tensors", file_of([GOOD], counts=(MANY, 0)), f"it has {MANY} tensors, expected at most 65536"),
    ("keys", file_of([GOOD], counts=(1, MANY)), f"it has {MANY} keys, expected at most 65536"),
    ("some_tensors", file_of([GOOD], counts=(50000, 0)), "damaged"),
    ("some_keys", file_of([GOOD], counts=(1, 50000)), "damaged"),
    ("name_length", file_of([struct.pack("<Q", MANY) + GOOD[8:]]), f"has {MANY} bytes, expected at most"),
    ("name_beyond", file_of([struct.pack("<Q", 9999) + GOOD[8:]]), "ends at byte [0-9]+, but the file has"),
    ("rank", file_of([GOOD[:12] + struct.pack("<I", 2**32 - 1) + GOOD[16:]]), "has 4294967295 dimensions, expected 4"),
    ("no_utf_8", file_of([described(b"\xff\xfe", 0, [8], 0)]), "name of the tensor .* is not UTF-8"),
    ("key_no_utf_8", file_of([GOOD], keys=[key(b"\xff", 4, b"1234")]), "a key is not UTF-8"),
    ("value_no_utf_8", file_of([GOOD], keys=[key("a", 8, struct.pack("<Q", 1) + b"\xff")]), "of 'a' is not UTF-8"),
    ("key_twice", file_of([GOOD], keys=[key("a", 4, b"1234")] * 2), "Duplicate a"),
    ("kind", file_of([GOOD], keys=[key("a", 13, b"1234")]), "13.? is not a valid"),
    ("string", file_of([GOOD], keys=[key("a", 8, struct.pack("<Q", MANY))]), "expected at most"),
    ("array", file_of([GOOD], keys=[key("a", 9, struct.pack("<IQ", 4, MANY))]), "but the file has"),
    ("strings", file_of([GOOD], keys=[key("a", 9, struct.pack("<IQ", 8, MANY))]), f"of {MANY} strings, expected"),
    ("more_strings", file_of([GOOD], keys=[key("a", 9, struct.pack("<IQ", 8, 4000))]), "goes on beyond the file"),
    ("arrays", file_of([GOOD], keys=[key("a", 9, struct.pack("<IQ", 9, 1))]), "of arrays, expected at most"),
    ("alignment", file_of([GOOD], keys=[key("general.alignment", 4, b"\x30\0\0\0")]), "power of two"),
    ("alignment_0", file_of([GOOD], keys=[key("general.alignment", 4, b"\0\0\0\0")]), "non-zero"),
    ("alignment_kind", file_of([GOOD], keys=[key("general.alignment", 10, b"\x20" + b"\0" * 7)]), "alignment"),
    ("no_tensors", file_of([]), "has no tensors, expected some"),
    ("shards", file_of([GOOD], keys=[key("split.count", 2, b"\3\0")]), "is one of 3 shards, expected a name"),
]  # fmt: skip


class Removed(unittest.TestCase):
    def test_names_of_removed_types(self):
        # The comments in ggml.h's enum ggml_type, and the enum before they were removed.
        names = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
                 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "in.gguf")
            path.write_bytes(file_of([described(f"t{n}", n, [32], 32 * n) for n in range(60)]))
            problems = {t.ggml_type: t.problem for t in read_gguf(path).tensors if "type is" in (t.problem or "")}
        self.assertEqual(set(problems), set(range(60)) - {*NUMBERS.values(), *(k for k, _ in PLAIN.values())})
        for number, problem in problems.items():
            removed = f" ({names[number]}, which ggml has removed)" if number in names else ""
            self.assertEqual(problem, f"its type is {number}{removed}, expected one that ggml has")


class Refusals(Folder):
    def setUp(self):
        super().setUp()
        self.path.write_bytes(file_of([GOOD]))
        self.convert()
        self.onnx.unlink()

    @parameterized.expand(UNUSABLE)
    def test_a_tensor_that_cannot_be_used(self, _, descriptions, message):
        self.path.write_bytes(file_of([*descriptions, GOOD]))
        self.assert_refused(rf"in.gguf: tensor '[^']*': .*{message}")
        with self.assertRaisesRegex(ValueError, message):
            from_gguf(self.path)

    @parameterized.expand(UNUSABLE)
    def test_it_is_left_out_and_listed(self, _, descriptions, message):
        descriptions = [*descriptions, GOOD, described("other", 2, [32, 2], 8192)]
        self.path.write_bytes(file_of(descriptions, data=b"\0" * 16384))
        lines = self.convert("--skip-unsupported").splitlines()
        self.assertRegex("\n".join(lines[:-1]), f"left out .*{message.removesuffix(', and 1 more')}")
        kept = {output.name for output in onnx.load(self.onnx).graph.output}
        self.assertIn("other", kept)
        self.assertNotIn("bad", kept)
        self.assertEqual(len(kept) + len(lines[:-1]), len(descriptions))
        model = from_gguf(self.path, skip_unsupported=True)
        self.assertEqual({output.name for output in model.graph.output}, kept)

    def test_one_that_spans_several(self):
        places = {"long": (1024, 0), "a": (8, 1024), "b": (8, 2048), "c": (8, 4064), "after": (8, 4096)}
        self.path.write_bytes(file_of([described(name, 0, [n], at) for name, (n, at) in places.items()], b"\0" * 8192))
        problems = {tensor.name: tensor.problem for tensor in read_gguf(self.path).tensors}
        overlap = dict.fromkeys("abc", "its data overlap those of 'long'")
        self.assertEqual(problems, {"long": "its data overlap those of 'a'", **overlap, "after": None})

    def test_one_that_is_not_selected_is_no_matter(self):
        self.path.write_bytes(file_of([described("bad", 99, [32], 0), GOOD]))
        self.convert("--select", "go*")
        self.assert_refused("none of 1 tensors can be used", "from-gguf", self.path, self.folder / "other.onnx",
                            "--select=bad", "--skip-unsupported")  # fmt: skip
        self.assert_refused("none of 2 tensors is selected", "from-gguf", self.path, self.onnx, "--select=x")

    def test_another_quantization_version(self):
        keys = [key("general.quantization_version", 4, b"\1\0\0\0")]
        self.path.write_bytes(
            file_of([GOOD], keys=[key("general.quantization_version", 8, struct.pack("<Q", 1) + b"2")])
        )
        self.assert_refused("tensor 'good': the file has quantization version '2', expected 2")
        aligned = [key("general.alignment", 4, b"\x40\0\0\0")]
        self.path.write_bytes(file_of([GOOD, described("f", 0, [8], 32)], keys=aligned))
        self.assert_refused("tensor 'f': .*at byte 32 of all data, expected a multiple of the alignment, 64")
        self.path.write_bytes(file_of([GOOD, described("f", 0, [8], 0)], keys=keys))
        self.assert_refused("tensor 'good': the file has quantization version 1, expected 2")
        self.convert("--select=f")

    @parameterized.expand(DAMAGED)
    def test_a_damaged_file(self, _, content, message):
        self.path.write_bytes(content)
        tracemalloc.start()
        self.assert_refused(f"in.gguf.*{message}")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.assertLess(
            peak, len(content) + (1 << 24)
        )  # the slack is for other threads; a count taken as it is needs more
        with self.assertRaises(ValueError):
            from_gguf(self.path)

    def test_truncated_at_every_boundary(self):
        write(self.path, real_tensors(), metadata=[lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "b"])])
        content = self.path.read_bytes()
        boundaries = Parser(content).read().boundaries
        self.assertGreater(len(boundaries), 75)
        for end in {*boundaries, *(end + 1 for end in boundaries), *(end - 1 for end in boundaries[1:])}:
            with self.subTest(end=end):
                self.path.write_bytes(content[:end])
                self.assert_refused("in.gguf")

    def test_outputs(self):
        other = self.folder / "other"
        other.mkdir()
        message = "is not in the folder of .*in.gguf, to which it refers; or --copy its data"
        self.assert_refused(message, "from-gguf", self.path, other / "out.onnx")
        self.assertEqual(self.command("from-gguf", self.path, other / "out.onnx", "--copy")[0], 0)
        self.assert_refused("in.gguf is the input", "from-gguf", self.path, self.path)
        self.assert_refused("is the input", "from-gguf", self.path, self.folder / "other" / ".." / "in.gguf", "--copy")
        self.assert_refused("is a folder", "from-gguf", self.path, other)
        self.assert_refused("is no folder", "from-gguf", self.path, self.folder / "none" / "out.onnx")
        self.assert_refused("No such file", "from-gguf", self.folder / "none.gguf", self.onnx)
        self.assert_refused("is no ordinary file", "from-gguf", other, self.onnx)
        os.mkfifo(self.folder / "fifo.gguf")
        self.assert_refused("is no ordinary file", "from-gguf", self.folder / "fifo.gguf", self.onnx)
        self.assert_refused("is no ordinary file", "inspect", self.folder / "fifo.gguf")

    def test_links_that_onnx_does_not_follow(self):
        link = self.folder / "link.gguf"
        link.symlink_to(self.path)
        self.assert_refused("link.gguf is a symbolic link, which onnx refuses", "from-gguf", link, self.onnx)
        self.convert("--copy", path=link)
        self.onnx.unlink()
        link.unlink()
        os.link(self.path, link)
        self.assert_refused("link.gguf has several hard links", "from-gguf", link, self.onnx)
        from_gguf(link, link=False)

    @parameterized.expand([("dots", "a..b.gguf", "two dots in a row"), ("bytes", "a\udcff.gguf", "is not UTF-8")])
    def test_names_that_cannot_be_locations(self, _, name, message):
        path = self.path.rename(self.folder / name)
        with self.assertRaisesRegex(ValueError, f"{message}.*: expected another file, or link=False"):
            from_gguf(path)
        from_gguf(path, link=False)
        self.assertEqual(self.command("from-gguf", path, self.onnx, "--copy")[0], 0)
        output = self.folder / f"{name}.onnx"
        status, text, errors = self.command("from-gguf", path, output, "--copy")
        self.assertEqual((status, text), (2, ""))
        self.assertRegex(errors, message)

    def test_the_function_refuses_links_too(self):
        link = self.folder / "link.gguf"
        link.symlink_to(self.path)
        with self.assertRaisesRegex(ValueError, "is a symbolic link, which onnx refuses as external data"):
            from_gguf(link)

    def test_outputs_that_are_symbolic_links(self):
        for name in ("loop.onnx", "other.onnx.data"):
            self.folder.joinpath(name).symlink_to(name)
        self.assert_refused("symbolic link in a circle", "from-gguf", self.path, self.folder / "loop.onnx")
        self.assert_refused("symbolic link in a circle", "from-gguf", self.path, self.folder / "other.onnx", "--copy")
        self.folder.joinpath("target").touch()
        self.folder.joinpath("out.onnx.data").symlink_to("target")
        self.assert_refused("out.onnx.data is a symbolic link", "from-gguf", self.path, self.onnx, "--copy")

    def test_select_and_types_that_are_something_else(self):
        for select in (5, b"w", [1], ["w", None]):
            with self.assertRaisesRegex(TypeError, "^select is or has .*, expected patterns of names or a function$"):
                from_gguf(self.path, select=select)

    def test_another_reader(self):
        code = (
            "import gguf, sys; del gguf.GGUFReader._build_tensors\n"
            "from onnx_dqp.__main__ import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "from-gguf", self.path, self.onnx]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"^onnx-dqp: gguf [0-9.]+ has no GGUFReader._build_tensors, expected [^\n]*\n$")

    def test_without_the_package(self):
        code = (
            "import sys; sys.modules['gguf'] = None; from onnx_dqp.__main__ import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "from-gguf", self.path, self.onnx]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wanted = "onnx-dqp: the package gguf is not installed: pip install 'onnx_dqp[gguf]'\n"
        self.assertEqual((done.returncode, done.stderr), (2, wanted))

    def test_over_2_gib_in_the_model(self):
        with self.path.open("wb") as file:
            file.write(file_of([described("w", 24, [2**31], 0)], data=b""))
            file.truncate(2**31 + 4096)
        with self.assertRaisesRegex(ValueError, "2147483648 bytes in the model, expected at most 2 GiB"):
            from_gguf(self.path, link=False)


class Corruption(Folder):
    def test_a_changed_byte_gives_a_right_model_or_one_line(self):
        tensors = {
            **{name: packed(f"gguf:{name}", SHAPES[n]) for n, name in enumerate(("q4_0", "q6_k", "iq1_m", "mxfp4"))},
            **{name: (kind, list(array.shape), array.tobytes()) for name, (kind, array) in PLAIN.items()},
        }
        write(self.path, tensors, metadata=[lambda w: w.add_array("tokenizer.ggml.tokens", ["a", "b"])])
        content = self.path.read_bytes()
        data = Parser(content).read().tensors[0][3]
        rng = np.random.default_rng(6)
        accepted = refused = 0
        for number in range(2000):
            place = int(rng.integers(data if number % 4 else len(content)))
            changed = bytearray(content)
            changed[place] ^= int(rng.integers(1, 256))
            self.path.write_bytes(changed)
            try:
                model = from_gguf(self.path)
            except ValueError as error:
                refused += 1
                self.assertRegex(str(error), r"^[^\n]*in.gguf[^\n]*$")
                continue
            accepted += 1
            self.assert_what_the_file_says(model, bytes(changed))
        self.assertGreater(accepted, 500)
        self.assertGreater(refused, 500)

    def assert_what_the_file_says(self, model, content):
        """The model has the tensors that an independent reader finds, each with the file's bytes."""
        nodes = {node.output[0]: node for node in model.graph.node}
        initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        shapes = {o.name: [dim.dim_value for dim in o.type.tensor_type.shape.dim] for o in model.graph.output}
        found = Parser(content).read().tensors
        self.assertEqual(list(shapes), [name for name, *_ in found])
        for name, kind, ne, offset in found:
            self.assertEqual(shapes[name], list(ne[::-1]))
            node = nodes.get(name)
            tensor = initializers[node.input[0] if node else name]
            elements = int(np.prod(ne, dtype=object))
            if kind in NUMBERS.values():
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
                self.assertEqual(NUMBERS[attributes["format"].decode().removeprefix("gguf:")], kind)
                self.assertEqual(attributes["shape"], list(ne[::-1]))
                format = FORMATS[attributes["format"].decode()]
                size = elements // format.elements * format.bytes
            else:
                dtype = next(array.dtype for number, array in PLAIN.values() if number == kind)
                size = elements * dtype.itemsize
                wanted = (
                    TensorProto.BFLOAT16 if dtype == ml_dtypes.bfloat16 else onnx.helper.np_dtype_to_tensor_dtype(dtype)
                )
                self.assertEqual(tensor.data_type, wanted)
            self.assertEqual(octets(tensor, self.folder).tobytes(), content[offset : offset + size])


class Inspect(Folder):
    def test_a_table(self):
        write(self.path, real_tensors())
        status, output, errors = self.command("inspect", self.path)
        self.assertEqual((status, errors), (0, ""))
        self.assertRegex(output, r" blk.8.q4_k +gguf:q4_k +\[2, 2, 1, 512\] +1,152 +4.5 ")
        self.assertRegex(output, r" bf16 +BF16 +\[5\] +10 +16 ")
        self.assertRegex(
            output, r"\n35 tensors, 27 of them packed: [0-9,]+ bytes; 221,184 as FLOAT, 110,592 as FLOAT16"
        )

    def test_by_content_and_unusable_tensors(self):
        self.path = self.folder / "model.bin"
        self.path.write_bytes(file_of([described("bad", 99, [32], 0), GOOD]))
        _, output, _ = self.command("inspect", self.path)
        self.assertRegex(output, r" bad +type 99 +\[32\] +\? +\? ")
        self.assertIn("'bad' cannot be used: its type is 99, expected one that ggml has\n", output)
        self.assertRegex(output, r" good +gguf:q4_0 +\[2, 32\] +36 +4.5 +100.0% ")
        self.assertIn("1 tensor (1 more cannot be used), 1 of them packed: 36 bytes", output)

    def test_json(self):
        write(self.path, ONE)
        found = json.loads(self.command("inspect", self.path, "--json")[1])
        self.assertEqual(found["metadata"]["general.name"], "a test")
        self.assertEqual(found["totals"]["bytes_as_float"], 4 * 2048)
        (row,) = found["tensors"]
        self.assertEqual((row["name"], row["format"], row["ggml_type"], row["shape"], row["bytes"], row["problem"]),
                         ("w", "gguf:q4_0", 2, [4, 512], 1152, None))  # fmt: skip
        self.assertEqual(row["offset"], Parser(self.path.read_bytes()).read().tensors[0][3])

    def test_long_names(self):
        name = "layers.0." + "x" * 80 + ".weight"
        write(self.path, {name: ONE["w"]})
        self.convert()
        for path, wanted in ((self.path, name), (self.onnx, f"{name}/packed")):
            self.assertEqual(json.loads(self.command("inspect", path, "--json")[1])["tensors"][0]["name"], wanted)
            self.assertIn(f"{wanted[:30]}\u2026{wanted[-29:]}  gguf:q4_0", self.command("inspect", path)[1])

    def test_metadata_that_json_does_not_have(self):
        write(
            self.path, ONE, metadata=[lambda w: w.add_float32("a", np.nan), lambda w: w.add_array("b", [1.0, -np.inf])]
        )
        output = self.command("inspect", self.path, "--json")[1]
        self.assertEqual(json.loads(output, parse_constant=self.fail)["metadata"]["b"], [1.0, "-inf"])
        found = {entry.key: entry.value for entry in from_gguf(self.path).metadata_props}
        self.assertEqual((found["a"], found["b"]), ('"nan"', '[1.0, "-inf"]'))

    def test_metadata_in_a_line(self):
        write(self.path, ONE)
        line = "general.architecture llama, general.name a test, general.file_type 15 (all 3 keys: --json)\n"
        self.assertIn(line, self.command("inspect", self.path)[1])

    def test_no_model_and_no_gguf(self):
        self.path.write_bytes(b"GGUX")
        self.assert_refused("is no GGUF file: it begins with b'GGUX'", "inspect", self.path)


class Large(Folder):
    """A file of eight tensors of the size given, all zero bytes, which takes no room on the disk."""

    def sparse(self, each):
        rows = each // FORMATS["gguf:q4_0"].bytes // 1024 * 1024
        size = rows * 18
        tensors = [described(f"blk.{n}.w", 2, [32 * 1024, rows // 1024], n * (size + -size % 32)) for n in range(8)]
        with self.path.open("wb") as file:
            file.write(file_of(tensors, data=b""))
            file.truncate(file.tell() + 8 * (size + -size % 32))
        return self.path.stat().st_size

    def test_linking_4_gib(self):
        self.assertGreater(self.sparse(1 << 29), 2**32 - 2**20)
        self.assertLess(measure("from-gguf", str(self.path), str(self.onnx))[1], 200)
        self.assertLess(self.onnx.stat().st_size, 2000)

    def test_copying_1_gib(self):
        size = self.sparse(1 << 27)
        self.assertLess(measure("from-gguf", str(self.path), str(self.onnx), "--copy")[1], 300)
        self.assertGreaterEqual((self.folder / "out.onnx.data").stat().st_size, size - 4096)

    @parameterized.expand(
        [("data", 1 << 20, ["--copy"]), ("end_of_data", 8128512 - 1000, ["--copy"]), ("model", 16, [])]
    )
    def test_a_full_disk_leaves_nothing(self, _, most, options):
        self.sparse(1 << 20)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        command = [sys.executable, "-m", "onnx_dqp", "from-gguf", str(self.path), str(self.onnx), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertRegex(done.stderr, r"^onnx-dqp: [^\n]*File too large\n$")
        self.assertEqual(self.names(), ["in.gguf"])

    def test_a_full_disk_leaves_what_was_there(self):
        write(self.path, ONE)
        self.convert("--copy")
        before = {path: path.read_bytes() for path in self.folder.iterdir()}
        other = write(self.folder / "other.gguf", {"w": packed("gguf:q8_0")})
        finish = NewFile.finish

        def fail(new):
            if new.path == self.onnx:
                raise OSError(28, "No space left on device")
            finish(new)

        with mock.patch.object(NewFile, "finish", fail):
            self.assert_refused("No space left", "from-gguf", other, self.onnx, "--copy")
        self.assertEqual({path: path.read_bytes() for path in before}, before)

    def test_an_end_from_outside_leaves_nothing(self):
        self.sparse(1 << 27)
        command = [sys.executable, "-m", "onnx_dqp", "from-gguf", str(self.path), str(self.onnx), "--copy"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None and not list(self.folder.glob(".*.data.*")):
            time.sleep(0.01)
        process.terminate()
        output, errors = process.communicate()
        self.assertEqual((process.returncode, output, errors), (143, b"", b""))
        self.assertEqual(self.names(), ["in.gguf"])
