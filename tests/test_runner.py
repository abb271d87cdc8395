"""The runner: right backends pass; whatever a hostile one does costs its case a verdict, and the run goes on."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase, mock

from parameterized import parameterized

from conformance.backends import BackendError, CommandBackend, PythonBackend, ResultsBackend
from conformance.compare import Comparison
from conformance.folder import REPOSITORY
from conformance.runner import Selection, matches, run
from conformance.testdata import read
from onnx_dqp import ggml

TESTS = Path(__file__).parent
ENTRIES = read(REPOSITORY)
ONE_CELL = Selection(("gguf:q5_0",), ("Empty",))  # in all types, with two invalid cases


def results(backend, selection=ONE_CELL, **options):
    with mock.patch.dict("os.environ", {"PYTHONPATH": str(TESTS)}):
        return run(backend, REPOSITORY, ENTRIES, selection, **{"jobs": 2, **options})


def verdicts(found):
    return dict(Counter(result.verdict for result in found))


def hostile(name, **options):
    return results(PythonBackend(f"hostile_backends:{name}"), **options)


class RightBackends(TestCase):
    @parameterized.expand(
        [
            ("reference", "reference"),
            ("fused_multiply_add", "hostile_backends:FusedMultiplyAdd"),
            ("factors_in_another_order", "hostile_backends:OtherOrder"),
            ("other_nan_payloads", "hostile_backends:OtherNaN"),
            ("non_contiguous_arrays", "hostile_backends:NonContiguous"),
        ]
    )
    def test_all_cases_pass_at_bits(self, _, name):
        found = results(PythonBackend(name), Selection())
        self.assertEqual([(r.entry.name, r.detail) for r in found if not r.passed], [])
        self.assertEqual(len(found), len(ENTRIES))


class WrongBackends(TestCase):
    """Right on the basic cases, so that the format counts as implemented."""

    @parameterized.expand(
        [
            ("Raises", "refused", "ZeroDivisionError: a bug"),
            ("Crashes", "crashed", "the process ended by signal SIGSEGV"),
            ("Exits", "crashed", "the process ended with status 7"),
            ("SysExits", "crashed", "SystemExit: 0"),
            ("Interrupts", "crashed", "KeyboardInterrupt"),
            ("WrongShape", "wrong", "the output has shape"),
            ("WrongType", "wrong", "the output has type int32"),
            ("TwoOutputs", "wrong", "2 outputs, expected 1"),
            ("NoOutput", "wrong", "0 outputs, expected 1"),
            ("NotAList", "wrong", "run() returned a ndarray, not a list"),
            ("NotAnArray", "wrong", "the output is of type str"),
            ("OneBit", "wrong", "1 of "),
            ("NotImplementedLater", "unsupported", "NotImplementedError: not yet"),
        ]
    )
    def test_verdict(self, name, verdict, detail):
        found = hostile(name)
        valid = [r for r in found if r.entry.valid and r.entry.category != "basic"]
        self.assertEqual({r.verdict for r in valid}, {verdict})
        for result in valid:
            self.assertTrue(result.detail.startswith(detail), result.detail)
        self.assertTrue(all(r.passed for r in found if r.entry.category == "basic"))
        self.assertTrue(all(r.passed for r in found if not r.entry.valid))

    def test_prints_garbage(self):
        chosen = [entry for entry in ENTRIES if ONE_CELL.takes(entry)]
        self.assertEqual(verdicts(hostile("Prints")), {"passed": len(chosen)})

    def test_unpicklable_surplus_output(self):
        valid = [r for r in hostile("Unpicklable") if r.entry.valid and r.entry.category != "basic"]
        self.assertEqual({r.verdict for r in valid}, {"wrong"})

    def test_an_exit_that_looks_well_is_noticed_in_the_end(self):
        found = hostile("ExitsWell", selection=Selection(("*q5_0_float_codes", "*q5_0_float_basic")), timeout=8.0)
        self.assertEqual(verdicts(found), {"passed": 1, "timed out": 1})

    def test_hangs(self):
        found = hostile("Hangs", selection=Selection(("*q5_0_float_codes", "*q5_0_float_basic")), timeout=8.0)
        self.assertEqual(verdicts(found), {"passed": 1, "timed out": 1})

    def test_accepts_invalid_models(self):
        invalid = [r for r in hostile("AcceptsAll", selection=Selection(("Invalid",))) if not r.entry.valid]
        self.assertEqual({r.verdict for r in invalid}, {"accepted invalid"})
        self.assertGreaterEqual(len(invalid), 70)

    def test_a_backend_that_always_fails_passes_nothing(self):
        found = hostile("AlwaysFails", selection=Selection())
        self.assertEqual(verdicts(found), {"unsupported": len(ENTRIES)})
        self.assertFalse(any(r.as_expected(allow_unsupported=False) for r in found))
        self.assertTrue(all(r.as_expected(allow_unsupported=True) for r in found))
        found = hostile("AlwaysExits")
        self.assertEqual({r.verdict for r in found}, {"crashed", "unsupported"})

    def test_the_first_wrong_element_is_located(self):
        found = hostile("OneBit", selection=Selection(("*q5_0_float_codes",)))[0]
        self.assertEqual((found.difference.first, found.difference.wrong, found.difference.ulp), (5, 1, 1))
        payload = (REPOSITORY / found.entry.folder / "test_data_set_0" / "input_0.pb").read_bytes()[-32 * 22 :]
        self.assertEqual(found.location[0], "block 0, element 5 of 32")
        # d, the fifth bit, the nibble
        deciding = {"d.byte0": 0, "d.byte1": 1, "qh.byte0": 2, "qs[5]": 11}
        octets = " ".join(f"{name}={payload[i]:02X}" for name, i in deciding.items())
        self.assertEqual(found.location[1], f"the block starts at byte 0 of the payload; these bytes decide: {octets}")

    def test_comparison_by_value(self):
        signs = Selection(("*q5_0_float_extreme_scales",))
        for how, verdict in (("bits", "wrong"), ("value", "passed")):
            found = hostile("NegatesZeros", selection=signs, comparison=Comparison.parse(how))
            self.assertEqual([r.verdict for r in found], [verdict])


class Selections(TestCase):
    def test_patterns(self):
        entry = next(e for e in ENTRIES if e.name == "test_dequantizepacked_mxfp4_float16_special_scales")
        for pattern in ("*mxfp4*", "mxfp4", "gguf:mxfp4", "float16", "scales", "SpecialScale", "Bug*"):
            self.assertTrue(matches(entry, [pattern]), pattern)
        for pattern in ("MXFP4", "float", "q4_0", "specialscale"):
            self.assertFalse(matches(entry, [pattern]), pattern)

    def test_select_skip_and_finite(self):
        chosen = [e for e in ENTRIES if Selection(("q4_0", "q4_1"), ("float16",), finite=True).takes(e)]
        self.assertEqual({e.format for e in chosen}, {"gguf:q4_0", "gguf:q4_1"})
        self.assertNotIn("float16", {e.type for e in chosen})
        self.assertFalse(any("SpecialScale" in e.flags for e in chosen))

    def test_expected_failures(self):
        found = hostile("OneBit", expected_failures=["*q5_0_float_*"])
        for result in found:
            expected = result.entry.type == "float" and result.entry.valid
            self.assertEqual(result.expected_failure, expected)
            fails = result.entry.valid and result.entry.category != "basic"
            self.assertEqual(result.as_expected(False), fails == expected)

    def test_results_do_not_depend_on_jobs(self):
        one, two = hostile("OneBit", jobs=1), hostile("OneBit", jobs=3)
        self.assertEqual(one, two)


class PythonBackends(TestCase):
    @parameterized.expand(
        [
            ("no_module", "no_such_module", "cannot be imported: ModuleNotFoundError"),
            ("no_class", "onnx.backend.base:NoSuchClass", "cannot be imported: AttributeError"),
            ("no_prepare", "json", "has no prepare"),
            ("empty", "", "cannot be imported"),
        ]
    )
    def test_what_is_none(self, _, name, message):
        with self.assertRaisesRegex(BackendError, message):
            PythonBackend(name).load()

    @parameterized.expand(["conformance.backends:Reference", "conformance.backends.Reference"])
    def test_spellings(self, name):
        self.assertTrue(hasattr(PythonBackend(name).load(), "prepare"))


class Results(TestCase):
    def test_outputs_written_elsewhere(self):
        with TemporaryDirectory() as directory:
            for entry in ENTRIES:
                if entry.valid and entry.format == "gguf:q5_0" and entry.type != "double":
                    folder = Path(directory, entry.name)
                    folder.mkdir()
                    shutil.copy(REPOSITORY / entry.folder / "test_data_set_0" / "output_0.pb", folder)
            Path(directory, "test_dequantizepacked_q5_0_float_codes", "output_0.pb").write_bytes(b"\xff\xff")
            found = results(ResultsBackend(Path(directory)))
        by_name = {r.entry.name: r for r in found}
        wrong = by_name.pop("test_dequantizepacked_q5_0_float_codes")
        self.assertEqual(wrong.verdict, "wrong")
        self.assertRegex(wrong.detail, "the file is no TensorProto")
        for result in by_name.values():
            self.assertEqual(result.verdict, "unsupported" if result.entry.type == "double" else "passed")


def command(code):
    """A command that runs Python code with ``model``, ``output`` and ``inputs`` set."""
    head = "import os, sys, time, shutil; model, output, *inputs = sys.argv[1:]\n"
    words = [sys.executable, "-S", "-c", head + code]
    return CommandBackend.parse(f"{shlex.join(words)} {{model}} {{output}} {{inputs}}")


COPY = """
answer = os.path.join(os.path.dirname(model), "test_data_set_0", "output_0.pb")
if not os.path.exists(answer): sys.exit(3)
shutil.copy(answer, output)
"""


class Commands(TestCase):
    def test_answers_and_refusals(self):
        found = results(command(COPY))
        self.assertEqual(verdicts(found), {"passed": len(found)})

    @parameterized.expand(
        [
            ("exit_1", "print('why', file=sys.stderr); sys.exit(1)", "crashed", "exit status 1"),
            ("signal", "os.kill(os.getpid(), 11)", "crashed", "signal SIGSEGV"),
            ("no_output", "sys.exit(0)", "crashed", "exit status 0, but no output file"),
            ("garbage", "open(output, 'wb').write(b'\\xff' * 99); sys.exit(0)", "wrong", "the file is no TensorProto"),
            ("empty_file", "open(output, 'wb'); sys.exit(0)", "wrong", "the TensorProto cannot be read"),
            ("refused", "sys.exit(3)", "refused", ""),
            ("not_supported", "sys.exit(4)", "unsupported", ""),
        ]
    )
    def test_verdict(self, _, code, verdict, detail):
        """Where the basic case is answered."""
        found = results(command(f"if '_basic' not in model and 'invalid' not in model:\n {code}\n{COPY}"))
        for result in found:
            if result.entry.valid and result.entry.category != "basic":
                self.assertEqual(result.verdict, verdict, result.detail)
                self.assertTrue(result.detail.startswith(detail), result.detail)
            else:
                self.assertTrue(result.passed)

    def test_a_hanging_program_and_its_children_are_ended(self):
        with TemporaryDirectory() as directory:
            alive = Path(directory, "alive")
            child = f"time.sleep(4); open({str(alive)!r}, 'w')"
            code = f"import subprocess\nsubprocess.Popen([sys.executable, '-S', '-c', {'import time;' + child!r}])\n"
            found = results(
                command(f"if '_codes' in model:\n {code.replace(chr(10), chr(10) + ' ')}time.sleep(60)\n{COPY}"),
                Selection(("*q5_0_float_codes", "*q5_0_float_basic")),
                timeout=1.5,
            )
            self.assertEqual(verdicts(found), {"passed": 1, "timed out": 1})
            subprocess.run([sys.executable, "-c", "import time; time.sleep(4)"], check=True)
            self.assertFalse(alive.exists())

    @parameterized.expand(
        [
            ("not_found", "/no/such/program {model} {output}", "/no/such/program: No such file or directory"),
            ("not_executable", f"{__file__} {{model}} {{output}}", "Permission denied"),
            ("exit_127", "sh -c 'exit 127' {model} {output}", "exit status 127: the program cannot be run"),
            ("exit_126", "sh -c 'exit 126' {model} {output}", "exit status 126: the program cannot be run"),
        ]
    )
    def test_a_program_that_cannot_be_run_stops_the_run(self, _, text, message):
        with self.assertRaisesRegex(BackendError, message):
            results(CommandBackend.parse(text))

    @parameterized.expand(
        [
            ("empty", "", "is empty"),
            ("no_model", "x {output}", "has no {model}"),
            ("no_output", "x {model}", "has no {output}"),
            ("quote", "'x {model} {output}", "closing quotation"),
            ("inputs_inside", "x {model} {output} --in={inputs}", "stands inside of '--in={inputs}'"),
        ]
    )
    def test_bad_command_lines(self, _, text, message):
        with self.assertRaisesRegex(ValueError, message):
            CommandBackend.parse(text)

    def test_inputs_are_one_argument_each_and_none_where_there_is_none(self):
        with TemporaryDirectory() as directory:
            log = Path(directory, "log")
            found = results(
                command(f"open({str(log)!r}, 'a').write(f'{{len(inputs)}} {{model}}\\n')\n{COPY}"),
                Selection(("*q4_0_float_initializer", "*q4_0_float_matmul", "*q4_0_float_basic")),
                jobs=1,
            )
            lines = log.read_text().split("\n")
        self.assertEqual(verdicts(found), {"passed": 3})
        counts = {line.split("/")[-2].split("float_")[-1]: line.split()[0] for line in lines if line}
        self.assertEqual(counts, {"basic": "1", "initializer": "0", "matmul": "2"})


class AnotherLanguage(TestCase):
    """A program in C that reads the protobufs with its own few lines and decodes with ggml's library."""

    @classmethod
    def setUpClass(cls):
        directory = TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.program = Path(directory.name, "ggml_backend")
        source = TESTS / "native" / "ggml_backend.c"
        subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", cls.program, source, "-ldl"], check=True)

    def test_26_formats_pass_in_float_and_the_rest_is_refused_or_unsupported(self):
        library = ggml.library()._name
        backend = CommandBackend((str(self.program), "{model}", "{output}", "{inputs}"))
        with mock.patch.dict("os.environ", {"GGML_LIBRARY": library}):
            found = results(backend, Selection())
        for result in found:
            entry = result.entry
            if entry.format == "gguf:q8_1" or entry.type != "float":
                self.assertEqual(result.verdict, "unsupported", entry.name)
            elif entry.category == "graph":
                alone = entry.name.endswith(("_initializer", "_default_type"))
                self.assertEqual(result.verdict, "passed" if alone else "unsupported", entry.name)
            else:
                self.assertTrue(result.passed, f"{entry.name} {result.verdict} {result.detail}")
        passed = Counter(r.entry.format for r in found if r.passed and r.entry.valid)
        self.assertEqual(len(passed), 26)
        specials = [r for r in found if r.passed and "SpecialScale" in r.entry.flags]
        self.assertGreaterEqual(len(specials), 25)
