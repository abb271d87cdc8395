"""What the scripts' command lines share: which extra to install where a package is missing, and counts as arguments."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def require(extra: str, *modules: str) -> None:
    """End the script with one line and status 2 where one of these modules is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        print(f"{Path(sys.argv[0]).name} needs {names}: pip install 'onnx_dqp[{extra}]'", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An argument that counts something, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
