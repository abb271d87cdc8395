"""The whole suite on expanded models: in ONNX Runtime, opset by opset, and in ONNX's evaluator without the operator."""

from __future__ import annotations

import os
import unittest

import numpy as np
from helpers import model, newest_opset, node, value
from onnx import TensorProto
from parameterized import parameterized

from conformance.backends import BackendError, PythonBackend
from conformance.compare import Comparison
from conformance.folder import REPOSITORY
from conformance.runner import Selection, run
from conformance.testdata import read
from conformance.verdict import PASSED

BACKENDS = [
    *((f"onnxruntime_{opset}", "onnxruntime-expanded", opset) for opset in sorted({18, 21, newest_opset()})),
    ("reference", "reference-expanded", None),
]


class TheSuite(unittest.TestCase):
    @parameterized.expand(BACKENDS)
    def test_every_case_passes(self, _, name, opset):
        entries = read(REPOSITORY)
        results = run(
            PythonBackend(name, opset),
            REPOSITORY,
            entries,
            Selection((), (), False),
            comparison=Comparison.parse("bits"),
            jobs=len(os.sched_getaffinity(0)),
            timeout=60,
        )
        wrong = [f"{result.entry.name}: {result.verdict} {result.detail}" for result in results
                 if result.verdict != PASSED]  # fmt: skip
        self.assertEqual(wrong, [])
        self.assertEqual(len(results), len(entries))


class Backends(unittest.TestCase):
    def test_onnx_runtime_returns_bfloat16(self):
        made = model([node(output_dtype=TensorProto.BFLOAT16)], [value("x", TensorProto.UINT8, [36])],
                     [value("y", TensorProto.BFLOAT16, [2, 32])])  # fmt: skip
        prepared = PythonBackend("onnxruntime-expanded", newest_opset()).load().prepare(made)
        (y,) = prepared.run([np.arange(36, dtype=np.uint8)])
        self.assertEqual((y.dtype.name, y.shape), ("bfloat16", (2, 32)))

    def test_an_unknown_name_is_one_line(self):
        with self.assertRaises(BackendError):
            PythonBackend("onnxruntime-folded").load()
