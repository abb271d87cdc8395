"""Write test_data/node, test_data/invalid and their manifest from the catalogue; --check shows that they are that.

This is ``python -m conformance generate test_data``. Expected outputs come from conformance.exact alone.
"""

from __future__ import annotations

from _command import require

require("conformance", "jinja2", "jsonschema", "pebble", "platformdirs", "rich")

import sys

from conformance.__main__ import main
from conformance.folder import REPOSITORY

if __name__ == "__main__":
    sys.exit(main(["generate", str(REPOSITORY), *sys.argv[1:]]))
