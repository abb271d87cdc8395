"""A row of the table of formats, and the decorator that adds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.unpack import Scratch

Blocks = NDArray[np.void]
"""Shape (n,): n blocks, each one item of the format's ``layout``."""

Decoder = Callable[[Blocks, NDArray[np.float32], Scratch], None]
"""Fills a C-contiguous FLOAT array of shape (n, elements) from n blocks, with some memory to work in."""


@dataclass(frozen=True, eq=False, repr=False)
class PackedFormat:
    """One block format: how many elements a block holds, how its bytes are laid out, how they decode.

    Every instance carries the decoding rule of its format as its own ``__doc__``.

    Attributes
    ----------
    identifier
        The operator's ``format`` attribute, for example ``"gguf:q4_0"``.
    name
        ggml's name, for example ``"Q4_0"``.
    ggml_type
        ggml's number for the type (``enum ggml_type`` in ``ggml.h``); the table is in its order.
    elements
        Elements per block.
    layout
        The block as a NumPy structured dtype: packed, every multibyte field little-endian.
    decode
        The decoder: ``decode(blocks, out, scratch)`` fills ``out``, C-contiguous FLOAT of shape (n, elements), from
        ``blocks`` of shape (n,), n at least 1, and dtype ``layout``. It raises nothing. ``scratch``, a
        ``formats.unpack.Scratch()``, is memory that it works in, not shared with other threads.
    """

    identifier: str
    ggml_type: int
    elements: int
    layout: np.dtype[np.void]
    decode: Decoder

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.decode.__doc__)

    @property
    def name(self) -> str:
        """ggml's name, for example ``"Q4_0"``."""
        return self.identifier.removeprefix("gguf:").upper()

    @property
    def bytes(self) -> int:
        """Bytes per block."""
        return self.layout.itemsize

    @property
    def bits_per_element(self) -> float:
        """Bits of payload per element, scales and unused fields included."""
        return self.bytes * 8 / self.elements

    def __reduce__(self) -> tuple[Callable[[str], PackedFormat], tuple[str]]:
        # There is one object of each format, also after pickling or copying.
        return _row, (self.identifier,)

    def __repr__(self) -> str:
        return f"<PackedFormat {self.identifier}: {self.elements} elements in {self.bytes} bytes>"


_rows: dict[str, PackedFormat] = {}


def _row(identifier: str) -> PackedFormat:
    return _rows[identifier]


def packed_format(identifier: str, *, ggml_type: int, elements: int, layout: list[Any]) -> Callable[[Decoder], Decoder]:
    """Add a decoder to the table, with its block's layout as NumPy's list of (name, type, count)."""

    def add(decode: Decoder) -> Decoder:
        _rows[identifier] = PackedFormat(identifier, ggml_type, elements, np.dtype(layout), decode)
        return decode

    return add


def table() -> Mapping[str, PackedFormat]:
    """All rows added so far by identifier, read-only, in the contract's order, which is that of ggml's numbers."""
    return MappingProxyType(dict(sorted(_rows.items(), key=lambda row: row[1].ggml_type)))
