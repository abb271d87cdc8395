"""What the scripts' command lines share: the extra to install where a package is missing, counts, files of results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def require(extra: str, *modules: str) -> None:
    """End the script with one line and status 2 where one of these modules is not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        print(f"{Path(sys.argv[0]).name} needs {names}: pip install 'onnx_dqp[{extra}]'", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """An argument that counts something, up to 2^32, for argparse."""
    number = int(text)
    if not 1 <= number <= 1 << 32:
        raise ValueError(text)
    return number


def results_file(text: str) -> Path:
    """An argument that names a JSON file of results, or one to be made, for argparse."""
    path = Path(text)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is no file")
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is no folder")
        if path.exists() and not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("is no JSON object")
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8") from None
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return path


def add_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write what was measured into a JSON file, beside what other scripts have written there."""
    from conformance.folder import replace  # noqa: PLC0415

    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    replace(path, (json.dumps({**known, **_rounded(results)}, indent=1) + "\n").encode())


def _rounded(value: Any) -> Any:
    """Results with four significant digits, which is more than they mean."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
