"""All that the contract says about a model's DequantizePacked nodes, every problem at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto

from onnx_dqp.attributes import examine
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.models.scopes import Scope, is_packed, packed_nodes, scopes, stated_length, with_types
from onnx_dqp.schema import SINCE_VERSION, check_input


@dataclass(frozen=True)
class Problem:
    """Something wrong with a node.

    Attributes
    ----------
    node
        The node's name, or its output where it has none.
    place
        Where it stands: ``graph``, ``graph / 'if' then_branch``, ``function local.F``.
    rule
        The rule of the contract that it breaks, ``R1`` to ``R9``, or ``opset`` where the operator does not exist in the
        version that the model or function imports.
    found, expected
        What is there and what should be; ``expected`` is empty where ``found`` says it all.
    text
        Both in one line.
    """

    node: str
    place: str
    rule: str
    found: str
    expected: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: node {self.node!r}: {self.rule}: {self.text}"


def check(model: ModelProto) -> list[Problem]:
    """Find everything that is wrong with a model's DequantizePacked nodes, in its graph, subgraphs and functions.

    Nothing is changed, and external data are not loaded; the length of a payload in an external file is the one that
    the model states. What is given by reference to a function's attribute, and types that cannot be inferred, are left
    to the runtime.

    Returns
    -------
    The problems in the order of nodes, empty where there are none.
    """
    return [
        Problem(node, place, error.rule, error.found, error.expected, str(error))
        for node, place, error in _errors(model)
    ]


def demand_valid(model: ModelProto) -> None:
    """Raise the first problem that ``check`` finds, as a PackedTensorError with its node and place."""
    for node, place, error in _errors(model):
        raise error.within(f"{place}: node {node!r}: {error.rule}")


def _errors(model: ModelProto) -> Iterator[tuple[str, str, PackedTensorError]]:
    """Node, place and error."""
    if next(packed_nodes(model), None) is None:
        return
    for scope, typed in zip(scopes(model), scopes(with_types(model)), strict=True):
        for node in scope.proto.node:
            if is_packed(node):
                name = node.name or next(iter(node.output), "")
                for error in _node_problems(node, scope, typed):
                    yield name[:60], scope.where, error


def _node_problems(node: NodeProto, scope: Scope, typed: Scope) -> Iterator[PackedTensorError]:
    if scope.opset < SINCE_VERSION:
        found = f"the operator does not exist in opset {scope.opset}"
        yield PackedTensorError(found, f"{SINCE_VERSION} or later", "opset")
    for what, names in (("input", node.input), ("output", node.output)):
        if len(names) != 1:
            yield PackedTensorError(f"the node has {len(names)} {what}s", "1", "R9")
        elif not names[0]:
            yield PackedTensorError(f"the node's {what} is left out", "1", "R9")
    attributes, problems = examine(node.attribute)
    yield from problems
    if not node.input or not node.input[0]:
        return
    try:
        check_input(typed.type(node.input[0]), attributes)
    except PackedTensorError as error:
        yield error
        return
    payload = scope.constant(node.input[0])
    if payload is not None:
        yield from _payload_problems(payload)


def _payload_problems(payload: TensorProto) -> Iterator[PackedTensorError]:
    """What an initializer holds, beside what its type says."""
    length = math.prod(payload.dims)
    if payload.data_location == TensorProto.EXTERNAL:
        stated = stated_length(payload)
        held = length if stated is None else stated
    else:
        held = len(payload.raw_data) if payload.HasField("raw_data") else len(payload.int32_data)
    if held != length:
        yield PackedTensorError(f"the tensor {payload.name!r} of {length} bytes holds {held}", "as many", "R4")


__all__ = ["Problem", "check"]
