"""Bad input is refused with PackedTensorError and one line, before anything is allocated."""

from __future__ import annotations

import tracemalloc
from unittest import TestCase, mock

import ml_dtypes
import numpy as np
from helpers import HUGE, NODES, one_node_model
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator as PlainEvaluator
from parameterized import parameterized

from onnx_dqp import FORMATS, DequantizePacked, PackedTensorError, ReferenceEvaluator, dequantize, packed_size
from onnx_dqp.rules import payload_size

X = np.zeros(36, np.uint8)
MAX_RANK = getattr(np, "MAXDIMS", 64)
RELEASED = memoryview(bytes(36))
RELEASED.release()

# What is wrong, the arguments of dequantize, and the whole message.
ARGUMENTS = [
    (
        "R4_one_short",
        (bytes(287), "gguf:q4_k", [2, 256]),
        "gguf:q4_k: x has 287 bytes, but shape [2, 256] needs 288 (2 rows x 1 block x 144 bytes)",
    ),
    (
        "R4_one_long",
        (bytes(37), "gguf:q4_0", [64]),
        "gguf:q4_0: x has 37 bytes, but shape [64] needs 36 (1 row x 2 blocks x 18 bytes)",
    ),
    (
        "R4_not_empty",
        (bytes(1), "gguf:q4_0", [0, 32]),
        "gguf:q4_0: x has 1 byte, but shape [0, 32] needs 0 (0 rows x 1 block x 18 bytes)",
    ),
    ("R1_case", (X, "gguf:Q4_0", [64]), "unknown format 'gguf:Q4_0': did you mean gguf:q4_0?"),
    ("R1_no_prefix", (X, "Q6_K", [64]), "unknown format 'Q6_K': did you mean gguf:q6_k?"),
    ("R1_parameter", (X, "gguf:q4_0:block=32", [64]), "unknown format 'gguf:q4_0:block=32': did you mean gguf:q4_0?"),
    ("R1_query", (X, "gguf:q4_0?x=1", [64]), "unknown format 'gguf:q4_0?x=1': did you mean gguf:q4_0?"),
    ("R1_space", (X, "gguf:q1_0 ", [64]), "unknown format 'gguf:q1_0 ': did you mean gguf:q1_0"),
    ("R1_empty", (X, "", [64]), "unknown format '': expected one of gguf:q4_0, gguf:q4_1, "),
    ("R1_bytes", (X, b"gguf:q4_0", [64]), "format is of type bytes, expected a string"),
    ("R1_list", (X, ["gguf:q4_0"], [64]), "format is of type list, expected a string"),
    ("R2_rank_0", (X, "gguf:q4_0", []), "gguf:q4_0: shape is [], expected a rank of at least 1"),
    (
        "R2_negative",
        (X, "gguf:q4_0", [-1, 32]),
        "gguf:q4_0: shape [-1, 32] has dimension -1, expected no negative dimension",
    ),
    (
        "R2_float",
        (X, "gguf:q4_0", [2.0, 32]),
        "gguf:q4_0: shape has an item that is of type float, expected a list of integers",
    ),
    ("R2_bool", (X, "gguf:q4_0", [True, 32]), "gguf:q4_0: shape has an item that is True, expected a list of integers"),
    (
        "R2_digits",
        (X, "gguf:q4_0", [-(10**5000)]),
        "gguf:q4_0: shape [an integer of 16610 bits] has dim",
    ),
    ("R2_rank", (X, "gguf:q4_0", range(10**7)), "gguf:q4_0: shape has rank 10000000, expected at most 65536"),
    ("R9_output_digits", (X, "gguf:q4_0", [64], 10**5000), "output_dtype is an integer of 16610 bits, expected the"),
    (
        "R4_bytes_overflow",
        (X, "gguf:q8_0", [2**58 - 1, 32]),
        f"gguf:q8_0: shape [{2**58 - 1}, 32] has more elements or bytes than fit in 63 bits",
    ),
    (
        "numpy_size_of_wide_type",
        (b"", "gguf:q4_0", [0, 2**55, 32], TensorProto.DOUBLE),
        f"gguf:q4_0: shape [0, {2**55}, 32] is too large for a NumPy array",
    ),
    ("R2_number", (X, "gguf:q4_0", 64), "gguf:q4_0: shape is of type int, expected a list of integers"),
    ("R2_text", (X, "gguf:q4_0", "64"), "gguf:q4_0: shape is of type str, expected a list of integers"),
    ("R2_bytes", (X, "gguf:q4_0", b"\x40"), "gguf:q4_0: shape is of type bytes, expected a list of integers"),
    ("R2_none", (X, "gguf:q4_0", None), "gguf:q4_0: shape is of type NoneType, expected a list of integers"),
    ("R2_too_wide", (b"", "gguf:q4_0", [0, 2**63]), f"gguf:q4_0: shape [0, {2**63}] has a dimension over 2^63 - 1"),
    (
        "R3",
        (X, "gguf:q4_k", [2, 200]),
        "gguf:q4_k: the last dimension of shape [2, 200] is 200, expected a multiple of 256, the elements of a block",
    ),
    (
        "R3_empty",
        (b"", "gguf:q4_0", [0, 33]),
        "gguf:q4_0: the last dimension of shape [0, 33] is 33, expected a multiple of 32, the elements of a block",
    ),
    (
        "R4_overflow",
        (X, "gguf:q4_0", [HUGE, HUGE, 32]),
        f"gguf:q4_0: shape [{HUGE}, {HUGE}, 32] has more elements or bytes than fit in 63 bits",
    ),
    (
        "R4_elements_overflow",
        (X, "gguf:q1_0", [2**56, 128]),
        f"gguf:q1_0: shape [{2**56}, 128] has more elements or bytes than fit in 63 bits",
    ),
    (
        "R4_huge",
        (X, "gguf:q4_0", [2**40, 2**18]),
        f"gguf:q4_0: x has 36 bytes, but shape [{2**40}, {2**18}] needs {2**53 * 18} ({2**40} rows x 8192 blocks x 18 ",
    ),
    ("R9_float", (np.zeros(36), "gguf:q4_0", [64]), "x has element type float64, expected uint8"),
    ("R9_int8", (np.zeros(36, np.int8), "gguf:q4_0", [64]), "x has element type int8, expected uint8"),
    (
        "R9_int4",
        (np.zeros(36, ml_dtypes.uint4), "gguf:q4_0", [64]),
        "x has element type uint4, expected uint8",
    ),
    (
        "R9_rank_2",
        (np.zeros((2, 18), np.uint8), "gguf:q4_0", [64]),
        "x has rank 2 (shape [2, 18]), expected rank 1",
    ),
    ("R9_rank_0", (np.zeros((), np.uint8), "gguf:q4_0", [32]), "x has rank 0 (shape []), expected rank 1"),
    (
        "R9_memoryview",
        (memoryview(np.zeros(9, np.float32)), "gguf:q4_0", [64]),
        "x is a memoryview of format 'f', expected 'B' (unsigned bytes)",
    ),
    (
        "R2_lines",
        (X, "gguf:q4_0", np.array([[2], [64]])),
        "gguf:q4_0: shape is an array of rank 2, expected a list of integers",
    ),
    ("R9_released", (RELEASED, "gguf:q4_0", [64]), "x is a released memoryview, expected one of bytes"),
    (
        "R9_list",
        ([0] * 36, "gguf:q4_0", [64]),
        "x is of type list, expected a uint8 array of rank 1, bytes, bytearray or memoryview",
    ),
    (
        "R9_none",
        (None, "gguf:q4_0", [64]),
        "x is of type NoneType, expected a uint8 array of rank 1, bytes, bytearray or memoryview",
    ),
    (
        "R9_output_int32",
        (X, "gguf:q4_0", [64], TensorProto.INT32),
        "output_dtype is 6, expected the number of one of FLOAT (1), FLOAT16 (10), DOUBLE (11), BFLOAT16 (16)",
    ),
    ("R9_output_bool", (X, "gguf:q4_0", [64], True), "output_dtype is True, expected the number of one of FLOAT (1), "),
    (
        "R9_output_dtype",
        (X, "gguf:q4_0", [64], np.float32),
        "output_dtype is of type type, expected the number of one of ",
    ),
    (
        "numpy_size",
        (b"", "gguf:q4_0", [0, HUGE, 32]),
        f"gguf:q4_0: shape [0, {HUGE}, 32] is too large for a NumPy array",
    ),
    (
        "numpy_rank",
        (bytes(18), "gguf:q4_0", [1] * 64 + [32]),
        "gguf:q4_0: shape [1, 1, 1, 1, 1, 1, 1, 1, ...] has rank 65",
    ),
]


