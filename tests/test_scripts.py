"""The scripts' command lines: one line and status 2 where a package is missing or an argument is bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase, mock

import _generated
from parameterized import parameterized

from conformance.folder import replace

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(script, *arguments, missing=()):
    """Exit status, output and errors of a script, run without some modules."""
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({list(missing)!r}))
sys.argv = {[script, *arguments]!r}
sys.path.insert(0, {str(SCRIPTS)!r})
runpy.run_path({str(SCRIPTS / script)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class CommandLines(TestCase):
    @parameterized.expand(
        [
            ("demo.py", "rich", "demo"),
            ("benchmark.py", "rich", "dev"),
            ("measure_memory.py", "rich", "dev"),
            ("measure_gguf.py", "gguf", "dev"),
            ("write_performance.py", "matplotlib", "dev"),
            ("make_real_weights.py", "magika", "data"),
            ("extract_codebooks.py", "gguf", "data"),
            ("check_package.py", "build", "dev"),
            ("compare_with_ggml.py", "libggml", "test"),
            ("generate_test_data.py", "rich", "conformance"),
        ]
    )
    def test_without_a_package(self, script, module, extra):
        others = {"rich", "libggml", "gguf", "magika", "build"} - {module}
        status, output, errors = run(script, "--help", missing=[module, *others])
        self.assertEqual((status, output), (2, ""))
        self.assertRegex(errors, rf"^{script} needs [^\n]*{module}[^\n]*: pip install 'onnx_dqp\[{extra}\]'\n$")

    @parameterized.expand(
        [("folder", "/tmp"), ("nowhere", "/no/such/file"), ("text", __file__), ("device", "/dev/full")]
    )
    def test_with_a_bad_file_of_results(self, _, path):
        for script in ("benchmark.py", "measure_memory.py"):
            status, output, errors = run(script, "--json", path)
            self.assertEqual((status, output), (2, ""))
            self.assertRegex(errors.splitlines()[-1], f"^{script}: error: argument --json: '{path}'")
            self.assertNotIn("Traceback", errors)

    @parameterized.expand([("unknown", ["--nonsense"]), ("more", ["surplus"])])
    def test_with_bad_arguments(self, _, arguments):
        status, output, errors = run("extract_codebooks.py", *arguments)
        self.assertEqual((status, output), (2, ""))
        self.assertNotIn("Traceback", errors)


class Measurements(TestCase):
    """That the scripts measure and write what the document needs; figures are no test's business."""

    def test_benchmark(self):
        with TemporaryDirectory() as directory:
            path = Path(directory, "results.json")
            path.write_text('{"memory": 1}')
            arguments = [
                "--formats",
                "gguf:q4_0",
                "gguf:q8_1",
                "--elements",
                "4096",
                "--sizes",
                "4096",
                "--repeat",
                "1",
            ]
            status, output, errors = run("benchmark.py", *arguments, "--json", str(path), missing=["torch", "gguf"])
            results = json.loads(path.read_text())
        self.assertEqual(status, 0)
        for contender in ("PyTorch", "gguf-py"):
            self.assertIn(f"{contender} is not measured", errors)
        self.assertIn("geometric mean", output)
        self.assertEqual(set(results), {"memory", "machine", "settings", "formats", "types", "growth", "small"})
        measured = results["formats"]["gaussian"]["Q4_0"]
        self.assertGreater(measured["ms"]["one"], 0)
        self.assertIsNone(measured["ratios"]["gguf-py / one"])
        self.assertGreater(measured["ratios"]["one / ggml"], 0)

    def test_memory(self):
        with TemporaryDirectory() as directory:
            path = Path(directory, "results.json")
            arguments = ["--formats", "gguf:q4_0", "--mebi-elements", "1", "--threads", "1", "--json", str(path)]
            status, output, _ = run("measure_memory.py", *arguments)
            results = json.loads(path.read_text())
        self.assertEqual(status, 0)
        self.assertRegex(output, r"largest: \d")
        self.assertEqual(len(results["memory"]["MiB"]["Q4_0"]), 4)


class Generated(TestCase):
    def test_several_at_once_and_leftovers(self):
        with TemporaryDirectory() as directory:
            contents = {str(i): bytes([i]) * 1000 for i in range(50)}

            def write():
                for name, content in contents.items():
                    replace(Path(directory, name), content)

            threads = [threading.Thread(target=write) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
            self.assertEqual(found, contents)

    def test_a_failed_write_leaves_the_file_as_it_was(self):
        with TemporaryDirectory() as directory:
            path = Path(directory, "file")
            path.write_bytes(b"before")
            with mock.patch("pathlib.Path.replace", side_effect=OSError("disk full")), self.assertRaises(OSError):
                replace(path, b"after")
            self.assertEqual((path.read_bytes(), os.listdir(directory)), (b"before", ["file"]))

    def test_check_tells_missing_and_changed_files(self):
        with TemporaryDirectory() as directory, mock.patch.object(_generated, "ROOT", Path(directory)):
            Path(directory, "changed").write_bytes(b"2")
            files = {"changed": b"x", "sub/missing": b"y"}
            for arguments, status in ((["--check"], 1), ([], 0), (["--check"], 0)):
                with mock.patch.object(sys, "argv", ["script", *arguments]), self.assertRaises(SystemExit) as exited:
                    _generated.main("", lambda: files)
                self.assertEqual(exited.exception.code, status)
