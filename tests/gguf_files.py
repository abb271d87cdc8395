"""GGUF files for tests, what stands in them, read without the package gguf, and what tests do with them."""

from __future__ import annotations

import contextlib
import ctypes
import io
import struct
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from _real_weights import read
from helpers import newest_opset

import onnx_dqp
from conformance import ggml
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import FORMATS
from onnx_dqp.__main__ import main
from onnx_dqp.ggml import library

REAL = read()

# What is no single byte, from the structs in ggml-common.h and how ggml's decoders read them: (offset, bytes, count).
FIELDS = {
    "q4_0": [(0, 2, 1)],
    "q4_1": [(0, 2, 2)],
    "q5_0": [(0, 2, 1), (2, 4, 1)],
    "q5_1": [(0, 2, 2), (4, 4, 1)],
    "q8_0": [(0, 2, 1)],
    "q8_1": [(0, 2, 2)],
    "q2_k": [(80, 2, 2)],
    "q3_k": [(108, 2, 1)],
    "q4_k": [(0, 2, 2)],
    "q5_k": [(0, 2, 2)],
    "q6_k": [(208, 2, 1)],
    "q8_k": [(0, 4, 1), (260, 2, 16)],
    "iq2_xxs": [(0, 2, 1), *((6 + 8 * group, 4, 1) for group in range(8))],
    "iq2_xs": [(0, 2, 33)],
    "iq3_xxs": [(0, 2, 1), (66, 4, 8)],
    "iq1_s": [(0, 2, 1), (34, 2, 8)],
    "iq4_nl": [(0, 2, 1)],
    "iq3_s": [(0, 2, 1)],
    "iq2_s": [(0, 2, 1)],
    "iq4_xs": [(0, 2, 2)],
    "iq1_m": [(48, 2, 4)],
    "tq1_0": [(52, 2, 1)],
    "tq2_0": [(64, 2, 1)],
    "mxfp4": [],
    "nvfp4": [],
    "q1_0": [(0, 2, 1)],
    "q2_0": [(0, 2, 1)],
}

SHAPES = ([4, 512], [2048], [2, 4, 256], [2, 2, 1, 512], [1, 4, 512])

PLAIN = {
    "f32": (0, np.linspace(-2, 2, 24, dtype=np.float32).reshape(2, 3, 4)),
    "f16": (1, np.array([[1.5, -0.0, np.inf], [2.0**-24, 65504, np.nan]], np.float16)),
    "bf16": (30, np.array([1.5, -0.0, 3e38, 1e-40, np.inf], ml_dtypes.bfloat16)),
    "f64": (28, np.array([[[[1 / 3]], [[1e300]]]], np.float64)),
    "i8": (24, np.array([-128, 127], np.int8)),
    "i16": (25, np.array([[-(2**15), 2**15 - 1]], np.int16)),
    "i32": (26, np.arange(6, dtype=np.int32).reshape(3, 2)),
    "i64": (27, np.array([2**62, -1], np.int64)),
}
"""Name -> ggml's type and elements."""


def big_endian(identifier, payload):
    """A payload as a big-endian machine would have it."""
    blocks = np.frombuffer(payload, np.uint8).reshape(-1, FORMATS[identifier].bytes).copy()
    for offset, size, count in FIELDS[identifier.removeprefix("gguf:")]:
        for start in range(offset, offset + size * count, size):
            blocks[:, start : start + size] = blocks[:, start : start + size][:, ::-1].copy()
    return blocks.ravel()


def packed(identifier, shape=(4, 512)):
    """A tensor of real weights, for ``write``."""
    format = FORMATS[identifier]
    return format.ggml_type, list(shape), REAL.payloads[identifier]


def real_tensors():
    """One of each format, and of each plain type."""
    made = {}
    for number, identifier in enumerate(FORMATS):
        made[f"blk.{number}.{identifier.removeprefix('gguf:')}"] = packed(identifier, SHAPES[number % len(SHAPES)])
    for name, (kind, array) in PLAIN.items():
        made[name] = (kind, list(array.shape), array.tobytes())
    return made


def decoded(identifier, shape):
    """The real weights of a format as FLOAT: from ggml's library, and the exact decoder for Q8_1, which it lacks."""
    if identifier in ggml.NO_DECODER:
        return expected(identifier, REAL.payloads[identifier]).reshape(shape)
    return ggml.dequantize(FORMATS[identifier], np.frombuffer(REAL.payloads[identifier], np.uint8)).reshape(shape)


