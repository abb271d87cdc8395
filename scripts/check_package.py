"""Build the source distribution and the wheel, look into both, and use the wheel where only its dependencies are."""

from __future__ import annotations

from _command import require

require("dev", "build")

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
CODEBOOKS = {f"onnx_dqp/codebooks/{path.name}" for path in ROOT.glob("onnx_dqp/codebooks/*.txt")}
CARRIED = CODEBOOKS | {"onnx_dqp/py.typed", "onnx_dqp/op.py", "conformance/py.typed", "conformance/report.html.j2"}
SOURCE_ONLY = {
    "test_data/real/manifest.json",
    "test_data/manifest.json",
    "tests/test_bits.py",
    "THIRD_PARTY_NOTICES",
    "LICENSE",
}

USE = """
import sys
from importlib.metadata import requires
import onnx_dqp
from conformance import exact
from onnx_dqp import ggml
for identifier, format in onnx_dqp.FORMATS.items():
    block = bytes(range(format.bytes % 256)) + bytes(format.bytes - format.bytes % 256)
    bits = list(exact.decode(identifier, block))
    assert onnx_dqp.dequantize(block, identifier, [format.elements]).view("u4").tolist() == bits, identifier
try:
    ggml.library()
except ImportError as error:
    assert "onnx_dqp[ggml]" in str(error)
else:
    raise AssertionError("libggml-python is no dependency")
print("the wheel works with its dependencies alone")
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; its failure is this script's."""
    subprocess.run(command, check=True, cwd=cwd)


def main() -> None:
    """Exit 1, by an exception, where anything is missing."""
    assert CODEBOOKS
    with TemporaryDirectory() as directory:
        folder = Path(directory)
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
        (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        in_wheel = set(zipfile.ZipFile(wheel).namelist())
        with tarfile.open(source) as archive:
            in_source = {name.partition("/")[2] for name in archive.getnames()}
        assert in_wheel >= CARRIED, CARRIED - in_wheel
        assert in_source >= CARRIED | SOURCE_ONLY, (CARRIED | SOURCE_ONLY) - in_source
        stray = {name for name in in_wheel if not name.startswith(("onnx_dqp/", "conformance/", "onnx_dqp-"))}
        assert not stray, stray
        assert not any(name.startswith((".venv", ".git/")) for name in in_source)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=folder)
        run(python, "-W", "error", "-c", USE, cwd=folder)
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"{wheel}[conformance]",
            cwd=folder,
        )
        # The installed suite, which makes its data in a cache of its own.
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        suite = [folder / "venv" / "bin" / "onnx-dqp-conformance", "run", "--select", "basic"]
        subprocess.run(suite, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        print("the installed suite makes its data and runs")


if __name__ == "__main__":
    main()
