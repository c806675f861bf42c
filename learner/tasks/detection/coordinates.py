"""Where an answer's coordinates are: all of them at once, before anything is read.

In: an answer's text with each token's place in it. Out: `Coordinates`, in the order in which they stand there. What
only looks like a coordinate (digits in a description, a coordinate token between two objects) is among them: the
judge asks for those inside a list that the grammar has seen, and there each is a number of that list. Called by
`parse_rollout`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import CoordSlots
from learner.tasks.pieces import TokenText

_NONE = np.empty(0, dtype=np.int64)


class Coordinates(NamedTuple):
    """`slots` has the C coordinates, each said in bytes `begins[i]..ends[i]`."""

    slots: CoordSlots
    begins: NDArray[np.int64]  # [C]
    ends: NDArray[np.int64]  # [C]


NO_COORDINATES = Coordinates(CoordSlots(start=_NONE, end=_NONE, bin=_NONE, lead=_NONE), _NONE, _NONE)


def token_coordinates(text: TokenText, bin_of_token: NDArray[np.int64]) -> Coordinates:
    """The tokens that are a coordinate each. `bin_of_token[id]` is negative for others; its last is for larger ids."""
    bins = bin_of_token.take(text.ids, mode="clip")
    at = np.flatnonzero(bins >= 0)
    slots = CoordSlots(start=at, end=at + 1, bin=bins[at], lead=np.zeros_like(at))
    return Coordinates(slots, text.starts()[at], text.ends[at])


def digit_coordinates(text: TokenText) -> Coordinates:
    """The runs of digits that do not go on a word. The text begins with something else: a container's opener. The bin
    of a run of more than three means nothing."""
    chars = np.frombuffer(text.data + b" ", dtype=np.uint8)
    digits = chars - ord("0")  # other characters wrap around to 10 and more
    is_digit = digits < 10
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    begins, ends = edges[0::2], edges[1::2]
    apart = chars[begins - 1] != ord("_")  # `object_12`, `bbox_2d`: a third of all
    begins, ends = begins[apart], ends[apart]
    first = text.ends.searchsorted(begins, "right")
    behind = text.ends.searchsorted(ends, "left") + 1
    ones, tens, hundreds = ((digits * is_digit)[ends - place].astype(np.int64) for place in (1, 2, 3))
    bins = ones + 10 * tens + 100 * hundreds * (ends - begins > 2)  # `1,2`: a number's digit before another number
    slots = CoordSlots(start=first, end=behind, bin=bins, lead=begins - text.starts()[first])
    return Coordinates(slots, begins, ends)
