"""Bit-exact comparison, and where and by how much an output is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def differing(actual: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.bool_]:
    """Where two arrays of one floating-point type and shape differ in a bit.

    Any NaN equals any NaN; +0 and -0 differ.

    Raises
    ------
    ValueError
        The arrays differ in type or shape.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise ValueError(
            f"found {actual.dtype} of shape {list(actual.shape)}, "
            f"expected {expected.dtype} of shape {list(expected.shape)}"
        )
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    unequal = np.ascontiguousarray(actual).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    return np.asarray(unequal & ~(np.isnan(actual) & np.isnan(expected)))


def same(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Whether two arrays have the same type, shape and bits; any NaN equals any NaN."""
    return actual.dtype == expected.dtype and actual.shape == expected.shape and not differing(actual, expected).any()


@dataclass(frozen=True)
class Difference:
    """How an output differs from the expected one.

    Attributes
    ----------
    summary
        One line.
    wrong, total
        Elements that differ, and elements; 0 and 0 where type, shape or count are wrong.
    ulp
        The largest distance in units of the last place (values of the type between the two, plus one), or None where a
        NaN stands against a number.
    first
        Index of the first wrong element in row-major order.
    expected_value, actual_value, expected_bits, actual_bits
        That element, as text.
    """

    summary: str
    wrong: int = 0
    total: int = 0
    ulp: int | None = None
    first: int | None = None
    expected_value: str = ""
    actual_value: str = ""
    expected_bits: str = ""
    actual_bits: str = ""


@dataclass(frozen=True)
class Comparison:
    """What counts as equal.

    Attributes
    ----------
    kind
        ``bits`` (the default): same bits, any NaN equals any NaN; ``value``: +0 and -0 are equal too; ``ulp``: as
        value, and numbers at most ``ulp`` apart are equal (an infinity is one beyond the largest number).
    ulp
        The distance allowed.
    """

    kind: str = "bits"
    ulp: int = 0

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Read ``bits``, ``value`` or ``ulp:N``; anything else is a ValueError."""
        if text in ("bits", "value"):
            return cls(text)
        name, _, number = text.partition(":")
        if name == "ulp" and number.isdecimal():
            return cls("ulp", int(number))
        raise ValueError(f"comparison is {text!r}, expected bits, value or ulp:N")

    def difference(self, actual: object, expected: NDArray[Any]) -> Difference | None:
        """How an answer differs from the expected array; None where it does not."""
        if not isinstance(actual, np.ndarray):
            return Difference(f"the output is of type {type(actual).__name__}, expected an array")
        if actual.dtype != expected.dtype:
            return Difference(f"the output has type {actual.dtype}, expected {expected.dtype}")
        if actual.shape != expected.shape:
            return Difference(f"the output has shape {list(actual.shape)}, expected {list(expected.shape)}")
        unequal = differing(actual, expected).ravel()
        if self.kind != "bits":
            unequal &= ~((actual == 0) & (expected == 0)).ravel()
        indices = np.flatnonzero(unequal)
        numbers = [a.ravel()[indices] for a in (actual, expected)]
        nan = np.isnan(numbers[0]) | np.isnan(numbers[1])  # not both: they would be equal
        distances = np.abs(_ordinals(numbers[0]) - _ordinals(numbers[1]))
        if self.kind == "ulp":
            kept = nan | (distances > self.ulp)
            indices, nan, distances = indices[kept], nan[kept], distances[kept]
        if not len(indices):
            return None
        first = int(indices[0])
        ulp = None if nan.any() else int(distances.max())
        unsigned = f"u{expected.dtype.itemsize}"
        digits = 2 * expected.dtype.itemsize
        bits = [int(np.ascontiguousarray(a).view(unsigned).flat[first]) for a in (expected, actual)]
        return Difference(
            f"{len(indices)} of {expected.size} elements differ",
            len(indices),
            expected.size,
            ulp,
            first,
            *(f"{float(a.flat[first])!r}" for a in (expected, actual)),
            *(f"0x{b:0{digits}X}" for b in bits),
        )


def _ordinals(values: NDArray[Any]) -> NDArray[Any]:
    """Each value's place among those of its type in order; both zeros have place 0. NaNs have places beyond."""
    size = values.dtype.itemsize
    # Differences of DOUBLEs' places do not fit in 64 bits.
    bits = np.ascontiguousarray(values).view(f"u{size}").astype(object if size == 8 else np.int64)
    sign = 1 << (8 * size - 1)
    return np.where((bits & sign).astype(bool), -(bits ^ sign), bits)
