"""Where the test data are, in the repository or in the user's cache; making, updating and checking them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp

from conformance.testdata import MANIFEST, VERSION, TestDataError, generate

REPOSITORY = Path(__file__).resolve().parent.parent / "test_data"

Progress = Callable[[int], None]


def _ignore(count: int) -> None:
    pass


def cache() -> Path:
    """The folder in the user's cache for the data of this version of the project."""
    import platformdirs  # noqa: PLC0415 - of the extra conformance

    from onnx_dqp import __version__  # noqa: PLC0415

    return Path(platformdirs.user_cache_dir("onnx_dqp")) / f"test_data-{__version__}-{VERSION}"


def in_repository() -> bool:
    """Whether this package lies in the project's repository, with the test data beside it."""
    return (REPOSITORY.parent / "pyproject.toml").is_file() and (REPOSITORY / MANIFEST).is_file()


def data_root() -> Path:
    """The folder of the test data.

    Raises
    ------
    TestDataError
        There are none yet: this is an installed package, and they were not made.
    """
    if in_repository():
        return REPOSITORY
    if (cache() / MANIFEST).is_file():
        return cache()
    raise TestDataError(f"no test data in {cache()}, expected them to be made with: python -m conformance generate")


def write(root: Path, jobs: int | None = None, progress: Progress = _ignore) -> int:
    """Make the test data: a new folder whole or not at all; in a folder that has test data, each file that differs.

    Parameters
    ----------
    root
        A folder that does not exist, is empty, or has test data.
    jobs
        Worker processes; None for as many as there are processors.
    progress
        Called with the number of files made so far.

    Returns
    -------
    The number of files.

    Raises
    ------
    TestDataError
        The folder has something else in it.
    """
    if (root / MANIFEST).is_file():
        return _update(root, jobs, progress)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TestDataError(f"{root} has something else in it, expected a new folder or test data")
    root.parent.mkdir(parents=True, exist_ok=True)
    new = Path(mkdtemp(prefix=f".{root.name}.", dir=root.parent))
    count = 0
    try:
        new.chmod(0o755)
        for name, content in generate(jobs):
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            count += 1
            progress(count)
        try:
            os.replace(new, root)  # an empty folder may be there
        except OSError:
            if not (root / MANIFEST).is_file():  # or another process was quicker
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return count


def _update(root: Path, jobs: int | None, progress: Progress) -> int:
    made = {}
    for count, (name, content) in enumerate(generate(jobs), 1):
        made[name] = content
        progress(count)
    for name, content in made.items():
        path = root / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, content)
    for name in _stray(root, set(made)):
        (root / name).unlink()
    return len(made)


def check(root: Path, jobs: int | None = None, progress: Progress = _ignore) -> list[str]:
    """Compare a folder with what would be made: the paths that are missing, different, or not of the data.

    Parameters are those of ``write``. What lies beside the folders ``node`` and ``invalid`` is not looked at.
    """
    wrong, made = [], set()
    for count, (name, content) in enumerate(generate(jobs), 1):
        path = root / name
        if not path.is_file() or path.read_bytes() != content:
            wrong.append(name)
        made.add(name)
        progress(count)
    return wrong + _stray(root, made)


def _stray(root: Path, made: set[str]) -> list[str]:
    found = (path for part in ("node", "invalid") for path in (root / part).rglob("*") if path.is_file())
    return sorted({path.relative_to(root).as_posix() for path in found} - made)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: an interrupt or a full disk leaves it as it was."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        new = Path(temporary.name)
        try:
            temporary.write(content)
            temporary.flush()
            new.chmod(0o644)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
