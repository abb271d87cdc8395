"""The whole suite on expanded models: in ONNX Runtime, opset by opset, and in ONNX's evaluator without the operator."""

from __future__ import annotations

import os
import unittest

import numpy as np
from helpers import model, newest_opset, node, value
from onnx import TensorProto, helper
from onnx.parser import parse_graph
from onnx.reference import ReferenceEvaluator
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


def gather_is_wrong():
    """Whether ONNX's evaluator gives Gather of no indices a wrong shape, as it does up to onnx 1.22."""
    graph = parse_graph("g (float[4] t, int32[0, 2] i) => (float[0, 2] y) { y = Gather (t, i) }")
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    (y,) = ReferenceEvaluator(made).run(None, {"t": np.zeros(4, np.float32), "i": np.zeros((0, 2), np.int32)})
    return y.shape != (0, 2)


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
        wrong = [
            f"{result.entry.name}: {result.verdict} {result.detail}"
            for result in results
            if result.verdict != PASSED
            and not (name == "reference-expanded" and 0 in (result.entry.shape or ()) and gather_is_wrong())
        ]
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
