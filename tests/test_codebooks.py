"""The codebook files: their contents by hash, their shapes, their values."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from unittest import TestCase

import numpy as np
from parameterized import parameterized

from onnx_dqp.codebooks import codebook

IQ2 = [8, 25, 43]
ROWS = [
    ("iq2_xxs", (256, 8), IQ2, "3edac24f742fe79123e3c1796e148050d4db4ea7fbc7bcaa13df220947209a56"),
    ("iq2_xs", (512, 8), IQ2, "639cb83ff8eb2cff5497cff9a079db1913172448aaff881995c088058b6ce6d6"),
    ("iq2_s", (1024, 8), IQ2, "65d1c22ec8968dbf91c137563cd43e7f252ab35f9769478a8a8c02e265facb4b"),
    (
        "iq3_xxs",
        (256, 4),
        [4, 12, 20, 28, 36, 44, 52, 62],
        "82eb4ea5a933cf53d39b1429bf3a003d17c0f6fd8052581e4bec669202a58a2a",
    ),
    (
        "iq3_s",
        (512, 4),
        [1, 3, 5, 7, 9, 11, 13, 15],
        "f805ed5fa31e57af56f5b9d6b08d3b9e0e55f73bc36470048c04d57c3a68e786",
    ),
    ("iq1_s", (2048, 8), [-1, 0, 1], "d33c6d8fb77d6b7bc938daa8126a68524bb8a95cdbce11ca218d6b6a145ae489"),
]


class Codebooks(TestCase):
    @parameterized.expand(ROWS)
    def test_file_and_values(self, name, shape, values, sha256):
        octets = files("onnx_dqp.codebooks").joinpath(f"{name}.txt").read_bytes()
        self.assertEqual(hashlib.sha256(octets).hexdigest(), sha256)
        rows = codebook(name)
        self.assertEqual(rows.shape, shape)
        self.assertEqual(np.unique(rows).tolist(), values)
        self.assertEqual(len(np.unique(rows, axis=0)), len(rows))
        self.assertFalse(rows.flags.writeable)
