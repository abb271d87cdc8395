"""The six codebooks of the IQ formats: text files, a row a line, read on first use.

They are part of the formats and cannot be derived. ``scripts/extract_codebooks.py`` writes the files from
the ``gguf`` package (MIT licence, see THIRD_PARTY_NOTICES).
"""

from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

__all__ = ["codebook"]


@cache
def codebook(name: str) -> NDArray[np.int8]:
    """Read one codebook.

    Parameters
    ----------
    name
        ``iq2_xxs``, ``iq2_xs``, ``iq2_s``, ``iq3_xxs``, ``iq3_s`` or ``iq1_s`` (which IQ1_M shares).

    Returns
    -------
    A read-only int8 array (rows, 8), or (rows, 4) for IQ3: magnitudes, for IQ1 values in {-1, 0, 1}.
    """
    lines = files(__name__).joinpath(f"{name}.txt").read_text(encoding="ascii").splitlines()
    rows = np.array([line.split() for line in lines if not line.startswith("#")], dtype=np.int8)
    rows.flags.writeable = False
    return rows
