"""The command: its exit statuses, its outputs, its one-line errors; and ONNX's runner class over the cases."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase, mock
from xml.etree import ElementTree

from parameterized import parameterized

from conformance.folder import REPOSITORY, check, write
from conformance.testdata import TestDataError, read

TESTS = Path(__file__).parent
COUNT = len(read(REPOSITORY))


def conformance(*arguments, env=None, **options):
    """Exit status, output and errors of the command."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120", **(env or {})}
    done = subprocess.run(
        [sys.executable, "-m", "conformance", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


class Folder(TestCase):
    def setUp(self):
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.folder = Path(directory.name)


class Run(Folder):
    def test_the_whole_suite_on_the_reference(self):
        status, output, errors = conformance("run")
        self.assertEqual((status, errors), (0, ""))
        self.assertIn(f"{COUNT} cases: {COUNT} passed", output)
        self.assertRegex(output, r"│ IQ2_XXS +│ +(\d+)/\1 │")

    def test_onnxruntime_which_has_no_kernel(self):
        status, output, errors = conformance("run", "--backend", "onnxruntime.backend")
        self.assertEqual((status, errors), (1, ""))
        self.assertIn(f"{COUNT} cases: {COUNT} unsupported", output)
        status, _, _ = conformance("run", "--backend", "onnxruntime.backend", "--allow-unsupported")
        self.assertEqual(status, 0)

    def test_failures_and_reports(self):
        files = {name: self.folder / f"r.{name}" for name in ("json", "junit", "html")}
        options = [x for name, path in files.items() for x in (f"--{name}", path)]
        status, output, _ = conformance(
            "run",
            "--backend",
            "hostile_backends:OneBit",
            "--select",
            "q6_k",
            "--skip",
            "graph",
            "--skip",
            "Empty",
            *options,
        )
        self.assertEqual(status, 1)
        self.assertRegex(output, r"Q6_K: \d+ failed")
        self.assertRegex(
            output, r"first at \[0, 5\]: *\n +expected .* \(0x\w{8}\), found .* \(0x\w{8}\) *\n +block 0, element 5"
        )
        document = json.loads(files["json"].read_text())
        self.assertFalse(document["passed"])
        wrong = [case for case in document["cases"] if case["verdict"] == "wrong"]
        self.assertEqual({case["difference"]["first"] for case in wrong}, {5})
        self.assertEqual(len(document["cases"]), sum(document["verdicts"].values()))
        suites = ElementTree.parse(files["junit"]).getroot()
        self.assertEqual([s.get("failures") for s in suites], [str(len(wrong))])
        self.assertEqual(len(suites.findall(".//failure")), len(wrong))
        page = files["html"].read_text()
        self.assertEqual(page.count("<details>"), len(wrong))
        for outside in ("http://", "https://", "src=", "<link"):
            self.assertNotIn(outside, page)

    def test_expected_failures(self):
        listed = self.folder / "xfail"
        listed.write_text("# known\nq6_k  # all of it\n\n")
        base = ["run", "--select", "q6_k", "--xfail", listed]
        base += [x for skipped in ("graph", "basic", "Invalid", "Empty") for x in ("--skip", skipped)]
        status, output, _ = conformance(*base, "--backend", "hostile_backends:OneBit")
        self.assertEqual(status, 0)
        self.assertIn("failed as expected", output)
        status, output, _ = conformance(*base)
        self.assertEqual(status, 1)
        self.assertIn("passed, but was expected to fail", output)

    @parameterized.expand([("finite", 0), ("full", 1)])
    def test_profiles(self, profile, some):
        _, output, _ = conformance("list", "--profile", profile, "--select", "SpecialScale")
        self.assertEqual(output == "0 cases\n", not some)

    @parameterized.expand([("while_workers_start", 0), ("while_cases_run", 6)])
    def test_interrupt_leaves_no_process_and_no_traceback(self, _, seconds):
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        arguments = ["run", "--backend", "hostile_backends:Hangs", "--html", self.folder / "r.html"]
        process = subprocess.Popen(
            [sys.executable, "-m", "conformance", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while children.exists() and len(children.read_text().split()) < 2:  # multiprocessing's tracker, and a worker
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # to all of them, as a terminal does
        _, errors = process.communicate(timeout=20)
        self.assertEqual((process.returncode, errors.strip()), (130, "interrupted"))
        with self.assertRaises(ProcessLookupError):
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        self.assertEqual(os.listdir(self.folder), [])


class BadUsage(Folder):
    @parameterized.expand(
        [
            ("no_command", [], "arguments are required"),
            ("unknown_option", ["run", "--nonsense"], "unrecognized arguments: --nonsense"),
            ("two_backends", ["run", "--backend", "x", "--command", "y"], "not allowed with argument"),
            ("jobs", ["run", "--jobs", "0"], "argument --jobs: invalid"),
            ("timeout", ["run", "--timeout", "nan"], "argument --timeout: invalid"),
            ("compare", ["run", "--compare", "rtol"], "comparison is 'rtol', expected bits, value or ulp:N"),
            ("module", ["run", "--backend", "no_such"], "backend 'no_such' cannot be imported: ModuleNotFoundError"),
            ("command", ["run", "--command", "x"], "the command has no {model}"),
            ("program", ["run", "--command", "/no/x {model} {output}"], "/no/x: No such file or directory"),
            ("results", ["run", "--results", "/no/such"], "/no/such is no folder"),
            ("select", ["run", "--select", "nothing"], "no case is selected"),
            ("data", ["run", "--test-data", "/no/such"], "/no/such/manifest.json: No such file or directory"),
            ("report", ["run", "--html", "/no/such/r.html"], "/no/such is no folder"),
            ("xfail", ["run", "--xfail", "/no/such"], "/no/such: No such file or directory"),
            ("show", ["show", "no_case"], "no case 'no_case', expected a name that list prints"),
        ]
    )
    def test_one_line_and_status_2(self, _, arguments, message):
        status, output, errors = conformance(*arguments)
        self.assertEqual((status, output), (2, ""))
        self.assertIn(message, errors)
        self.assertNotIn("Traceback", errors)
        own = [line for line in errors.splitlines() if not line.startswith(("usage:", " "))]
        self.assertEqual(len(own), 1, errors)

    def test_damaged_data(self):
        data = self.folder / "data"
        shutil.copytree(REPOSITORY, data)
        path = data / read(data)[0].folder / "model.onnx"
        path.write_bytes(path.read_bytes() + b"\0")
        status, output, errors = conformance("run", "--test-data", data)
        self.assertEqual((status, output), (2, ""))
        self.assertRegex(errors, r"^onnx-dqp-conformance: \S+model.onnx has SHA-256 \w{64}, expected \w{64}, as the")

    def test_without_the_extra(self):
        code = (
            "import sys; sys.modules['pebble'] = None; from conformance.__main__ import main; sys.exit(main(['list']))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(
            done.stderr, "onnx-dqp-conformance: pebble not installed: pip install 'onnx_dqp[conformance]'\n"
        )

    @parameterized.expand([("stdin", "<&-"), ("stdout", ">&-"), ("both", "<&- >&-")])
    def test_closed_standard_files_do_not_hang(self, _, closed):
        command = f"{sys.executable} -m conformance run --select q1_0 {closed}"
        done = subprocess.run(["bash", "-c", command], check=False, timeout=60, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_full_disk_leaves_no_report(self):
        """A file-size limit stands for it."""
        code = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        code += "from conformance.__main__ import main; sys.exit(main(sys.argv[1:]))"
        arguments = ["run", "--select", "q6_k", "--html", str(self.folder / "r.html")]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, "^onnx-dqp-conformance: .*File too large\n$")
        self.assertEqual(os.listdir(self.folder), [])


class ListAndShow(Folder):
    def test_list(self):
        status, output, _ = conformance("list", "--select", "*q4_0_float_basic")
        self.assertEqual(status, 0)
        self.assertEqual(
            output,
            "test_dequantizepacked_q4_0_float_basic  [Basic, BugPairOrder]  "
            "Three rows of two Q4_0 blocks with random codes and ordinary scales.\n1 case\n",
        )

    def test_show_takes_blocks_apart(self):
        status, output, _ = conformance("show", "test_dequantizepacked_q8_k_float_basic", "--blocks", "1")
        self.assertEqual(status, 0)
        for text in (
            "shape [3, 512]",
            "Basic: Several rows",
            "block 0, payload bytes 0 to 291",
            "bsums: i16[16] = ",
            "codes: ",
        ):
            self.assertIn(text, output)
        self.assertRegex(output, r"d: f32 = (\w\w ){3}\w\w \(-?0\.\d+\)")
        self.assertIn("... and 5 more blocks", output)
        files = [line.strip() for line in output.splitlines() if line.strip().startswith(str(REPOSITORY))]
        self.assertEqual([Path(file).is_file() for file in files], [True] * 4)

    @parameterized.expand(["invalid_dequantizepacked_r3_empty", "test_dequantizepacked_q4_0_float_matmul"])
    def test_show_others(self, name):
        self.assertEqual(conformance("show", name)[0], 0)

    def test_show_every_format(self):
        for name in ("iq1_m", "iq2_xxs", "nvfp4", "q4_k"):
            status, output, _ = conformance("show", f"test_dequantizepacked_{name}_float_basic")
            self.assertEqual(status, 0)
            self.assertIn("qs: ", output)

    def test_a_closed_pipe_is_no_traceback(self):
        command = f"{sys.executable} -m conformance list | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        self.assertEqual(done.stderr, "")


class Generate(Folder):
    def test_whole_or_not_at_all(self):
        """Making all data is another test's, and the script's --check."""
        files = {"node/a/model.onnx": b"1", "node/b/model.onnx": b"2", "manifest.json": b"3"}
        data, seen = self.folder / "data", []
        with mock.patch("conformance.folder.generate", side_effect=lambda _: iter(files.items())):
            self.assertEqual(write(data, 2, seen.append), 3)
            self.assertEqual(seen, [1, 2, 3])
            self.assertEqual(check(data), [])
            (data / "node/a/model.onnx").write_bytes(b"")
            (data / "node/b/model.onnx").unlink()
            (data / "node/stray").write_bytes(b"")
            self.assertEqual(check(data), ["node/a/model.onnx", "node/b/model.onnx", "node/stray"])
            self.assertEqual(write(data), 3)  # what differs is put right
            self.assertEqual(check(data), [])
            (self.folder / "mine").mkdir()
            (self.folder / "mine" / "file").write_bytes(b"")
            with self.assertRaisesRegex(TestDataError, "has something else in it, expected a new folder or test data"):
                write(self.folder / "mine")

        def broken(_):
            yield from files.items()
            raise KeyboardInterrupt

        with mock.patch("conformance.folder.generate", broken), self.assertRaises(KeyboardInterrupt):
            write(self.folder / "other")
        self.assertEqual(sorted(os.listdir(self.folder)), ["data", "mine"])


BACKEND_TEST = """
import unittest
import conformance
from conformance.backends import Reference
from hostile_backends import AcceptsAll, NotImplementedLater, OneBit

tests = conformance.BackendTest({backend}, __name__).include("_(q5_0|r3)_"){more}
globals().update(tests.test_cases)
if __name__ == "__main__":
    unittest.main()
"""


class BackendTest(Folder):
    def outcome(self, runner, backend="Reference", more=""):
        """Exit status and output of a backend's test file of a few lines."""
        (self.folder / "test_backend.py").write_text(BACKEND_TEST.format(backend=backend, more=more))
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
        command = [sys.executable, "-m", *runner]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=environment)
        return done.returncode, done.stdout + done.stderr

    @parameterized.expand([("pytest", ["pytest", "-q", "test_backend.py"]), ("unittest", ["unittest", "test_backend"])])
    def test_runs_under(self, _, runner):
        status, output = self.outcome(runner)
        self.assertEqual(status, 0, output)
        status, output = self.outcome(runner, "OneBit")
        self.assertEqual(status, 1)
        self.assertIn("first at [0, 5]:", output)
        status, output = self.outcome(runner, "AcceptsAll")
        self.assertEqual(status, 1)
        self.assertIn("accepted invalid: R3", output)

    def test_exclude_and_xfail(self):
        everything = '.exclude("_(basic|invalid|zero)_").exclude("_r3_")'
        self.assertEqual(self.outcome(["pytest", "-q", "test_backend.py"], "OneBit", everything)[0], 1)
        more = everything + '.xfail("q5_0")'
        status, output = self.outcome(["pytest", "-q", "test_backend.py"], "OneBit", more)
        self.assertEqual(status, 0, output)
        self.assertRegex(output, r"\d+ skipped, \d+ xfailed")

    def test_suite(self):
        code = "import unittest, conformance; from conformance.backends import Reference\n"
        code += "suite = conformance.BackendTest(Reference).include('q1_0_').test_suite\n"
        code += "result = unittest.TextTestRunner().run(suite)\n"
        code += "print(result.wasSuccessful(), result.testsRun - len(result.skipped))\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        count = sum("q1_0_" in f"{entry.name}_cpu" for entry in read(REPOSITORY))
        self.assertEqual((done.returncode, done.stdout), (0, f"True {count}\n"))

    def test_unsupported_is_skipped_also_without_assertions(self):
        everything = '.exclude("_basic_")'
        for python in (["python"], ["python", "-O"]):
            runner = [sys.executable, *python[1:], "-m", "unittest", "test_backend"]
            (self.folder / "test_backend.py").write_text(
                BACKEND_TEST.format(backend="NotImplementedLater", more=everything)
            )
            environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
            done = subprocess.run(runner, capture_output=True, text=True, check=False, cwd=self.folder, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            (self.folder / "test_backend.py").write_text(BACKEND_TEST.format(backend="OneBit", more=everything))
            done = subprocess.run(runner, capture_output=True, text=True, check=False, cwd=self.folder, env=environment)
            self.assertEqual(done.returncode, 1)


class Mutants(Folder):
    def test_all_mutants_of_three_formats_are_killed(self):
        """Those of all formats are tried by the command mutants."""
        from conformance.mutants import mutants  # noqa: PLC0415
        from conformance.score import killer, targets  # noqa: PLC0415
        from onnx_dqp import FORMATS  # noqa: PLC0415

        count = 0
        for identifier in ("gguf:q5_k", "gguf:mxfp4", "gguf:q8_1"):
            cases = targets(REPOSITORY, FORMATS[identifier])
            names: set[tuple[str, str]] = set()
            for mutant in mutants(FORMATS[identifier]):
                self.assertIsNotNone(killer(mutant, cases), mutant.name)
                self.assertNotIn((mutant.kind, mutant.name), names)
                names.add((mutant.kind, mutant.name))
                count += 1
            self.assertGreater(len(names), 80)
        self.assertGreater(count, 270)

    def test_a_right_decoder_is_not_killed(self):
        from conformance.mutants import Mutant  # noqa: PLC0415
        from conformance.score import killer, targets  # noqa: PLC0415
        from onnx_dqp import FORMATS  # noqa: PLC0415
        from onnx_dqp.formats.anatomy import RULES  # noqa: PLC0415

        for format in FORMATS.values():
            right = Mutant("none", "unchanged", RULES[format.name])
            self.assertIsNone(killer(right, targets(REPOSITORY, format)))

    def test_the_command_tells_survivors(self):
        """On data without the codebook rows, many survive."""
        data = self.folder / "data"
        shutil.copytree(REPOSITORY, data)
        manifest = json.loads((data / "manifest.json").read_text())
        manifest["cases"] = {"basic": manifest["cases"]["basic"]}
        (data / "manifest.json").write_text(json.dumps(manifest))
        report = self.folder / "score.json"
        status, output, _ = conformance("mutants", "--test-data", data, "--quarter", "0", "--json", report)
        self.assertEqual(status, 1)
        self.assertRegex(output, r"survived IQ1_S: codebook row, row \d+")
        self.assertEqual(set(json.loads(report.read_text())), {"total", "killed", "survivors"})
