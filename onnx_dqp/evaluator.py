"""ONNX's reference evaluator with the operator plugged in wherever a node can stand, model-local functions included."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import onnx.inliner
import onnx.reference
from onnx import ModelProto, NodeProto
from onnx.model_container import ModelContainer
from onnx.reference.op_run import OpRun

from onnx_dqp.op import DequantizePacked


class ReferenceEvaluator(onnx.reference.ReferenceEvaluator):
    """``onnx.reference.ReferenceEvaluator`` that knows DequantizePacked everywhere.

    The plain class does not hand ``new_ops`` on to model-local functions. This one inlines them first, with ``onnx``'s
    own inliner, so that nested calls, functions in subgraphs, and attributes by reference, by default or left out mean
    what they mean in shape inference; and a node in a function is refused when the evaluator is built.

    Parameters
    ----------
    proto
        A ModelProto, GraphProto, FunctionProto, NodeProto, ModelContainer, serialized model or path.
    opsets, functions, verbose, options
        As in the base class. A model with functions is copied, by way of protobuf's serialization: it may have at most
        2 GiB, external data not counted.
    new_ops
        Further operators, which come before DequantizePacked.

    Raises
    ------
    PackedTensorError
        A DequantizePacked node breaks a rule that its attributes tell.
    ValueError
        Functions call one another in a circle.
    """

    def __init__(
        self,
        proto: Any,
        opsets: dict[str, int] | None = None,
        functions: Any = None,
        verbose: int = 0,
        new_ops: Iterable[type[OpRun]] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(proto, bytes):
            proto = onnx.load_from_string(proto)
        elif isinstance(proto, (str, os.PathLike)):
            proto = onnx.load(proto)
        if isinstance(proto, ModelProto) and proto.functions:
            proto = inlined(proto)
        elif isinstance(proto, ModelContainer) and proto.model_proto.functions:
            container, proto = proto, ModelContainer()
            proto.model_proto = inlined(container.model_proto)
            proto.large_initializers = container.large_initializers
        operators: list[type[OpRun]] = [*(new_ops or ()), DequantizePacked]
        super().__init__(proto, opsets, functions, verbose=verbose, new_ops=operators, **options)


def inlined(model: ModelProto) -> ModelProto:
    """A copy of the model without functions, but for those of another opset, which the inliner leaves as they are."""
    copy = ModelProto()
    copy.CopyFrom(model)
    # Two things that the inliner does not do: it drops references to attributes that have a default, and it does not
    # import the opsets of what it takes out of functions.
    functions = {(f.domain, f.name, f.overload): f for f in copy.functions}
    calls = {key: {_called(node) for node in _all_nodes(f.node)} & functions.keys() for key, f in functions.items()}
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:  # the inliner of onnx up to 1.21 would crash
        circle = " -> ".join(name for _, name, _ in error.args[1])
        raise ValueError(f"functions call one another in a circle: {circle}") from None
    for node in _all_nodes([*copy.graph.node, *(node for f in copy.functions for node in f.node)]):
        called = functions.get(_called(node))
        if called is not None:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(default for default in called.attribute_proto if default.name not in given)
    imported = {opset.domain for opset in copy.opset_import}
    for function in copy.functions:
        copy.opset_import.extend(opset for opset in function.opset_import if opset.domain not in imported)
        imported |= {opset.domain for opset in function.opset_import}
    return onnx.inliner.inline_local_functions(copy)


def _called(node: NodeProto) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """These nodes and all in their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_nodes(graph.node)
