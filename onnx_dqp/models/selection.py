"""Which tensors a caller means: patterns of names, or a function of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

Selection = str | Iterable[str] | Callable[[str], bool] | None
"""A shell pattern such as ``blk.*.weight``, several of them, a function that tells of a name, or None for all."""


def chooser(select: Selection) -> Callable[[str], bool]:
    """Whether a name is meant; case counts."""
    if select is None:
        return lambda _: True
    if callable(select):
        return select
    patterns = (select,) if isinstance(select, str) else tuple(select)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
