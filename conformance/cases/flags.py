"""What a case's flags mean: what it is about, or the bug that it is after."""

from collections.abc import Mapping
from types import MappingProxyType

FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "Basic": "Several rows of several blocks, ordinary scales. Without an answer the format counts as unsupported.",
        "EveryCode": "Every value of a code at every position of a block.",
        "EveryRow": "Every row of the format's codebook.",
        "EverySign": "Every pattern of stored sign bits.",
        "EverySubScale": "Every value of a sub-block's scale, and of its minimum where it has one.",
        "UnusedField": "Garbage in a field that takes no part in decoding.",
        "ScaleBytes": "Every value of a one-byte scale that is normal as a FLOAT.",
        "ExtremeScale": "Scales that are zero, the smallest or the largest normal number, of either sign.",
        "SpecialScale": "Scales that are subnormal, infinite or NaN. Left out by --profile finite.",
        "TiesToEven": "Values half-way between two of the output type's, to be rounded both ways.",
        "Overflow": "Values beyond the output type's largest, which become infinite.",
        "SubnormalResult": "Results that are subnormal in the output type.",
        "FloatFirst": "Values where rounding to FLOAT and then to the output type differs from rounding once.",
        "FloatArithmetic": "Values where decoding in the output type's arithmetic differs from decoding in FLOAT's.",
        "Rank": "The shape's rank, 1 to 6, with dimensions of 1.",
        "Empty": "A dimension of 0.",
        "ManyRows": "Many rows of one block.",
        "LongRow": "One row of many blocks.",
        "Initializer": "The payload is an initializer.",
        "ExternalData": "The payload is external data.",
        "Consumer": "Another operator works on the result.",
        "SharedPayload": "Two nodes decode one payload.",
        "Subgraph": "The node stands in the body of an If.",
        "Function": "The node stands in a model-local function, its attributes given by reference.",
        "DefaultType": "The attribute output_dtype is left out.",
        "ComputedPayload": "The payload is the result of an earlier node.",
        "Invalid": "A model that must be refused.",
        "InvalidR1": "The identifier.",
        "InvalidR2": "The shape.",
        "InvalidR3": "The last dimension.",
        "InvalidR4": "The length of the payload.",
        "InvalidR9": "Types, ranks, arity, and attributes that are missing, unknown, repeated or wrongly typed.",
        "BugPairOrder": "Elements taken in pairs of nibbles instead of in two halves.",
        "BugFactorOfTwo": "E2M1 values or their scale off by a factor of 2.",
        "BugExponentBias": "NVFP4's scale with another exponent bias.",
        "BugSanitizedScale": "NaN, infinite or subnormal scales replaced by 0.",
        "BugBlockSize": "Q8_1 taken as 40 bytes a block.",
        "BugHighBits": "Q5_K's plane of high bits advanced with the sub-blocks.",
        "BugTruncation": "BFLOAT16 truncated instead of rounded.",
        "BugTypeArithmetic": "Decoding done in the output type.",
    }
)
"""Flag -> what it means."""
