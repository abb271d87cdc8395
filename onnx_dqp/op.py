"""The operator for ONNX's reference evaluator: a few lines over ``dequantize``."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from onnx import NodeProto
from onnx.reference.op_run import OpRun

from onnx_dqp.attributes import DEFAULT_OUTPUT_DTYPE, read_attributes
from onnx_dqp.dequantize import dequantize
from onnx_dqp.errors import PackedTensorError
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
                if len(names) != 1 or not names[0]:
                    raise PackedTensorError(f"{what}s are {list(names)}, expected one {what}")
            read_attributes(onnx_node.attribute)
        except PackedTensorError as error:
            raise _located(onnx_node, error) from None
        super().__init__(onnx_node, run_params, schema)

    @classmethod
    def make_node(cls, n_inputs: int | None = 1, n_outputs: int | None = 1, **kwargs: Any) -> NodeProto:
        """Make a node with these attributes; ``eval`` uses it. (ONNX looks up the arity among registered schemas.)"""
        return super().make_node(n_inputs or 1, n_outputs or 1, **kwargs)

    def run(self, *args: Any, linked_attributes: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Run the node; an attribute by reference is absent where the caller of the function leaves it out."""
        if self.has_linked_attribute:
            linked_attributes = dict(linked_attributes or {})
            for attribute in self.onnx_node.attribute:
                reference = attribute.ref_attr_name
                if reference and reference not in linked_attributes:
                    if attribute.name != "output_dtype":
                        text = f"attribute {attribute.name!r} refers to {reference!r}, which the function is not given"
                        raise _located(self.onnx_node, PackedTensorError(text))
                    linked_attributes[reference] = DEFAULT_OUTPUT_DTYPE
        return super().run(*args, linked_attributes=linked_attributes, **kwargs)  # type: ignore[no-untyped-call]

    def _run(self, x: Any, *, format: Any, shape: Any, output_dtype: Any = DEFAULT_OUTPUT_DTYPE) -> tuple[NDArray[Any]]:
        try:
            return (dequantize(x, format, shape, output_dtype),)
        except PackedTensorError as error:
            raise _located(self.onnx_node, error) from None


def _located(node: NodeProto, error: PackedTensorError) -> PackedTensorError:
    """The same error with the node's name, or its output where it has none, in front."""
    name = node.name or next(iter(node.output), "")
    return PackedTensorError(f"DequantizePacked node {name[:60]!r}: {error}")
