"""A third decoder: a format is a table of bit positions and a few constants, and one function in NumPy decodes it.

It exists to be made wrong (see ``conformance.mutants``) and to find payloads with wanted properties: all that a decoder
can get wrong is data (``onnx_dqp.formats.anatomy``). Unchanged it equals ``conformance.exact``; it shares nothing with
it or with ``onnx_dqp``'s decoders but the codebook files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.anatomy import Bits, Rule


class Payload:
    """A payload's bits, with two more for each block, 0 and 1, for mutants that cut bits off or invert them.

    The integers that the unchanged rule reads are kept: mutants of a format share most of them.
    """

    def __init__(self, octets: bytes, rule: Rule) -> None:
        blocks = np.frombuffer(octets, np.uint8).reshape(-1, rule.bytes)
        self.bits = np.pad(np.unpackbits(blocks, axis=1, bitorder="little"), ((0, 0), (0, 2)))
        self.bits[:, -1] = 1
        self._kept = {id(bits) for bits in vars(rule).values() if isinstance(bits, np.ndarray)}
        self._integers: dict[tuple[int, bool], NDArray[np.int64]] = {}

    def integers(self, bits: Bits, signed: bool = False) -> NDArray[np.int64]:
        """The integers (blocks, elements) that have these bits."""
        key = id(bits), signed
        if key in self._integers:
            return self._integers[key]
        value = self.bits[:, bits].astype(np.int64) @ (1 << np.arange(bits.shape[1], dtype=np.int64))
        if signed:
            value -= (value >> (bits.shape[1] - 1)) << bits.shape[1]
        if id(bits) in self._kept:
            self._integers[key] = value
        return value


Stored = Callable[[NDArray[Any]], NDArray[Any]]
"""What a mutant makes of scales and minima as they are read."""


def decode(rule: Rule, payload: Payload, dtype: Any = np.float32, stored: Stored = lambda scale: scale) -> NDArray[Any]:
    """Decode a payload to (blocks, elements), in the arithmetic of a floating-point dtype; FLOAT's is the right one."""
    with np.errstate(all="ignore"):
        scale = _scale(rule, payload, dtype, stored)
        y = scale * _weight(rule, payload, dtype)
        if rule.sign is not None:
            ones = np.bitwise_xor.reduce(payload.bits[:, rule.sign], axis=2)
            y = y * np.array([1, -1], dtype)[ones]
        if rule.minimum is not None:
            minimum = stored(payload.integers(rule.minimum).astype(np.uint16).view(np.float16)).astype(dtype)
            if rule.minimum_factor is not None:
                minimum = minimum * payload.integers(rule.minimum_factor).astype(dtype)
            y = y + minimum if rule.minimum_sign > 0 else y - minimum
    return np.broadcast_to(y, (len(y), rule.elements))


def _scale(rule: Rule, payload: Payload, dtype: Any, stored: Stored) -> NDArray[Any]:
    bits = payload.integers(rule.scale)
    if rule.scale_table is not None:
        scale = stored(rule.scale_table[bits]).astype(dtype)
    else:
        scale = stored(bits.astype(f"u{rule.scale_dtype[1]}").view(rule.scale_dtype)).astype(dtype)
    if rule.factor is not None:
        k = payload.integers(rule.factor, rule.factor_signed)
        scale = scale * (rule.factor_slope * k + rule.factor_offset).astype(dtype)
    for constant in rule.constants:
        scale = scale * np.array(constant, dtype)
    return scale


def _weight(rule: Rule, payload: Payload, dtype: Any) -> NDArray[Any]:
    code = payload.integers(rule.code, rule.code_signed)
    if rule.digit is not None:
        code = (code * rule.digit % 256 * 3) >> 8
    if rule.values is not None:
        code = rule.values[code]
    elif rule.rows is not None:
        code = rule.rows[code, rule.column]
    if rule.code_offset:  # adding 0 would take the sign of a mutant's -0
        code = code + rule.code_offset
    if rule.delta is None:
        return code.astype(dtype)
    negative = payload.integers(rule.delta)
    return (code + np.where(negative, -rule.delta_size, rule.delta_size)).astype(dtype)
