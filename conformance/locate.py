"""Where the test data are: in the repository, or made once in the user's cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from conformance.testdata import MANIFEST, VERSION, TestDataError, generate

REPOSITORY = Path(__file__).resolve().parent.parent / "test_data"


def cache() -> Path:
    """The folder in the user's cache for the data of this version of the project."""
    import platformdirs  # noqa: PLC0415 - of the extra conformance

    from onnx_dqp import __version__  # noqa: PLC0415

    return Path(platformdirs.user_cache_dir("onnx_dqp")) / f"test_data-{__version__}-{VERSION}"


def data_root() -> Path:
    """The folder of the test data.

    Raises
    ------
    TestDataError
        There are none yet: this is an installed package, and they were not made.
    """
    for root in (REPOSITORY, cache()):
        if (root / MANIFEST).is_file():
            return root
    raise TestDataError(f"no test data in {cache()}, expected them to be made with: python -m conformance generate")


def write(
    root: Path,
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda count: None,  # noqa: ARG005
) -> int:
    """Make the test data in a new folder, whole or not at all.

    Parameters
    ----------
    root
        The folder; it must not exist, or be empty.
    jobs
        Worker processes; None for as many as there are processors.
    progress
        Called with the number of files written so far.

    Returns
    -------
    The number of files.

    Raises
    ------
    TestDataError
        The folder has something in it.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TestDataError(f"{root} is not empty, expected a new folder")
    root.parent.mkdir(parents=True, exist_ok=True)
    new = Path(mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    try:
        new.chmod(0o755)
        count = 0
        for name, content in generate(jobs):
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            count += 1
            progress(count)
        os.replace(new, root)  # an empty folder may be there
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return count


def check(root: Path, jobs: int | None = None, progress: Callable[[int], None] = lambda count: None) -> list[str]:  # noqa: ARG005
    """Compare a folder with what would be made: the paths that are missing, different, or not of the data.

    Folders beside ``node`` and ``invalid`` are not looked at.
    """
    wrong, expected = [], set()
    for count, (name, content) in enumerate(generate(jobs), 1):
        path = root / name
        if not path.is_file() or path.read_bytes() != content:
            wrong.append(name)
        expected.add(name)
        progress(count)
    found = {
        p.relative_to(root).as_posix() for part in ("node", "invalid") for p in (root / part).rglob("*") if p.is_file()
    }
    return wrong + sorted(found - expected)
