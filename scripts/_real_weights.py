"""Reads test_data/real: real trained weights and their payload in each format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent.parent / "test_data" / "real"


@dataclass(frozen=True)
class RealWeights:
    """Weights (rows, elements) and the bytes that each format packs them into, by identifier."""

    weights: NDArray[np.float32]
    payloads: dict[str, bytes]


def read() -> RealWeights:
    """Read the committed files by their manifest."""
    manifest: dict[str, Any] = json.loads(FOLDER.joinpath("manifest.json").read_text(encoding="utf-8"))
    weights = np.frombuffer(FOLDER.joinpath("weights.bin").read_bytes(), "<f4").reshape(manifest["shape"])
    payloads = {
        identifier: FOLDER.joinpath(row["file"]).read_bytes() for identifier, row in manifest["formats"].items()
    }
    return RealWeights(weights, payloads)


def relative_rms_error(decoded: NDArray[np.float32], weights: NDArray[np.float32]) -> float:
    """Root mean square of the error over that of the weights."""
    exact = weights.astype(np.float64)
    return float(np.sqrt(np.sum(np.square(decoded - exact)) / np.sum(np.square(exact))))
