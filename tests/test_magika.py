"""A real model, packed, run three ways over a few hundred real files. Needs the extra data."""

from __future__ import annotations

import unittest

from compare_magika import NAMES, compare, corpus, newest_opset, outcome, session
from pack_magika import original
from parameterized import parameterized


class Magika(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.x, cls.types = corpus()
        cls.wanted = outcome(session(original()).run(None, {"bytes": cls.x}))

    def test_the_corpus_is_large_and_varied(self):
        self.assertGreaterEqual(len(self.x), 200)
        self.assertGreaterEqual(len(self.types), 20)
        self.assertGreaterEqual(len(set(self.wanted.labels.tolist())), 15)

    @parameterized.expand(NAMES)
    def test_three_ways_agree(self, name):
        found = compare(name, self.wanted, self.x, newest_opset())
        print(
            f"{name}: label as the original's for {found['agree']} of {found['files']} files, "
            f"logits {found['logit_difference']:.1e} apart"
        )
        self.assertTrue(found["same_labels"])
        self.assertLess(found["logit_difference"], 1e-4)
        self.assertGreaterEqual(found["agree"], 0.97 * found["files"])
        self.assertLess(found["bytes"]["packed"], 0.3 * found["bytes"]["folded"])
