"""Write the tables of docs/conformance.md: cases by category and mutants by kind; --check shows that they are right."""

from __future__ import annotations

from collections import Counter

from _generated import ROOT, Generated, main, with_table

from conformance.cases import CATEGORIES
from conformance.folder import REPOSITORY
from conformance.mutants import mutants
from conformance.testdata import read
from onnx_dqp import FORMATS

DOCUMENT = "docs/conformance.md"

COVERS = {
    "basic": "27 formats x 4 types, three rows of two blocks, ordinary scales",
    "codes": "every code at every position, every codebook row, sign pattern, sub-scale and minimum; unused fields",
    "scales": "every special scale, every scale byte, x 4 types",
    "rounding": "ties, overflow, subnormal results, and values that depend on when a decoder rounds",
    "shapes": "rank 1 to 6, a 0 in each place, 1s, many rows, one long row",
    "graph": "payload from anywhere, other operators around, subgraphs, functions",
    "invalid": "models that must be refused",
}


def generate() -> Generated:
    """The document, with the numbers of the committed data."""
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    cases = Counter(entry.category for entry in read(REPOSITORY))
    rows = [f"| `{category}` | {cases[category]} | {COVERS[category]} |" for category in CATEGORIES]
    text = with_table(text, "| category | cases | what it covers |", [*rows, f"| all | {cases.total()} | |"])
    kinds = Counter(mutant.kind for format in FORMATS.values() for mutant in mutants(format))
    rows = [f"| {kind} | {count} |" for kind, count in kinds.items()]
    text = with_table(text, "| kind | mutants |", [*rows, f"| all, all caught | {kinds.total()} |"])
    return {DOCUMENT: text.encode()}


if __name__ == "__main__":
    main(__doc__, generate)
