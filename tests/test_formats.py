"""The table of formats against the contract, and the layouts against ggml's structures."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Mapping
from unittest import TestCase

import numpy as np
from helpers import FORMAT_ROWS
from parameterized import parameterized

from conformance import exact
from conformance.compare import differing
from onnx_dqp import FORMATS, PackedFormat, ggml
from onnx_dqp.formats.unpack import Scratch

# The operator's table, and each field's offset, item type and number of items, in the order of ggml's structures.
CONTRACT = {
    "q4_0": (32, 18, "d@0 <f2, qs@2 u1 16"),
    "q4_1": (32, 20, "d@0 <f2, m@2 <f2, qs@4 u1 16"),
    "q5_0": (32, 22, "d@0 <f2, qh@2 <u4, qs@6 u1 16"),
    "q5_1": (32, 24, "d@0 <f2, m@2 <f2, qh@4 <u4, qs@8 u1 16"),
    "q8_0": (32, 34, "d@0 <f2, qs@2 i1 32"),
    "q8_1": (32, 36, "d@0 <f2, s@2 <f2, qs@4 i1 32"),
    "q2_k": (256, 84, "scales@0 u1 16, qs@16 u1 64, d@80 <f2, dmin@82 <f2"),
    "q3_k": (256, 110, "hmask@0 u1 32, qs@32 u1 64, scales@96 u1 12, d@108 <f2"),
    "q4_k": (256, 144, "d@0 <f2, dmin@2 <f2, scales@4 u1 12, qs@16 u1 128"),
    "q5_k": (256, 176, "d@0 <f2, dmin@2 <f2, scales@4 u1 12, qh@16 u1 32, qs@48 u1 128"),
    "q6_k": (256, 210, "ql@0 u1 128, qh@128 u1 64, scales@192 i1 16, d@208 <f2"),
    "q8_k": (256, 292, "d@0 <f4, qs@4 i1 256, bsums@260 <i2 16"),
    "iq2_xxs": (256, 66, "d@0 <f2, groups@2 (qs@0 u1 4, signs_and_scale@4 <u4) 8"),
    "iq2_xs": (256, 74, "d@0 <f2, qs@2 <u2 32, scales@66 u1 8"),
    "iq3_xxs": (256, 98, "d@0 <f2, qs@2 u1 64, signs_and_scale@66 <u4 8"),
    "iq1_s": (256, 50, "d@0 <f2, qs@2 u1 32, qh@34 <u2 8"),
    "iq4_nl": (32, 18, "d@0 <f2, qs@2 u1 16"),
    "iq3_s": (256, 110, "d@0 <f2, qs@2 u1 64, qh@66 u1 8, signs@74 u1 32, scales@106 u1 4"),
    "iq2_s": (256, 82, "d@0 <f2, qs@2 u1 32, signs@34 u1 32, qh@66 u1 8, scales@74 u1 8"),
    "iq4_xs": (256, 136, "d@0 <f2, scales_h@2 <u2, scales_l@4 u1 4, qs@8 u1 128"),
    "iq1_m": (256, 56, "qs@0 u1 32, qh@32 u1 16, scales@48 <u2 4"),
    "tq1_0": (256, 54, "qs@0 u1 48, qh@48 u1 4, d@52 <f2"),
    "tq2_0": (256, 66, "qs@0 u1 64, d@64 <f2"),
    "mxfp4": (32, 17, "e@0 u1, qs@1 u1 16"),
    "nvfp4": (64, 36, "d@0 u1 4, qs@4 u1 32"),
    "q1_0": (128, 18, "d@0 <f2, qs@2 u1 16"),
    "q2_0": (64, 18, "d@0 <f2, qs@2 u1 16"),
}


def described(layout):
    """A layout in the notation of the table above, its byte order as it is on a little-endian host."""
    texts = []
    for name in layout.names:
        dtype, offset = layout.fields[name]
        item = dtype.base
        text = f"({described(item)})" if item.names else item.str.removeprefix("|")
        texts.append(f"{name}@{offset} {text}" + "".join(f" {n}" for n in dtype.shape))
    return ", ".join(texts)


class Table(TestCase):
    def test_is_the_contracts_in_its_order(self):
        found = {f.identifier: (f.elements, f.bytes, described(f.layout)) for f in FORMATS.values()}
        self.assertEqual(list(found.items()), [(f"gguf:{name}", row) for name, row in CONTRACT.items()])

    def test_a_format_is_one_object(self):
        for format in FORMATS.values():
            self.assertIs(pickle.loads(pickle.dumps(format)), format)
            self.assertIs(copy.deepcopy(format), format)

    def test_is_read_only(self):
        self.assertIsInstance(FORMATS, Mapping)
        with self.assertRaises(TypeError):
            FORMATS["gguf:new"] = FORMATS["gguf:q4_0"]
        with self.assertRaises(AttributeError):
            FORMATS["gguf:q4_0"].elements = 64

    @parameterized.expand(FORMAT_ROWS)
    def test_has_names_and_a_decoding_rule(self, name, format):
        self.assertIsInstance(format, PackedFormat)
        self.assertEqual(format.identifier, f"gguf:{name.lower()}")
        self.assertEqual(format.bits_per_element, 8 * format.bytes / format.elements)
        self.assertNotEqual(format.__doc__, PackedFormat.__doc__)
        self.assertRegex(format.__doc__, "^``y = ")

    @parameterized.expand(FORMAT_ROWS)
    def test_no_multibyte_field_is_of_native_order(self, _, format):
        """Byte order is explicit, so that a big-endian host decodes the same bits."""

        def check(layout):
            for name in layout.names:
                item = layout[name].base
                if item.names:
                    check(item)
                elif item.itemsize > 1:
                    self.assertEqual(item, item.newbyteorder("<"), name)
                    self.assertNotEqual(item, item.newbyteorder(">"), name)

        check(format.layout)

    @parameterized.expand(FORMAT_ROWS)
    def test_is_ggmls_type(self, name, format):
        library = ggml.library()
        library.ggml_type_name.restype = ctypes.c_char_p
        library.ggml_type_size.restype = ctypes.c_size_t
        library.ggml_blck_size.restype = ctypes.c_int64
        self.assertEqual(library.ggml_type_name(format.ggml_type).decode().upper(), name)
        self.assertEqual(library.ggml_blck_size(format.ggml_type), format.elements)
        self.assertEqual(library.ggml_type_size(format.ggml_type), format.bytes)

    def test_the_exact_decoders_own_table_is_the_same(self):
        own = {identifier: (rule.elements, rule.bytes) for identifier, rule in exact.FORMATS.items()}
        self.assertEqual(own, {f"gguf:{name}": row[:2] for name, row in CONTRACT.items()})


class ByteOrder(TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_a_foreign_order_layout_decodes_the_same(self, _, format):
        """The decoders take fields by value: with fields of the other order, as a big-endian host sees these, and
        the same values in them, the result is the same.
        """
        rng = np.random.default_rng(0)
        blocks = rng.integers(0, 256, 8 * format.bytes, np.uint8).view(format.layout)
        swapped = blocks.astype(format.layout.newbyteorder(">"))
        results = []
        for some in (blocks, swapped):
            out = np.empty((8, format.elements), np.float32)
            with np.errstate(all="ignore"):
                format.decode(some, out, Scratch())
            results.append(out)
        self.assertFalse(differing(*results).any())
