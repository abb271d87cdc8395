"""The one exception that bad payloads, shapes and attributes give."""

from __future__ import annotations


class PackedTensorError(ValueError):
    """A payload, shape or attribute that breaks one of the operator's rules.

    Its text is one line: what was found and what was expected.

    Attributes
    ----------
    found, expected
        The two parts of it, with ``link`` between them; ``expected`` is empty where ``found`` says it all.
    rule
        The rule that is broken, ``"R1"`` to ``"R9"``, or empty where it is none of the contract's.
    """

    def __init__(self, found: str, expected: str = "", rule: str = "", link: str = ", expected ") -> None:
        super().__init__(found, expected, rule, link)
        self.found, self.expected, self.rule, self._link = found, expected, rule, link

    def within(self, place: str) -> PackedTensorError:
        """The same with its place in front."""
        return PackedTensorError(f"{place}: {self.found}", self.expected, self.rule, self._link)

    def __str__(self) -> str:
        return f"{self.found}{self._link}{self.expected}" if self.expected else self.found
