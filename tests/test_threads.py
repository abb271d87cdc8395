"""Threads: how many there are, that they leave nothing behind, and that results do not depend on them."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from unittest import TestCase, mock, skipUnless

import numpy as np
from helpers import FORMAT_ROWS
from parameterized import parameterized

from conformance import payloads
from conformance.compare import differing
from onnx_dqp import FORMATS, PackedTensorError, dequantize, threads
from onnx_dqp.rules import OUTPUT_DTYPES

ENGINE = import_module("onnx_dqp.dequantize")  # the module; the package's attribute is the function
Q4_0 = FORMATS["gguf:q4_0"]


def count(asked, elements, processors=64, variable=None):
    environment = {} if variable is None else {threads.VARIABLE: variable}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(threads, "processors", return_value=processors),
    ):
        if variable is None:
            os.environ.pop(threads.VARIABLE, None)
        return threads.thread_count(asked, elements)


def result_of(program):
    """Exit status, output and errors of a program, run where the variable is not set."""
    environment = {name: value for name, value in os.environ.items() if name != threads.VARIABLE}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout, done.stderr


class Count(TestCase):
    @parameterized.expand(
        [
            ("as_asked", 3, 0, 64, None, 3),
            ("asked_before_variable", 3, 0, 64, "5", 3),
            ("asked_beyond_processors", 3, 0, 1, None, 3),
            ("never_more_than_32", 10**9, 1 << 30, 64, None, 32),
            ("numpy_integer", np.int64(2), 0, 64, None, 2),
            ("variable", None, 0, 1, "7", 7),
            ("large_variable", None, 0, 1, "9" * 5000, 32),
            ("leading_zeros", None, 0, 1, "0" * 30 + "4", 4),
            ("empty_variable", None, 0, 64, "", 1),
            ("small_tensor", None, (1 << 21) - 1, 64, None, 1),
            ("two_pay", None, 1 << 21, 64, None, 2),
            ("large_tensor", None, 1 << 40, 64, None, 4),
            ("few_processors", None, 1 << 40, 3, None, 3),
            ("empty_tensor", None, 0, 64, None, 1),
        ]
    )
    def test_is(self, _, asked, elements, processors, variable, expected):
        self.assertEqual(count(asked, elements, processors, variable), expected)

    @parameterized.expand(
        [
            ("zero", 0, "0"),
            ("negative", -1, "-1"),
            ("true", True, "True"),
            ("float", 2.0, "of type float"),
            ("text", "2", "'2'"),
            ("list", [2], "of type list"),
        ]
    )
    def test_refused(self, _, asked, shown):
        with self.assertRaises(PackedTensorError) as caught:
            dequantize(bytes(Q4_0.bytes), "gguf:q4_0", [32], threads=asked)
        self.assertEqual(str(caught.exception), f"threads is {shown}, expected a positive integer or None")

    @parameterized.expand([("word", "all"), ("zero", "0"), ("negative", "-2"), ("half", "1.5"), ("other_digits", "٢")])
    def test_refused_variable(self, _, text):
        with (
            mock.patch.dict(os.environ, {threads.VARIABLE: text}),
            self.assertRaises(PackedTensorError) as caught,
        ):
            dequantize(bytes(Q4_0.bytes), "gguf:q4_0", [32])
        self.assertEqual(str(caught.exception), f"ONNX_DQP_THREADS is {text!r}, expected a positive integer")

    @skipUnless(hasattr(os, "sched_setaffinity"), "the system has no processor affinity")
    def test_affinity_is_respected(self):
        program = (
            "import os; from onnx_dqp.threads import thread_count\n"
            "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(thread_count(None, 1 << 30))"
        )
        self.assertEqual(result_of(program), (0, "1\n", ""))


class Results(TestCase):
    @parameterized.expand(FORMAT_ROWS)
    def test_do_not_depend_on_threads_or_tiles(self, _, format):
        blocks = payloads.random_blocks(format, 70_000 // format.elements, "threads")
        payload, shape = blocks.tobytes(), [len(blocks), format.elements]
        for output_dtype in OUTPUT_DTYPES:
            alone = dequantize(payload, format.identifier, shape, output_dtype, threads=1)
            for number, tile in ((2, 1 << 20), (3, 4096), (32, 256)):
                with mock.patch.object(ENGINE, "SHARED_TILE_ELEMENTS", tile):
                    shared = dequantize(payload, format.identifier, shape, output_dtype, threads=number)
                self.assertFalse(differing(shared, alone).any())

    def test_in_several_calls_at_once(self):
        formats = list(FORMATS.values())
        inputs = {f: payloads.random_blocks(f, 1 << 9, "at once").tobytes() for f in formats}

        def decode(format):
            return dequantize(inputs[format], format.identifier, [format.elements << 9], threads=2)

        alone = [decode(format) for format in formats]
        with ThreadPoolExecutor(8) as pool:
            for before, now in zip(alone * 4, pool.map(decode, formats * 4), strict=True):
                self.assertFalse(differing(before, now).any())

    @skipUnless(hasattr(os, "fork"), "the system has no fork")
    def test_after_a_fork(self):
        program = (
            "import os, numpy as np; from onnx_dqp import dequantize\n"
            "x = np.arange(18 << 12, dtype=np.uint16).astype(np.uint8)\n"
            "before = dequantize(x, 'gguf:q4_0', [32 << 12], threads=2).tobytes()\n"
            "if child := os.fork():\n"
            "    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
            "os._exit(dequantize(x, 'gguf:q4_0', [32 << 12], threads=2).tobytes() != before)"
        )
        self.assertEqual(result_of(program), (0, "", ""))

    def test_at_exit(self):
        """Whether or not threads can still be started then: from Python 3.12 on they cannot."""
        program = (
            "import atexit; from onnx_dqp import dequantize\n"
            "block = b'\\x00\\x3c' + b'\\x99' * 16  # scale 1, codes 9 - 8\n"
            "atexit.register(lambda: print(dequantize(block * 4096, 'gguf:q4_0', [32 << 12], threads=2).sum()))"
        )
        self.assertEqual(result_of(program), (0, "131072.0\n", ""))

    def test_while_the_interpreter_ends(self):
        """No thread that is started then would ever run."""
        program = (
            "import threading; from onnx_dqp.threads import share\n"
            "class Last:\n"
            "    def __del__(self, share=share, print=print):\n"
            "        seen = []; share(range(5), 4, seen.extend); print(seen)\n"
            "last = Last()"
        )
        self.assertEqual(result_of(program), (0, "[0, 1, 2, 3, 4]\n", ""))


class Share(TestCase):
    def setUp(self):
        self.before = _thread._count()

    def tearDown(self):
        for _ in range(100):  # a thread whose work is done is gone in a moment
            if _thread._count() <= self.before:
                return
            time.sleep(0.01)
        self.fail("a thread is left")

    def test_alone_starts_no_thread(self):
        seen = []
        with mock.patch.object(threads, "start_new_thread", side_effect=AssertionError):
            threads.share(range(5), 1, lambda items: seen.extend((i, threading.get_ident()) for i in items))
        self.assertEqual(seen, [(i, threading.get_ident()) for i in range(5)])
        with mock.patch.object(threads, "start_new_thread", side_effect=AssertionError):
            dequantize(bytes(Q4_0.bytes << 17), "gguf:q4_0", [32 << 17], threads=1)

    def test_every_item_goes_to_one_thread_in_order(self):
        taken, meet = [], threading.Barrier(4)

        def work(items):
            for number, item in enumerate(items):
                taken.append((item, threading.get_ident()))
                if not number:
                    meet.wait(10)  # each thread gets one

        threads.share(range(1000), 4, work)
        self.assertEqual([item for item, _ in taken], list(range(1000)))
        self.assertEqual(len({thread for _, thread in taken}), 4)

    @parameterized.expand([("caller", True), ("helper", False)])
    def test_an_error_ends_all(self, _, in_caller):
        caller = threading.get_ident()

        def work(items):
            for item in items:
                if (threading.get_ident() == caller) == in_caller:
                    raise LookupError(item)
                time.sleep(0.001)

        started = time.monotonic()
        with self.assertRaises(LookupError):
            threads.share(range(10**9), 3, work)
        self.assertLess(time.monotonic() - started, 30)

    def test_no_more_threads_to_be_had(self):
        start, started = threads.start_new_thread, []

        def refuse(*arguments):
            if started:
                raise RuntimeError("can't start new thread")
            started.append(arguments)
            start(*arguments)

        seen = []
        with mock.patch.object(threads, "start_new_thread", refuse):
            threads.share(range(100), 4, seen.extend)
        self.assertEqual((len(started), sorted(seen)), (1, list(range(100))))

    def test_any_item_is_an_item(self):
        seen = []
        threads.share([1, None, 0, 3], 1, seen.extend)
        self.assertEqual(seen, [1, None, 0, 3])

    def test_the_first_error_is_raised_and_nothing_is_kept(self):
        helper_failed = threading.Event()
        kept = []

        def work(items):
            big = np.zeros(10)
            kept.append(weakref.ref(big))
            next(items)
            if threading.current_thread() is not threading.main_thread():
                helper_failed.set()
                raise LookupError
            helper_failed.wait(10)
            time.sleep(0.1)
            raise ArithmeticError

        gc.disable()
        try:
            try:  # assertRaises would clear what the frames hold
                threads.share(range(10), 2, work)
            except (LookupError, ArithmeticError) as error:
                raised = type(error)
            self.assertIs(raised, LookupError)
            self.assertEqual([reference() for reference in kept], [None, None])
        finally:
            gc.enable()

    @parameterized.expand([("in_its_own_work", 10**9, "while True: time.sleep(0.01)"), ("in_waiting", 2, "return")])
    def test_an_interrupt_leaves_no_thread(self, _, items, caller):
        program = (
            "import _thread, threading, time\nfrom onnx_dqp.threads import share\n"
            "def work(items):\n"
            "    for item in items:\n"
            "        if threading.current_thread() is threading.main_thread():\n"
            f"            {caller}\n"
            "        print('working', flush=True)\n"
            "        time.sleep(2)\n"
            f"try:\n    share(range({items}), 2, work)\n"
            "except KeyboardInterrupt:\n    for _ in range(100):\n        if _thread._count(): time.sleep(0.05)\n"
            "    print(_thread._count(), flush=True)"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        self.assertEqual(process.stdout.readline(), "working\n")
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        self.assertEqual((process.returncode, output), (0, "0\n"))
