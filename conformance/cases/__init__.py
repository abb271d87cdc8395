"""The catalogue: which cases exist and why, a module per category.

Payload bytes come from SHAKE-128 of a case's name (without its type, so that a case's four types share a payload) or
are constructed; expected outputs from ``conformance.exact`` alone.
"""

from collections.abc import Iterator

from conformance.cases import basic, codes, graph, invalid, rounding, scales, shapes
from conformance.cases.case import Case, InvalidCase
from conformance.cases.flags import FLAGS

__all__ = ["CATEGORIES", "FLAGS", "Case", "InvalidCase", "invalid_cases", "valid_cases"]

_VALID = {
    "basic": basic.cases,
    "codes": codes.cases,
    "scales": scales.cases,
    "rounding": rounding.cases,
    "shapes": shapes.cases,
    "graph": graph.cases,
}

CATEGORIES = (*_VALID, "invalid")


def valid_cases(*categories: str) -> Iterator[Case]:
    """The valid cases, of all categories or of some."""
    for category in categories or _VALID:
        yield from _VALID[category]()


def invalid_cases() -> Iterator[InvalidCase]:
    """The models that must be refused."""
    return invalid.cases()