class Arguments(TestCase):
    @parameterized.expand(ARGUMENTS)
    def test_message(self, _, arguments, message):
        with self.assertRaises(PackedTensorError) as caught:
            dequantize(*arguments)
        text = str(caught.exception)
        self.assertEqual(text[: len(message)], message)
        self.assertNotIn("\n", text)

    @parameterized.expand(ARGUMENTS)
    def test_nothing_is_allocated(self, _, arguments, __):
        with mock.patch("numpy.empty", side_effect=AssertionError("allocated")):
            tracemalloc.start()
            try:
                with self.assertRaises(PackedTensorError):
                    dequantize(*arguments)
                self.assertLess(tracemalloc.get_traced_memory()[1], 1 << 20)
            finally:
                tracemalloc.stop()

    def test_a_long_identifier_is_compared_in_part(self):
        """Matching takes quadratic time."""
        with mock.patch("difflib.get_close_matches", return_value=[]) as matched:
            with self.assertRaises(PackedTensorError) as caught:
                dequantize(X, "gguf:q4_0" * 1_000_000, [64])
            self.assertLessEqual(len(matched.call_args.args[0]), 64)
        self.assertLess(len(str(caught.exception)), 700)

    def test_the_product_of_many_dimensions_is_cut_off(self):
        """Multiplying integers that grow without bound takes quadratic time."""

        class Counted(int):
            def __rmul__(self, other):
                products.append(other)
                return int(self) * other

        products = []
        dims = (*(Counted(HUGE) for _ in range(100)), 32)
        with self.assertRaises(PackedTensorError):
            payload_size(FORMATS["gguf:q4_0"], dims)
        self.assertLess(len(products), 4)

    def test_a_shape_of_many_dimensions_does_not_fill_the_message(self):
        with self.assertRaises(PackedTensorError) as caught:
            packed_size("gguf:q4_0", [HUGE] * 100_000 + [32])
        self.assertLess(len(str(caught.exception)), 300)

    @given(st.binary(max_size=80), st.sampled_from([*FORMATS, "gguf:q9"]), st.lists(st.integers(-2, 2**64), max_size=4))
    def test_anything_gives_an_array_or_the_one_exception(self, x, identifier, shape):
        try:
            actual = dequantize(x, identifier, shape)
        except PackedTensorError as error:
            self.assertNotIn("\n", str(error))
        else:
            self.assertEqual(list(actual.shape), shape)

    def test_what_is_just_allowed(self):
        self.assertEqual(packed_size("gguf:q4_0", [HUGE, HUGE, 0, 32]), 0)
        self.assertEqual(packed_size("gguf:q4_0", [0, 2**63 - 32]), 0)
        self.assertEqual(dequantize(bytes(18), "gguf:q4_0", [1] * (MAX_RANK - 1) + [32]).ndim, MAX_RANK)
        self.assertEqual(dequantize(b"", "gguf:q4_0", [0, 2**54, 32]).size, 0)

    def test_exception_is_a_value_error(self):
        self.assertTrue(issubclass(PackedTensorError, ValueError))


