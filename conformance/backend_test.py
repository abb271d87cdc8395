"""ONNX's own test runner class over these cases, with bit-exact comparison.

In a backend's test file::

    import conformance
    globals().update(conformance.BackendTest(MyBackend, __name__).test_cases)
"""

from __future__ import annotations

import unittest
from collections import defaultdict
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.test.runner import Runner
from onnx.backend.test.runner.item import TestItem

from conformance.backends import Answer, says_unsupported
from conformance.compare import Comparison
from conformance.folder import data_root
from conformance.testdata import Entry, read
from conformance.verdict import judge
from onnx_dqp.console import one_line
from onnx_dqp.models.files import read_tensor


class BackendTest(Runner):
    """``onnx.backend.test.BackendTest`` with the cases of this suite instead of ONNX's.

    ``include``, ``exclude``, ``xfail``, ``test_cases`` and ``test_suite`` work as there; patterns are regular
    expressions on test names, which are the cases' names (``test_`` before those of invalid ones) and ``_cpu``. A case
    that the backend says it is not supposed to implement is skipped, not passed.

    Parameters
    ----------
    backend
        An ONNX backend: ``prepare(model, device).run(inputs)``.
    parent_module
        ``__name__`` of the test file.
    test_kwargs
        Given to ``prepare``.
    test_data
        The test data's folder; None for that of the repository, or the user's cache.
    comparison
        ``"bits"``, ``"value"`` or ``"ulp:N"``.

    Raises
    ------
    conformance.testdata.TestDataError
        There are no test data there.
    """

    def __init__(
        self,
        backend: Any,
        parent_module: str | None = None,
        test_kwargs: dict[str, Any] | None = None,
        *,
        test_data: Path | None = None,
        comparison: str = "bits",
    ) -> None:
        # Not the base class's: that loads ONNX's own cases.
        self.backend = backend
        self._parent_module = parent_module
        self._include_patterns = set()
        self._exclude_patterns = set()
        self._xfail_patterns = set()
        self._test_kwargs = test_kwargs or {}
        self._test_items = defaultdict(dict)
        self._root = test_data or data_root()
        self._comparison = Comparison.parse(comparison)
        supported = getattr(backend, "supports_device", lambda _: True)("CPU")
        for entry in read(self._root):
            name = entry.name if entry.valid else f"test_{entry.name}"

            def test(_: unittest.TestCase, entry: Entry = entry) -> None:
                self._run(entry)

            test.__doc__ = entry.reason
            func = test if supported else unittest.skip("the backend does not support the CPU")(test)
            category = f"DequantizePacked{entry.category.capitalize()}"
            self._test_items[category][f"{name}_cpu"] = TestItem(func, [None])

    def _run(self, entry: Entry) -> None:
        folder = self._root / entry.folder
        inputs = [read_tensor(self._root / entry.path(name)) for name in entry.inputs]
        model = onnx.load(folder / "model.onnx")
        try:
            prepared: Any = self.backend.prepare(model, "CPU", **self._test_kwargs)
            if prepared is None:
                raise unittest.SkipTest("prepare() gave None")
            outputs = prepared.run(inputs)
        except Exception as error:
            if says_unsupported(error):
                raise unittest.SkipTest(one_line(error)) from None
            if entry.valid:
                raise  # with the backend's own traceback
            return  # refused, as it must be
        result = judge(self._root, entry, Answer("output", outputs), self._comparison)
        if not result.passed:
            raise AssertionError("\n".join([f"{result.verdict}: {result.detail}", *result.details()]))
