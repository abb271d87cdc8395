"""Which tensors a caller means: patterns of names, or a function of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from onnx_dqp.rules import shown

Selection = str | Iterable[str] | Callable[[str], bool] | None
"""A shell pattern such as ``blk.*.weight``, several of them, a function that tells of a name, or None.

What None means, is said where it is taken.
"""


def chooser(select: Selection) -> Callable[[str], bool]:
    """Whether a name is meant, of which case counts; all are where nothing is said.

    Raises
    ------
    TypeError
        ``select`` is something else.
    """
    if select is None:
        return lambda _: True
    if callable(select):
        return select
    patterns: tuple[object, ...] = (select,)
    if not isinstance(select, str) and isinstance(select, Iterable):
        patterns = tuple(select)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"select is or has {shown(pattern)}, expected patterns of names or a function")
    return lambda name: any(fnmatchcase(name, str(pattern)) for pattern in patterns)