class Nodes(TestCase):
    """What is static in the node is refused when the evaluator is built."""

    @parameterized.expand(NODES)
    def test_message(self, _, made, message):
        model = one_node_model()
        model.graph.node[0].CopyFrom(made)
        for build in (
            lambda: ReferenceEvaluator(model),
            lambda: PlainEvaluator(model, new_ops=[DequantizePacked]),
            lambda: ReferenceEvaluator(made),
        ):
            with self.assertRaises(PackedTensorError) as caught:
                build()
            self.assertTrue(
                str(caught.exception).startswith(f"DequantizePacked node 'dq': {message}"), caught.exception
            )

    @parameterized.expand(
        [("rank", [1] * 64 + [32], "rank 65"), ("size", [0, HUGE, 32], "too large for a NumPy array")]
    )
    def test_what_numpy_cannot_hold(self, _, shape, message):
        with self.assertRaisesRegex(PackedTensorError, f"DequantizePacked node 'y': .* {message}"):
            ReferenceEvaluator(one_node_model(None, shape))

    def test_a_payload_is_refused_when_it_runs(self):
        evaluator = ReferenceEvaluator(one_node_model(length=None))
        for x, message in (
            (np.zeros(35, np.uint8), "gguf:q4_0: x has 35 bytes, but shape [2, 32] needs 36"),
            (np.zeros((2, 18), np.uint8), "x has rank 2 (shape [2, 18]), expected rank 1"),
            (np.zeros(36, np.float32), "x has element type float32, expected uint8"),
        ):
            with self.assertRaises(PackedTensorError) as caught:
                evaluator.run(None, {"x": x})
            self.assertTrue(str(caught.exception).startswith(f"DequantizePacked node 'y': {message}"), caught.exception)
