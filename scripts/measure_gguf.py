"""Measure what ``onnx-dqp from-gguf`` takes, linking to and copying a large GGUF file: seconds, and peak memory.

The file is made on the spot: packed tensors of zero bytes, which take no room on the disk, and a vocabulary. The copy
does take room: as much as the file says it has.
"""

from __future__ import annotations

from _command import require

require("dev", "gguf", "rich")

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from _command import positive
from rich.console import Console
from rich.table import Column, Table

from onnx_dqp import FORMATS

TENSORS, TOKENS = 8, 150_000
# Not getrusage(): its peak counts what the process was before it became this program.
CODE = """
import sys, time
start = time.perf_counter()
from onnx_dqp.__main__ import main
status = main(sys.argv[1:])
print(time.perf_counter() - start, open("/proc/self/status").read().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(status)
"""


def make(path: Path, size: int) -> None:
    """A file of about ``size`` bytes, sparse."""
    format = FORMATS["gguf:q4_k"]
    rows = size // TENSORS // (16 * format.bytes)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(TOKENS)])
    writer.add_array("tokenizer.ggml.scores", [float(number) for number in range(TOKENS)])
    for number in range(TENSORS):
        shape, kind = (rows, 16 * format.elements), gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor_info(f"blk.{number}.weight", shape, np.dtype(np.int8), rows * 16 * format.bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4096 + TENSORS * (rows * 16 * format.bytes + 32))


def measure(*arguments: str) -> tuple[float, float]:
    """Seconds, imports included, and MiB at the peak of the command in a process of its own; Linux tells."""
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"measure_gguf.py: {done.stderr.strip()}")
    seconds, peak = done.stderr.split()[-2:]
    return float(seconds), int(peak) / 1024


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=positive, default=4, help="size of the file in GiB (4)")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "in.gguf"), Path(folder, "out.onnx")
        make(path, parsed.gib << 30)
        rows: list[tuple[str, float, float | None, int | None]] = []
        for name, options in (("link", []), ("copy", ["--copy"])):
            seconds, peak = measure("from-gguf", str(path), str(output), *options)
            written = sum(file.stat().st_size for file in Path(folder).glob("out*"))
            rows.append((f"from-gguf, {name}", seconds, peak, written))
        copyfile = partial(shutil.copyfile, dst=output)
        for name, peer in (("gguf.GGUFReader", gguf.GGUFReader), ("shutil.copyfile", copyfile)):
            start = time.perf_counter()
            peer(path)
            rows.append((name, time.perf_counter() - start, None, None))
        size = path.stat().st_size
    title = f"a file of {size:,} bytes, {TENSORS} tensors, {TOKENS:,} tokens"
    table = Table(
        "", *(Column(name, justify="right") for name in ("seconds", "peak MiB", "bytes written")), title=title
    )
    for name, seconds, peak, written in rows:
        shown = ["" if peak is None else f"{peak:.0f}", "" if written is None else f"{written:,}"]
        table.add_row(name, f"{seconds:.2f}", *shown)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
