"""The function: the inputs it takes, the array it gives, tiles, memory, lengths."""

from __future__ import annotations

import dataclasses
import tracemalloc
from importlib import import_module
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase, mock

import numpy as np
from helpers import FORMAT_ROWS, TYPE_ROWS
from hypothesis import given
from hypothesis import strategies as st
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import FORMATS, PackedTensorError, dequantize, packed_size, take_apart
from onnx_dqp.rules import OUTPUT_DTYPES

MIB = 1 << 20
ENGINE = import_module("onnx_dqp.dequantize")  # the module; the package's attribute is the function
Q4_0 = FORMATS["gguf:q4_0"]
PAYLOAD = payloads.finite_blocks(Q4_0, 4, "inputs").tobytes()
VALUES = expected(Q4_0.identifier, PAYLOAD)


def spread(payload, step):
    array = np.zeros(len(payload) * step, np.uint8)
    array[::step] = np.frombuffer(payload, np.uint8)
    return array[::step]


def unaligned(payload):
    return np.frombuffer(b"\0" + payload, np.uint8)[1:]


class Formats(TestCase):
    def test_a_format_is_its_identifier(self):
        for identifier, format in FORMATS.items():
            payload = bytes(format.bytes)
            wanted = dequantize(payload, identifier, [format.elements])
            self.assertFalse(differing(dequantize(payload, format, [format.elements]), wanted).any())
            self.assertEqual(packed_size(format, [format.elements]), format.bytes)
            self.assertEqual(str(take_apart(format, payload)), str(take_apart(identifier, payload)))

    def test_an_object_that_is_no_format_of_the_table(self):
        own = dataclasses.replace(FORMATS["gguf:q4_0"], elements=64)
        with self.assertRaisesRegex(PackedTensorError, "format is of type PackedFormat, expected a string"):
            dequantize(bytes(18), own, [64])


class Inputs(TestCase):
    @parameterized.expand(
        [
            ("bytes", PAYLOAD),
            ("bytearray", bytearray(PAYLOAD)),
            ("memoryview", memoryview(PAYLOAD)),
            ("strided_memoryview", memoryview(b"".join(bytes([octet, 0]) for octet in PAYLOAD))[::2]),
            ("read_only_array", np.frombuffer(PAYLOAD, np.uint8)),
            ("writable_array", np.frombuffer(bytearray(PAYLOAD), np.uint8)),
            ("non_contiguous_array", spread(PAYLOAD, 3)),
            ("reversed_array", np.frombuffer(PAYLOAD[::-1], np.uint8)[::-1]),
            ("unaligned_array", unaligned(PAYLOAD)),
            ("broadcast_strides", np.broadcast_to(np.frombuffer(PAYLOAD, np.uint8), (1, len(PAYLOAD)))[0]),
        ]
    )
    def test_kind(self, _, x):
        actual = dequantize(x, "gguf:q4_0", [2, 64])
        self.assertFalse(differing(actual.ravel(), VALUES).any())

    def test_memory_mapped_file(self):
        with TemporaryDirectory() as directory:
            path = Path(directory, "payload")
            path.write_bytes(b"head" + PAYLOAD)
            x = np.memmap(path, np.uint8, "r", offset=4)
            actual = dequantize(x, "gguf:q4_0", [2, 64])
            self.assertIs(type(actual), np.ndarray)
            self.assertFalse(differing(actual.ravel(), VALUES).any())

    def test_the_input_is_not_changed(self):
        x = np.frombuffer(bytearray(PAYLOAD), np.uint8)
        for identifier, format in FORMATS.items():
            x = np.arange(format.bytes, dtype=np.uint8)
            dequantize(x, identifier, [format.elements])
            np.testing.assert_array_equal(x, np.arange(format.bytes, dtype=np.uint8))

    @parameterized.expand([("list", [2, 64]), ("tuple", (2, 64)), ("array", np.array([2, 64])), ("rank_1", [128])])
    def test_shape(self, _, shape):
        self.assertEqual(dequantize(PAYLOAD, "gguf:q4_0", shape).shape, tuple(shape))


