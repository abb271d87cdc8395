"""DequantizePacked as standard operators: a function of ONNX opset 18 or later for each format and output type.

A body has the same steps for all formats, and ``anatomy`` says which of them a format needs: cut the payload into
blocks, read the scale, the sub-blocks' scales and the elements' codes out of their bytes, and multiply in the
contract's order. It computes the bits that ``dequantize`` computes, on every runtime that keeps subnormals.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_dqp.formats import PackedFormat
from onnx_dqp.formats.anatomy import RULES, Bits, Rule

DOMAIN = "onnx_dqp"
"""The domain of the functions."""


def function_name(format: PackedFormat, output_dtype: int) -> str:
    """``dequantize_packed_q4_0_float16``, for example."""
    return f"dequantize_packed_{format.name.lower()}_{TensorProto.DataType.Name(output_dtype).lower()}"


def function(format: PackedFormat, output_dtype: int, opset: int) -> FunctionProto:
    """Make the function that decodes a format: input ``x``, output ``y``, attribute ``shape``.

    Parameters
    ----------
    format
        One of ``FORMATS``' values.
    output_dtype
        The type of ``y``: FLOAT, FLOAT16, BFLOAT16 or DOUBLE.
    opset
        The opset of its nodes, 18 or later. The nodes are the same for all.
    """
    body = _Body(RULES[format.name])
    y = body.decoded()
    if output_dtype != TensorProto.FLOAT:
        y = body("Cast", y, name="converted", to=output_dtype)
    body.finish(y)
    return helper.make_function(
        DOMAIN,
        function_name(format, output_dtype),
        ["x"],
        ["y"],
        body.nodes,
        [helper.make_opsetid("", opset)],
        attributes=["shape"],
        doc_string=f"DequantizePacked of {format.identifier}. {format.__doc__}",
    )


class _Body:
    """Nodes one after the other, and what they make: arrays (blocks, items)."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.nodes: list[NodeProto] = []
        self._names: dict[str, int] = {}
        # R9: moving no dimension, but taking rank 1 only.
        payload = self("Transpose", "x", name="payload", perm=[0])
        self("Reshape", payload, self.constant([-1, rule.bytes], np.int64), name="blocks")

    def __call__(self, op_type: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Add a node; the name of its output, which is numbered where it is not the first of the name."""
        self._names[name] = number = self._names.get(name, 0) + 1
        output = name if number == 1 else f"{name}_{number}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def constant(self, values: Any, dtype: Any, name: str = "constant") -> str:
        return self("Constant", name=name, value=numpy_helper.from_array(np.asarray(values, dtype)))

    def finish(self, y: str) -> None:
        """``y``, of the dimensions that the function's attribute says; zeros in them are zeros."""
        shape = helper.make_node("Constant", [], ["shape"])
        shape.attribute.append(AttributeProto(name="value_ints", type=AttributeProto.INTS, ref_attr_name="shape"))
        self.nodes += [shape, helper.make_node("Reshape", [y, "shape"], ["y"], allowzero=1)]

    def decoded(self) -> str:
        """All elements in FLOAT: (blocks, sub-blocks, elements of a sub-block)."""
        rule = self.rule
        subblocks = max(_runs(bits) for bits in (rule.scale, rule.factor, rule.minimum_factor) if bits is not None)
        whole = self.constant([-1, subblocks, rule.elements // subblocks], np.int64)
        each = self.constant([-1, subblocks, 1], np.int64)
        weight = self("Reshape", self.weight(), whole, name="weight_by_subblock")
        scale = self("Reshape", self.scale(), each, name="scale_by_subblock")
        y = self("Mul", scale, weight, name="product")
        if rule.sign is not None:
            y = self("Mul", y, self("Reshape", self.sign(), whole, name="sign_by_subblock"), name="signed")
        if rule.minimum is not None:
            minimum = self.number(rule.minimum, "f2", "minimum")
            if rule.minimum_factor is not None:
                factor = self.as_float(self.integer(rule.minimum_factor, "minimum_factor"), "minimum_factor_float")
                minimum = self("Mul", minimum, factor, name="subblock_minimum")
            minimum = self("Reshape", minimum, each, name="minimum_by_subblock")
            y = self("Add" if rule.minimum_sign > 0 else "Sub", y, minimum, name="value")
        return y

    def scale(self) -> str:
        """``d``, times the sub-block's integer and constants: (blocks, sub-blocks)."""
        rule = self.rule
        if rule.scale_table is not None:
            scale = self.looked_up(rule.scale_table, self.integer(rule.scale, "scale_code"), "scale")
        else:
            scale = self.number(rule.scale, rule.scale_dtype, "d")
        if rule.factor is not None:
            factor = self.integer(rule.factor, "factor", rule.factor_signed)
            factor = self.as_float(factor, "factor_float")
            if rule.factor_slope != 1:
                slope = self.constant(rule.factor_slope, np.float32, "factor_slope")
                factor = self("Mul", factor, slope, name="factor_product")
            if rule.factor_offset != 0:
                offset = self.constant(rule.factor_offset, np.float32, "factor_offset")
                factor = self("Add", factor, offset, name="factor_sum")
            scale = self("Mul", scale, factor, name="scale")
        for value in rule.constants:
            scale = self("Mul", scale, self.constant(value, np.float32, "scale_constant"), name="scale")
        return scale

    def weight(self) -> str:
        """What the scale is multiplied with: (blocks, elements), or codebook rows (blocks, rows, elements of a row)."""
        rule = self.rule
        if rule.rows is not None:
            width = rule.rows.shape[1]
            rows = self.looked_up(rule.rows.astype(np.float32), self.integer(rule.code[::width], "row"), "codebook_row")
            if rule.delta is None:
                return rows
            table = np.array([rule.delta_size, -rule.delta_size], np.float32)
            count = _runs(rule.delta)
            delta = self.looked_up(table, self.integer(rule.delta, "delta_bit"), "delta")
            delta = self("Reshape", delta, self.constant([-1, count, 1], np.int64), name="delta_by_run")
            runs = self.constant([-1, count, rule.elements // count], np.int64)
            return self("Add", self("Reshape", rows, runs, name="row_by_run"), delta, name="weight")
        code = self.integer(rule.code, "code", rule.code_signed)
        if rule.digit is not None:
            code = self.digit(code)
        if rule.values is not None:
            return self.looked_up(rule.values.astype(np.float32), code, "weight")
        weight = self.as_float(code, "code_float")
        if rule.code_offset:
            weight = self("Add", weight, self.constant(rule.code_offset, np.float32, "code_offset"), name="weight")
        return weight

    def digit(self, code: str) -> str:
        """The ternary digit that a power of 3 moves to the top of a byte."""
        wide = self("Cast", code, name="wide", to=TensorProto.INT32)
        moved = self("Mul", wide, self.constant(self.rule.digit, np.int32, "power_of_3"), name="moved")
        fraction = self("BitwiseAnd", moved, self.constant(255, np.int32, "byte"), name="fraction")
        tripled = self("Mul", fraction, self.constant(3, np.int32, "three"), name="tripled")
        return self("Div", tripled, self.constant(256, np.int32, "one_in_fractions"), name="digit")

    def sign(self) -> str:
        """1 or -1: (blocks, elements), or (blocks, rows, 8)."""
        sign = self.rule.sign
        assert sign is not None
        if sign.shape[1] == 1:
            return self.looked_up(np.array([1, -1], np.float32), self.integer(sign, "sign_bit"), "sign")
        # Seven bits are stored for eight signs; all of them decide the last.
        stored = np.arange(128)[:, np.newaxis] >> np.arange(7) & 1
        ones = np.append(stored, stored.sum(axis=1, keepdims=True) % 2, axis=1)
        return self.looked_up((1 - 2 * ones).astype(np.float32), self.integer(sign[7::8], "seven_signs"), "sign")

    def number(self, bits: Bits, dtype: str, name: str) -> str:
        """A floating-point number, exactly, from its bits.

        ``BitCast`` came with opset 26. An exponent's first number, and the step between its numbers, are FLOATs, and so
        is a sum of them. In the last exponent the first number is an infinity and the others are NaN: each exponent
        has two entries. (``Where`` would be plainer, but ONNX Runtime's turns -0 into 0.)
        """
        mantissa_bits = {"f2": 10, "f4": 23}[dtype]
        exponents = np.arange(1 << (8 * int(dtype[1]) - mantissa_bits), dtype=f"u{dtype[1]}") << mantissa_bits
        first, second = (e.view(dtype).astype(np.float32) for e in (exponents, exponents | 1))
        finite = np.isfinite(first)
        step = np.where(finite, second, 0) - np.where(finite, first, 0)
        integer = self.integer(bits, f"{name}_bits")
        by = self.constant(mantissa_bits, np.uint32)
        exponent = self("BitShift", integer, by, name=f"{name}_exponent", direction="RIGHT")
        mask = self.constant((1 << mantissa_bits) - 1, np.uint32)
        mantissa = self("BitwiseAnd", integer, mask, name=f"{name}_mantissa")
        not_first = self("Cast", mantissa, name=f"{name}_is_not_first", to=TensorProto.BOOL)
        not_first = self("Cast", not_first, name=f"{name}_not_first", to=TensorProto.UINT32)
        entry = self("BitShift", exponent, self.constant(1, np.uint32), name=f"{name}_pair", direction="LEFT")
        entry = self("BitwiseOr", entry, not_first, name=f"{name}_entry")
        start = np.stack([first, np.where(finite, first, np.float32(np.nan))], axis=1).reshape(-1)
        steps = self.looked_up(np.repeat(step, 2), entry, f"{name}_step")
        steps = self("Mul", self.as_float(mantissa, f"{name}_steps"), steps, name=f"{name}_after_first")
        return self("Add", self.looked_up(start, entry, f"{name}_first"), steps, name=name)

    def as_float(self, value: str, name: str) -> str:
        return self("Cast", value, name=name, to=TensorProto.FLOAT)

    def looked_up(self, table: NDArray[np.float32], index: str, name: str) -> str:
        """Entries or rows of a table; of two entries by what a bit adds to the first, quicker, and exact here."""
        if table.shape == (2,):
            step = self.constant(table[1] - table[0], np.float32)
            step = self("Mul", self.as_float(index, f"{name}_float"), step, name=f"{name}_step")
            return self("Add", step, self.constant(table[0], np.float32), name=name)
        index = self("Cast", index, name=f"{name}_index", to=TensorProto.INT32)
        return self("Gather", self.constant(table, np.float32, f"{name}_table"), index, name=name, axis=0)

    def integer(self, bits: Bits, name: str, signed: bool = False) -> str:
        """The integers that have these bits, one for each run of equal rows: uint8 (int8), or uint32 where wider."""
        bits = bits[:: len(bits) // _runs(bits)]
        together = (np.diff(bits, axis=1) == 1).all(axis=0)
        starts = [0, *(np.flatnonzero(~together) + 1).tolist(), bits.shape[1]]
        wide = bits.shape[1] > 8
        value = ""
        for start, stop in pairwise(starts):
            part = self.field(bits[:, start:stop], name, wide)
            if start:
                by = self.constant(start, np.uint32 if wide else np.uint8)
                part = self("BitShift", part, by, name=f"{name}_high", direction="LEFT")
            value = self("BitwiseOr", value, part, name=name) if value else part
        return self("Cast", value, name=f"{name}_signed", to=TensorProto.INT8) if signed else value

    def field(self, bits: Bits, name: str, wide: bool) -> str:
        """Integers whose bits follow one another, perhaps over the ends of bytes."""
        byte, shift, width = bits[:, 0] // 8, bits[:, 0] % 8, bits.shape[1]
        count = math.ceil((int(shift.max()) + width) / 8)
        if count == 1:
            value = self.bits_of_bytes(byte, shift, width, name)
            return self("Cast", value, name=f"{name}_wide", to=TensorProto.UINT32) if wide else value
        value = ""
        for k in range(count):
            # A field that ends before needs no further byte, and its mask leaves none of it.
            octet = self.octets(np.minimum(byte + k, self.rule.bytes - 1), f"{name}_byte{k}")
            octet = self("Cast", octet, name=f"{name}_wide_byte{k}", to=TensorProto.UINT32)
            if k:
                by = self.constant(8 * k, np.uint32)
                octet = self("BitShift", octet, by, name=f"{name}_moved_byte{k}", direction="LEFT")
            value = self("BitwiseOr", value, octet, name=f"{name}_bytes") if value else octet
        value = self.cut(value, shift, width, 8 * count, np.uint32, name)
        return value if wide else self("Cast", value, name=f"{name}_narrow", to=TensorProto.UINT8)

    def bits_of_bytes(self, byte: NDArray[np.int64], shift: NDArray[np.int64], width: int, name: str) -> str:
        """Fields that lie in one byte each; in planes, where a run of bytes holds one field of each after another."""
        planes = _planes(byte, shift)
        if planes is None:
            return self.cut(self.octets(byte, f"{name}_bytes"), shift, width, 8, np.uint8, name)
        runs, shifts, run = planes
        octets = self.octets(np.arange(byte[0], byte[0] + runs * run), f"{name}_bytes")
        octets = self("Reshape", octets, self.constant([-1, runs, 1, run], np.int64), name=f"{name}_runs")
        value = self.cut(octets, shifts[:, np.newaxis], width, 8, np.uint8, f"{name}_planes")
        return self("Reshape", value, self.constant([-1, len(byte)], np.int64), name=name)

    def octets(self, byte: NDArray[np.int64], name: str) -> str:
        """Bytes of the blocks: (blocks, len(byte))."""
        if (np.diff(byte) == 1).all():
            start, stop = (self.constant([at], np.int64) for at in (byte[0], byte[-1] + 1))
            return self("Slice", "blocks", start, stop, self.constant([1], np.int64), name=name)
        return self("Gather", "blocks", self.constant(byte, np.int64), name=name, axis=1)

    def cut(self, value: str, shift: NDArray[np.int64], width: int, size: int, dtype: Any, name: str) -> str:
        """``width`` bits, from bit ``shift`` on, of integers of ``size`` bits."""
        if shift.any():
            by = shift.reshape(-1)[:1] if (shift == shift.flat[0]).all() else shift
            value = self("BitShift", value, self.constant(by, dtype), name=f"{name}_shifted", direction="RIGHT")
        if int(shift.min()) + width < size:
            value = self("BitwiseAnd", value, self.constant((1 << width) - 1, dtype), name=name)
        return value


def _runs(bits: Bits) -> int:
    """How many runs of equal rows there are, all of one length."""
    changes = np.flatnonzero((bits[1:] != bits[:-1]).any(axis=1)) + 1
    return len(bits) // math.gcd(len(bits), *changes.tolist())


def _planes(byte: NDArray[np.int64], shift: NDArray[np.int64]) -> tuple[int, NDArray[np.int64], int] | None:
    """(runs, shifts, bytes in a run), where each run of bytes is read once with each shift, or None."""
    for planes in (8, 4, 2):
        for run in (64, 32, 16, 8, 1):
            runs = len(byte) // (planes * run)
            if runs * planes * run != len(byte):
                continue
            shape = (runs, planes, run)
            place = byte[0] + np.arange(runs)[:, np.newaxis, np.newaxis] * run + np.arange(run)
            shifts = shift[: planes * run : run]
            if (byte.reshape(shape) == place).all() and (shift.reshape(shape) == shifts[:, np.newaxis]).all():
                return runs, shifts, run
    return None
