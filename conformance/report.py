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
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from conformance.cases.case import TYPE_NAMES
from conformance.verdict import PASSED, Result
from onnx_dqp.formats import FORMATS

_MOST_SHOWN = 3
"""Failures of a format, and reasons, that the terminal shows in full."""

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
        cases = "1 case" if len(self.results) == 1 else f"{len(self.results)} cases"
        return f"{cases}: {counts or 'none'}{tail}"

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
        reasons = Counter(r.detail for r in self.results if r.verdict == "unsupported")
        if reasons:
            console.print("(m/n): some or all are unsupported", style="yellow", highlight=False)
        for reason, count in reasons.most_common(_MOST_SHOWN):
            self._lines(console, [f"{count} unsupported: {reason or 'no reason given'}"], 2)
        if len(reasons) > _MOST_SHOWN:
            self._lines(console, [f"and {len(reasons) - _MOST_SHOWN} more reasons, which JSON has"], 2)
        for identifier in self.formats:
            failures = self.failures(identifier)
            if failures:
                console.print(f"\n[bold]{FORMATS[identifier].name}[/]: {len(failures)} failed")
            for result in failures[:_MOST_SHOWN]:
                lines = [f"{result.verdict}: {result.detail}" if result.detail else result.verdict, *result.details()]
                if result.passed:
                    lines = ["passed, but was expected to fail"]
                self._lines(console, [result.entry.name], 2, "red")
                self._lines(console, lines, 4)
            if len(failures) > _MOST_SHOWN:
                names = ", ".join(result.entry.name for result in failures[_MOST_SHOWN:])
                self._lines(console, [f"and {len(failures) - _MOST_SHOWN} more: {names}"], 2)
        self._lines(console, ["", self.summary], 0)

    def failures(self, identifier: str) -> list[Result]:
        """The results of a format that fail the run, unsupported ones aside: basic ones and FLOAT first."""
        order = {name: number for number, name in enumerate(TYPE_NAMES.values())}
        failed = [r for r in self.unexpected if r.entry.format == identifier and r.verdict != "unsupported"]
        return sorted(failed, key=lambda r: (r.entry.category != "basic", order[r.entry.type], not r.entry.valid))

    @staticmethod
    def _lines(console: Console, lines: Sequence[str], indent: int, style: str = "") -> None:
        for line in lines:
            console.print(Padding(Text(line, style), (0, 0, 0, indent), expand=False))

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
                text = "\n".join(result.details())
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
            rows.append((FORMATS[identifier], [_html_cell(cell) for cell in cells], self.failures(identifier)))
        return environment.from_string(source).render(report=self, columns=COLUMNS, rows=rows)


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


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold."""
    return "".join(
        c
        if c in "\t\n\r" or (ord(c) >= 0x20 and not 0xD800 <= ord(c) <= 0xDFFF and c not in "\ufffe\uffff")
        else "\ufffd"
        for c in text
    )
