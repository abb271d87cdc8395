"""Backends of the suite's own: ONNX Runtime, and any backend on models whose nodes ``onnx_dqp.expand`` replaced."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import onnxruntime
from numpy.typing import NDArray

from onnx_dqp import expand

_FATAL_ONLY = 4
"""ONNX Runtime's number for it: a refusal is an exception, and nothing on standard error."""


class OnnxRuntime:
    """ONNX Runtime on the CPU. Its own backend cannot return BFLOAT16."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.intra_op_num_threads = 1  # the suite runs many at once
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> OnnxRuntime:  # noqa: ARG003
        """Make a session."""
        return cls(model)

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[Any]:
        """Run it."""
        names = [value.name for value in self._session.get_inputs()]
        given = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in zip(names, inputs, strict=True)}
        return [_array(value) for value in self._session.run_with_ort_values(None, given)]


def _array(value: onnxruntime.OrtValue) -> NDArray[Any]:
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        found: NDArray[Any] = value.numpy()
        return found
    octets = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()) if np.prod(value.shape()) else b""
    return np.frombuffer(octets, ml_dtypes.bfloat16).reshape(value.shape())


class PlainReference:
    """ONNX's own ReferenceEvaluator, which does not know the operator."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = onnx.reference.ReferenceEvaluator(model)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> PlainReference:  # noqa: ARG003
        """Build the evaluator."""
        return cls(model)

    def run(self, inputs: Sequence[NDArray[Any]]) -> list[Any]:
        """Run it."""
        return list(self._evaluator.run(None, dict(zip(self._evaluator.input_names, inputs, strict=True))))


class Expanded:
    """A backend on expanded models."""

    def __init__(self, backend: Any, opset: int | None = None) -> None:
        self._backend, self._opset = backend, opset

    def prepare(self, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> Any:
        """Expand the model and prepare the backend."""
        return self._backend.prepare(expand(model, opset=self._opset), device, **options)
