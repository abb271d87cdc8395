"""All that the contract says about a model's DequantizePacked nodes, every problem at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import FunctionProto, ModelProto, NodeProto, TensorProto

from onnx_dqp.attributes import examine
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.models.scopes import Scope, declared_opset, is_packed, scopes, with_types
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
    """

    node: str
    place: str
    rule: str
    found: str
    expected: str
    _text: str = ""

    def __str__(self) -> str:
        return f"{self.place}: node {self.node!r}: {self.rule}: {self._text}"


def check(model: ModelProto) -> list[Problem]:
    """Find everything that is wrong with a model's DequantizePacked nodes, in its graph, subgraphs and functions.

    Nothing is changed, and external data are not loaded; the length of a payload in an external file is the one that
    the model states. What is given by reference to a function's attribute, and types that cannot be inferred, are left
    to the runtime.

    Returns
    -------
    The problems in the order of nodes, empty where there are none.
    """
    if not any(is_packed(node) for scope in scopes(model) for node in scope.proto.node):
        return []
    problems = []
    inferred = with_types(model)
    version = declared_opset(model)
    for scope, typed in zip(scopes(model), scopes(inferred), strict=True):
        if isinstance(scope.proto, FunctionProto):
            version = declared_opset(scope.proto)
        for node in scope.proto.node:
            if is_packed(node):
                name = node.name or next(iter(node.output), "")
                problems += [
                    Problem(name[:60], scope.where, error.rule, error.found, error.expected, str(error))
                    for error in _node_problems(node, scope, typed, version)
                ]
    return problems


def _node_problems(node: NodeProto, scope: Scope, typed: Scope, version: int) -> Iterator[PackedTensorError]:
    if version < SINCE_VERSION:
        yield PackedTensorError(f"the operator does not exist in opset {version}", f"{SINCE_VERSION} or later", "opset")
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
        stated = {entry.key: entry.value for entry in payload.external_data}.get("length", "")
        held = int(stated) if stated.isdecimal() else length
    else:
        held = len(payload.raw_data) if payload.HasField("raw_data") else len(payload.int32_data)
    if held != length:
        yield PackedTensorError(f"the tensor {payload.name!r} of {length} bytes holds {held}", "as many", "R4")


__all__ = ["Problem", "check"]
