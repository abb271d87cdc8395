"""All places of a model where nodes stand: its graph, subgraphs and functions, and what is known there of a name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import onnx.shape_inference
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from onnx_dqp.attributes import DEFAULT_OUTPUT_DTYPE
from onnx_dqp.rules import OUTPUT_DTYPES
from onnx_dqp.schema import OP_TYPE

MAIN_DOMAINS = ("", "ai.onnx")
"""Both spellings of ONNX's main domain."""

_UNKNOWN = "onnx_dqp.unknown"
"""A domain of no operators: inference passes by its nodes."""

_MOST_CALLS = 10_000
"""Calls of functions that shape inference may walk through: functions that call others twice, these others ... ."""

_SMALL = 1024
"""Bytes of a tensor whose contents shape inference may look at, for example the shape of a Reshape."""


@dataclass(frozen=True, eq=False)
class Scope:
    """Nodes that stand together.

    Attributes
    ----------
    where
        For a message: ``graph``, ``graph / 'if' then_branch``, ``function local.F``.
    proto
        What holds them.
    opset
        The version of the main domain that holds here: the model's or the function's, 0 where it imports none.
    parent
        The scope around a subgraph, whose names are visible here.
    """

    where: str
    proto: GraphProto | FunctionProto
    opset: int
    parent: Scope | None = None

    @cached_property
    def constants(self) -> dict[str, TensorProto]:
        """Tensors by name that no caller can replace: initializers that are no inputs, and Constant nodes."""
        found = {}
        if isinstance(self.proto, GraphProto):
            inputs = {value.name for value in self.proto.input}
            found = {tensor.name: tensor for tensor in self.proto.initializer if tensor.name not in inputs}
        for node in self.proto.node:
            if node.op_type == "Constant" and node.domain in MAIN_DOMAINS and len(node.attribute) == 1:
                attribute = node.attribute[0]
                if attribute.name == "value" and not attribute.ref_attr_name and len(node.output) == 1:
                    found[node.output[0]] = attribute.t
        return found

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """The declared types of inputs, outputs and other values, initializers' included."""
        found = {}
        if isinstance(self.proto, GraphProto):
            for tensor in self.proto.initializer:
                found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            for value in (*self.proto.input, *self.proto.output, *self.proto.value_info):
                found[value.name] = value.type
        for name, tensor in self.constants.items():
            found[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        return found

    def constant(self, name: str) -> TensorProto | None:
        """The constant of a name, here or around."""
        if name in self.names:
            return self.constants.get(name)
        return self.parent.constant(name) if self.parent else None

    def type(self, name: str) -> TypeProto | None:
        """The declared type of a name, here or around."""
        if name in self.names:
            return self.types.get(name)
        return self.parent.type(name) if self.parent else None

    @cached_property
    def names(self) -> set[str]:
        """What is defined here."""
        inputs: Iterable[str]
        if isinstance(self.proto, GraphProto):
            tensors = {tensor.name for tensor in self.proto.initializer}
            tensors |= {tensor.values.name for tensor in self.proto.sparse_initializer}
            inputs = {value.name for value in self.proto.input} | tensors
        else:
            inputs = self.proto.input
        return {*inputs, *(name for node in self.proto.node for name in node.output)}


def scopes(model: ModelProto) -> Iterator[Scope]:
    """Every scope of a model, outer ones before inner ones."""
    yield from _with_subgraphs(Scope("graph", model.graph, declared_opset(model)))
    for function in model.functions:
        name = ".".join(filter(None, (function.domain, function.name, function.overload)))
        yield from _with_subgraphs(Scope(f"function {name}", function, declared_opset(function)))


def _with_subgraphs(scope: Scope) -> Iterator[Scope]:
    yield scope
    for node in scope.proto.node:
        for attribute in node.attribute:
            name = f"{scope.where} / {label(node)} {attribute.name}"
            if attribute.HasField("g"):
                yield from _with_subgraphs(Scope(name, attribute.g, scope.opset, scope))
            for number, graph in enumerate(attribute.graphs):
                yield from _with_subgraphs(Scope(f"{name}[{number}]", graph, scope.opset, scope))


def label(node: NodeProto) -> str:
    """A node for a message: its name, or else its first output, or else its operator."""
    return repr((node.name or next(filter(None, node.output), "") or node.op_type)[:60])


def is_packed(node: NodeProto) -> bool:
    """Whether a node is a DequantizePacked."""
    return node.op_type == OP_TYPE and node.domain in MAIN_DOMAINS


def packed_nodes(model: ModelProto) -> Iterator[tuple[Scope, NodeProto]]:
    """Every DequantizePacked node of a model, and where it stands."""
    for scope in scopes(model):
        for node in scope.proto.node:
            if is_packed(node):
                yield scope, node


def declared_opset(model: ModelProto | FunctionProto) -> int:
    """The version of the main domain that a model or function imports, 0 where it imports none."""
    return max((imported.version for imported in model.opset_import if imported.domain in MAIN_DOMAINS), default=0)


def output_type(node: NodeProto) -> int | None:
    """The element type that a DequantizePacked node's attribute gives, None where that cannot be told."""
    for attribute in node.attribute:
        if attribute.name == "output_dtype":
            return attribute.i if not attribute.ref_attr_name and attribute.i in OUTPUT_DTYPES else None
    return DEFAULT_OUTPUT_DTYPE


def external(tensor: TensorProto) -> dict[str, str]:
    """What a tensor says of its external data; empty where it has none."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return {}
    return {entry.key: entry.value for entry in tensor.external_data}


def stated_length(tensor: TensorProto) -> int | None:
    """The length in bytes that a tensor states for its external data, None where it states none."""
    text = external(tensor).get("length", "")
    return int(text) if text.isdecimal() and len(text) < 20 else None


def clear_data(tensor: TensorProto) -> None:
    """Take a tensor's elements out of it."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)


def _calls(model: ModelProto) -> int:
    """Calls of functions, those in called functions counted each time; many where they go in circles."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    counts: dict[tuple[str, str, str], int] = {}

    def of(proto: GraphProto | FunctionProto) -> int:
        total = 0
        for inner in _with_subgraphs(Scope("", proto, 0)):
            for node in inner.proto.node:
                key = (node.domain, node.op_type, node.overload)
                if key in functions:
                    if key not in counts:
                        counts[key] = _MOST_CALLS + 1  # until it is known: it may call itself
                        counts[key] = of(functions[key])
                    total += 1 + counts[key]
        return total

    return of(model.graph)


def with_types(model: ModelProto) -> ModelProto:
    """A copy in which types are inferred as far as can be, and that has no large tensors' contents.

    It has the same scopes. DequantizePacked is not registered for that: its output's type is declared.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    for holder in (copy, *copy.functions):
        holder.opset_import.append(helper.make_opsetid(_UNKNOWN, 1))
    for scope in scopes(copy):
        tensors = [] if isinstance(scope.proto, FunctionProto) else list(scope.proto.initializer)
        for node in scope.proto.node:
            tensors += [attribute.t for attribute in node.attribute if attribute.HasField("t")]
            if is_packed(node):
                node.domain = _UNKNOWN
                dtype = output_type(node)
                if dtype is not None and isinstance(scope.proto, GraphProto) and node.output:
                    shape = next((a.ints for a in node.attribute if a.name == "shape" and not a.ref_attr_name), None)
                    scope.proto.value_info.append(helper.make_tensor_value_info(node.output[0], dtype, shape))
        for tensor in tensors:
            if tensor.ByteSize() > _SMALL:
                clear_data(tensor)
    if _calls(copy) > _MOST_CALLS:
        return copy
    try:
        return onnx.shape_inference.infer_shapes(copy)
    except Exception:  # of a Python inference function, or over 2 GiB: what is declared must do
        return copy
