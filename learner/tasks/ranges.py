"""Many ranges of numbers as one array. Called where tokens become bytes, and where coordinates get their labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ranges(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of every `first[i] .. first[i] + lengths[i]`, one range behind the other."""
    if not len(first):
        return np.empty(0, dtype=np.int64)
    ends = lengths.cumsum()
    return (first - ends + lengths).repeat(lengths) + np.arange(ends[-1])
