"""The documents are true: their tables, their examples, their links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import TestCase

import onnx
from gguf_files import decoded, packed, write

import onnx_dqp
from conformance.folder import REPOSITORY
from conformance.testdata import read
from onnx_dqp import FORMATS, PackedTensorError, dequantize

ROOT = Path(__file__).parent.parent
README = ROOT.joinpath("README.md").read_text(encoding="utf-8")
DECODING = ROOT.joinpath("docs", "decoding.md").read_text(encoding="utf-8")


def notation(layout):
    """A layout as docs/decoding.md writes it."""
    fields = []
    for name in layout.names:
        item = layout[name].base
        kind = f"({notation(item)})" if item.names else f"{item.kind}{8 * item.itemsize}"
        fields.append(f"{name}: {kind}" + "".join(f"[{n}]" for n in layout[name].shape))
    return ", ".join(fields)


class Readme(TestCase):
    def test_its_table_of_formats(self):
        rows = re.findall(r"^\| `(gguf:\w+)` \| (\d+) \| (\d+) \| (\S+) \|$", README, re.MULTILINE)
        table = [(f.identifier, str(f.elements), str(f.bytes), f"{f.bits_per_element:.4g}") for f in FORMATS.values()]
        self.assertEqual(rows, table)

    def test_its_table_of_names(self):
        section = README[README.index("| name | what |") : README.index("## Formats")]
        named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", "\n".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))
        self.assertEqual(named, set(onnx_dqp.__all__) - {"PackedFormat"})

    def test_its_examples_run(self):
        text = README + ROOT.joinpath("docs", "gguf.md").read_text(encoding="utf-8")
        examples = re.findall(r"<!-- test: \w+ -->\n```python\n(.*?)```", text, re.DOTALL)
        self.assertEqual(len(examples), text.count("```python"))
        self.addCleanup(os.chdir, os.getcwd())
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            write(Path("model.gguf"), {"w": packed("gguf:q4_0", [4, 512])})
            for example in examples:
                names: dict[str, object] = {}
                exec(compile(example.replace("print(", "str("), "README.md", "exec"), names)
                if "model" in names:  # the first example's is the one that the others load
                    onnx.save(names["model"], "model.onnx")
            os.chdir("/")

    def test_from_a_gguf_file_to_onnx_runtime(self):
        (block,) = re.findall(r"<!-- test: gguf -->\n```sh\n(.*?)```", README, re.DOTALL)
        self.assertEqual(len(block.splitlines()), 3)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder, "model.gguf"), {"w": packed("gguf:q4_0", [4, 512])})
            results = []
            for line in block.splitlines():
                name, *arguments = shlex.split(line)
                command = [sys.executable, *({"onnx-dqp": ["-m", "onnx_dqp"], "python": []}[name]), *arguments]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                results.append(done.stdout)
        self.assertEqual(results[-1], f"{decoded('gguf:q4_0', [4, 512])}\n")

    def test_its_error_messages(self):
        block = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].splitlines()
        found = []
        for arguments in ((bytes(287), "gguf:q4_k", [2, 256]), (b"", "gguf:Q4_K", [256])):
            with self.assertRaises(PackedTensorError) as caught:
                dequantize(*arguments)
            found.append(str(caught.exception))
        self.assertEqual(found, block)

    def test_its_number_of_cases(self):
        numbers = set(re.findall(r"(\d+) cases", README))
        self.assertEqual(numbers, {str(len(read(REPOSITORY)))})

    def test_its_dependency_bounds(self):
        pyproject = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
        for name in ("onnx", "numpy", "ml_dtypes"):
            bound = re.search(rf'"{name}>=([\d.]+)"', pyproject)[1]
            self.assertIn(f"`{name}` {bound}", README)


class Decoding(TestCase):
    def test_its_layouts(self):
        found = {}
        for heading, _, rows in re.findall(r"<!-- layout -->\n(\|.*\|)\n(\|.*\|)\n((?:\|.*\|\n)+)", DECODING):
            names = [cell.strip() for cell in heading.strip("|").split("|")]
            for row in rows.splitlines():
                cells = dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
                found[cells["format"]] = (int(cells["S"]), cells["layout"])
        self.assertEqual(found, {f.name: (f.bytes, notation(f.layout)) for f in FORMATS.values()})

    def test_its_codebooks(self):
        documented = re.findall(r"\| (iq\w+), (\d+) rows of (\d) \|", DECODING)
        self.assertEqual(len(documented), 7)
        for name, rows, columns in documented:
            shape = onnx_dqp.formats.i_quants.codebook(name).shape
            self.assertEqual((int(rows), int(columns)), shape)


class Links(TestCase):
    def test_lead_to_files_and_headings(self):
        for path in (ROOT / "README.md", *ROOT.joinpath("docs").glob("*.md")):
            for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
                if target.startswith("http"):
                    continue
                file, _, anchor = target.partition("#")
                leads_to = path.parent.joinpath(file) if file else path
                self.assertTrue(leads_to.exists(), f"{path.name}: {target}")
                if anchor:
                    headings = re.findall(r"^#+ (.*)$", leads_to.read_text(encoding="utf-8"), re.MULTILINE)
                    anchors = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
                    self.assertIn(anchor, anchors, f"{path.name}: {target}")
