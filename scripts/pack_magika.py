"""Pack the weights of the content-type model in the package magika into one block format, as a model of opset 29.

Each large weight becomes a payload, made by ggml's quantizer, and a DequantizePacked node. A format's blocks must fill
rows (rule R3): a weight whose last dimension does not fit is packed flattened to [first dimension, the rest], or
transposed, and a Reshape or Transpose restores it. One that fits in no way stays as it is.
"""

from __future__ import annotations

from _command import require

require("data", "libggml", "magika")

import argparse
import math
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from conformance import ggml
from onnx_dqp import FORMATS, PackedFormat

MODEL = "models/standard_v3_3/model.onnx"
SCOPE = "jax2tf_get_logits_/pjit_get_logits_"
LOGITS = f"{SCOPE}/MagikaV2/Dense_1/AddV2:0"
"""What the softmax at the end of the model takes."""

_LARGE = 4096
"""Elements from which on a tensor is a weight to pack."""


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


def pack(model: ModelProto, format: PackedFormat) -> ModelProto:
    """The model with its large weights packed, declared as opset 29."""
    packed = ModelProto()
    packed.CopyFrom(model)
    graph, nodes, payloads = packed.graph, [], []
    for tensor in list(graph.initializer):
        if tensor.data_type != TensorProto.FLOAT or math.prod(tensor.dims) < _LARGE:
            continue
        found = _packed(tensor, format)
        if found is not None:
            payload, restoring = found
            payloads.append(payload)
            nodes += restoring
            graph.initializer.remove(tensor)
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(payloads)
    for imported in packed.opset_import:
        if not imported.domain:
            imported.version = 29
    return packed


def _packed(tensor: TensorProto, format: PackedFormat) -> tuple[TensorProto, list[NodeProto]] | None:
    """The payload of a weight and the nodes that give it back, or None where no row of it takes whole blocks."""
    name, dims, weights = tensor.name, list(tensor.dims), numpy_helper.to_array(tensor)
    nodes: list[NodeProto] = []
    if dims[-1] % format.elements == 0:
        rows, output = weights, name
    elif math.prod(dims[1:]) % format.elements == 0:
        rows, output = weights.reshape(dims[0], -1), f"{name}/flat"
        shape = helper.make_node("Constant", [], [f"{name}/shape"], value_ints=dims)
        nodes = [shape, helper.make_node("Reshape", [output, f"{name}/shape"], [name])]
    elif len(dims) == 2 and dims[0] % format.elements == 0:
        rows, output = weights.T, f"{name}/transposed"
        nodes = [helper.make_node("Transpose", [output], [name])]
    else:
        return None
    payload: NDArray[np.uint8] = ggml.quantize(format, np.ascontiguousarray(rows.reshape(-1, rows.shape[-1])))
    node = helper.make_node(
        "DequantizePacked", [f"{name}/packed"], [output], name, format=format.identifier, shape=rows.shape
    )
    return numpy_helper.from_array(payload.reshape(-1), f"{name}/packed"), [node, *nodes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = sorted(set(FORMATS) - ggml.NO_QUANTIZER)
    parser.add_argument("--format", choices=choices, default="gguf:q4_k", metavar="FORMAT", help="gguf:q4_k or another")
    parser.add_argument("output", type=Path, metavar="OUT.onnx")
    parsed = parser.parse_args()
    model = original()
    stable(model)
    onnx.save(pack(model, FORMATS[parsed.format]), parsed.output)
