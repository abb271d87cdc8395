"""The test data as files: written from the catalogue, byte for byte the same everywhere, and read back.

docs/conformance.md describes the layout.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
from onnx import ModelProto, TensorProto

from conformance.cases import CATEGORIES, FLAGS, Case, InvalidCase, invalid_cases, valid_cases
from conformance.cases.case import TYPE_NAMES
from onnx_dqp.formats import FORMATS, PackedFormat

MANIFEST = "manifest.json"
SCHEMA = "manifest.schema.json"
VERSION = 1
"""Of the manifest's form; a new number where a reader of the old one would go wrong."""


class TestDataError(Exception):
    """Test data that are missing, damaged, or of another version."""

    __test__ = False  # pytest: not a test


@dataclass(frozen=True)
class Entry:
    """A case as the manifest has it.

    Attributes
    ----------
    name, category, format, type, flags, reason
        As in the catalogue; ``format`` is an identifier, ``type`` a lower-case name.
    files
        All files of the case by name, with their SHA-256; see ``path``.
    shape
        Of a valid case: the node's ``shape``.
    rule, stage
        Of an invalid case: the rule that is broken and the earliest stage that can know, "load" or "run".
    """

    name: str
    category: str
    format: str
    type: str
    flags: list[str]
    reason: str
    files: dict[str, str]
    shape: list[int] | None = None
    rule: str | None = None
    stage: str | None = None

    @property
    def valid(self) -> bool:
        """Whether the model is to be run, or to be refused."""
        return self.rule is None

    @property
    def folder(self) -> str:
        """The case's folder, relative to the data's root."""
        return f"{'node' if self.valid else 'invalid'}/{self.name}"

    @property
    def inputs(self) -> list[str]:
        """The input files by name, in the order of the graph's inputs."""
        return [name for name in self.files if name.startswith("input_")]

    def path(self, name: str) -> str:
        """Where a file of the case is, relative to the data's root: tensors are in a folder of their own."""
        return f"{self.folder}/{'test_data_set_0/' if name.endswith('.pb') else ''}{name}"

    @property
    def packed_format(self) -> PackedFormat:
        """The row of the table of formats."""
        return FORMATS[self.format]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _bytes(message: ModelProto | TensorProto) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def case_files(case: Case | InvalidCase) -> dict[str, bytes]:
    """The files of a case by name."""
    if isinstance(case, InvalidCase):
        files = {"model.onnx": _bytes(case.model)}
        files |= {f"input_{i}.pb": _bytes(x) for i, x in enumerate(case.inputs)}
        files["expected.json"] = _json({"rule": case.rule, "reason": case.reason, "stage": case.stage})
        return files
    content = case.content()
    files = {"model.onnx": _bytes(content.model), **content.files}
    files |= {f"input_{i}.pb": _bytes(x) for i, x in enumerate(content.inputs)}
    files["output_0.pb"] = _bytes(content.output)
    files["data.json"] = _json({"rtol": 0, "atol": 0})
    return files


