"""onnx_dqp.explain: what it says of a block is what the block holds, and what the element is decoded from."""

from __future__ import annotations

import json
import unittest

import numpy as np
from helpers import FORMAT_ROWS
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import PackedTensorError, explain, take_apart
from onnx_dqp.formats.anatomy import RULES
from onnx_dqp.formats.explain import layout_text


def block_of(format, name="explain"):
    return payloads.ordinary_blocks(format, 1, name).tobytes()


def weight(name, rule, element, block):
    """What an element's scale is multiplied with, from its code and the bits named for its sign."""

    def ones(part):
        return sum(block[s.byte] >> bit & 1 for s in element.sources if s.part == part for bit in s.bits)

    if element.column is not None:
        found = float(rule.rows[element.code, element.column])
        if name in ("IQ1_S", "IQ1_M"):
            return found + (-0.125 if ones("delta") else 0.125)
        return -found if ones("sign") % 2 else found
    if rule.values is not None:
        return float(rule.values[element.code])
    return None if name == "TQ1_0" else element.code + rule.code_offset


def ternary_place(number):
    """Which ternary digit of its byte an element of TQ1_0 is."""
    if number < 160:
        return number // 32
    return (number - 160) // 16 if number < 240 else (number - 240) // 4


class EveryFormat(unittest.TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_fields_are_all_bytes_in_order(self, _, format):
        block = block_of(format)
        fields = take_apart(format.identifier, block).fields
        self.assertEqual(b"".join(field.raw for field in fields), block)
        self.assertEqual([field.start for field in fields[1:]], [field.stop for field in fields[:-1]])
        for field in fields:
            self.assertEqual(block[field.start : field.stop], field.raw)

    @parameterized.expand(FORMAT_ROWS)
    def test_values_are_exact(self, _, format):
        block = block_of(format)
        values = [element.value for element in take_apart(format.identifier, block).elements]
        self.assertFalse(differing(np.float32(values), expected(format.identifier, block)).any())

    @parameterized.expand(FORMAT_ROWS)
    def test_scale_and_minimum_give_the_values(self, _, format):
        """From the parts alone: scale times weight, with its sign, and the minimum; in DOUBLE, rounded once."""
        block = block_of(format)
        found, rule = take_apart(format.identifier, block), RULES[format.name]
        wanted = expected(format.identifier, block)
        for sub_block in found.sub_blocks:
            for number in range(sub_block.first, sub_block.last + 1):
                element = found.elements[number]
                factor = weight(format.name, rule, element, block)
                if factor is None:
                    factor = int(element.code * 3 ** ternary_place(number) % 256 * 3 >> 8) - 1
                value = sub_block.scale * factor
                if sub_block.minimum is not None:
                    value += rule.minimum_sign * sub_block.minimum
                self.assertEqual(np.float32(value), wanted[number], number)

    @parameterized.expand(FORMAT_ROWS)
    def test_the_bits_named_and_no_others_decide(self, _, format):
        """Each bit of a block is flipped: exactly the elements that name it may change, and most of them do."""
        block = np.frombuffer(block_of(format), np.uint8)
        found = take_apart(format.identifier, block.tobytes())
        names = [set() for _ in range(8 * format.bytes)]
        for sub_block in found.sub_blocks:
            for source in sub_block.sources:
                for bit in source.bits:
                    names[8 * source.byte + bit].update(range(sub_block.first, sub_block.last + 1))
        for number, element in enumerate(found.elements):
            for source in element.sources:
                for bit in source.bits:
                    names[8 * source.byte + bit].add(number)
        flipped = np.tile(block, (8 * format.bytes, 1))
        for position, row in enumerate(flipped):
            row[position // 8] ^= 1 << position % 8
        before = expected(format.identifier, block.tobytes()).view("u4")
        after = expected(format.identifier, flipped.tobytes()).reshape(len(flipped), -1).view("u4")
        changed = after != before
        for position, elements in enumerate(names):
            self.assertLessEqual(set(np.flatnonzero(changed[position]).tolist()), elements, position)
        in_all = sum(map(len, names))
        self.assertGreater(int(changed.sum()), 0.6 * in_all)

    @parameterized.expand(FORMAT_ROWS)
    def test_text_and_json(self, _, format):
        block = block_of(format)
        found = take_apart(format.identifier, block)
        text = explain(format.identifier, block)
        self.assertEqual(text, str(found))
        self.assertIn(f"element {format.elements - 1}: ", text)
        self.assertEqual(json.loads(json.dumps(found.as_dict()))["elements"][0]["value"], found.elements[0].value)
        self.assertTrue(text.startswith(f"{format.identifier}: y = "))


class Known(unittest.TestCase):
    def test_q4_k_by_hand(self):
        # d = 1, dmin = 2; scales[0] = 5 with the low bits of the fifth scale's top above, scales[4] = 7.
        block = bytearray(144)
        block[0:4] = np.array([1, 2], "<f2").tobytes()
        block[4], block[8], block[12] = 5 | 0b10 << 6, 7 | 0b01 << 6, 0x93
        block[16] = 0xA4
        found = take_apart("gguf:q4_k", bytes(block))
        first, fifth = found.sub_blocks[0], found.sub_blocks[4]
        self.assertEqual((first.scale, first.factor, first.minimum, first.minimum_factor), (5, 5, 14, 7))
        self.assertEqual((fifth.scale, fifth.minimum), (3 + 16 * 0b10, 2 * (9 + 16 * 0b01)))
        self.assertEqual((found.elements[0].code, found.elements[0].value), (4, 5 * 4 - 14))
        self.assertEqual(found.elements[32].code, 10)
        (source,) = found.elements[32].sources
        self.assertEqual((source.part, source.byte, source.bits), ("code", 16, (4, 5, 6, 7)))

    def test_iq1_m_puts_its_scale_together(self):
        block = bytearray(56)
        block[48:56] = np.array([0x1000, 0x2000, 0xC000, 0x3000], "<u2").tobytes()
        found = take_apart("gguf:iq1_m", bytes(block))
        self.assertEqual(found.sub_blocks[0].d, float(np.array([0x3C21], "u2").view("f2")[0]))

    def test_layout_text(self):
        texts = {format.name: layout_text(format) for _, format in FORMAT_ROWS}
        self.assertEqual(texts["Q8_K"], "d f32, qs i8[256], bsums i16[16]")
        self.assertEqual(texts["IQ2_XXS"], "d f16, groups (qs u8[4], signs_and_scale u32)[8]")

    @parameterized.expand([("short", bytes(143)), ("long", bytes(288)), ("empty", b""), ("type", "text")])
    def test_refused(self, _, block):
        with self.assertRaises(PackedTensorError):
            explain("gguf:q4_k", block)
        with self.assertRaisesRegex(PackedTensorError, "did you mean gguf:q4_k"):
            explain("q4_k", block)
