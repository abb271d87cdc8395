"""Conversion from FLOAT, against NumPy's and ml_dtypes' own, element by element."""

from __future__ import annotations

from unittest import TestCase

import ml_dtypes
import numpy as np
from parameterized import parameterized

from onnx_dqp.convert import convert
from onnx_dqp.formats.unpack import Scratch

LARGEST = np.float32(65520)  # the least that rounds to FLOAT16's infinity


def converted(values, dtype, alone=True):
    out = np.empty(values.shape, dtype)
    with np.errstate(all="ignore"):
        convert(values.copy(), out, Scratch(), alone)
    return out


class Half(TestCase):
    def check(self, values):
        """``values`` in pieces of a tile's size, as FLOAT16, equal to NumPy's conversion in every bit."""
        for piece in np.array_split(values, max(1, values.size >> 17)):
            with np.errstate(over="ignore"):
                wanted = piece.astype(np.float16)
            found = converted(piece, np.float16)
            wrong = np.flatnonzero(found.view(np.uint16) != wanted.view(np.uint16))
            self.assertEqual(wrong.size, 0, piece[wrong[:5]])

    def check_both_signs(self, values):
        self.check(values)
        self.check(-values)

    def test_the_neighbourhood_of_every_number_and_every_half_way_point(self):
        """Each FLOAT16 number, each point half way to the next, and the four FLOAT numbers around either."""
        numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
        half_way = (numbers[:-1] + numbers[1:]) / 2
        points = np.concatenate([numbers, half_way])
        bits = points.view(np.int32)[:, np.newaxis] + np.arange(-2, 3, dtype=np.int32)
        self.check_both_signs(np.abs(bits.clip(0).astype(np.uint32).view(np.float32)).ravel())

    def test_random_bit_patterns(self):
        """A hundred million numbers that FLOAT16 can hold, of either sign and every exponent that FLOAT has there."""
        rng = np.random.default_rng(0)
        count = 0
        while count < 100_000_000:
            exponents = rng.integers(0, 127 + 16, 1 << 20, np.uint32)
            rest = rng.integers(0, 1 << 32, exponents.size, np.uint32) & 0x807FFFFF  # sign and mantissa
            values = (exponents << 23 | rest).view(np.float32)
            values = values[np.abs(values) < LARGEST]
            self.check(values)
            count += values.size

    def test_the_quick_way_is_taken_for_them(self):
        with self.assertRaises(ZeroDivisionError), np.errstate(all="raise"):
            convert(np.ones(4, np.float32), np.empty(4, np.float16), _Broken(), True)

    @parameterized.expand(
        [
            ("zeros", [0.0, -0.0]),
            ("overflow", [1.0, 65519.996, 65520.0, -65520.0, 1e38]),
            ("infinities", [1.0, np.inf, -np.inf]),
            ("nan", [1.0, np.nan, -np.nan]),
            ("subnormal_floats", [1e-45, -1e-40, 2.0**-25, 2.0**-24]),
        ]
    )
    def test_special(self, _, values):
        self.check_both_signs(np.array(values, np.float32))

    def test_nan_payloads(self):
        mantissas = np.concatenate([1 << np.arange(23), [0x7FFFFF]]).astype(np.uint32)
        self.check_both_signs((0x7F800000 | mantissas).view(np.float32))

    def test_threads_together_give_the_same(self):
        values = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
        self.assertTrue(np.array_equal(converted(values, np.float16, True), converted(values, np.float16, False)))


class _Broken:
    """Memory for nobody: tells that it was asked."""

    def empty(self, *_):
        raise ZeroDivisionError


class Others(TestCase):
    @parameterized.expand([("FLOAT", np.float32), ("DOUBLE", np.float64), ("BFLOAT16", ml_dtypes.bfloat16)])
    def test_as_numpy_does(self, _, dtype):
        values = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            wanted = values.astype(dtype)
        self.assertEqual(converted(values, dtype).tobytes(), wanted.tobytes())
