"""basic: each format and type once, several rows of several blocks, ordinary scales."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.cases.case import TYPE_NAMES, Case
from conformance.payloads import ordinary_blocks
from onnx_dqp.formats import FORMATS

# The bugs, seen in public decoders, that a payload of random codes shows at once.
_BUGS = {
    "MXFP4": ("BugPairOrder", "BugFactorOfTwo"),
    "NVFP4": ("BugPairOrder", "BugFactorOfTwo", "BugExponentBias"),
    "Q4_0": ("BugPairOrder",),
    "Q8_1": ("BugBlockSize",),
    "Q5_K": ("BugHighBits",),
}


def cases() -> Iterator[Case]:
    """27 formats x 4 types."""
    for format in FORMATS.values():
        payload = ordinary_blocks(format, 6, f"{format.identifier} basic").tobytes()
        for output_dtype in TYPE_NAMES:
            yield Case(
                "basic",
                format,
                output_dtype,
                "basic",
                f"Three rows of two {format.name} blocks with random codes and ordinary scales.",
                ("Basic", *_BUGS.get(format.name, ())),
                (3, 2 * format.elements),
                payload,
            )
