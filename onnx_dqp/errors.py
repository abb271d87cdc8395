"""The one exception that bad payloads, shapes and attributes give."""


class PackedTensorError(ValueError):
    """A payload, shape or attribute that breaks one of the operator's rules.

    The message is one line: what was found and what was expected.
    """
