"""Decoders to measure against: ggml's C, gguf-py, and PyTorch in the way that loaders of GGUF files use it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from conformance import ggml
from onnx_dqp import FORMATS, PackedFormat

PACKAGES = {"gguf-py": "gguf", "ggml": "libggml", "PyTorch": "torch"}
"""The package that each contender needs, a development extra."""

Decoder = Callable[[np.ndarray], object]
"""From a payload, uint8 of rank 1, to a new FLOAT tensor."""


def installed(contender: str) -> bool:
    """Whether a contender can be measured."""
    return find_spec(PACKAGES[contender]) is not None


def decoder(contender: str, format: PackedFormat) -> Decoder | None:
    """A contender's decoder of a format, if it has one."""
    if contender == "gguf-py":
        import gguf  # noqa: PLC0415

        kind = gguf.GGMLQuantizationType.__members__.get(format.name)
        known = hasattr(gguf.quants, format.name)
        return (lambda payload: gguf.quants.dequantize(payload, kind)) if known else None
    if contender == "ggml":
        return None if format.identifier in ggml.NO_DECODER else lambda payload: ggml.dequantize(format, payload)
    return _torch_decoders().get(format.name)


def _torch_decoders() -> dict[str, Decoder]:
    """Whole-tensor operations, one after the other, each with a tensor of its own for the result."""
    import torch  # noqa: PLC0415

    values = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)

    def split(payload: np.ndarray, name: str) -> dict[str, Any]:
        """The fields of all blocks, each (n, bytes)."""
        format = FORMATS[f"gguf:{name.lower()}"]
        blocks = torch.from_numpy(payload).view(-1, format.bytes)
        offsets = {field: (offset, dtype.itemsize) for field, (dtype, offset, *_) in format.layout.fields.items()}
        return {field: blocks[:, start : start + size] for field, (start, size) in offsets.items()}

    def scale(field: Any) -> Any:
        return field.contiguous().view(torch.float16).to(torch.float32)

    def nibble_planes(field: Any, run: int) -> Any:
        """(n, m) -> (n, m / run, 2, run): low nibbles, then high ones."""
        packed = field.reshape(field.shape[0], -1, 1, run)
        return torch.cat([packed & 15, packed >> 4], dim=2)

    def q4_0(payload: np.ndarray) -> object:
        block = split(payload, "Q4_0")
        codes = nibble_planes(block["qs"], 16).reshape(-1, 32).to(torch.int8) - 8
        return scale(block["d"]) * codes

    def iq4_nl(payload: np.ndarray) -> object:
        block = split(payload, "IQ4_NL")
        codes = nibble_planes(block["qs"], 16).reshape(-1, 32)
        return scale(block["d"]) * values[codes.to(torch.int32)]

    def q4_k(payload: np.ndarray) -> object:
        block = split(payload, "Q4_K")
        first, second, rest = block["scales"].reshape(-1, 3, 4).unbind(1)
        scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
        mins = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
        codes = nibble_planes(block["qs"], 32).reshape(-1, 8, 32)
        factor = (scale(block["d"]) * scales).unsqueeze(-1)
        return factor * codes - (scale(block["dmin"]) * mins).unsqueeze(-1)

    def q6_k(payload: np.ndarray) -> object:
        block = split(payload, "Q6_K")
        low = nibble_planes(block["ql"], 64).reshape(-1, 256)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
        high = (block["qh"].reshape(-1, 2, 1, 32) >> shifts) & 3
        codes = (low | (high.reshape(-1, 256) << 4)).to(torch.int8) - 32
        factor = scale(block["d"]) * block["scales"].contiguous().view(torch.int8)
        return factor.unsqueeze(-1) * codes.view(-1, 16, 16)

    return {"Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl}
