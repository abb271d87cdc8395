"""GGUF files as ONNX models: the same bits as ggml decodes, and one line for what is wrong with a file."""

from __future__ import annotations

import json
import struct
import unittest
from unittest import mock

import gguf
import numpy as np
import onnx
import onnxruntime
from gguf_files import (
    GOOD,
    NAMES,
    NUMBERS,
    ONE,
    REAL,
    Folder,
    Parser,
    big_endian,
    by_ggml,
    decoded,
    described,
    file_of,
    key,
    packed,
    real_tensors,
    write,
)
from helpers import FORMAT_ROWS, TYPE_ROWS, newest_opset
from onnx import TensorProto
from parameterized import parameterized

import onnx_dqp
from conformance.compare import differing
from onnx_dqp import FORMATS, PackedTensorError, from_ggml_type, from_gguf, read_gguf, shape_from_gguf, to_ggml_type
from onnx_dqp.models.files import DataFile, octets
from onnx_dqp.models.from_gguf import copying
from onnx_dqp.rules import OUTPUT_DTYPES


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
            name = tensor.name.split("/")[0]
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
