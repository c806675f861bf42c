"""Where an answer's coordinates are: all of them at once, before anything is read.

In: an answer's text with each token's place in it. Out: `Coordinates`, in the order in which they stand there. What
only looks like a coordinate (digits in a description, a coordinate token between two objects) is among them: the
reader asks for those inside a list that its grammar has seen, and there each is a number of that list. Called by
`read_answer`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import CoordSlot
from learner.tasks.pieces import TokenText

Ints = NDArray[np.int64]  # [coordinates]

_MAX_DIGITS = 3  # of a bin; the `bin` of a longer run of digits means nothing


class Coordinates(NamedTuple):
    """`slots[i]` says `bins[i]`, in bytes `begins[i]..ends[i]`."""

    slots: list[CoordSlot]
    bins: list[int]
    begins: list[int]
    ends: list[int]

    def between(self, begin: int, end: int) -> tuple[tuple[CoordSlot, ...], tuple[int, ...]]:
        """Slots and bins of those that lie wholly in bytes begin..end."""
        first = bisect_left(self.begins, begin)
        behind = bisect_right(self.ends, end, first)
        return tuple(self.slots[first:behind]), tuple(self.bins[first:behind])


def token_coordinates(text: TokenText, bin_of_token: NDArray[np.int64]) -> Coordinates:
    """The tokens that are a coordinate each. `bin_of_token[id]` is negative for others; its last is for larger ids."""
    bins = bin_of_token.take(text.ids, mode="clip")
    at = np.flatnonzero(bins >= 0)
    return _coordinates(at, at + 1, bins[at], np.zeros_like(at), text.starts()[at], text.ends[at])


def digit_coordinates(text: TokenText) -> Coordinates:
    """The runs of digits that do not go on a word. The text begins with something else: a container's opener."""
    chars = np.frombuffer(text.data + b" ", dtype=np.uint8)
    digits = chars - ord("0")  # other characters wrap around to 10 and more
    is_digit = digits < 10
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    begins, ends = edges[0::2], edges[1::2]
    apart = chars[begins - 1] != ord("_")  # `object_12`, `bbox_2d`: a third of all
    begins, ends = begins[apart], ends[apart]
    first = text.ends.searchsorted(begins, "right")
    behind = text.ends.searchsorted(ends, "left") + 1
    bins = np.zeros_like(begins)
    for place in range(_MAX_DIGITS):
        at = ends - 1 - place
        bins += np.where(at >= begins, digits[at], 0) * np.int64(10**place)
    return _coordinates(first, behind, bins, begins - text.starts()[first], begins, ends)


def _coordinates(first: Ints, behind: Ints, bins: Ints, lead: Ints, begins: Ints, ends: Ints) -> Coordinates:
    said = bins.tolist()
    fields = zip(first.tolist(), behind.tolist(), said, lead.tolist(), strict=True)
    return Coordinates(list(map(CoordSlot._make, fields)), said, begins.tolist(), ends.tolist())
