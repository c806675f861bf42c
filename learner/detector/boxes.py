"""Defines predicted objects in pixels, and merges the objects found in the tiles of a large photograph.

A `Prediction` has all boxes of one image. Tiles overlap. So an object that one tile cuts is whole in the next tile, if
the object is smaller than the overlap. `merge` leaves out a box if a better box of its class overlaps it, or if a
tile's edge cut the box and a better box covers it. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.data.tiles import Tile
from learner.records import DetectionObject
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.grammar import NUM_BINS

SAME_IOU, COVERED = 0.5, 0.7
_EDGE = 2.0  # pixels; a box nearer than this to its tile's edge counts as cut


class ScoredBox(NamedTuple):
    """A found object with its score. `box` is x1, y1, x2, y2 in pixels. `outline` is x1, y1, x2, y2, ... of a polygon,
    or (). `votes`: number of sampled answers that have the object; None: no answers were sampled."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    outline: tuple[float, ...] = ()
    votes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The objects found in one image, best first. `truncated`: an answer reached the token limit before its end."""

    id: int | str
    name: str
    source: str
    width: int
    height: int
    boxes: tuple[ScoredBox, ...]
    truncated: bool = False


def in_pixels(obj: DetectionObject, tile: Tile) -> tuple[tuple[float, float, float, float], tuple[float, ...]]:
    """Return box and outline (`()` for a box) of an object that was found in the tile, in the whole image's pixels."""
    sizes = ((tile.right - tile.left) / (NUM_BINS - 1), (tile.bottom - tile.top) / (NUM_BINS - 1))
    offsets = (tile.left, tile.top)

    def pixels(bins: Sequence[int]) -> tuple[float, ...]:
        return tuple(round(value * sizes[i % 2] + offsets[i % 2], 2) for i, value in enumerate(bins))

    x1, y1, x2, y2 = pixels(bounding_box(obj))
    return (x1, y1, x2, y2), pixels(obj.bins) if obj.kind == "poly" else ()


def merge(parts: Sequence[tuple[Tile, Sequence[ScoredBox]]], width: int, height: int) -> list[ScoredBox]:
    """Return the boxes of all tiles, each object once, best first."""
    found = [(box, is_cut(box, tile, width, height)) for tile, boxes in parts for box in boxes]
    # Boxes that no tile cuts go first, because they show their objects whole.
    found.sort(key=lambda entry: (entry[1], -entry[0].score))
    kept: list[ScoredBox] = []
    for box, cut in found:
        same = [other.box for other in kept if other.name == box.name]
        if not same or not _repeats(box.box, np.array(same), cut=cut):
            kept.append(box)
    return sorted(kept, key=lambda box: -box.score)


def _repeats(box: tuple[float, ...], others: NDArray[np.float64], *, cut: bool) -> bool:
    """Return True if a box of `others` [N, 4] is the same object."""
    x1, y1, x2, y2 = box
    width = np.minimum(x2, others[:, 2]) - np.maximum(x1, others[:, 0])
    height = np.minimum(y2, others[:, 3]) - np.maximum(y1, others[:, 1])
    shared = np.clip(width, 0, None) * np.clip(height, 0, None)
    area = (x2 - x1) * (y2 - y1)
    areas = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    same = shared >= SAME_IOU * (area + areas - shared)
    # A part of an object has a small IoU with the whole object. So a box that was cut is judged by the fraction of its
    # area that another box covers.
    return bool((same | (cut & (shared >= COVERED * area))).any())


def is_cut(box: ScoredBox, tile: Tile, width: int, height: int) -> bool:
    """Return True if the box touches an edge of its tile that is inside the image."""
    x1, y1, x2, y2 = box.box
    return (
        (tile.left > 0 and x1 <= tile.left + _EDGE)
        or (tile.top > 0 and y1 <= tile.top + _EDGE)
        or (tile.right < width and x2 >= tile.right - _EDGE)
        or (tile.bottom < height and y2 >= tile.bottom - _EDGE)
    )
