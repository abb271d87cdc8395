"""A GGUF file's tensors as an ONNX model's: packed ones as they are, byte for byte, behind DequantizePacked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from onnx import ModelProto, TensorProto, helper

from onnx_dqp import __version__
from onnx_dqp.console import printable
from onnx_dqp.models.files import MOST_INLINE, DataFile, ModelFileError, Progress, demand_location, no_progress, refer
from onnx_dqp.models.gguf_file import PLAIN_TYPES, Gguf, GgufTensor, json_ready, read_gguf
from onnx_dqp.models.selection import Selection, chooser
from onnx_dqp.rules import OUTPUT_DTYPES, check_output_dtype
from onnx_dqp.schema import OP_TYPE, SINCE_VERSION

Store = Callable[[TensorProto, GgufTensor], None]
"""Gives an initializer the bytes of a tensor, or lets it refer to them."""

_IR_VERSION = 10
"""That of ONNX 1.16, so that older tools can look into the model; nothing in it needs a later one."""


def from_gguf(
    path: str | os.PathLike[str],
    *,
    select: Selection = None,
    output_dtype: int = TensorProto.FLOAT,
    link: bool = True,
    skip_unsupported: bool = False,
) -> ModelProto:
    """A model of opset 29 whose outputs are a GGUF file's tensors, each under its name.

    A packed tensor becomes an initializer of exactly its bytes, ``NAME/packed``, and a DequantizePacked node. F32,
    F16, BF16 and F64 tensors become initializers, behind a Cast where their type is not ``output_dtype``; integers
    stay as they are. The file's metadata but for the tokenizer's become the model's.

    Parameters
    ----------
    path
        The file; of a sharded one (``-00001-of-00003.gguf``) any, all of them beside each other. It may be big-endian.
    select
        A shell pattern of names, several, a function that tells of a name, or None for all tensors.
    output_dtype
        The type of floating-point outputs: FLOAT, FLOAT16, BFLOAT16 or DOUBLE.
    link
        Whether initializers are external data whose location is the GGUF file itself. Nothing is copied; the model must
        be saved in the file's folder. The tensors of a big-endian file are always copied, because ONNX's data are
        little-endian. With False, all bytes are in the model, which must stay under 2 GiB; the command
        ``onnx-dqp from-gguf --copy`` writes them to a file of external data.
    skip_unsupported
        Leave out tensors that cannot be used: of a type that ggml does not have (any more), with a last dimension that
        is no multiple of the block (rule R3), with data outside the file or overlapping another's, with a name that is
        used twice or holds a path separator. ``onnx_dqp.read_gguf(path)`` tells of each what its problem is.

    Raises
    ------
    ImportError
        The package ``gguf`` is not installed (extra ``gguf``), or its reader is not as is known here.
    ValueError
        A file is damaged or cannot be linked to, a tensor cannot be used, no tensor is left, or the bytes do not fit in
        the model.
    PackedTensorError
        ``output_dtype`` is none of the four.
    OSError
        A file cannot be read.
    """
    check_output_dtype(output_dtype)
    source = read_gguf(path)
    tensors, _ = usable(source, select, skip_unsupported)
    if link:
        demand_linkable(tensors)
    copied = sum(tensor.size for tensor in tensors if not link or tensor.big_endian)
    if copied > MOST_INLINE:
        raise ModelFileError(f"{source.paths[0]}: {copied} bytes in the model, expected at most 2 GiB")
    return build(source, tensors, output_dtype, linked if link else inline)


def usable(source: Gguf, select: Selection, skip: bool) -> tuple[list[GgufTensor], list[GgufTensor]]:
    """The tensors that are meant and can be used, and those that cannot.

    Raises
    ------
    ModelFileError
        None is meant or can be used; or one that is meant cannot be, and it is not to be skipped.
    """
    chosen = chooser(select)
    path = source.paths[0]
    if not source.tensors:
        raise ModelFileError(f"{path} has no tensors, expected some")
    meant = [tensor for tensor in source.tensors if chosen(tensor.name)]
    if not meant:
        raise ModelFileError(f"{path}: none of {len(source.tensors)} tensors is selected")
    bad = [tensor for tensor in meant if tensor.problem is not None]
    if bad and not skip:
        more = f", and {len(bad) - 1} more with problems" if len(bad) > 1 else ""
        raise ModelFileError(f"{path}: tensor {printable(bad[0].name, 60)!r}: {bad[0].problem}{more}")
    good = [tensor for tensor in meant if tensor.problem is None]
    if not good:
        raise ModelFileError(f"{path}: none of {len(meant)} tensors can be used")
    return good, bad


def demand_linkable(tensors: Iterable[GgufTensor]) -> None:
    """Refuse files of tensors that ONNX does not take for external data.

    Raises
    ------
    ModelFileError
        A file is a symbolic link, has several hard links, or a name that cannot be a location.
    """
    for path in {tensor.path: None for tensor in tensors if not tensor.big_endian}:
        try:
            demand_location(path)
            if path.stat().st_nlink > 1:
                raise ModelFileError(f"{path} has several hard links, which onnx refuses as external data")
        except ModelFileError as error:
            raise ModelFileError(f"{error}: expected another file, or link=False (--copy)") from None


def linked(initializer: TensorProto, tensor: GgufTensor) -> None:
    """Refer to the GGUF file; bytes that must be changed, or that there are none of, are in the model."""
    if tensor.big_endian or not tensor.size:
        inline(initializer, tensor)
    else:
        refer(initializer, tensor.path.name, tensor.offset, tensor.size)


def inline(initializer: TensorProto, tensor: GgufTensor) -> None:
    """Put the bytes in the model."""
    initializer.raw_data = b"".join(part.data for part in tensor.parts())


def copying(data: DataFile, tensors: Iterable[GgufTensor], progress: Progress = no_progress) -> Store:
    """Write the bytes to a file of external data, tensor after tensor, part by part."""
    total, done = sum(tensor.size for tensor in tensors), 0

    def store(initializer: TensorProto, tensor: GgufTensor) -> None:
        nonlocal done
        data.add_parts(initializer, tensor.parts(), lambda written: progress(done + written, total))
        done += tensor.size

    return store


def build(source: Gguf, tensors: Iterable[GgufTensor], output_dtype: int, store: Store) -> ModelProto:
    """The model of usable tensors."""
    model = ModelProto(ir_version=_IR_VERSION, producer_name="onnx_dqp", producer_version=__version__)
    model.opset_import.append(helper.make_opsetid("", SINCE_VERSION))
    graph = model.graph
    graph.name = source.paths[0].stem.encode(errors="replace").decode()
    for tensor in tensors:
        format, name, dtype = tensor.format, tensor.name, output_dtype
        initializer = graph.initializer.add()
        if format is not None:
            initializer.name, initializer.data_type = f"{name}/packed", TensorProto.UINT8
            initializer.dims.append(tensor.size)
            node = helper.make_node(OP_TYPE, [initializer.name], [name], name)
            attributes = {"format": format.identifier, "shape": tensor.shape, "output_dtype": output_dtype}
            node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
            graph.node.append(node)
        else:
            own = PLAIN_TYPES[tensor.ggml_type].elem_type
            initializer.name, initializer.data_type = name, own
            initializer.dims.extend(tensor.shape)
            if own not in OUTPUT_DTYPES:
                dtype = own
            elif own != output_dtype:
                initializer.name = f"{name}/{tensor.type_name.lower()}"
                graph.node.append(helper.make_node("Cast", [initializer.name], [name], name, to=output_dtype))
        store(initializer, tensor)
        graph.output.append(helper.make_tensor_value_info(name, dtype, tensor.shape))
    for key, value in source.metadata.items():
        model.metadata_props.add(key=key, value=_text(value))
    return model


def _text(value: Any) -> str:
    """A metadata value: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(json_ready(value))
