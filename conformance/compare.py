"""Bit-exact comparison."""

from __future__ import annotations

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