class Result(TestCase):
    @parameterized.expand(TYPE_ROWS)
    def test_is_new_contiguous_and_writable(self, _, output_dtype):
        for shape in ([128], [4, 32], [1, 2, 1, 64], [2, 0, 32]):
            actual = dequantize(PAYLOAD if prod(shape) else b"", "gguf:q4_0", shape, output_dtype)
            self.assertEqual(list(actual.shape), shape)
            self.assertTrue(actual.flags.c_contiguous and actual.flags.writeable and actual.flags.aligned)

    @parameterized.expand([("first", [0, 256]), ("last", [3, 0]), ("all", [0, 0, 0]), ("rank_1", [0])])
    def test_empty(self, _, shape):
        for identifier in FORMATS:
            self.assertEqual(dequantize(b"", identifier, shape).shape, tuple(shape))


class Tiles(TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_their_size_does_not_matter(self, _, format):
        blocks = payloads.random_blocks(format, 2 * ENGINE.TILE_ELEMENTS // format.elements + 3, "tiles")
        payload, shape = blocks.tobytes(), [len(blocks), format.elements]
        for output_dtype in (1, 16):
            whole = dequantize(payload, format.identifier, shape, output_dtype, threads=1)
            for elements in (format.elements, 5 * format.elements):
                with mock.patch.object(ENGINE, "TILE_ELEMENTS", elements):
                    head = dequantize(payload[: 33 * format.bytes], format.identifier, [33, shape[1]], output_dtype)
                self.assertFalse(differing(head, whole[:33]).any())
            tail = dequantize(payload[-4 * format.bytes :], format.identifier, [4, shape[1]], output_dtype)
            self.assertFalse(differing(tail, whole[-4:]).any())


class Out(TestCase):
    """An array given to be filled."""

    @parameterized.expand(TYPE_ROWS)
    def test_is_filled_and_returned(self, _, output_dtype):
        for format in FORMATS.values():
            payload = payloads.random_blocks(format, 6, "out").tobytes()
            fresh = dequantize(payload, format.identifier, [2, 3, format.elements], output_dtype)
            out = np.empty_like(fresh)
            self.assertIs(dequantize(payload, format.identifier, out.shape, output_dtype, out=out), out)
            self.assertFalse(differing(out, fresh).any())

    def test_memory_mapped_and_unaligned(self):
        with TemporaryDirectory() as directory:
            mapped = np.memmap(Path(directory, "out"), np.float32, "w+", 4, (2, 64))
            self.assertIs(dequantize(PAYLOAD, "gguf:q4_0", [2, 64], out=mapped), mapped)
            self.assertFalse(differing(np.array(mapped).ravel(), VALUES).any())
        for output_dtype, dtype in OUTPUT_DTYPES.items():
            fresh = dequantize(PAYLOAD, "gguf:q4_0", [2, 64], output_dtype)
            out = np.empty(128 * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(2, 64)
            self.assertFalse(differing(dequantize(PAYLOAD, "gguf:q4_0", [2, 64], output_dtype, out=out), fresh).any())

    def test_is_filled_between_the_bytes_of_the_payload(self):
        """Only memory that is really shared is an overlap."""
        memory = np.zeros((2, 64 * 4), np.uint8)
        x, out = memory[0, : 2 * Q4_0.bytes], memory[1].view(np.float32)
        x[:] = np.frombuffer(PAYLOAD[: x.size], np.uint8)
        self.assertFalse(differing(dequantize(x, "gguf:q4_0", [64], out=out), VALUES[:64]).any())

    @parameterized.expand(
        [
            ("list", [0.0] * 64, "out is of type list, expected a NumPy array"),
            ("type", np.zeros(64), "out has element type float64, expected float32"),
            ("order", np.zeros(64, ">f4"), "out has element type float32 in foreign byte order, expected float32"),
            ("shape", np.zeros((2, 32), "f4"), r"gguf:q4_0: out has shape \[2, 32\], expected \[64\]"),
            ("strides", np.zeros(128, "f4")[::2], r"out has strides \[8\], expected a C-contiguous array"),
            ("read_only", np.broadcast_to(np.zeros(64, "f4"), 64), "out is read-only, expected a writable array"),
        ]
    )
    def test_refused(self, _, out, message):
        with self.assertRaisesRegex(PackedTensorError, f"^{message}$"):
            dequantize(PAYLOAD[:36], "gguf:q4_0", [64], out=out)
        self.assertFalse(np.any(out))

    def test_overlap_is_refused(self):
        memory = np.zeros(256, np.uint8)
        out = memory.view(np.float32)
        for x in (memory[:36], memory[::-1][:36], memory[: 36 * 7 : 7]):
            with self.assertRaisesRegex(PackedTensorError, "^out overlaps x, expected memory of its own$"):
                dequantize(x, "gguf:q4_0", [64], out=out)

    def test_overlap_of_a_class_of_its_own(self):
        class Hidden(np.ndarray):
            def reshape(self, *_):
                return np.zeros(64, np.float32)

        memory = np.zeros(256, np.uint8)
        with self.assertRaisesRegex(PackedTensorError, "^out overlaps x"):
            dequantize(memory[:36], "gguf:q4_0", [64], out=memory.view(np.float32).view(Hidden))

    @parameterized.expand([("payload", {"x": b""}), ("threads", {"threads": 0}), ("format", {"format": "q4_0"})])
    def test_nothing_is_written_where_anything_is_refused(self, _, wrong):
        out = np.ones(64, np.float32)
        with self.assertRaises(PackedTensorError):
            dequantize(**{"x": PAYLOAD[:36], "format": "gguf:q4_0", "shape": [64], "out": out, **wrong})
        self.assertTrue((out == 1).all())


class Memory(TestCase):
    def check(self, format, elements, threads, limit):
        """The peak of allocations beside input and output, for every output type."""
        x = np.zeros(elements // format.elements * format.bytes * 2, np.uint8)[::2]  # non-contiguous: the worst case
        dequantize(b"\0" * format.bytes, format.identifier, [format.elements])  # reads the codebook
        for output_dtype, dtype in OUTPUT_DTYPES.items():
            out = np.empty(elements, dtype)
            tracemalloc.start()
            try:
                dequantize(x, format.identifier, [elements], output_dtype, out=out, threads=threads)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertLess(peak, limit)

    @parameterized.expand(FORMAT_ROWS)
    def test_no_temporary_grows_with_the_tensor(self, _, format):
        """4 Mi elements: a temporary of a byte an element would be 4 MiB."""
        self.check(format, 4 * MIB, 1, 4 * MIB)

    @parameterized.expand(FORMAT_ROWS)
    def test_threads_keep_within_bounds(self, _, format):
        """32 Mi elements: a temporary of a byte an element would be 32 MiB."""
        for threads in (2, 32):
            self.check(format, 32 * MIB, threads, 28 * MIB)


class PackedSize(TestCase):
    @given(st.sampled_from(list(FORMATS.values())), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 4))
    def test_is_the_sum_over_rows_and_what_dequantize_takes(self, format, rows, blocks):
        shape = [*rows, blocks * format.elements]
        size = packed_size(format.identifier, shape)
        self.assertEqual(size, sum(format.bytes for _ in range(blocks) for _ in np.ndindex(*rows)))
        actual = dequantize(bytes(size), format.identifier, shape)
        self.assertEqual(list(actual.shape), shape)
        for wrong in {size - 1, size + 1} - {-1}:
            with self.assertRaises(PackedTensorError):
                dequantize(bytes(wrong), format.identifier, shape)

    def test_of_a_shape_that_no_machine_holds(self):
        self.assertEqual(packed_size("gguf:q4_0", [2**40, 2**20]), 2**55 * 18)
        self.assertEqual(packed_size("gguf:q4_0", [0, 2**62, 2**62]), 0)
