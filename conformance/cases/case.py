"""What a case is: a model, its inputs, and the one right output; or a model that must be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from conformance.expected import expected
from onnx_dqp.formats import PackedFormat

OPSET = 29
IR_VERSION = 10

TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        int(TensorProto.FLOAT): "float",
        int(TensorProto.FLOAT16): "float16",
        int(TensorProto.BFLOAT16): "bfloat16",
        int(TensorProto.DOUBLE): "double",
    }
)
"""Output types in the order of reports, with their names in case names."""


@dataclass(frozen=True)
class Content:
    """What a valid case consists of: the model, its inputs in order, the output, and external-data files by name."""

    model: ModelProto
    inputs: Sequence[TensorProto]
    output: TensorProto
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """A valid case.

    Attributes
    ----------
    category
        The module of this package that it comes from.
    format, output_dtype
        What its DequantizePacked node (the first, where there are several) is given.
    what
        The end of its name.
    reason
        One sentence: why the case exists.
    flags
        Names from ``FLAGS``.
    shape
        The node's ``shape``.
    payload
        The bytes of the packed tensor.
    around
        Makes the content of a case whose model is more than one node; None for the node alone.
    """

    category: str
    format: PackedFormat
    output_dtype: int
    what: str
    reason: str
    flags: tuple[str, ...]
    shape: tuple[int, ...]
    payload: bytes = field(repr=False)
    around: Callable[[Case], Content] | None = field(default=None, repr=False)

    @property
    def type_name(self) -> str:
        """The output type's name in lower case."""
        return TYPE_NAMES[self.output_dtype]

    @property
    def name(self) -> str:
        """The name of the case and of its folder."""
        short = self.format.identifier.removeprefix("gguf:")
        return f"test_dequantizepacked_{short}_{self.type_name}_{self.what}"

    def decoded(self) -> NDArray[Any]:
        """What the node gives: the exact decoder's values, as an array of ``shape``."""
        return expected(self.format.identifier, self.payload, self.output_dtype).reshape(self.shape)

    def content(self) -> Content:
        """The model, inputs and output."""
        if self.around is not None:
            return self.around(self)
        x = tensor("x", TensorProto.UINT8, [len(self.payload)], self.payload)
        y = array_tensor("y", self.output_dtype, self.decoded())
        return Content(model([node(self)], [x], [y]), [x], y)


@dataclass(frozen=True, eq=False)
class InvalidCase:
    """A model that must be refused.

    Attributes
    ----------
    what
        The end of its name.
    rule
        The rule of the contract that is broken, "R1" to "R9".
    reason
        What is wrong with it, as a sentence.
    stage
        The earliest stage that can know: "load" (attributes, declared types and shapes) or "run".
    model
        The model.
    inputs
        What it is run with; for a fault that is known at load, inputs that would suit the declared types.
    format
        The format concerned, as far as there is one.
    output_dtype
        The type that its output would have.
    """

    what: str
    rule: str
    reason: str
    stage: str
    model: ModelProto = field(repr=False)
    inputs: Sequence[TensorProto] = field(repr=False)
    format: PackedFormat
    output_dtype: int = int(TensorProto.FLOAT)

    category = "invalid"

    @property
    def flags(self) -> tuple[str, ...]:
        """The rule that is broken, as a flag."""
        return ("Invalid", f"Invalid{self.rule}")

    @property
    def name(self) -> str:
        """The name of the case and of its folder."""
        return f"invalid_dequantizepacked_{self.what}"

    @property
    def type_name(self) -> str:
        """The output type's name in lower case."""
        return TYPE_NAMES[self.output_dtype]


# --- Protobufs that are the same on every machine ------------------------------------------------------------------


def tensor(name: str, data_type: int, dims: Sequence[int], raw: bytes) -> TensorProto:
    """A tensor with dims, data_type, name and little-endian raw_data, and nothing else."""
    return TensorProto(name=name, data_type=data_type, dims=dims, raw_data=raw)


def array_tensor(name: str, data_type: int, array: NDArray[Any]) -> TensorProto:
    """An array of the type's NumPy dtype as a tensor."""
    # By way of unsigned integers, for which every NumPy knows byte order.
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return tensor(name, data_type, array.shape, bits.astype(f"<u{array.dtype.itemsize}").tobytes())


def value_info(like: TensorProto) -> ValueInfoProto:
    """A graph's input or output of a tensor's name, type and shape."""
    return helper.make_tensor_value_info(like.name, like.data_type, list(like.dims))


def node(case: Case, x: str = "x", y: str = "y", **attributes: Any) -> NodeProto:
    """The case's DequantizePacked node; an attribute given as None is left out."""
    given: dict[str, Any] = {"format": case.format.identifier, "shape": list(case.shape)}
    given |= {"output_dtype": case.output_dtype} | attributes
    return helper.make_node("DequantizePacked", [x], [y], **{k: v for k, v in given.items() if v is not None})


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[TensorProto | ValueInfoProto],
    outputs: Sequence[TensorProto | ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> ModelProto:
    """A model of opset 29 and IR version 10, without anything that varies between machines."""

    def infos(values: Sequence[TensorProto | ValueInfoProto]) -> list[ValueInfoProto]:
        return [value_info(v) if isinstance(v, TensorProto) else v for v in values]

    graph = helper.make_graph(
        list(nodes), "dequantize_packed", infos(inputs), infos(outputs), initializer=list(initializers)
    )
    made = ModelProto(ir_version=IR_VERSION, graph=graph, functions=list(functions))
    made.opset_import.extend(helper.make_opsetid(*opset) for opset in [("", OPSET), *((d, 1) for d in domains)])
    return made
