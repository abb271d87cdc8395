"""The operator's schema, with type and shape inference, and its registration with ``onnx``."""

from __future__ import annotations

import atexit
import threading
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from onnx_dqp.attributes import ATTRIBUTE_TYPES, DEFAULT_OUTPUT_DTYPE, Attributes, read_attributes
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import FORMATS
from onnx_dqp.rules import check_payload_size

OP_TYPE = "DequantizePacked"
DOMAIN = ""
SINCE_VERSION = 29

_DOC = """\
Turns the packed payload of one quantized tensor into a floating-point tensor.

The input `x` holds exactly the bytes of the tensor: consecutive blocks of the block format named by `format`, every \
multibyte field little-endian. Each block holds a fixed number of consecutive elements of a row.

- R1: `format` is one of the identifiers below. It is case-sensitive and takes no parameters.
- R2: `shape` has at least one dimension, and none is negative. A dimension of 0 gives an empty tensor.
- R3: The last dimension is a multiple of the format's elements per block, also where the tensor is empty: blocks \
never straddle rows.
- R4: The length of `x` is product(shape[:-1]) * (shape[-1] / elements per block) * (bytes per block). It fits in 63 \
bits.
- R5: Blocks are decoded in the order of the input, concatenated, and reshaped to `shape`.
- R6: Blocks are decoded to FLOAT with FLOAT arithmetic, whatever `output_dtype` is.
- R7: The FLOAT values are converted once to `output_dtype`, as Cast does: FLOAT16 and BFLOAT16 round to nearest, ties \
to even; overflow gives an infinity; subnormal results and the sign of zero are kept; NaN stays NaN.
- R8: A GGUF tensor descriptor [ne0, ne1, ...] becomes shape = [..., ne1, ne0]; the bytes of the payload stay as they \
are.
- R9: `x` of another element type or rank, an `output_dtype` other than FLOAT, FLOAT16, BFLOAT16 and DOUBLE, and a \
missing or wrongly typed attribute are errors.

| format | elements per block | bytes per block |
| --- | --- | --- |
{table}

How the bytes of each format become values: docs/decoding.md of the onnx_dqp project.
"""


def schema() -> defs.OpSchema:
    """Make the operator's schema, since version 29 of the main domain; its document text states the rules.

    A new object each time, registered nowhere, with type and shape inference, which raises
    ``onnx.shape_inference.InferenceError``.
    """
    table = "\n".join(f"| `{f.identifier}` | {f.elements} | {f.bytes} |" for f in FORMATS.values())
    made = defs.OpSchema(
        OP_TYPE,
        DOMAIN,
        SINCE_VERSION,
        doc=_DOC.format(table=table),
        inputs=[
            defs.OpSchema.FormalParameter(
                "x", "tensor(uint8)", "The payload, of rank 1: the packed tensor's bytes and nothing else."
            )
        ],
        outputs=[defs.OpSchema.FormalParameter("y", "T", "The tensor, of dimensions `shape` and type `output_dtype`.")],
        type_constraints=[
            (
                "T",
                ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"],
                "The floating-point types that a packed tensor can be turned into.",
            )
        ],
        attributes=[
            defs.OpSchema.Attribute("format", defs.OpSchema.AttrType.STRING, "The identifier of the block format."),
            defs.OpSchema.Attribute(
                "shape", defs.OpSchema.AttrType.INTS, "The tensor's dimensions, in ONNX (row-major) order."
            ),
            defs.OpSchema.Attribute(
                "output_dtype",
                helper.make_attribute("output_dtype", DEFAULT_OUTPUT_DTYPE),
                "The element type of `y`: FLOAT (1), FLOAT16 (10), DOUBLE (11) or BFLOAT16 (16).",
            ),
        ],
    )
    made.set_type_and_shape_inference_function(_infer)
    return made


_registering = threading.Lock()


def register_schema() -> None:
    """Make ``onnx.checker`` and ``onnx.shape_inference`` know the operator.

    Where ``onnx`` has it already, from an earlier call or as its own, nothing changes. Raises nothing. Evaluation
    does not look at schemas: it still needs ``new_ops`` or ``onnx_dqp.ReferenceEvaluator``.

    ``onnx`` takes the newest version among its schemas for its own opset: from here on
    ``onnx.defs.onnx_opset_version()`` is at least 29, and so is the opset of models that ``onnx.helper.make_model`` is
    not given one for. The schema is taken out again when the interpreter exits: with a Python inference function left
    in the registry, onnx 1.20 to 1.22 crash there.
    """
    with _registering:
        if not defs.has(OP_TYPE, SINCE_VERSION, DOMAIN):
            defs.register_schema(schema())
            atexit.register(_deregister)


def _deregister() -> None:
    if defs.has(OP_TYPE, SINCE_VERSION, DOMAIN):
        defs.deregister_schema(OP_TYPE, SINCE_VERSION, DOMAIN)


def _infer(context: Any) -> None:
    """Type and shape inference: ``context`` is an ``onnx.shape_inference.InferenceContext``.

    ``onnx`` lets an exception of a Python inference function through as it is, in non-strict mode too; an
    InferenceError is what its own operators raise.
    """
    try:
        found = (context.get_attribute(name) for name in ATTRIBUTE_TYPES)
        attributes = read_attributes(a for a in found if a is not None)
        for what, count in (("input", context.get_num_inputs()), ("output", context.get_num_outputs())):
            if count != 1:
                raise PackedTensorError(f"the node has {count} {what}s", "1", "R9")
        check_input(context.get_input_type(0), attributes)
    except PackedTensorError as error:
        raise onnx.shape_inference.InferenceError(f"{OP_TYPE}: {error}") from None
    if attributes.output_dtype is not None:  # onnx takes no output type without an element type
        context.set_output_type(0, helper.make_tensor_type_proto(attributes.output_dtype, attributes.dims))


def check_input(input_type: onnx.TypeProto | None, attributes: Attributes) -> None:
    """R9 and R4, as far as the type and shape of ``x`` are known."""
    if input_type is None or input_type.WhichOneof("value") is None:
        return
    kind = input_type.WhichOneof("value")
    if kind != "tensor_type":
        raise PackedTensorError(f"x is of kind {str(kind).removesuffix('_type')}", "a tensor", "R9")
    tensor = input_type.tensor_type
    if tensor.elem_type not in (TensorProto.UNDEFINED, TensorProto.UINT8):
        known = tensor.elem_type in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(tensor.elem_type) if known else tensor.elem_type
        raise PackedTensorError(f"x has element type {name}", "UINT8", "R9")
    if not tensor.HasField("shape"):
        return
    if len(tensor.shape.dim) != 1:
        raise PackedTensorError(f"x has rank {len(tensor.shape.dim)}", "rank 1", "R9")
    length = tensor.shape.dim[0]
    known = length.HasField("dim_value") and length.dim_value >= 0
    if known and attributes.format is not None and attributes.dims is not None:
        check_payload_size(attributes.format, attributes.dims, length.dim_value)


__all__ = ["DOMAIN", "OP_TYPE", "SINCE_VERSION", "register_schema", "schema"]
