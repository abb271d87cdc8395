"""The catalogue: enough cases, each with a reason, and each covering what its category promises."""

from __future__ import annotations

from collections import Counter
from unittest import TestCase

import numpy as np
from helpers import FORMAT_ROWS
from onnx import TensorProto
from parameterized import parameterized

from conformance import exact
from conformance.cases import CATEGORIES, FLAGS, invalid_cases, valid_cases
from conformance.compare import differing
from conformance.expected import BINARIES
from conformance.payloads import SPECIAL_FLOAT, SPECIAL_FLOAT16, scale_bits, scales
from conformance.table_decoder import Payload, decode
from onnx_dqp import FORMATS
from onnx_dqp.formats.anatomy import RULES

VALID = list(valid_cases())
INVALID = list(invalid_cases())
FLOAT16, BFLOAT16, DOUBLE = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE


def payloads(format, category, *whats, output_dtype=None):
    """The payloads of some cases of a format."""
    found = [
        c.payload
        for c in VALID
        if c.format is format
        and c.category == category
        and (not whats or c.what in whats)
        and output_dtype in (None, c.output_dtype)
    ]
    return list(dict.fromkeys(found))


def seen(format, field, category, *whats, signed=False):
    """The values that an integer of the format's rule has at each element, over some cases: a set per element."""
    rule = RULES[format.name]
    bits = getattr(rule, field)
    values = [Payload(p, rule).integers(bits, signed) for p in payloads(format, category, *whats)]
    table = np.concatenate(values)
    return [set(column.tolist()) for column in table.T]


class Catalogue(TestCase):
    def test_counts(self):
        self.assertGreaterEqual(len(VALID), 700)
        self.assertGreaterEqual(len(INVALID), 70)
        self.assertEqual(set(Counter(c.category for c in [*VALID, *INVALID])), set(CATEGORIES))

    def test_names_are_unique_and_flags_explained(self):
        names = [case.name for case in [*VALID, *INVALID]]
        self.assertEqual(len(names), len(set(names)))
        flags = {flag for case in [*VALID, *INVALID] for flag in case.flags}
        self.assertEqual(flags, set(FLAGS))

    def test_each_has_a_sentence(self):
        for case in [*VALID, *INVALID]:
            self.assertRegex(case.reason, r"^[A-Za-z].*[^.]\.$")
            self.assertNotIn("\n", case.reason)

    def test_basic_is_formats_times_types(self):
        basic = [(c.format.identifier, c.type_name) for c in VALID if c.category == "basic"]
        self.assertEqual(len(basic), 27 * 4)
        self.assertEqual(len(set(basic)), 27 * 4)

    def test_finite_profile_has_no_special_scale(self):
        for case in VALID:
            if "SpecialScale" in case.flags:
                continue
            blocks = np.frombuffer(case.payload, case.format.layout)
            for scale in scales(case.format):
                if (case.format.name, scale) == ("Q8_1", "s"):
                    continue
                bits = scale_bits(case.format, blocks, scale)
                fraction, mask = (23, 255) if case.format.name == "Q8_K" else (10, 31)
                exponent, rest = bits >> fraction & mask, bits & ((1 << fraction) - 1)
                self.assertFalse((exponent == mask).any(), case.name)
                self.assertFalse(((exponent == 0) & (rest != 0)).any(), case.name)

    def test_shapes(self):
        for case in VALID:
            blocks = int(np.prod(case.shape, dtype=object)) // case.format.elements
            self.assertEqual(len(case.payload), blocks * case.format.bytes, case.name)
        shapes = {case.shape for case in VALID if case.category == "shapes"}
        self.assertEqual({len(shape) for shape in shapes}, {1, 2, 3, 4, 5, 6})
        zeros = {tuple(dim == 0 for dim in shape) for shape in shapes if 0 in shape}
        self.assertTrue({(True, False), (False, True), (False, True, False), (True,), (True, True, True)} <= zeros)


class Codes(TestCase):
    @parameterized.expand([row for row in FORMAT_ROWS if RULES[row[0]].rows is None])
    def test_every_code_at_every_position(self, name, format):
        rule = RULES[name]
        codes = set(range(1 << rule.code.shape[1]))
        for values in seen(format, "code", "codes", "codes"):
            self.assertEqual(values, codes)

    @parameterized.expand([row for row in FORMAT_ROWS if RULES[row[0]].rows is not None])
    def test_every_codebook_row(self, name, format):
        found = set().union(*seen(format, "code", "codes", "codebook_rows"))
        self.assertEqual(found, set(range(len(RULES[name].rows))))

    @parameterized.expand([row for row in FORMAT_ROWS if RULES[row[0]].sign is not None])
    def test_every_sign_pattern_at_every_position(self, name, format):
        rule = RULES[name]
        stored = rule.sign[:, 0].reshape(32, 8)
        width = 7 if rule.sign.shape[1] > 1 else 8
        for row in stored:
            bits = np.arange(width) + row[0]
            values = [Payload(p, rule).integers(bits[np.newaxis]) for p in payloads(format, "codes", "signs")]
            self.assertEqual(set(np.concatenate(values).ravel().tolist()), set(range(1 << width)))

    @parameterized.expand(
        [
            (f"{name}_{field}", format, field)
            for name, format in FORMAT_ROWS
            for field in ("factor", "minimum_factor")
            if getattr(RULES[name], field) is not None
        ]
    )
    def test_every_sub_scale_at_every_sub_block(self, _, format, field):
        width = getattr(RULES[format.name], field).shape[1]
        for values in seen(format, field, "codes", "sub_scales"):
            self.assertEqual(values, set(range(1 << width)))

    @parameterized.expand(["gguf:mxfp4", "gguf:nvfp4"])
    def test_every_scale_byte(self, identifier):
        for values in seen(FORMATS[identifier], "scale", "scales"):
            self.assertEqual(values, set(range(256)))