def _entry(case: Case | InvalidCase, files: Mapping[str, bytes]) -> Entry:
    own: dict[str, Any] = (
        {"shape": list(case.shape)} if isinstance(case, Case) else {"rule": case.rule, "stage": case.stage}
    )
    return Entry(
        case.name,
        case.category,
        case.format.identifier,
        case.type_name,
        list(case.flags),
        case.reason,
        {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        **own,
    )


def _built(case: Case | InvalidCase) -> tuple[Entry, dict[str, bytes]]:
    files = case_files(case)
    return _entry(case, files), files


def _build_group(group: tuple[str, str]) -> list[tuple[Entry, dict[str, bytes]]]:
    """All cases of a category and format, in a worker process; cases do not travel between processes, names do."""
    category, identifier = group
    some: Iterator[Case | InvalidCase] = invalid_cases() if category == "invalid" else valid_cases(category)
    return [_built(case) for case in some if case.format.identifier == identifier]


def groups() -> list[tuple[str, str]]:
    """What the work of ``generate`` is divided into: category and format."""
    cases: list[Case | InvalidCase] = [*valid_cases(), *invalid_cases()]
    return list(dict.fromkeys((case.category, case.format.identifier) for case in cases))


def generate(jobs: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Make all files, the manifest last.

    Parameters
    ----------
    jobs
        Worker processes; None for as many as there are processors.

    Yields
    ------
    Path relative to the data's root, and contents.
    """
    entries = []
    with ProcessPoolExecutor(jobs) as pool:
        for built in pool.map(_build_group, groups()):
            for entry, files in built:
                entries.append(entry)
                yield from ((entry.path(name), data) for name, data in files.items())
    yield SCHEMA, _json(manifest_schema())
    yield MANIFEST, _manifest(entries)


def _manifest(entries: Sequence[Entry]) -> bytes:
    """The manifest, a case a line."""
    parts = []
    for category in CATEGORIES:
        lines = []
        for entry in sorted((e for e in entries if e.category == category), key=lambda entry: entry.name):
            given = {k: v for k, v in asdict(entry).items() if v is not None and k != "category"}
            lines.append(json.dumps(given, separators=(",", ":"), ensure_ascii=False))
        parts.append(f'"{category}": [\n' + ",\n".join(lines) + "\n]")
    head = json.dumps({"version": VERSION, "flags": dict(FLAGS)}, indent=1, ensure_ascii=False).removesuffix("\n}")
    return (head + ',\n "cases": {\n' + ",\n".join(parts) + "\n}}\n").encode()


def read(root: Path) -> list[Entry]:
    """Read the manifest.

    Raises
    ------
    TestDataError
        There is none, or it is not one, or of another version.
    """
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise TestDataError(f"{path}: {error.strerror}, expected the test data's manifest") from None
    except (ValueError, RecursionError) as error:
        raise TestDataError(f"{path} is no JSON ({type(error).__name__}), expected the test data's manifest") from None
    if isinstance(manifest, dict) and manifest.get("version", VERSION) != VERSION:
        raise TestDataError(f"{path} has version {str(manifest['version'])[:20]}, expected {VERSION}")
    # The schema also keeps names and paths inside the folder.
    for found in jsonschema.Draft202012Validator(manifest_schema()).iter_errors(manifest):
        place = "/".join(map(str, found.absolute_path)) or "the whole"
        raise TestDataError(f"{path} is no manifest of test data: {place} does not fit {SCHEMA}")
    entries = [Entry(category=category, **e) for category, cases in manifest["cases"].items() for e in cases]
    entries.sort(key=lambda entry: (not entry.valid, entry.name))
    twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise TestDataError(f"{path} has case {twice[0]} twice, expected once")
    return entries


def verify(root: Path, entries: Sequence[Entry]) -> None:
    """Compare every file of these cases with the manifest's SHA-256.

    Raises
    ------
    TestDataError
        The first file that is missing or different.
    """
    for entry in entries:
        for name, expected in entry.files.items():
            path = root / entry.path(name)
            try:
                found = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise TestDataError(f"{path}: {error.strerror}") from None
            if found != expected:
                raise TestDataError(f"{path} has SHA-256 {found}, expected {expected}, as the manifest says")


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of the manifest."""
    text = {"type": "string"}
    case = {
        "name": {
            **text,
            "pattern": "^[a-z0-9_]+$",
            "description": "the name of the case's folder, in node/ if valid, else in invalid/",
        },
        "format": {"enum": list(FORMATS), "description": "of the DequantizePacked node (the first, if several)"},
        "type": {"enum": list(TYPE_NAMES.values()), "description": "that node's output type"},
        "flags": {"type": "array", "items": {"enum": list(FLAGS)}, "uniqueItems": True},
        "reason": {**text, "description": "why the case exists; of an invalid case, what is wrong with it"},
        "files": {
            "type": "object",
            "description": "every file, external data included, and its SHA-256; names that end in .pb are in "
            "its folder test_data_set_0, the others beside the model; input_<i>.pb is the graph's input i",
            "required": ["model.onnx"],
            "propertyNames": {"pattern": "^[a-z0-9_]+[.][a-z]+$"},
            "additionalProperties": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
        },
    }
    valid: dict[str, Any] = {
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "the node's shape"},
    }
    invalid: dict[str, Any] = {
        "rule": {"enum": ["R1", "R2", "R3", "R4", "R9"], "description": "the rule that the model breaks"},
        "stage": {"enum": ["load", "run"], "description": "the earliest stage that can refuse it"},
    }

    def item(own: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": case | own,
            "required": [*case, *own],
            "additionalProperties": False,
        }

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Conformance test data for ONNX DequantizePacked",
        "type": "object",
        "properties": {
            "version": {"const": VERSION},
            "flags": {"type": "object", "description": "what each flag means", "additionalProperties": text},
            "cases": {
                "type": "object",
                "description": "by category",
                "properties": {
                    category: {"type": "array", "items": item(invalid if category == "invalid" else valid)}
                    for category in CATEGORIES
                },
                "additionalProperties": False,
            },
        },
        "required": ["version", "flags", "cases"],
        "additionalProperties": False,
    }
