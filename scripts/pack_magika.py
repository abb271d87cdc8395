"""Pack the weights of the content-type model in the package magika into one block format, with ``onnx_dqp.pack``.

Also lets the model be evaluated more exactly, which is not packing: see ``stable``.
"""

from __future__ import annotations

from _command import require

require("data", "libggml", "magika")

import argparse
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import onnx
import onnx.version_converter
from onnx import ModelProto, TensorProto, helper

from onnx_dqp import FORMATS, pack
from onnx_dqp.ggml import NO_QUANTIZER

MODEL = "models/standard_v3_3/model.onnx"
SCOPE = "jax2tf_get_logits_/pjit_get_logits_"
LOGITS = f"{SCOPE}/MagikaV2/Dense_1/AddV2:0"
"""What the softmax at the end of the model takes."""


def stable(model: ModelProto) -> None:
    """Let the two layer normalizations compute a variance as the mean of (x - mean)^2.

    As the mean of x^2 minus the square of the mean, it loses most of its digits where a column hardly varies (padding
    does): two runtimes that add in another order then give logits of the same FLOAT model that are 0.03 apart.
    """
    graph = model.graph
    made = {output: node for node in graph.node for output in node.output}
    for number in (0, 1):
        scope = f"{SCOPE}/MagikaV2/LayerNorm_{number}"
        made[f"{scope}/Square:0"].input[:] = [f"{scope}/Sub_1:0"] * 2
        variance = made[f"{scope}/Maximum:0"]
        variance.input[:] = [f"{scope}/truediv_1:0" if x == f"{scope}/Sub:0" else x for x in variance.input]
    before = {output: {x for x in node.input if x in made} for output, node in made.items()}
    order = [made[output] for output in TopologicalSorter(before).static_order()]
    ordered = [ModelProto().graph.node.add() for _ in order]
    for new, node in zip(ordered, order, strict=True):
        new.CopyFrom(node)
    del graph.node[:]
    graph.node.extend(ordered)


def original() -> ModelProto:
    """The package's model, with the logits as a second output, in opset 28 or the newest that ``onnx`` knows."""
    package = find_spec("magika")
    assert package is not None
    assert package.origin is not None
    model = onnx.load(Path(package.origin).parent / MODEL)
    model.graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["files", "labels"]))
    return onnx.version_converter.convert_version(model, min(28, onnx.defs.onnx_opset_version()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = sorted(set(FORMATS) - NO_QUANTIZER)
    parser.add_argument("--format", choices=choices, default="gguf:q4_k", metavar="FORMAT", help="gguf:q4_k or another")
    parser.add_argument("output", type=Path, metavar="OUT.onnx")
    parsed = parser.parse_args()
    model = original()
    stable(model)
    onnx.save(pack(model, parsed.format, quantizer="ggml"), parsed.output)
