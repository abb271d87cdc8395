"""ONNX's reference evaluator with the operator plugged in wherever a node can stand, model-local functions included."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import onnx.reference
from numpy.typing import NDArray
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto
from onnx.model_container import ModelContainer
from onnx.reference.op_run import OpRun

from onnx_dqp.op import DequantizePacked


class ReferenceEvaluator(onnx.reference.ReferenceEvaluator):
    """``onnx.reference.ReferenceEvaluator`` that knows DequantizePacked everywhere.

    The plain class does not hand ``new_ops`` on to model-local functions, needs the functions of a model in the
    order of their calls, and demands every attribute of a function although some have a default; this one does not
    have these limits.

    Parameters
    ----------
    proto
        A ModelProto, GraphProto, FunctionProto, NodeProto, ModelContainer, serialized model or path.
    opsets, functions, verbose, options
        As in the base class.
    new_ops
        Further operators, which come before DequantizePacked; handed on to functions too.
    """

    def __init__(
        self,
        proto: Any,
        opsets: dict[str, int] | None = None,
        functions: Iterable[FunctionProto | onnx.reference.ReferenceEvaluator] | None = None,
        verbose: int = 0,
        new_ops: Iterable[type[OpRun]] | None = None,
        **options: Any,
    ) -> None:
        operators: list[type[OpRun]] = [*(new_ops or ()), DequantizePacked]
        self._container = proto if isinstance(proto, ModelContainer) else None
        if isinstance(proto, ModelContainer):
            proto = proto.model_proto
        elif isinstance(proto, bytes):
            proto = onnx.load_from_string(proto)
        elif isinstance(proto, (str, os.PathLike)):
            proto = onnx.load(proto)
        evaluated = proto
        if isinstance(proto, ModelProto) and opsets is None and functions is None:
            # The base class makes evaluators of a model's functions without new_ops; given the graph and ready
            # evaluators instead, it has nothing to make.
            evaluated, functions = proto.graph, proto.functions
            opsets = {opset.domain: opset.version for opset in proto.opset_import}
        ready = None
        if functions is not None:
            ready = _function_evaluators(type(self), functions, verbose=verbose, new_ops=operators, **options)
        super().__init__(evaluated, opsets, ready, verbose=verbose, new_ops=operators, **options)
        self.proto_ = proto
        if isinstance(proto, FunctionProto):
            # The base class demands these of every call; but a call may leave out what its nodes have a default for.
            self.attributes_ = []

    def retrieve_external_data(self, initializer: TensorProto) -> NDArray[np.generic]:
        """Return an initializer's external data from the ModelContainer that the evaluator was given."""
        self.container_ = self._container
        return super().retrieve_external_data(initializer)

    def run(
        self, output_names: Any, feed_inputs: Any, attributes: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the model; a function's attributes that its caller leaves out have their default values."""
        if isinstance(self.proto_, FunctionProto) and attributes is not None:
            attributes = {a.name: _python_value(a) for a in self.proto_.attribute_proto} | attributes
        return super().run(output_names, feed_inputs, attributes, *args, **kwargs)


def _function_evaluators(
    cls: type[ReferenceEvaluator],
    functions: Iterable[FunctionProto | onnx.reference.ReferenceEvaluator],
    **arguments: Any,
) -> list[onnx.reference.ReferenceEvaluator]:
    """An evaluator for each function, each given those of the functions that it calls."""
    functions = list(functions)
    evaluators = {(f.proto_.domain, f.proto_.name): f for f in functions if not isinstance(f, FunctionProto)}
    protos = {(f.domain, f.name): f for f in functions if isinstance(f, FunctionProto)}
    calls = {
        key: {(node.domain, node.op_type) for node in _all_nodes(function.node)} & protos.keys()
        for key, function in protos.items()
    }
    for key in TopologicalSorter(calls).static_order():
        evaluators[key] = cls(protos[key], functions=list(evaluators.values()), **arguments)
    return list(evaluators.values())


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """These nodes and all in their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)


def _python_value(attribute: AttributeProto) -> Any:
    """An attribute's value as ONNX's operators get it."""
    value = onnx.helper.get_attribute_value(attribute)
    match attribute.type:
        case AttributeProto.STRING:
            return value.decode("utf-8")
        case AttributeProto.STRINGS:
            return [item.decode("utf-8") for item in value]
        case AttributeProto.TENSOR:
            return onnx.numpy_helper.to_array(value)
    return value