def write(path, tensors, *, alignment=32, big=False, metadata=(), split=0):
    """Write a file with gguf's writer; tensors are name -> (ggml's type, ONNX's shape, little-endian bytes)."""
    order = gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, "llama", endianess=order, split_max_tensors=split)
    writer.add_name("a test")
    writer.add_file_type(15)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for add in metadata:
        add(writer)
    for name, (kind, shape, content) in tensors.items():
        format = next((format for format in FORMATS.values() if format.ggml_type == kind), None)
        if big and format is not None:
            content = big_endian(format.identifier, content)  # noqa: PLW2901
        elif big:
            dtype = next(array.dtype for number, array in PLAIN.values() if number == kind)
            content = np.frombuffer(content, f"u{dtype.itemsize}").byteswap()  # noqa: PLW2901
        # As INT8, so that the writer neither turns bytes round nor computes a shape by its own sizes of blocks.
        flat = np.frombuffer(bytes(content), np.int8)
        writer.add_tensor(name, flat, raw_shape=shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class Found:
    """A file as the format's description has it."""

    boundaries: list[int]
    tensors: list[tuple[str, int, tuple[int, ...], int]]
    """Name, type, dimensions in the file's order, and the offset from the file's beginning."""


class Parser:
    """A reader of little-endian files of version 2 and 3, strict, after the description in ggml's docs/gguf.md."""

    SIZES = (1, 1, 2, 2, 4, 4, 4, 1, None, None, 8, 8, 8)

    def __init__(self, content):
        self.content, self.at, self.boundaries = content, 0, [0]

    def take(self, kind):
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def string(self):
        length = self.take("Q")
        if self.at + length > len(self.content):
            raise ValueError("a string ends beyond the file")
        self.at += length
        return self.content[self.at - length : self.at]

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            kind, count = self.take("I"), self.take("Q")
            return [self.value(kind) for _ in range(count)]
        at = self.at
        self.at += self.SIZES[kind]
        if self.at > len(self.content):
            raise ValueError("a value ends beyond the file")
        return self.content[at : self.at]

    def mark(self):
        self.boundaries.append(self.at)

    def read(self):
        if self.content[:4] != b"GGUF":
            raise ValueError("no magic")
        self.at = 4
        self.mark()
        self.take("I")
        self.mark()
        tensors, keys = self.take("Q"), self.take("Q")
        self.mark()
        alignment = 32
        for _ in range(keys):
            key, kind = self.string(), self.take("I")
            value = self.value(kind)
            if key == b"general.alignment":
                alignment = int.from_bytes(value, "little")
            self.mark()
        found = []
        for _ in range(tensors):
            name = self.string().decode()
            ne = tuple(self.take("Q") for _ in range(self.take("I")))
            found.append((name, self.take("I"), ne, self.take("Q")))
            self.mark()
        data = self.at + -self.at % alignment
        self.boundaries.append(data)
        tensors = [(name, kind, ne, data + offset) for name, kind, ne, offset in found]
        self.boundaries.extend(sorted(start for *_, start in tensors)[1:])
        return Found(sorted(set(self.boundaries)), tensors)


class _Parameters(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def by_ggml(path):
    """(name, type, offset from the file's beginning) of each tensor, from the reader in ggml's compiled library."""
    loaded = library()
    for name, result in (("init_from_file", ctypes.c_void_p), ("get_n_tensors", ctypes.c_int64),
                         ("get_tensor_name", ctypes.c_char_p), ("get_tensor_offset", ctypes.c_size_t),
                         ("get_tensor_type", ctypes.c_int), ("get_data_offset", ctypes.c_size_t)):  # fmt: skip
        getattr(loaded, f"gguf_{name}").restype = result
    context = loaded.gguf_init_from_file(str(path).encode(), _Parameters(True, None))
    if not context:
        raise ValueError("ggml cannot read the file")
    context = ctypes.c_void_p(context)
    start = loaded.gguf_get_data_offset(context)
    found = []
    for number in map(ctypes.c_int64, range(loaded.gguf_get_n_tensors(context))):
        name = loaded.gguf_get_tensor_name(context, number).decode()
        offset = start + loaded.gguf_get_tensor_offset(context, number)
        found.append((name, loaded.gguf_get_tensor_type(context, number), offset))
    loaded.gguf_free(context)
    return found


# ggml.h's enum ggml_type.
NUMBERS = {
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q8_1": 9, "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13,
    "q6_k": 14, "q8_k": 15, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21,
    "iq2_s": 22, "iq4_xs": 23, "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40, "q1_0": 41, "q2_0": 42,
}  # fmt: skip

NAMES = {identifier: f"blk.{n}.{identifier.removeprefix('gguf:')}" for n, identifier in enumerate(FORMATS)}

ONE = {"w": packed("gguf:q4_0")}


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
