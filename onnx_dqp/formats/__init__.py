"""The 27 block formats: layout, table row and decoder of each stand together in a module per family."""

from onnx_dqp.formats import fp4, i_quants, k_quants, legacy, low_bit, ternary
from onnx_dqp.formats.registry import PackedFormat, table

__all__ = ["FORMATS", "PackedFormat", "fp4", "i_quants", "k_quants", "legacy", "low_bit", "ternary"]

FORMATS = table()
"""Identifier -> PackedFormat, read-only, in the contract's order."""
