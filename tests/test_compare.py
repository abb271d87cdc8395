"""The comparison: what is equal, how far apart values are, and what a report of a difference says."""

from __future__ import annotations

from unittest import TestCase

import ml_dtypes
import numpy as np
from parameterized import parameterized

from conformance.compare import Comparison, differing

F4 = np.float32


def bits(dtype, *values):
    return np.array(values, f"u{np.dtype(dtype).itemsize}").view(dtype)


class Differing(TestCase):
    def test_any_nan_equals_any_nan_and_zeros_differ(self):
        a = bits(F4, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x00000000, 0x80000000, 0x3F800000)
        b = bits(F4, 0xFF800001, 0x7FC00000, 0x7FC00000, 0x80000000, 0x80000000, 0x3F800001)
        self.assertEqual(differing(a, b).tolist(), [False, False, False, True, False, True])

    def test_other_types_and_shapes_are_refused(self):
        for other in (np.zeros(3, np.float64), np.zeros((3, 1), F4)):
            with self.assertRaisesRegex(ValueError, "found .* expected float32 of shape"):
                differing(other, np.zeros(3, F4))


class Comparing(TestCase):
    def test_difference(self):
        expected = bits(F4, 0x3F800000, 0x40000000, 0x40400000, 0x7F800000).reshape(2, 2)
        actual = bits(F4, 0x3F800000, 0x40000002, 0x40400001, 0x7F7FFFFF).reshape(2, 2)
        found = Comparison().difference(actual, expected)
        self.assertEqual((found.wrong, found.total, found.ulp, found.first), (3, 4, 2, 1))
        self.assertEqual((found.expected_bits, found.actual_bits), ("0x40000000", "0x40000002"))
        self.assertEqual((found.expected_value, found.actual_value), ("2.0", "2.000000476837158"))

    @parameterized.expand(
        [
            ("across_zero", F4, 0x80000001, 0x00000001, 2),
            ("negative", F4, 0xBF800000, 0xBF800003, 3),
            ("to_infinity", np.float16, 0x7BFF, 0x7C00, 1),
            ("bfloat16", ml_dtypes.bfloat16, 0x3F80, 0x3F85, 5),
            ("double", np.float64, 0x3FF0000000000000, 0xBFF0000000000000, 2 * 0x3FF0000000000000),
            ("zeros", F4, 0x80000000, 0x00000000, 0),
        ]
    )
    def test_ulp(self, _, dtype, a, b, ulp):
        self.assertEqual(Comparison().difference(bits(dtype, a), bits(dtype, b)).ulp, ulp)

    def test_nan_against_a_number_has_no_distance(self):
        found = Comparison().difference(bits(F4, 0x7FC00000), bits(F4, 0x3F800000))
        self.assertIsNone(found.ulp)
        self.assertIsNotNone(Comparison.parse("ulp:1000000000").difference(bits(F4, 0x7FC00000), bits(F4, 0x3F800000)))

    def test_kinds(self):
        zeros = bits(F4, 0x80000000), bits(F4, 0x00000000)
        near = bits(F4, 0x3F800000), bits(F4, 0x3F800002)
        nans = bits(F4, 0xFFC00001), bits(F4, 0x7FC00000)
        equal = {
            how: [Comparison.parse(how).difference(*pair) is None for pair in (zeros, near, nans)]
            for how in ("bits", "value", "ulp:1", "ulp:2", "ulp:0")
        }
        self.assertEqual(
            equal,
            {
                "bits": [False, False, True],
                "value": [True, False, True],
                "ulp:0": [True, False, True],
                "ulp:1": [True, False, True],
                "ulp:2": [True, True, True],
            },
        )

    @parameterized.expand(["", "bit", "ulp", "ulp:", "ulp:-1", "ulp:1.5", "value:1"])
    def test_bad_kinds(self, text):
        with self.assertRaisesRegex(ValueError, "expected bits, value or ulp:N"):
            Comparison.parse(text)

    @parameterized.expand(
        [
            ("list", [1.0], "the output is of type list, expected an array"),
            ("none", None, "the output is of type NoneType"),
            ("type", np.zeros(2, np.float64), "the output has type float64, expected float32"),
            ("shape", np.zeros((2, 1), F4), r"the output has shape \[2, 1\], expected \[2\]"),
        ]
    )
    def test_what_is_no_array_of_the_type_and_shape(self, _, actual, message):
        self.assertRegex(Comparison("ulp", 10).difference(actual, np.zeros(2, F4)).summary, message)

    def test_non_contiguous_arrays(self):
        wide = np.arange(20, dtype=F4).reshape(5, 4)
        self.assertIsNone(Comparison().difference(wide[:, ::2], np.ascontiguousarray(wide[:, ::2])))