class Scales(TestCase):
    @parameterized.expand([row for row in FORMAT_ROWS if scales(row[1])])
    def test_every_special_value_of_every_scale(self, name, format):
        special = set(SPECIAL_FLOAT if name == "Q8_K" else SPECIAL_FLOAT16)
        for scale in scales(format):
            if (name, scale) == ("Q8_1", "s"):
                continue
            for output_dtype in BINARIES:
                found = set()
                for payload in payloads(format, "scales", output_dtype=output_dtype):
                    found |= set(scale_bits(format, np.frombuffer(payload, format.layout), scale).tolist())
                self.assertLessEqual(special, found)
                if output_dtype == TensorProto.FLOAT and name != "Q8_K":
                    self.assertEqual({bits >> 10 & 31 for bits in found}, set(range(32)))


def exactly(format, payload):
    """The elements as exact numbers, before any rounding."""
    rule = exact.FORMATS[format.identifier]
    for start in range(0, len(payload), rule.bytes):
        block = payload[start : start + rule.bytes]
        yield from (rule.element(block, i) for i in range(rule.elements))


class Rounding(TestCase):
    @parameterized.expand([(c.name, c) for c in VALID if "FloatFirst" in c.flags])
    def test_float_first_differs_from_rounding_once(self, _, case):
        binary = BINARIES[case.output_dtype]
        once = [binary.round(number) for number in exactly(case.format, case.payload)]
        right = case.decoded().ravel().view("u2").tolist()
        self.assertNotEqual(once, right)

    @parameterized.expand([(c.name, c) for c in VALID if c.what == "float_arithmetic" and c.output_dtype == DOUBLE])
    def test_double_arithmetic_differs(self, _, case):
        in_double = [exact.DOUBLE.round(number) for number in exactly(case.format, case.payload)]
        self.assertNotEqual(in_double, case.decoded().ravel().view("u8").tolist())

    @parameterized.expand([(c.name, c) for c in VALID if c.what == "float_arithmetic" and c.output_dtype != DOUBLE])
    def test_the_types_arithmetic_differs(self, _, case):
        rule, right = RULES[case.format.name], case.decoded()
        own = np.ascontiguousarray(decode(rule, Payload(case.payload, rule), right.dtype)).reshape(case.shape)
        self.assertTrue(differing(own, right).any())

    def test_every_format_has_what_its_arithmetic_can_show(self):
        rounds = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "Q8_K"}
        first = Counter(c.format.name for c in VALID if c.what == "float_first")
        self.assertEqual(first, dict.fromkeys(rounds, 2))
        arithmetic = {
            output_dtype: {
                c.format.name for c in VALID if c.what == "float_arithmetic" and c.output_dtype == output_dtype
            }
            for output_dtype in (FLOAT16, BFLOAT16, DOUBLE)
        }
        self.assertEqual(arithmetic[DOUBLE], rounds | {"MXFP4"})
        every = {name for name, _ in FORMAT_ROWS}
        one_product = {"Q4_0", "Q5_0", "Q8_0", "Q8_1", "IQ4_NL"}
        self.assertLessEqual(every - arithmetic[FLOAT16], one_product | {"Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "NVFP4"})
        self.assertLessEqual(every - arithmetic[BFLOAT16], {"Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "NVFP4", "MXFP4"})

    @parameterized.expand([(c.name, c) for c in VALID if c.what == "ties_to_even"])
    def test_ties_go_both_ways(self, _, case):
        floats = [exact.FLOAT.round(n) for n in exactly(case.format, case.payload)]
        binary = BINARIES[case.output_dtype]
        directions = set()
        for bits in floats:
            value = exact.FLOAT.number(bits)
            if value.nan or value.magnitude is None:
                continue
            result = binary.number(binary.round(value))
            if result.magnitude is None or result.magnitude == value.magnitude:
                continue
            mirrored = 2 * value.magnitude - result.magnitude  # the other neighbour, if the value is a tie
            if binary.number(binary.round(exact.Number(value.negative, mirrored))).magnitude == mirrored:
                directions.add(result.magnitude > value.magnitude)
        self.assertEqual(directions, {False, True})

    @parameterized.expand([(c.name, c) for c in VALID if c.what == "overflow"])
    def test_overflow_has_infinities_and_numbers(self, _, case):
        decoded = case.decoded().astype(np.float32)
        self.assertTrue(np.isinf(decoded).any() and np.isfinite(decoded).any())

    @parameterized.expand([(c.name, c) for c in VALID if c.what == "subnormal_results"])
    def test_subnormal_results(self, _, case):
        magnitude = np.abs(case.decoded().astype(np.float32))
        self.assertTrue(((magnitude > 0) & (magnitude < 2.0**-14)).any())


class TableDecoder(TestCase):
    """The third decoder, which finds payloads and is mutated, is right as long as it is not."""

    @parameterized.expand(FORMAT_ROWS)
    def test_equals_exact_on_all_cases(self, name, format):
        rule = RULES[name]
        for case in VALID:
            if case.format is format and case.around is None and case.output_dtype == TensorProto.FLOAT:
                y = np.ascontiguousarray(decode(rule, Payload(case.payload, rule))).astype(np.float32)
                self.assertFalse(differing(y.reshape(case.shape), case.decoded()).any(), case.name)
