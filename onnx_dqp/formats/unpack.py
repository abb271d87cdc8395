"""How bytes hold more than one code: the two orders in which the formats pack bits, and scales widened to FLOAT.

All integer work stays in eight bits as long as it can; codes become FLOAT once, in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Unsigned = TypeVar("Unsigned", np.uint8, np.uint16, np.uint32)


def planes(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Unpack bytes whose bit fields lie in planes: the lowest field of every byte first, then the next of every byte.

    ``packed`` (..., k) -> codes (..., 8 / width, k). With ``width`` 4: k low nibbles, then k high nibbles.
    """
    packed = np.ascontiguousarray(packed)  # read once with a stride, then up to eight times without
    *rows, k = packed.shape
    codes = np.empty((*rows, 8 // width, k), np.uint8)
    for i in range(8 // width):
        np.right_shift(packed, width * i, out=codes[..., i, :])
    codes &= (1 << width) - 1
    return codes


def bit_fields(packed: NDArray[Unsigned], shifts: Sequence[int], width: int) -> NDArray[Unsigned]:
    """Unpack integers whose bit fields belong to consecutive items: (..., k) -> (..., k, len(shifts))."""
    codes = packed[..., np.newaxis] >> np.array(shifts, packed.dtype)
    codes &= (1 << width) - 1
    return codes


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack bytes that hold two consecutive items, the low nibble first: (..., k) -> (..., 2k)."""
    *rows, k = packed.shape
    return bit_fields(packed, (0, 4), 4).reshape(*rows, 2 * k)


def bits(packed: NDArray[Any]) -> NDArray[np.uint8]:
    """Unpack integers into their bits, lowest first: (n, ...) -> (n, 8 x bytes)."""
    octets = np.ascontiguousarray(packed, packed.dtype.newbyteorder("<")).view(np.uint8)
    return np.unpackbits(octets.ravel(), bitorder="little").reshape(len(packed), -1)


def widen(scale: NDArray[Any]) -> NDArray[np.float32]:
    """Stored scales as FLOAT, exactly, with an axis for the elements they scale: (n, ...) -> (n, ..., 1)."""
    return scale.astype(np.float32)[..., np.newaxis]


def lookup(table: NDArray[np.int8], codes: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Values of one-byte codes from a table of at most 256 entries, same shape.

    ``bytes.translate`` takes half the time of ``numpy.take``, which turns each code into a 64-bit index first.
    """
    values = codes.tobytes().translate(table.tobytes().ljust(256, b"\0"))
    return np.frombuffer(values, np.int8).reshape(codes.shape)
