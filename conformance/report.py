"""What came out of a run: as a table in the terminal, JSON, JUnit XML, and a self-contained HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

import jinja2
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.cases.case import TYPE_NAMES
from conformance.runner import PASSED, Result
from onnx_dqp.formats import FORMATS

COLUMNS = (*TYPE_NAMES.values(), "invalid")


class Report:
    """The results of a run, counted.

    Parameters
    ----------
    title
        What was run.
    results
        In the order of the manifest.
    allow_unsupported
        Unsupported cases do not fail the run.
    """

    def __init__(self, title: str, results: Sequence[Result], allow_unsupported: bool = False) -> None:
        self.title = title
        self.results = list(results)
        self.allow_unsupported = allow_unsupported

    @property
    def unexpected(self) -> list[Result]:
        """The results that fail the run."""
        return [r for r in self.results if not r.as_expected(self.allow_unsupported)]

    @property
    def verdicts(self) -> Counter[str]:
        """How many cases have each verdict."""
        return Counter(result.verdict for result in self.results)

    def cell(self, identifier: str, column: str) -> list[Result]:
        """The results of a format (an identifier) and a column of ``COLUMNS``."""
        return [r for r in self.results if r.entry.format == identifier and _column(r) == column]

    @property
    def formats(self) -> list[str]:
        """The identifiers that have results, in the table's order."""
        present = {result.entry.format for result in self.results}
        return [identifier for identifier in FORMATS if identifier in present]

    @property
    def summary(self) -> str:
        """The run in a line."""
        counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(self.verdicts.items()))
        expected = sum(r.expected_failure and not r.passed for r in self.results)
        tail = f"; {expected} failed as expected" if expected else ""
        return f"{len(self.results)} cases: {counts or 'none'}{tail}"

    def print(self, console: Console) -> None:
        """The matrix, then the failures by format."""
        table = Table(title=escape(self.title))
        table.add_column("format")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for identifier in self.formats:
            cells = [self.cell(identifier, column) for column in COLUMNS]
            table.add_row(FORMATS[identifier].name, *(self._terminal_cell(cell) for cell in cells))
        console.print(table)
        if self.verdicts["unsupported"]:
            console.print("(m/n): some or all are unsupported", style="yellow", highlight=False)
        for identifier in self.formats:
            failures = [r for r in self.unexpected if r.entry.format == identifier and r.verdict != "unsupported"]
            if failures:
                console.print(f"\n[bold]{FORMATS[identifier].name}[/]: {len(failures)} failed")
            for result in failures:
                lines = [f"{result.verdict}: {result.detail}" if result.detail else result.verdict, *_details(result)]
                if result.passed:
                    lines = ["passed, but was expected to fail"]
                console.print(
                    f"  [red]{escape(result.entry.name)}[/]\n", *(f"    {escape(x)}\n" for x in lines), end=""
                )
        console.print(f"\n{escape(self.summary)}")

    def _terminal_cell(self, cell: list[Result]) -> str:
        kind, text = _state(cell), _count(cell)
        return {"none": "-", "passed": f"[green]{text}[/]", "failed": f"[red]{text}[/]"}.get(
            kind, f"[yellow]({text})[/]"
        )

    def as_json(self) -> str:
        """The run as JSON: title, summary, and each case's verdict, with the difference where there is one."""
        cases = []
        for r in self.results:
            entry: dict[str, Any] = {
                "name": r.entry.name,
                "category": r.entry.category,
                "format": r.entry.format,
                "type": r.entry.type,
                "flags": r.entry.flags,
                "verdict": r.verdict,
                "as_expected": r.as_expected(self.allow_unsupported),
                "detail": r.detail,
                "location": list(r.location),
                "difference": None if r.difference is None else asdict(r.difference),
            }
            cases.append(entry)
        document = {
            "title": self.title,
            "passed": not self.unexpected,
            "verdicts": dict(sorted(self.verdicts.items())),
            "cases": cases,
        }
        return json.dumps(document, indent=1) + "\n"

    def as_junit(self) -> str:
        """The run as JUnit XML, a suite per format; what was expected to fail, or may be unsupported, is skipped."""
        root = ElementTree.Element("testsuites", name=_xml(self.title))
        for identifier in self.formats:
            results = [r for r in self.results if r.entry.format == identifier]
            failed = [r for r in results if not r.as_expected(self.allow_unsupported)]
            skipped = [r for r in results if r.as_expected(self.allow_unsupported) and not r.passed]
            suite = ElementTree.SubElement(
                root,
                "testsuite",
                name=identifier,
                tests=str(len(results)),
                failures=str(len(failed)),
                skipped=str(len(skipped)),
                errors="0",
            )
            for result in results:
                case = ElementTree.SubElement(suite, "testcase", classname=identifier, name=result.entry.name)
                text = "\n".join(_details(result))
                if result in failed:
                    message = (
                        "passed, but was expected to fail" if result.passed else f"{result.verdict}: {result.detail}"
                    )
                    ElementTree.SubElement(case, "failure", message=_xml(message)).text = _xml(text)
                elif result in skipped:
                    ElementTree.SubElement(case, "skipped", message=_xml(f"{result.verdict}: {result.detail}"))
        ElementTree.indent(root)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"

    def as_html(self) -> str:
        """The run as one HTML file that needs nothing else."""
        source = files("conformance").joinpath("report.html.j2").read_text(encoding="utf-8")
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        rows = []
        for identifier in self.formats:
            cells = [self.cell(identifier, column) for column in COLUMNS]
            failures = [r for r in self.unexpected if r.entry.format == identifier and r.verdict != "unsupported"]
            rows.append((FORMATS[identifier], [_html_cell(cell) for cell in cells], failures))
        return environment.from_string(source).render(report=self, columns=COLUMNS, rows=rows, details=_details)


def _column(result: Result) -> str:
    return result.entry.type if result.entry.valid else "invalid"


def _state(cell: Sequence[Result]) -> str:
    """How a cell is shown; ``partly``: some cases passed, the others are unsupported."""
    verdicts = {result.verdict for result in cell}
    if verdicts - {PASSED, "unsupported"}:
        return "failed"
    if "unsupported" in verdicts:
        return "partly" if PASSED in verdicts else "unsupported"
    return "passed" if cell else "none"


def _count(cell: Sequence[Result]) -> str:
    return f"{sum(result.passed for result in cell)}/{len(cell)}" if cell else "-"


def _html_cell(cell: Sequence[Result]) -> dict[str, str]:
    verdicts = Counter(result.verdict for result in cell)
    title = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    return {"class": _state(cell), "text": _count(cell), "title": title or "no case"}


def _details(result: Result) -> list[str]:
    """Lines on a wrong output: the first wrong element, its place, and the largest distance."""
    difference = result.difference
    if difference is None or difference.first is None:
        return []
    place = f"element {difference.first} in row-major order"
    if result.entry.category != "graph":
        index = np.unravel_index(difference.first, result.entry.shape or ())
        place = f"[{', '.join(str(int(i)) for i in index)}]"
    ulp = "a NaN stands against a number" if difference.ulp is None else f"at most {difference.ulp} ULP apart"
    return [
        f"{ulp}; first at {place}:",
        f"expected {difference.expected_value} ({difference.expected_bits}), "
        f"found {difference.actual_value} ({difference.actual_bits})",
        *result.location,
        f"the case: {result.entry.reason}",
    ]


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold."""
    return "".join(
        c if c in "\t\n\r" or (ord(c) >= 0x20 and not 0xD800 <= ord(c) <= 0xDFFF) else "\ufffd" for c in text
    )
