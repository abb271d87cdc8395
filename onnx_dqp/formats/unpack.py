"""How bytes hold more than one code, and the memory that decoders work in.

All integer work stays in eight bits as long as it can; codes become FLOAT once, in the output. Figures in comments are
microseconds for 65,536 elements on one core; ``docs/performance.md`` tells of which machine, and what did not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")


class Scratch:
    """The intermediate arrays of one tile, and views of them, used again for the next.

    NumPy asks the system for fresh pages for each larger array, which costs several times the arithmetic done in it (14
    against 2), and making a view costs as much as a loop over a few hundred elements. A decoder asks for the same
    things in the same order for every tile, so the n-th request of a tile gets what the n-th of the tile before got.
    Not for more than one thread.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
        self._requests = 0

    def rewind(self) -> None:
        """Start a tile: whatever was handed out before may be overwritten."""
        self._requests = 0

    def keep(self, make: Callable[..., Made], *key: Any) -> Made:
        """``make(*key)``, or what it gave for the same key at the same place in the tile before."""
        position = self._requests
        self._requests += 1
        if position < len(self._kept):
            made_by, made_for, made = self._kept[position]
            if made_by is make and made_for == key:
                found: Made = made
                return found
            del self._kept[position:]
        found = make(*key)
        self._kept.append((make, key, found))
        return found

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A C-contiguous array that holds anything."""
        made: NDArray[Any] = self.keep(np.empty, shape, dtype)
        return made


@cache
def row(size: int) -> np.dtype[np.void]:
    """Bytes that move as one item."""
    return np.dtype((np.void, size))


def gather(field: NDArray[Any], scratch: Scratch) -> NDArray[Any]:
    """A block's field (n, k), contiguous in a row, as a contiguous array.

    A row moves as one item of k bytes: 2 for rows of 16 bytes, against 12 byte by byte.
    """
    rows, gathered = scratch.keep(_rows, *field.shape, field.dtype)
    np.copyto(rows, field.view(rows.dtype))
    return gathered


def _rows(n: int, k: int, dtype: np.dtype[Any]) -> tuple[NDArray[np.void], NDArray[Any]]:
    """An array (n, 1) of rows of k items, and the same as an array (n, k)."""
    rows = np.empty((n, 1), row(k * dtype.itemsize))
    return rows, rows.view(dtype)


def octets(integers: NDArray[Any], scratch: Scratch) -> NDArray[np.uint8]:
    """Integers as their bytes, the lowest first, whatever the order in memory: (n, ...) -> (n, bytes)."""
    little = scratch.empty(integers.shape, integers.dtype.newbyteorder("<"))
    np.copyto(little, integers)
    return little.view(np.uint8).reshape(len(integers), -1)


def planes(
    packed: NDArray[np.uint8], width: int, scratch: Scratch, *, run: int | None = None, at: int = 0
) -> NDArray[np.uint8]:
    """Unpack bytes whose bit fields lie in planes: the lowest field of every byte first, then the next of every byte.

    Parameters
    ----------
    packed
        Shape (n, m), m a multiple of 4.
    width
        Bits in a field: 1, 2 or 4.
    run
        Planes span this many bytes, then those of the next run follow; m, if None. With ``width`` 4: ``run`` low
        nibbles, then ``run`` high nibbles, and so on.
    at
        The bit of a code that the field's lowest bit becomes, where other fields complete the code.

    Returns
    -------
    Codes (n, m * 8 / width).
    """
    n, m = packed.shape
    rows, words, whole, shifted, plane, rooms, codes = scratch.keep(_room_for_planes, n, m, 8 // width, run or m)
    np.copyto(rows, packed.view(rows.dtype))
    for i, room in enumerate(rooms):
        # Words of four bytes shift faster than bytes, and what crosses from one byte to the next is masked off.
        if at == width * i:
            np.copyto(room, whole)
            continue
        if at > width * i:
            np.left_shift(words, at - width * i, out=shifted)
        else:
            np.right_shift(words, width * i - at, out=shifted)
        np.copyto(room, plane)
    found: NDArray[np.uint8] = codes
    found &= ((1 << width) - 1) << at
    return found


def _room_for_planes(n: int, m: int, count: int, run: int) -> tuple[Any, ...]:
    """What ``planes`` works in: n rows of m bytes, also as words and by runs; a plane, as words and by runs; all."""
    rows, words = _rows(n, m // 4, np.dtype(np.uint32))
    shifted = np.empty_like(words)
    whole, plane = (each.view(row(run)).reshape(-1) for each in (words, shifted))
    return rows, words, whole, shifted, plane, *_interleaved(n, m, count, run)


def _interleaved(n: int, m: int, count: int, run: int) -> tuple[list[NDArray[np.void]], NDArray[np.uint8]]:
    """Room for ``count`` planes of n rows of m bytes, whose runs move as one item each: every plane's, all codes."""
    items = np.empty((n * m // run, count), row(run))
    return list(items.T), items.view(np.uint8).reshape(n, -1)


def take(rows: NDArray[Any], index: NDArray[Any], scratch: Scratch) -> NDArray[Any]:
    """``rows[index]``, for a table of one axis and an index that is in its range."""
    where, found = scratch.keep(_room_to_take, index.shape, rows.dtype)
    np.copyto(where, index)
    # With mode "raise" NumPy would check into a buffer first: 22 against 6.
    return rows.take(where, out=found, mode="clip")


def _room_to_take(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    return np.empty(shape, np.intp), np.empty(shape, dtype)


@cache
def _field_rows(width: int, values: tuple[int, ...]) -> NDArray[Any]:
    """For every byte the values of its bit fields, the lowest first, as one item of 8 / width bytes: (256,)."""
    codes = np.arange(256)[:, np.newaxis] >> np.arange(0, 8, width) & (1 << width) - 1
    rows: NDArray[Any] = np.array(values, np.int8)[codes].view(f"u{8 // width}")[:, 0]
    return rows


def fields(packed: NDArray[np.uint8], values: tuple[int, ...], scratch: Scratch) -> NDArray[np.int8]:
    """Values of bytes whose bit fields belong to consecutive items, the lowest first: (n, k) -> (n, k * 8 / width).

    ``values`` has a value for each code of 1, 2 or 4 bits, which tells the width. A byte costs one look-up.
    """
    width = len(values).bit_length() - 1
    return take(_field_rows(width, values), packed, scratch).view(np.int8)


_NIBBLES = tuple(range(16))


def nibbles(packed: NDArray[np.uint8], scratch: Scratch) -> NDArray[np.uint8]:
    """Unpack bytes that hold two consecutive items, the low nibble first: (n, k) -> (n, 2k)."""
    return fields(packed, _NIBBLES, scratch).view(np.uint8)


class NibbleTable:
    """Sixteen int8 values for four-bit codes, looked up four codes at a time."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = np.array(values, np.int8)

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """For two bytes as one item, the values of both low nibbles, and of both high ones.

        A quarter of the look-ups, where making an index takes longer than fetching a value.
        """
        octets = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
        return self._values[octets & 15].view(np.uint16), self._values[octets >> 4].view(np.uint16)

    def planes(self, packed: NDArray[np.uint8], scratch: Scratch, *, run: int | None = None) -> NDArray[np.int8]:
        """The values of the codes that ``planes(packed, 4, scratch, run=run)`` would give: (n, m) -> (n, 2m)."""
        n, m = packed.shape
        pairs, half, plane, rooms, values = scratch.keep(_room_for_nibbles, n, m, run or m)
        np.copyto(pairs, gather(packed, scratch).view(np.uint16))
        for table, room in zip(self._pairs, rooms, strict=True):
            table.take(pairs, out=half, mode="clip")
            np.copyto(room, plane)
        found: NDArray[np.int8] = values.view(np.int8)
        return found


def _room_for_nibbles(n: int, m: int, run: int) -> tuple[Any, ...]:
    """What ``NibbleTable.planes`` works in: an index; half of the values, also by runs; all values."""
    half = np.empty((n, m // 2), np.uint16)
    return np.empty((n, m // 2), np.intp), half, half.view(row(run)).reshape(-1), *_interleaved(n, m, 2, run)


def widen(scale: NDArray[Any]) -> NDArray[np.float32]:
    """Stored scales as FLOAT, exactly, with an axis for the elements they scale: (n, ...) -> (n, ..., 1)."""
    return scale.astype(np.float32)[..., np.newaxis]


def scaled(values: NDArray[Any], scale: NDArray[np.float32], out: NDArray[np.float32]) -> NDArray[np.float32]:
    """``out = values * scale``; a scale (n, k) for each 1 / k of a row. Returns ``out`` as (n, k, elements / k)."""
    y = out.reshape(*scale.shape, -1)
    # The scales first, for NumPy spreads them out in a buffer anyway, and casts the values in its buffers as it goes.
    np.copyto(y, scale[..., np.newaxis])
    y *= values.reshape(y.shape)
    return y
