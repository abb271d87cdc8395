"""One and two bits an element: consecutive elements in one byte, the lowest bits first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_dqp.formats.registry import Blocks, packed_format
from onnx_dqp.formats.unpack import Scratch, fields, scaled, widen


@packed_format("gguf:q1_0", ggml_type=41, elements=128, layout=[("d", "<f2"), ("qs", "u1", 16)])
def q1_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = d`` where bit i of ``qs`` is set, else ``-d``."""
    scaled(fields(blocks["qs"], (-1, 1), scratch), widen(blocks["d"]), out)


@packed_format("gguf:q2_0", ggml_type=42, elements=64, layout=[("d", "<f2"), ("qs", "u1", 16)])
def q2_0(blocks: Blocks, out: NDArray[np.float32], scratch: Scratch) -> None:
    """``y = (c - 1) * d``; c is two bits of ``qs[i / 4]``, from bit 2 (i mod 4) (so 3 gives 2d)."""
    scaled(fields(blocks["qs"], (-1, 0, 1, 2), scratch), widen(blocks["d"]), out)
