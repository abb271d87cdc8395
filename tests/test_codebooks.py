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
    ("iq2_xxs", (256, 8), IQ2, "972f165307d2fa0ebb6ceebef3c8fb3c34dffb6db0a248937209b2b8f5aaa7bd"),
    ("iq2_xs", (512, 8), IQ2, "fae9c8b5a904459e6b3851a518374f51d71f55434de97f2c8727310c87e55a02"),
    ("iq2_s", (1024, 8), IQ2, "c43e0796edaff8fcd3314400f5bab76892fadfa7d5f9c95dc654a6933b5afc5f"),
    (
        "iq3_xxs",
        (256, 4),
        [4, 12, 20, 28, 36, 44, 52, 62],
        "b39119ab23c79249d413669ffc0e40e71ed58174c8604e260305465ae4237d69",
    ),
    (
        "iq3_s",
        (512, 4),
        [1, 3, 5, 7, 9, 11, 13, 15],
        "d8e194e0ebe7966b6b8035a6f7faf71e577e38ecf9c2e115e21e0c55b2dcf2d0",
    ),
    ("iq1_s", (2048, 8), [-1, 0, 1], "1c94b3dfbb6071959714c77e1c52a34feea8ed581a98bdb1cb93c4e4e10bfc8b"),
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
