"""Quantizers that others have written, by name: ggml's compiled ones, and those of the package ``gguf`` in Python."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from onnx_dqp import ggml
from onnx_dqp.formats import PackedFormat
from onnx_dqp.rules import shown

Quantizer = Callable[[PackedFormat, NDArray[np.float32]], NDArray[np.uint8]]
"""Gives the payload, of rank 1, of weights of shape (rows, elements), whole blocks a row."""

PACKAGES = {"ggml": "libggml", "gguf": "gguf"}
"""Quantizer's name -> the module that it needs, in the order in which they are tried."""


def gguf_quantize(format: PackedFormat, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize with the package ``gguf``, which must know the format."""
    import gguf  # noqa: PLC0415 - an extra

    with np.errstate(all="ignore"):
        payload = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(format.ggml_type))
    return payload.reshape(-1)


def can_quantize(name: str, format: PackedFormat) -> bool:
    """Whether the quantizer of a name is installed and knows a format."""
    if find_spec(PACKAGES[name]) is None:
        return False
    if name == "ggml":
        return format.identifier not in ggml.NO_QUANTIZER
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - an extra

    if format.ggml_type not in set(GGMLQuantizationType):
        return False
    try:
        gguf_quantize(format, np.zeros((1, format.elements), np.float32))
    except NotImplementedError:  # no list of those that are
        return False
    return True


def find_quantizer(choice: str | Quantizer | None, format: PackedFormat) -> Quantizer:
    """A quantizer for a format.

    Parameters
    ----------
    choice
        Its name, ``"ggml"`` or ``"gguf"``; None for the first of these that is installed and knows the format; or a
        function, which is the result.
    format
        What it must know.

    Raises
    ------
    ImportError
        None that could know the format is installed.
    ValueError
        The name is another, or those that are installed do not know the format.
    """
    if callable(choice):
        return choice
    if choice is not None and (not isinstance(choice, str) or choice not in PACKAGES):
        raise ValueError(f"quantizer is {shown(choice)}, expected a function or one of {', '.join(PACKAGES)}")
    names = tuple(PACKAGES) if choice is None else (choice,)
    for name in names:
        if can_quantize(name, format):
            return ggml.quantize if name == "ggml" else gguf_quantize
    missing = [name for name in names if find_spec(PACKAGES[name]) is None]
    if missing and format.identifier not in ggml.NO_QUANTIZER:
        extras = " or ".join(f"'onnx_dqp[{name}]'" for name in missing)
        raise ImportError(f"no quantizer for {format.identifier} is installed: pip install {extras}")
    raise ValueError(
        f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no quantizer for {format.identifier}"
    )
