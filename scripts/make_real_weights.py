"""Write test_data/real: real trained weights, quantized to every format, and docs/accuracy.md: what each format costs.

The weights are 2,048 of the convolution in the content-type model of the package magika; ggml's own quantizers pack
them. With --check, shows that the committed files are what the script writes.
"""

from __future__ import annotations

from _command import require

require("data", "libggml", "magika")

import hashlib
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from _generated import Generated, main
from _real_weights import relative_rms_error
from numpy.typing import NDArray

from conformance.expected import expected
from onnx_dqp import FORMATS, PackedFormat, ggml

MODEL = "models/standard_v3_3/model.onnx"
TENSOR = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Conv_0/transpose_3:0"
SHAPE = (4, 512)


def real_weights() -> NDArray[np.float32]:
    """The first elements of the tensor, in its own order."""
    package = find_spec("magika")
    assert package is not None
    assert package.origin is not None
    model = onnx.load(Path(package.origin).parent / MODEL)
    tensor = next(t for t in model.graph.initializer if t.name == TENSOR)
    return onnx.numpy_helper.to_array(tensor).ravel()[: np.prod(SHAPE)].reshape(SHAPE)


def quantize_by_definition(format: PackedFormat, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Q8_1 and Q8_K, which ggml only makes of activations: the largest magnitude of a block becomes 127."""
    rows = weights.reshape(-1, format.elements)
    blocks = np.zeros(len(rows), format.layout)
    scale = (np.abs(rows).max(axis=1) / np.float32(127)).astype(blocks["d"].dtype)
    codes = np.rint(rows / scale.astype(np.float32)[:, np.newaxis]).clip(-127, 127).astype(np.int8)
    blocks["d"], blocks["qs"] = scale, codes
    if format.name == "Q8_1":
        blocks["s"] = scale * codes.sum(axis=1)
    else:
        blocks["bsums"] = codes.reshape(-1, 16, 16).sum(axis=2)
    return blocks.view(np.uint8)


def accuracy(rows: list[tuple[PackedFormat, float]]) -> str:
    """The document with the table of errors."""
    magika, libggml = version("magika"), version("libggml-python")
    table = "\n".join(f"| {f.name} | {f.bits_per_element:.4g} | {error:.3g} |" for f, error in rows)
    return f"""\
# What each format costs

The error of {np.prod(SHAPE):,} real trained weights in each format: the root mean square of (decoded - original),
divided by that of the originals. The weights are part of a convolution of the content-type model in the package
`magika` {magika} (Apache-2.0), quantized by ggml's own quantizers (`libggml-python` {libggml}, uniform importance);
Q8_1 and Q8_K, for which ggml has none, by the formats' definition. `scripts/make_real_weights.py` writes this file.

One slice of one model ranks formats of like size only roughly; it shows the order of magnitude.

| format | bits per element | relative RMS error |
| --- | --- | --- |
{table}
"""


def generate() -> Generated:
    """All files' contents."""
    weights = real_weights()
    written = {"weights.bin": weights.astype("<f4").tobytes()}
    entries, errors = {}, []
    for identifier, format in FORMATS.items():
        by_ggml = identifier not in ggml.NO_QUANTIZER
        payload = (ggml.quantize if by_ggml else quantize_by_definition)(format, weights).tobytes()
        errors.append((format, relative_rms_error(expected(identifier, payload).reshape(SHAPE), weights)))
        file = f"{format.name.lower()}.bin"
        written[file] = payload
        entries[identifier] = {
            "file": file,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "quantizer": "ggml_quantize_chunk" if by_ggml else "by definition",
        }
    manifest = {
        "source": {
            "package": f"magika {version('magika')}",
            "license": "Apache-2.0",
            "model": MODEL,
            "tensor": TENSOR,
            "elements": f"the first {weights.size} in row-major order",
        },
        "quantizer": f"libggml-python {version('libggml-python')}, uniform importance",
        "shape": list(SHAPE),
        "weights": {"file": "weights.bin", "sha256": hashlib.sha256(written["weights.bin"]).hexdigest()},
        "formats": entries,
    }
    written["manifest.json"] = (json.dumps(manifest, indent=2) + "\n").encode()
    files = {f"test_data/real/{name}": content for name, content in written.items()}
    return files | {"docs/accuracy.md": accuracy(errors).encode()}


if __name__ == "__main__":
    main(__doc__, generate)
