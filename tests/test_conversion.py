"""Rules R6 and R7: FLOAT arithmetic, then one conversion; and no NumPy warning, whatever the payload."""

from __future__ import annotations

import warnings
from unittest import TestCase

import numpy as np
from helpers import FORMAT_ROWS, TYPE_ROWS
from onnx import TensorProto
from parameterized import parameterized

from conformance import exact, payloads
from conformance.compare import differing
from conformance.expected import BINARIES
from onnx_dqp import FORMATS, dequantize
from onnx_dqp.rules import OUTPUT_DTYPES


def q8_k(floats):
    """A payload whose decoded FLOAT values are the given ones: Q8_K blocks with scale d and codes 1."""
    floats = np.asarray(floats, np.float32)
    blocks = np.zeros(len(floats), FORMATS["gguf:q8_k"].layout)
    blocks["d"] = floats
    blocks["qs"][:, 0] = 1
    return blocks.tobytes()


def converted(floats, output_dtype):
    payload = q8_k(floats)
    return dequantize(payload, "gguf:q8_k", [len(floats), 256], output_dtype)[:, 0]


def neighbourhoods(halfway):
    """FLOAT values at, just below and just above each of these, with both signs."""
    halfway = np.asarray(halfway, np.float32)
    inf = np.float32(np.inf)
    some = np.concatenate([halfway, np.nextafter(halfway, -inf), np.nextafter(halfway, inf)])
    return np.concatenate([some, -some])


class Conversion(TestCase):
    def check(self, floats, output_dtype):
        binary, dtype = BINARIES[output_dtype], OUTPUT_DTYPES[output_dtype]
        bits = [binary.round(exact.FLOAT.number(int(b))) for b in np.asarray(floats, np.float32).view(np.uint32)]
        reference = np.array(bits, f"u{dtype.itemsize}").view(dtype)
        self.assertFalse(differing(converted(floats, output_dtype), reference).any())

    @parameterized.expand(
        [
            ("FLOAT16", TensorProto.FLOAT16, np.float16, 0x7C00, 16),
            ("BFLOAT16", TensorProto.BFLOAT16, OUTPUT_DTYPES[TensorProto.BFLOAT16], 0x7F80, 16),
        ]
    )
    def test_ties_go_to_even_in_every_binade(self, _, output_dtype, dtype, infinity, step):
        bits = np.arange(0, infinity, step - 1, dtype=np.uint16)  # an odd step: even and odd values, all exponents
        low = bits.view(dtype).astype(np.float64)
        high = np.where(bits + 1 < infinity, (bits + 1).astype(np.uint16).view(dtype).astype(np.float64), np.inf)
        with np.errstate(over="ignore"):
            halfway = ((low + high) / 2).astype(np.float32)  # exact: 12 significant bits at most
        self.check(neighbourhoods(halfway[np.isfinite(halfway)]), output_dtype)

    @parameterized.expand(TYPE_ROWS)
    def test_special_values(self, _, output_dtype):
        self.check(np.array(payloads.SPECIAL_FLOAT, np.uint32).view(np.float32), output_dtype)

    def test_float16_overflows_from_65520_up(self):
        below, at = np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)
        actual = converted([below, at, -below, -at], TensorProto.FLOAT16)
        self.assertEqual(actual.tolist(), [65504.0, float("inf"), -65504.0, float("-inf")])

    def test_bfloat16_overflow_and_truncation(self):
        largest = np.uint32(0x7F7F0000).view(np.float32)
        actual = converted([largest, np.float32(3.4e38), np.float32(1 + 2**-7 * 0.75)], TensorProto.BFLOAT16)
        self.assertEqual(actual.view(np.uint16).tolist(), [0x7F7F, 0x7F80, 0x3F81])

    @parameterized.expand([("FLOAT16", TensorProto.FLOAT16, 2.0**-24), ("BFLOAT16", TensorProto.BFLOAT16, 2.0**-133)])
    def test_subnormal_results(self, _, output_dtype, smallest):
        self.check(neighbourhoods(smallest * np.arange(0.5, 9, 0.25)), output_dtype)

    def test_float_is_rounded_first(self):
        """Q5_1: 29 d + m is just above a FLOAT16 tie, and its FLOAT is the tie, which goes down to even."""
        blocks = np.zeros(1, FORMATS["gguf:q5_1"].layout)
        blocks["d"], blocks["m"], blocks["qh"], blocks["qs"] = 565 / 1024, 32768, 0xFFFFFFFF, 0xDD
        tie = np.float32(32768 + 16)
        rounded_once = np.float16(32768 + 16 + 1 / 1024)
        self.assertEqual(rounded_once, 32800)
        actual = {
            output_dtype: dequantize(blocks.tobytes(), "gguf:q5_1", [32], output_dtype)[0]
            for output_dtype in OUTPUT_DTYPES
        }
        self.assertEqual(actual[TensorProto.FLOAT], tie)
        self.assertEqual(actual[TensorProto.FLOAT16], 32768)
        self.assertEqual(actual[TensorProto.BFLOAT16], 32768)
        self.assertEqual(actual[TensorProto.DOUBLE], tie)


class NoWarning(TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_even_where_numpy_is_told_to_raise(self, _, format):
        blocks = np.concatenate([payloads.scale_sweep(format, 1), payloads.random_blocks(format, 64, "warnings")])
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            for output_dtype in OUTPUT_DTYPES:
                dequantize(blocks.tobytes(), format.identifier, [len(blocks), format.elements], output_dtype)

    def test_the_callers_error_state_stays(self):
        with np.errstate(all="raise"):
            dequantize(bytes(18), "gguf:q4_0", [32])
            self.assertEqual(np.geterr()["over"], "raise")
