"""What every script that writes committed files shares: write them, or with --check compare and say what differs."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from conformance.folder import replace

Generated = Mapping[str, bytes]
"""File contents by path, relative to the project's root."""

ROOT = Path(__file__).resolve().parent.parent


def with_table(document: str, heading: str, rows: Iterable[str]) -> str:
    """A Markdown document with the rows of the table that has this heading, replaced."""
    pattern = rf"(^{re.escape(heading)}\n\| --- .*\n)(?:\|.*\n)*"
    changed, count = re.subn(
        pattern, lambda found: found[1] + "".join(f"{row}\n" for row in rows), document, flags=re.M
    )
    assert count == 1, heading
    return changed


def main(description: str | None, generate: Callable[[], Generated]) -> None:
    """Run a generator script: exit 0 when the files are written (or equal, with ``--check``), else 1."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a committed file differs")
    check = parser.parse_args().check
    wrong = []
    generated = dict(generate())
    for name, content in generated.items():
        path = ROOT / name
        if check:
            if not path.is_file() or path.read_bytes() != content:
                wrong.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, content)
    for name in wrong:
        print(f"{name}: not what the script writes", file=sys.stderr)
    print(f"{len(generated)} files {'checked' if check else 'written'}, {len(wrong)} differ")
    sys.exit(1 if wrong else 0)
