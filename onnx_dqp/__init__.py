"""DequantizePacked of ONNX opset 29: GGUF/GGML packed tensors to floating point, bit for bit.

``DequantizePacked`` plugs into ``onnx.reference.ReferenceEvaluator(model, new_ops=[DequantizePacked])``;
``ReferenceEvaluator`` is that class with the operator plugged in everywhere; ``dequantize`` is the same as a function.
``expand``, ``fold``, ``pack`` and ``check`` work on models, ``explain`` on one block. ``from_gguf`` makes a model of a
GGUF file. Importing the package registers nothing with ``onnx``; ``register_schema`` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnx_dqp.dequantize import dequantize
from onnx_dqp.errors import PackedTensorError
from onnx_dqp.formats import FORMATS, PackedFormat
from onnx_dqp.rules import from_ggml_type, packed_size, shape_from_gguf, to_ggml_type
from onnx_dqp.schema import register_schema, schema

if TYPE_CHECKING:
    from onnx_dqp.evaluator import ReferenceEvaluator
    from onnx_dqp.formats.explain import explain, take_apart
    from onnx_dqp.models.check import Problem, check
    from onnx_dqp.models.expand import expand
    from onnx_dqp.models.fold import fold
    from onnx_dqp.models.from_gguf import from_gguf
    from onnx_dqp.models.gguf_file import Gguf, GgufTensor, read_gguf
    from onnx_dqp.models.pack import pack
    from onnx_dqp.op import DequantizePacked

__version__ = "0.4.0"

__all__ = [
    "FORMATS",
    "DequantizePacked",
    "Gguf",
    "GgufTensor",
    "PackedFormat",
    "PackedTensorError",
    "Problem",
    "ReferenceEvaluator",
    "check",
    "dequantize",
    "expand",
    "explain",
    "fold",
    "from_ggml_type",
    "from_gguf",
    "pack",
    "packed_size",
    "read_gguf",
    "register_schema",
    "schema",
    "shape_from_gguf",
    "take_apart",
    "to_ggml_type",
]

_LATER = {
    "DequantizePacked": "onnx_dqp.op",
    "Gguf": "onnx_dqp.models.gguf_file",
    "GgufTensor": "onnx_dqp.models.gguf_file",
    "Problem": "onnx_dqp.models.check",
    "ReferenceEvaluator": "onnx_dqp.evaluator",
    "check": "onnx_dqp.models.check",
    "expand": "onnx_dqp.models.expand",
    "explain": "onnx_dqp.formats.explain",
    "fold": "onnx_dqp.models.fold",
    "from_gguf": "onnx_dqp.models.from_gguf",
    "pack": "onnx_dqp.models.pack",
    "read_gguf": "onnx_dqp.models.gguf_file",
    "take_apart": "onnx_dqp.formats.explain",
}


def __getattr__(name: str) -> Any:
    """What works on models is imported on first use: that takes longer than all the rest."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
