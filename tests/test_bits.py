"""Every element of every format, bit for bit, against ggml's compiled library, gguf and the exact decoder."""

from __future__ import annotations

from collections import Counter
from unittest import TestCase

import gguf
import numpy as np
from compare_with_ggml import by_ggml, payload_groups
from helpers import FORMAT_ROWS, TYPE_ROWS
from parameterized import parameterized

from conformance import exact, ggml, payloads
from conformance.cases import valid_cases
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import FORMATS, dequantize
from onnx_dqp.rules import OUTPUT_DTYPES

GGML_ROWS = [row for row in FORMAT_ROWS if row[1].identifier not in ggml.NO_DECODER]
GGUF_ROWS = [row for row in FORMAT_ROWS if hasattr(gguf.quants, row[0])]


def decoded(format, blocks):
    payload = np.frombuffer(blocks.tobytes(), np.uint8)
    return payload, dequantize(payload, format.identifier, [len(blocks) * format.elements])


class AgainstGgml(TestCase):
    """Q8_1, which ggml cannot decode, is compared as Q8_0 with the unused field cut out."""

    @parameterized.expand(FORMAT_ROWS)
    def test_random_bytes_codes_rows_signs_sub_scales_and_special_scales(self, _, format):
        compared = Counter()
        for group, blocks in payload_groups(format):
            _, actual = decoded(format, blocks)
            wrong = differing(actual, by_ggml(format, blocks))
            np.testing.assert_array_equal(np.flatnonzero(wrong)[:5], [])
            compared[group] += actual.size
        self.assertGreaterEqual(compared["random"], 1 << 20)
        self.assertGreater(compared["constructed"], 1 << 13)


class AgainstGguf(TestCase):
    def test_it_has_23_of_the_formats(self):
        self.assertEqual(len(GGUF_ROWS), 23)

    @parameterized.expand(GGUF_ROWS)
    def test_random_bytes(self, name, format):
        blocks = payloads.random_blocks(format, 2048, "gguf")
        payload, actual = decoded(format, blocks)
        with np.errstate(all="ignore"):
            reference = gguf.quants.dequantize(payload, gguf.GGMLQuantizationType[name])
        self.assertFalse(differing(actual, reference).any())


class UnusedFields(TestCase):
    @parameterized.expand([("gguf:q8_1", "s"), ("gguf:q8_k", "bsums")])
    def test_have_no_effect(self, identifier, field):
        format = FORMATS[identifier]
        blocks = payloads.finite_blocks(format, 16, "unused")
        _, before = decoded(format, blocks)
        for pattern in (0x0000, 0x7C00, 0x7E00, 0x7C01, 0xFFFF):
            blocks[field] = np.array(pattern, "<u2").view(format.layout[field].base)
            _, after = decoded(format, blocks)
            self.assertFalse(differing(after, before).any())


class AgainstExact(TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_random_bytes(self, _, format):
        payload, actual = decoded(format, payloads.random_blocks(format, 2048 // format.elements, "exact"))
        self.assertFalse(differing(actual, expected(format.identifier, payload.tobytes())).any())

    @parameterized.expand(FORMAT_ROWS)
    def test_special_scales_and_scale_bytes(self, _, format):
        found = {case.payload for case in valid_cases("scales") if case.format is format}
        self.assertTrue(found)
        for payload in sorted(found):
            payload, actual = decoded(format, np.frombuffer(payload, format.layout))  # noqa: PLW2901
            self.assertFalse(differing(actual, expected(format.identifier, payload.tobytes())).any())

    @parameterized.expand(
        [
            (f"{name}_{type_name}", format, output_dtype)
            for name, format in FORMAT_ROWS
            for type_name, output_dtype in TYPE_ROWS
        ]
    )
    def test_every_output_type(self, _, format, output_dtype):
        blocks = payloads.random_blocks(format, max(2, 512 // format.elements), "types")
        payload = blocks.tobytes()
        actual = dequantize(payload, format.identifier, [len(blocks) * format.elements], output_dtype)
        self.assertEqual(actual.dtype, OUTPUT_DTYPES[output_dtype])
        self.assertFalse(differing(actual, expected(format.identifier, payload, output_dtype)).any())


class ExactAgainstGgml(TestCase):
    """The two references, without the operator between them."""

    @parameterized.expand(GGML_ROWS)
    def test_random_bytes(self, _, format):
        payload = payloads.random_blocks(format, 1024 // format.elements, "references").tobytes()
        reference = ggml.dequantize(format, np.frombuffer(payload, np.uint8))
        self.assertFalse(differing(expected(format.identifier, payload), reference).any())


class ExactByHand(TestCase):
    """Values worked out by hand from the layouts, so that the references are not only held against each other."""

    @parameterized.expand(
        [
            ("q4_0", "gguf:q4_0", "003c" + "f0" + "88" * 15, {0: -8.0, 16: 7.0, 1: 0.0}),
            ("q4_0_negative_scale", "gguf:q4_0", "00bc" + "88" * 16, {0: -0.0}),
            ("q4_1", "gguf:q4_1", "003c" + "0040" + "5a" + "00" * 15, {0: 12.0, 16: 7.0, 1: 2.0}),
            ("q8_0", "gguf:q8_0", "0038" + "80" + "7f" + "00" * 30, {0: -64.0, 1: 63.5}),
            ("mxfp4_2_is_code_4", "gguf:mxfp4", "7f" + "94" + "00" * 15, {0: 2.0, 16: -0.5}),
            ("mxfp4_byte_255", "gguf:mxfp4", "ff" + "21" + "00" * 15, {0: 2.0**127, 16: float("inf")}),
            ("nvfp4_scale_1", "gguf:nvfp4", "38383838" + "2f" + "00" * 31, {0: -6.0, 8: 1.0}),
            ("q1_0", "gguf:q1_0", "003c" + "01" + "00" * 15, {0: 1.0, 1: -1.0, 127: -1.0}),
            ("q2_0", "gguf:q2_0", "003c" + "e4" + "55" * 15, {0: -1.0, 1: 0.0, 2: 1.0, 3: 2.0, 4: 0.0}),
            ("tq2_0", "gguf:tq2_0", "e4" + "55" * 63 + "003c", {0: -1.0, 32: 0.0, 64: 1.0, 96: 2.0}),
        ]
    )
    def test_value(self, _, identifier, payload, values):
        bits = list(exact.decode(identifier, bytes.fromhex(payload)))
        for i, value in values.items():
            self.assertEqual(bits[i], np.float32(value).view(np.uint32), f"element {i}")
