"""Tiles of large photographs: where they lie, and training samples of them (`data.tile`).

`predict --tile` asks the whole photograph and its tiles, so a run learns both. A tile is a `View` of its photograph, as
an augmented picture is, with its rule for objects at the border: one with at least 35% of its area in the tile is a
label there, cut at the border; of any other the part in the tile is an ignore region. Tiles overlap by a quarter, so an
object that one cuts is whole in the next, if it is smaller than that. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from learner.data.augment import seen_as
from learner.data.raw import rounded
from learner.records import Sample, View

OVERLAP = 0.25  # share of a tile's side


class Tile(NamedTuple):
    """A part of an image, in its pixels."""

    left: int
    top: int
    right: int
    bottom: int


def tiles_of(width: int, height: int, side: int | None) -> list[Tile]:
    """Return the whole image, and if it is larger than a tile, its tiles row by row: as few as cover it with the
    overlap."""
    whole = Tile(0, 0, width, height)
    if side is None or (width <= side and height <= side):
        return [whole]
    return [
        whole,
        *(
            Tile(left, top, min(left + side, width), min(top + side, height))
            for top in _starts(height, side)
            for left in _starts(width, side)
        ),
    ]


def _starts(length: int, side: int) -> list[int]:
    if length <= side:
        return [0]
    number = 1 + -(-(length - side) // max(1, round(side * (1 - OVERLAP))))
    return [round(i * (length - side) / (number - 1)) for i in range(number)]


def tiled(sample: Sample, side: int) -> Iterator[Sample]:
    """Yield the sample, whose bins are not rounded, with whole bins, and one for each tile of its photograph, with ids
    of their own. A sample of several images stays alone."""
    yield rounded(sample)
    if len(sample.images) != 1:
        return
    for tile in tiles_of(sample.width, sample.height, side)[1:]:
        size = (tile.right - tile.left, tile.bottom - tile.top)
        seen = seen_as(sample, View(photograph=(sample.width, sample.height), window=tile, size=size))
        yield replace(seen, sample_id=f"{sample.sample_id}@{tile.left},{tile.top}")
