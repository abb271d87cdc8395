"""The committed test data: what the catalogue says, what the manifest says, what a reader of a few lines can read."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase

import jsonschema
import onnx
from onnx import TensorProto, defs

import onnx_dqp
from conformance.cases import invalid_cases, valid_cases
from conformance.folder import REPOSITORY, data_root
from conformance.testdata import MANIFEST, SCHEMA, TestDataError, case_files, manifest_schema, read, verify

ENTRIES = read(REPOSITORY)
KIB, MIB = 1 << 10, 1 << 20


class Manifest(TestCase):
    def test_fits_its_schema(self):
        schema = json.loads(REPOSITORY.joinpath(SCHEMA).read_bytes())
        self.assertEqual(schema, manifest_schema())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(json.loads(REPOSITORY.joinpath(MANIFEST).read_bytes()), schema)

    def test_has_every_case_and_every_file(self):
        self.assertEqual(
            sorted(entry.name for entry in ENTRIES), sorted(c.name for c in [*valid_cases(), *invalid_cases()])
        )
        listed = {entry.path(name) for entry in ENTRIES for name in entry.files}
        there = {
            path.relative_to(REPOSITORY).as_posix()
            for part in ("node", "invalid")
            for path in (REPOSITORY / part).rglob("*")
            if path.is_file()
        }
        self.assertEqual(listed, there)

    def test_hashes(self):
        verify(REPOSITORY, ENTRIES)

    def test_some_cases_are_what_the_catalogue_gives(self):
        """All of them are compared by scripts/generate_test_data.py --check."""
        for case in [*list(valid_cases("basic"))[::10], *list(valid_cases("graph"))[::7], *list(invalid_cases())[::9]]:
            entry = next(e for e in ENTRIES if e.name == case.name)
            for name, content in case_files(case).items():
                self.assertEqual((REPOSITORY / entry.path(name)).read_bytes(), content)

    def test_counts(self):
        by_validity = Counter(entry.valid for entry in ENTRIES)
        self.assertGreaterEqual(by_validity[True], 700)
        self.assertGreaterEqual(by_validity[False], 70)


class Files(TestCase):
    def test_sizes(self):
        sizes = {path: path.stat().st_size for path in REPOSITORY.rglob("*") if path.is_file()}
        self.assertLessEqual(sum(sizes.values()), 24 * MIB)
        self.assertLessEqual(max(sizes.values()), 512 * KIB)

    def test_layout(self):
        for entry in ENTRIES:
            names = set(entry.files)
            self.assertIn("model.onnx", names)
            if entry.valid:
                self.assertLessEqual({"data.json", "output_0.pb"}, names)
                data = json.loads((REPOSITORY / entry.folder / "data.json").read_bytes())
                self.assertEqual(data, {"rtol": 0, "atol": 0})
                self.assertTrue(entry.name.startswith("test_dequantizepacked_"))
            else:
                expected = json.loads((REPOSITORY / entry.folder / "expected.json").read_bytes())
                found = {"rule": entry.rule, "reason": entry.reason, "stage": entry.stage}
                self.assertEqual(expected, found)
                self.assertEqual(bool(entry.inputs), entry.stage == "run")

    def test_tensors_have_four_fields(self):
        """dims, data_type, name, raw_data: also the initializers, but for external ones."""
        for entry in ENTRIES:
            folder = REPOSITORY / entry.folder
            tensors = []
            for name in entry.files:
                if name.endswith(".pb"):
                    tensors.append(TensorProto.FromString((REPOSITORY / entry.path(name)).read_bytes()))
            model = onnx.load(folder / "model.onnx", load_external_data=False)
            tensors.extend(model.graph.initializer)
            for tensor in tensors:
                fields = {field.name for field, _ in tensor.ListFields()}
                external = {"data_location", "external_data"} if tensor.external_data else set()
                self.assertLessEqual(fields, {"dims", "data_type", "name", "raw_data"} | external, entry.name)

    def test_inputs_are_the_graphs(self):
        for entry in ENTRIES:
            model = onnx.load(REPOSITORY / entry.folder / "model.onnx", load_external_data=False)
            names = [TensorProto.FromString((REPOSITORY / entry.path(name)).read_bytes()).name for name in entry.inputs]
            self.assertEqual(names, [value.name for value in model.graph.input], entry.name)
            self.assertEqual([o.name for o in model.graph.output], ["y"])

    def test_models(self):
        onnx_dqp.register_schema()
        self.addCleanup(defs.deregister_schema, "DequantizePacked", 29, "")
        for entry in ENTRIES:
            path = REPOSITORY / entry.folder / "model.onnx"
            model = onnx.load(path, load_external_data=False)
            self.assertEqual(model.ir_version, 10)
            self.assertEqual({o.domain: o.version for o in model.opset_import}[""], 29)
            self.assertEqual((model.producer_name, model.producer_version, model.doc_string), ("", "", ""))
            if entry.valid:
                onnx.checker.check_model(str(path), full_check=True)


class Damage(TestCase):
    def setUp(self):
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = Path(directory.name, "data")
        entry = next(e for e in ENTRIES if e.category == "basic")
        self.name = entry.name
        shutil.copytree(REPOSITORY / entry.folder, self.root / entry.folder)
        shutil.copy(REPOSITORY / MANIFEST, self.root)
        self.file = self.root / entry.folder / "model.onnx"

    def check(self, message):
        with self.assertRaisesRegex(TestDataError, message):
            verify(self.root, [e for e in read(self.root) if e.name == self.name])

    def test_none(self):
        verify(self.root, [e for e in read(self.root) if e.name == self.name])

    def test_changed(self):
        self.file.write_bytes(self.file.read_bytes()[:-1])
        self.check(r"model\.onnx has SHA-256 \w+, expected \w+")

    def test_missing(self):
        self.file.unlink()
        self.check(r"model\.onnx: No such file")

    def test_no_manifest(self):
        (self.root / MANIFEST).unlink()
        self.check("manifest.json: No such file or directory, expected the test data's manifest")

    def test_not_a_manifest(self):
        for content in (b"", b"\xff", b"{"):
            (self.root / MANIFEST).write_bytes(content)
            self.check("manifest.json is no JSON")
        for content in (
            b"[]",
            b"1",
            b'{"version": 1}',
            b'{"version": 1, "flags": {}, "cases": {"basic": [{"name": 1}]}}',
        ):
            (self.root / MANIFEST).write_bytes(content)
            self.check("manifest.json is no manifest of test data: .* does not fit manifest.schema.json")

    def changed(self, **changes):
        manifest = json.loads((self.root / MANIFEST).read_bytes())
        manifest["cases"]["basic"][0] |= changes
        (self.root / MANIFEST).write_text(json.dumps(manifest))

    def test_paths_out_of_the_folder(self):
        for changes in (
            {"name": "../x"},
            {"name": "/etc/x"},
            {"files": {"model.onnx": "0" * 64, "../../x.pb": "0" * 64}},
        ):
            self.changed(**changes)
            self.check("is no manifest of test data: cases/basic/0.* does not fit")

    def test_a_case_twice(self):
        manifest = json.loads((self.root / MANIFEST).read_bytes())
        manifest["cases"]["basic"].append(manifest["cases"]["basic"][0])
        (self.root / MANIFEST).write_text(json.dumps(manifest))
        self.check(f"has case {self.name} twice")

    def test_another_version(self):
        (self.root / MANIFEST).write_text('{"version": 99, "cases": {}}')
        self.check("has version 99, expected 1")


class Place(TestCase):
    def test_the_repositorys(self):
        self.assertEqual(data_root(), REPOSITORY)
