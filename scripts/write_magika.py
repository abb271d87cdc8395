"""Write the tables of docs/magika.md from docs/magika.json, which scripts/compare_magika.py measures."""

from __future__ import annotations

import json

from _generated import ROOT, Generated, main, with_table

DOCUMENT = "docs/magika.md"
RESULTS = "docs/magika.json"


def generate() -> Generated:
    """The document, with the figures that were measured."""
    found = json.loads((ROOT / RESULTS).read_text(encoding="utf-8"))
    formats, original = found["formats"], found["original"]
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    agreement = [
        f"| {name} | {row['agree']} of {row['files']} | {'yes' if row['same_labels'] else 'no'} "
        f"| {row['logit_difference']:.1e} |"
        for name, row in formats.items()
    ]
    text = with_table(text, "| format | label as the original's | same label three ways | logits apart |", agreement)
    size, session, run = original["bytes"], original["session_ms"], original["run_ms"]
    costs = [f"| original | | {size:,} | | {session:.1f} | {run:.1f} |"]
    for name, row in formats.items():
        sizes, made = row["bytes"], row["make_ms"]
        costs.append(f"| {name} | packed | {sizes['packed']:,} | | | |")
        costs += [
            f"| {name} | {kind} | {sizes[kind]:,} | {made[kind]:.1f} | {row['session_ms'][kind]:.1f} "
            f"| {row['run_ms'][kind]:.1f} |"
            for kind in ("expanded", "folded")
        ]
    text = with_table(text, "| format | model | bytes | made in ms | session in ms | run in ms |", costs)
    return {DOCUMENT: text.encode()}


if __name__ == "__main__":
    main(__doc__, generate)
