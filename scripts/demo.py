"""The main job, shown: a model with one DequantizePacked node per format over real trained weights, run by ONNX.

Then the whole conformance suite, on the reference evaluator.
"""

from __future__ import annotations

from _command import require

require("demo", "jinja2", "pebble", "platformdirs", "rich")

import argparse
import sys

import numpy as np
from _real_weights import RealWeights, read, relative_rms_error
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from rich.console import Console
from rich.table import Table

from conformance.__main__ import main as conformance
from conformance.compare import differing
from conformance.expected import expected
from onnx_dqp import FORMATS, DequantizePacked, register_schema


def model_of(real: RealWeights) -> ModelProto:
    """A model without inputs: a payload as initializer, a node and an output for each format."""
    shape = list(real.weights.shape)
    nodes, outputs, initializers = [], [], []
    for identifier, payload in real.payloads.items():
        name = FORMATS[identifier].name
        initializers.append(numpy_helper.from_array(np.frombuffer(payload, np.uint8), f"{name} packed"))
        nodes.append(
            helper.make_node("DequantizePacked", [f"{name} packed"], [name], format=identifier, shape=shape, name=name)
        )
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    graph = helper.make_graph(nodes, "every_format", [], outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 29)], ir_version=10)


def main() -> int:
    """Print the table; the exit status is 1 where an element differs from the exact decoder."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    real = read()
    model = model_of(real)
    register_schema()
    checker.check_model(model, full_check=True)
    decoded = ReferenceEvaluator(model, new_ops=[DequantizePacked]).run(None, {})

    table = Table(title=f"{real.weights.size:,} real weights in each format, decoded by ONNX's ReferenceEvaluator")
    for heading in ("format", "bits per element", "elements decoded", "relative RMS error", "equal to exact.py"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    wrong = 0
    for (identifier, payload), y in zip(real.payloads.items(), decoded, strict=True):
        format = FORMATS[identifier]
        differences = int(differing(y, expected(identifier, payload).reshape(y.shape)).sum())
        wrong += differences
        table.add_row(
            format.name,
            f"{format.bits_per_element:.4g}",
            f"{y.size:,}",
            f"{relative_rms_error(y, real.weights):.3f}",
            f"[red]{differences} differ[/]" if differences else f"[green]all {y.size:,}[/]",
        )
    Console().print(table)
    print(f"{len(decoded)} formats, {wrong} elements differ from the exact decoder's")
    print("\nThe conformance suite on the same evaluator (python -m conformance run):\n")
    return max(1 if wrong else 0, conformance(["run"]))


if __name__ == "__main__":
    sys.exit(main())
