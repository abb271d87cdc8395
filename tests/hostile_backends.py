"""Backends for the runner's tests: wrong ones, hostile ones, and ones that are right in another way."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from onnx import helper

from conformance.backends import Reference
from conformance.table_decoder import Payload, decode
from onnx_dqp import FORMATS
from onnx_dqp.formats.anatomy import RULES


class Backend:
    """Answers rightly, for subclasses that spoil it."""

    def __init__(self, model):
        self.model = model
        self.reference = Reference.prepare(model)

    @classmethod
    def prepare(cls, model, device="CPU", **_):
        assert device == "CPU"
        return cls(model)

    def run(self, inputs):
        return self.spoiled(np.array(self.reference.run(inputs)[0]))

    def spoiled(self, y):
        return [y]


def is_basic(model):
    node = model.graph.node[0]
    if len(model.graph.node) != 1 or node.op_type != "DequantizePacked" or not model.graph.input:
        return False
    format = FORMATS.get(helper.get_node_attr_value(node, "format").decode())
    return format is not None and list(helper.get_node_attr_value(node, "shape")) == [3, 2 * format.elements]


class FailsLater(Backend):
    """Right on cases like the basic ones only; on others, subclasses say."""

    def run(self, inputs):
        y = self.reference.run(inputs)[0]
        return [y] if is_basic(self.model) else self.fail(y)


class Raises(FailsLater):
    def fail(self, _):
        raise ZeroDivisionError("a bug")


class Crashes(FailsLater):
    def fail(self, _):
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(FailsLater):
    def fail(self, _):
        os._exit(7)


class SysExits(FailsLater):
    def fail(self, _):
        sys.exit(0)


class Interrupts(FailsLater):
    def fail(self, _):
        raise KeyboardInterrupt


class AlwaysExits:
    @staticmethod
    def prepare(*_, **__):
        sys.exit(0)


class ExitsWell(FailsLater):
    def fail(self, _):
        os._exit(0)


class Hangs(FailsLater):
    def fail(self, _):
        time.sleep(1000)


class Prints(FailsLater):
    def fail(self, y):
        print("\x1b[2Jgarbage" * 1000, flush=True)
        print("garbage", file=sys.stderr, flush=True)
        os.write(1, b"\x00\xff")
        return [y]


class WrongShape(FailsLater):
    def fail(self, y):
        return [y.ravel()[:-1]]


class WrongType(FailsLater):
    def fail(self, y):
        return [y.astype(np.int32)]


class TwoOutputs(FailsLater):
    def fail(self, y):
        return [y, y]


class NoOutput(FailsLater):
    def fail(self, _):
        return []


class NotAList(FailsLater):
    def fail(self, y):
        return y


class NotAnArray(FailsLater):
    def fail(self, _):
        return ["garbage"]


class Unpicklable(FailsLater):
    def fail(self, y):
        return [y, lambda: None]


class OneBit(FailsLater):
    """Wrong in the last bit of element 5."""

    def fail(self, y):
        y = np.array(y)
        bits = y.view(f"u{y.dtype.itemsize}").reshape(-1)
        bits[5:6] ^= bits.dtype.type(1)
        return [y]


class NegatesZeros(FailsLater):
    def fail(self, y):
        return [np.where(y == 0, -y, y)]


class NotImplementedLater(FailsLater):
    def fail(self, _):
        raise NotImplementedError("not yet")


class AlwaysFails:
    @staticmethod
    def prepare(*_, **__):
        raise RuntimeError("no")


class AcceptsAll:
    """Gives something for every model, also for invalid ones."""

    @classmethod
    def prepare(cls, model, *_, **__):
        made = cls()
        try:
            made.reference = Reference.prepare(model)
        except ValueError:
            made.reference = None
        return made

    def run(self, inputs):
        try:
            return self.reference.run(inputs)
        except (ValueError, AttributeError):
            return [np.zeros((2, 32), np.float32)]


# --- Right in another way ------------------------------------------------------------------------------------------


class NonContiguous(Backend):
    def spoiled(self, y):
        wide = np.zeros((*y.shape, 2), y.dtype)
        wide[..., 0] = y
        return [wide[..., 0]]


class OtherNaN(Backend):
    """NaNs with the sign set and a payload."""

    def spoiled(self, y):
        bits = y.view(f"u{y.dtype.itemsize}")
        bits[np.isnan(y)] = np.iinfo(bits.dtype).max
        return [y]


class ByTables(Backend):
    """Single nodes are decoded by the table decoder; the rest by the reference."""

    def run(self, inputs):
        (first, *more) = self.model.graph.node
        if more or first.op_type != "DequantizePacked" or len(inputs) != 1:
            return self.reference.run(inputs)
        y = self.reference.run(inputs)[0]  # refuses what is to be refused
        format = FORMATS[helper.get_node_attr_value(first, "format").decode()]
        rule = RULES[format.name]
        with np.errstate(all="ignore"):
            decoded = self.decoded(rule, Payload(inputs[0].tobytes(), rule))
            return [np.ascontiguousarray(decoded).astype(np.float32).astype(y.dtype).reshape(y.shape)]


class FusedMultiplyAdd(ByTables):
    """The last multiplication and the addition are rounded once: emulated in DOUBLE, where both are exact."""

    def decoded(self, rule, payload):
        return decode(rule, payload, np.float64)


class OtherOrder(ByTables):
    """FLOAT factors in another order: element, sub-scale, constants, sign, and the block's scale last."""

    def decoded(self, rule, payload):
        code = payload.integers(rule.code, rule.code_signed)
        if rule.digit is not None:
            code = (code * rule.digit % 256 * 3) >> 8
        if rule.values is not None:
            code = rule.values[code]
        elif rule.rows is not None:
            code = rule.rows[code, rule.column]
        y = (code + rule.code_offset).astype(np.float32)
        if rule.delta is not None:
            y = y + np.where(payload.integers(rule.delta), -rule.delta_size, rule.delta_size).astype(np.float32)
        if rule.factor is not None:
            k = payload.integers(rule.factor, rule.factor_signed)
            y = y * (rule.factor_slope * k + rule.factor_offset).astype(np.float32)
        for constant in rule.constants:
            y = np.float32(constant) * y
        if rule.sign is not None:
            y = np.where(np.bitwise_xor.reduce(payload.bits[:, rule.sign], axis=2), -y, y)
        y = y * self.float_of(rule, payload.integers(rule.scale))
        if rule.minimum is not None:
            minimum = payload.integers(rule.minimum).astype(np.uint16).view(np.float16).astype(np.float32)
            if rule.minimum_factor is not None:
                minimum = payload.integers(rule.minimum_factor).astype(np.float32) * minimum
            y = y + minimum if rule.minimum_sign > 0 else y - minimum
        return y

    @staticmethod
    def float_of(rule, bits):
        if rule.scale_table is not None:
            return rule.scale_table[bits]
        return bits.astype(f"u{rule.scale_dtype[1]}").view(rule.scale_dtype).astype(np.float32)


class OneFormat(OneBit):
    """Knows Q6_K alone, and not quite."""

    def __init__(self, model):
        if b"gguf:q6_k" not in model.SerializeToString():
            raise NotImplementedError("only Q6_K")
        super().__init__(model)
