"""The command ``python -m conformance``, also installed as ``onnx-dqp-conformance``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from onnx_dqp.console import UsageError, fail, progress, run_command

PROGRAM = "onnx-dqp-conformance"

NEEDED = ("jinja2", "jsonschema", "pebble", "platformdirs", "rich")
"""Packages of the extra ``conformance``."""

EPILOG = """\
examples:
  python -m conformance run
  python -m conformance run --backend onnxruntime.backend --allow-unsupported --html report.html
  python -m conformance run --command './decode {model} {inputs} {output}' --select 'q4_*' --profile finite
  python -m conformance show test_dequantizepacked_mxfp4_float_basic

exit status: 0 all as expected; 1 a case failed; 2 bad usage, or damaged test data
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Conformance suite for ONNX's DequantizePacked.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")

    def selecting(sub: argparse.ArgumentParser) -> None:
        what = "PATTERN: a glob on case names, categories, flags, formats or types (repeatable)"
        sub.add_argument("--select", action="append", default=[], metavar="PATTERN", help=f"only these cases; {what}")
        sub.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="not these cases")
        sub.add_argument(
            "--profile", choices=("finite", "full"), default="full", help="without or with special scales (NaN, ...)"
        )
        sub.add_argument(
            "--test-data", type=Path, metavar="DIR", help="the test data (default: the repository's, else the cache's)"
        )

    run = commands.add_parser("run", help="run the suite on an implementation")
    which = run.add_mutually_exclusive_group()
    which.add_argument(
        "--backend",
        metavar="MODULE",
        help="an ONNX backend: module or module:Class, or one of the suite's own: reference (default), onnxruntime, "
        "onnxruntime-expanded, reference-expanded (ONNX's plain evaluator)",
    )
    which.add_argument(
        "--command",
        metavar="CMD",
        help="a program: 'CMD {model} {inputs} {output}'; exit status 0 answered, 3 refused, 4 not supported",
    )
    which.add_argument("--results", type=Path, metavar="DIR", help="outputs already written as DIR/<case>/output_0.pb")
    run.add_argument(
        "--opset", type=_positive, metavar="N", help="of the models that onnx_dqp.expand makes for -expanded (28)"
    )
    selecting(run)
    run.add_argument("--compare", default="bits", metavar="HOW", help="bits (default), value or ulp:N")
    run.add_argument("--xfail", type=Path, metavar="FILE", help="patterns of cases that fail, a line each; # comments")
    run.add_argument("--allow-unsupported", action="store_true", help="what is unsupported does not fail the run")
    run.add_argument("--jobs", type=_positive, default=_processors(), metavar="N", help="worker processes")
    run.add_argument("--timeout", type=_seconds, default=60.0, metavar="S", help="seconds a case may take (60)")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    run.add_argument("--junit", type=Path, metavar="FILE", help="write the results as JUnit XML")
    run.add_argument("--html", type=Path, metavar="FILE", help="write the results as an HTML page")

    lister = commands.add_parser("list", help="list the cases")
    selecting(lister)
    show = commands.add_parser("show", help="one case, and its blocks taken apart")
    show.add_argument("case")
    show.add_argument("--blocks", type=_positive, default=2, metavar="N", help="how many blocks (2)")
    show.add_argument("--first", type=_natural, default=0, metavar="N", help="from which block on (0)")
    show.add_argument(
        "--test-data", type=Path, metavar="DIR", help="the test data (default: the repository's, else the cache's)"
    )
    make = commands.add_parser("generate", help="make the test data")
    make.add_argument(
        "directory",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="where (default: the repository's, else the user's cache)",
    )
    make.add_argument("--check", action="store_true", help="write nothing; exit 1 where DIR has other files")
    make.add_argument("--jobs", type=_positive, default=_processors(), metavar="N", help="worker processes")
    score = commands.add_parser("mutants", help="the suite's own score: wrong decoders that it catches")
    score.add_argument("--quarter", type=int, choices=range(4), help="only a quarter, chosen by a hash of the names")
    score.add_argument("--jobs", type=_positive, default=_processors(), metavar="N", help="worker processes")
    score.add_argument(
        "--test-data", type=Path, metavar="DIR", help="the test data (default: the repository's, else the cache's)"
    )
    score.add_argument("--json", type=Path, metavar="FILE", help="write kinds, kills and survivors as JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 1e6:
        raise ValueError(text)
    return seconds


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_command(PROGRAM, lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return fail(PROGRAM, f"{', '.join(missing)} not installed: pip install 'onnx_dqp[conformance]'")
    from conformance.backends import BackendError  # noqa: PLC0415 - after the check
    from conformance.testdata import TestDataError  # noqa: PLC0415

    commands = {"run": _run, "list": _list, "show": _show, "generate": _generate, "mutants": _mutants}
    try:
        return commands[parsed.subcommand](parsed)
    except (TestDataError, BackendError) as error:
        raise UsageError(str(error)) from None


def _data(given: Path | None) -> Path:
    """The test data's folder; in an installed package they are made once, in the user's cache."""
    from conformance.folder import cache, data_root, write  # noqa: PLC0415
    from conformance.testdata import TestDataError  # noqa: PLC0415

    if given is not None:
        return given.resolve()  # a backend may change the working directory
    try:
        return data_root()
    except TestDataError:
        with progress("making the test data, once") as update:
            write(cache(), progress=update)
        return cache()


def _run(parsed: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415

    from conformance.backends import CaseBackend, CommandBackend, PythonBackend, ResultsBackend  # noqa: PLC0415
    from conformance.compare import Comparison  # noqa: PLC0415
    from conformance.report import Report  # noqa: PLC0415
    from conformance.runner import Selection, run  # noqa: PLC0415
    from conformance.testdata import read, verify  # noqa: PLC0415
    from onnx_dqp.models.opsets import checked_opset  # noqa: PLC0415

    try:
        comparison = Comparison.parse(parsed.compare)
        backend: CaseBackend
        if parsed.command is not None:
            backend, title = CommandBackend.parse(parsed.command), parsed.command
        elif parsed.results is not None:
            if not parsed.results.is_dir():
                raise UsageError(f"{parsed.results} is no folder, expected one with <case>/output_0.pb")
            backend, title = ResultsBackend(parsed.results), f"results in {parsed.results}"
        else:
            name = title = parsed.backend or "reference"
            if parsed.opset is not None:
                if not name.endswith("-expanded"):
                    raise UsageError("--opset is for a backend whose name ends in -expanded")
                title = f"{name}, opset {checked_opset(parsed.opset)}"
            backend = PythonBackend(name, parsed.opset)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for path in (parsed.json, parsed.junit, parsed.html):
        if path is not None and path.is_dir():
            raise UsageError(f"{path} is a folder, expected a file to write")
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"{path.parent} is no folder")
    expected_failures = _patterns(parsed.xfail)
    root = _data(parsed.test_data)
    entries = read(root)
    verify(root, entries)
    selection = Selection(tuple(parsed.select), tuple(parsed.skip), parsed.profile == "finite")
    if not any(selection.takes(entry) for entry in entries):
        raise UsageError("no case is selected")
    with progress("cases") as update:
        results = run(
            backend,
            root,
            entries,
            selection,
            comparison=comparison,
            jobs=parsed.jobs,
            timeout=parsed.timeout,
            expected_failures=expected_failures,
            progress=update,
        )
    report = Report(f"DequantizePacked conformance: {title}", results, parsed.allow_unsupported)
    report.print(Console())
    for path, text in ((parsed.json, report.as_json), (parsed.junit, report.as_junit), (parsed.html, report.as_html)):
        if path is not None:
            _write(path, text())
    return 1 if report.unexpected else 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all, but for what is no ordinary file."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _patterns(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text, expected a pattern a line") from None
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def _list(parsed: argparse.Namespace) -> int:
    from conformance.runner import Selection  # noqa: PLC0415
    from conformance.testdata import read  # noqa: PLC0415

    selection = Selection(tuple(parsed.select), tuple(parsed.skip), parsed.profile == "finite")
    chosen = [entry for entry in read(_data(parsed.test_data)) if selection.takes(entry)]
    for entry in chosen:
        print(f"{entry.name}  [{', '.join(entry.flags)}]  {entry.reason}")
    print("1 case" if len(chosen) == 1 else f"{len(chosen)} cases")
    return 0


def _show(parsed: argparse.Namespace) -> int:
    from conformance.anatomy import describe  # noqa: PLC0415
    from conformance.cases import FLAGS  # noqa: PLC0415
    from conformance.testdata import read  # noqa: PLC0415
    from conformance.verdict import decoded_payload  # noqa: PLC0415

    root = _data(parsed.test_data)
    entry = next((e for e in read(root) if e.name == parsed.case), None)
    if entry is None:
        raise UsageError(f"no case {parsed.case!r}, expected a name that list prints")
    print(entry.name)
    print(f"  {entry.reason}")
    print(f"  category {entry.category}, format {entry.format}, type {entry.type}")
    print(f"  shape {entry.shape}" if entry.valid else f"  breaks {entry.rule}; known at {entry.stage}")
    for flag in entry.flags:
        print(f"  {flag}: {FLAGS[flag]}")
    for name in entry.files:
        print(f"  {root / entry.path(name)}")
    payload = decoded_payload(root, entry)
    if payload is None:
        print("  the model has other nodes; blocks are shown where it is the one node")
    else:
        for line in describe(entry.packed_format, payload, parsed.first, parsed.blocks):
            print(f"  {line}")
    return 0


def _generate(parsed: argparse.Namespace) -> int:
    from conformance.folder import REPOSITORY, cache, check, in_repository, write  # noqa: PLC0415

    root = parsed.directory or (REPOSITORY if in_repository() else cache())
    with progress("files") as update:
        if not parsed.check:
            count = write(root, parsed.jobs, update)
            print(f"{count} files written to {root}")
            return 0
        wrong = check(root, parsed.jobs, update)
    for name in wrong:
        print(f"{root / name}: not what the catalogue gives", file=sys.stderr)
    print(f"{len(wrong)} files differ in {root}")
    return 1 if wrong else 0


def _mutants(parsed: argparse.Namespace) -> int:
    import json  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from conformance.score import score  # noqa: PLC0415

    with progress("mutants") as update:
        found = score(_data(parsed.test_data), parsed.jobs, parsed.quarter, update)
    if parsed.json is not None:
        _write(parsed.json, json.dumps(found.as_json(), indent=1) + "\n")
    found.print(Console())
    return 1 if found.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
