"""The operator for ONNX's reference evaluator: a few lines over ``dequantize``."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from onnx import NodeProto
from onnx.reference.op_run import OpRun

from onnx_dqp.attributes import read_attributes
from onnx_dqp.dequantize import dequantize
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.rules import OUTPUT_DTYPES, check_array_fits
from onnx_dqp.schema import DOMAIN, schema


class DequantizePacked(OpRun):
    """DequantizePacked-29 of the main domain, for ``ReferenceEvaluator(model, new_ops=[DequantizePacked])``.

    A node whose attributes or arity break the contract is refused with PackedTensorError when the evaluator is
    built, before ONNX's own machinery sees it; a payload, when it runs. The message names the node.
    """

    op_domain = DOMAIN
    op_schema = schema()

    def __init__(self, onnx_node: NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
        try:
            for what, names in (("input", onnx_node.input), ("output", onnx_node.output)):
                if len(names) != 1:
                    raise PackedTensorError(f"the node has {len(names)} {what}s", "1", "R9")
                if not names[0]:
                    raise PackedTensorError(f"the node's {what} is left out", "1", "R9")
            attributes = read_attributes(onnx_node.attribute)
            if attributes.format and attributes.dims and attributes.output_dtype:
                check_array_fits(attributes.format, attributes.dims, OUTPUT_DTYPES[attributes.output_dtype])
        except PackedTensorError as error:
            raise _located(onnx_node, error) from None
        super().__init__(onnx_node, run_params, schema)

    @classmethod
    def make_node(cls, n_inputs: int | None = None, n_outputs: int | None = None, **kwargs: Any) -> NodeProto:
        """Make a node with these attributes; ``eval`` uses it. (ONNX looks up the arity among registered schemas.)"""
        return super().make_node(1 if n_inputs is None else n_inputs, 1 if n_outputs is None else n_outputs, **kwargs)

    def _run(self, x: Any, *, format: Any, shape: Any, output_dtype: Any) -> tuple[NDArray[Any]]:
        try:
            return (dequantize(x, format, shape, output_dtype),)
        except PackedTensorError as error:
            raise _located(self.onnx_node, error) from None


def _located(node: NodeProto, error: PackedTensorError) -> PackedTensorError:
    """The same error with the node's name, or its output where it has none, in front."""
    name = node.name or next(iter(node.output), "")
    return error.within(f"{node.op_type} node {name[:60]!r}")
