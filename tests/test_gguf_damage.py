"""Damaged, hostile and huge GGUF files: one line for what is wrong, nothing left behind, little memory."""

from __future__ import annotations

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

import ml_dtypes
import numpy as np
import onnx
from gguf_files import (
    GOOD,
    NUMBERS,
    ONE,
    PLAIN,
    SHAPES,
    Folder,
    Parser,
    described,
    file_of,
    key,
    packed,
    real_tensors,
    write,
)
from measure_gguf import measure
from onnx import TensorProto
from parameterized import parameterized

from onnx_dqp import FORMATS, from_gguf, read_gguf
from onnx_dqp.models.files import NewFile, octets

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

    @parameterized.expand([("data", 1 << 20, ["--copy"]), ("later_data", 1 << 22, ["--copy"]), ("model", 16, [])])
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
