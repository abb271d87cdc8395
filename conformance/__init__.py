"""What anyone can check a DequantizePacked implementation against.

Exact expected values, test data that any language reads, a runner (``python -m conformance``), and ``BackendTest``,
ONNX's runner class over these cases.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.backend_test import BackendTest

__all__ = ["BackendTest"]


def __getattr__(name: str) -> Any:
    """Import BackendTest when it is asked for: the rest needs nothing of ONNX's test machinery."""
    if name == "BackendTest":
        from conformance.backend_test import BackendTest  # noqa: PLC0415

        return BackendTest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
