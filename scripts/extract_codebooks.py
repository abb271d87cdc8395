"""Write onnx_dqp/codebooks/*.txt from the gguf package, or show with --check that they are what it gives."""

from __future__ import annotations

from _command import require

require("data", "gguf")

import gguf.quants
import numpy as np
from _generated import Generated, main

NAMES = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s")


def text(name: str) -> bytes:
    """One codebook as a file's contents: a comment line, then a row a line."""
    quant = getattr(gguf.quants, name.upper())
    quant.init_grid()
    rows = quant.grid[0, 0].astype(np.int8)
    lines = [f"# {name.upper()} codebook, {len(rows)} rows; from gguf.quants (MIT, see THIRD_PARTY_NOTICES)"]
    lines += [" ".join(f"{value:2d}" for value in row) for row in rows]
    return ("\n".join(lines) + "\n").encode("ascii")


def generate() -> Generated:
    """The six files' contents by name."""
    return {f"onnx_dqp/codebooks/{name}.txt": text(name) for name in NAMES}


if __name__ == "__main__":
    main(__doc__, generate)
