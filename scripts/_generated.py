"""What every script that writes committed files shares: write them, or with --check compare and say what differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

Generated = Mapping[str, bytes]
"""File contents by path, relative to the project's root."""

ROOT = Path(__file__).resolve().parent.parent


def main(description: str | None, generate: Callable[[], Generated], owned: Sequence[str] = ()) -> None:
    """Run a generator script: exit 0 when the files are written (or equal, with ``--check``), else 1.

    In the folders ``owned`` there are to be no other files.
    """
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
            _write(path, content)
    stray = {p.relative_to(ROOT).as_posix() for folder in owned for p in (ROOT / folder).rglob("*") if p.is_file()}
    for name in sorted(stray - generated.keys()):
        if check:
            wrong.append(name)
        else:
            (ROOT / name).unlink()
    for name in wrong:
        print(f"{name}: not what the script writes", file=sys.stderr)
    print(f"{len(generated)} files {'checked' if check else 'written'}, {len(wrong)} differ")
    sys.exit(1 if wrong else 0)


def _write(path: Path, content: bytes) -> None:
    """Under a temporary name first, so that an interrupt or a full disk leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        new = Path(temporary.name)
        try:
            temporary.write(content)
            temporary.flush()
            new.chmod(0o644)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
