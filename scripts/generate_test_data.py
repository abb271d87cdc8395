"""Write test_data/node, test_data/invalid and their manifest from the catalogue; --check shows that they are that.

The expected outputs come from conformance.exact alone.
"""

from __future__ import annotations

from _generated import Generated, main

from conformance.testdata import generate


def generated() -> Generated:
    """All files' contents."""
    return {f"test_data/{name}": content for name, content in generate()}


if __name__ == "__main__":
    main(__doc__, generated, owned=("test_data/node", "test_data/invalid"))
