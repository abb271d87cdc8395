"""Real trained weights in every format: the committed payloads decode to ggml's bits and stay near the weights."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from unittest import TestCase

import numpy as np
from _real_weights import FOLDER, read, relative_rms_error
from helpers import FORMAT_ROWS
from parameterized import parameterized

from conformance import ggml
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import dequantize, packed_size

REAL = read()

# What is seen on slices of these weights lies well below; a swapped half or a wrong offset lies well above.
BOUNDS = {
    **{"Q4_0": 0.12, "Q4_1": 0.11, "Q5_0": 0.06, "Q5_1": 0.055, "Q8_0": 0.008, "Q8_1": 0.008},
    **{"Q2_K": 0.40, "Q3_K": 0.21, "Q4_K": 0.10, "Q5_K": 0.05, "Q6_K": 0.026, "Q8_K": 0.011},
    **{"IQ2_XXS": 0.45, "IQ2_XS": 0.40, "IQ2_S": 0.37, "IQ3_XXS": 0.28, "IQ3_S": 0.23, "IQ1_S": 0.65, "IQ1_M": 0.75},
    **{"IQ4_NL": 0.10, "IQ4_XS": 0.105, "MXFP4": 0.16, "NVFP4": 0.13},
    **{"TQ1_0": 0.9, "TQ2_0": 0.9, "Q1_0": 0.75, "Q2_0": 0.85},
}


class RealWeights(TestCase):
    def decoded(self, format):
        return dequantize(REAL.payloads[format.identifier], format.identifier, REAL.weights.shape)

    @parameterized.expand(FORMAT_ROWS)
    def test_bits(self, _, format):
        payload = REAL.payloads[format.identifier]
        self.assertEqual(len(payload), packed_size(format.identifier, REAL.weights.shape))
        if format.identifier in ggml.NO_DECODER:
            reference = expected(format.identifier, payload)
        else:
            reference = ggml.dequantize(format, np.frombuffer(payload, np.uint8))
        self.assertFalse(differing(self.decoded(format).ravel(), reference).any())

    @parameterized.expand(FORMAT_ROWS)
    def test_error(self, name, format):
        error = relative_rms_error(self.decoded(format), REAL.weights)
        self.assertLess(error, BOUNDS[name])
        documented = re.search(rf"^\| {name} \| \S+ \| (\S+) \|$", accuracy(), re.MULTILINE)
        self.assertEqual(f"{error:.3g}", documented[1])

    def test_files_are_those_of_the_manifest(self):
        manifest = json.loads(FOLDER.joinpath("manifest.json").read_text(encoding="utf-8"))
        entries = [manifest["weights"], *manifest["formats"].values()]
        for entry in entries:
            content = FOLDER.joinpath(entry["file"]).read_bytes()
            self.assertEqual(hashlib.sha256(content).hexdigest(), entry["sha256"])
        self.assertEqual({e["file"] for e in entries} | {"manifest.json"}, {p.name for p in FOLDER.iterdir()})
        self.assertGreater(len(np.unique(REAL.weights)), 1000)


def accuracy():
    return Path(__file__).parent.parent.joinpath("docs", "accuracy.md").read_text(encoding="utf-8")
