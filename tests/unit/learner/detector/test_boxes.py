"""Tiles of large photographs, and their boxes as one (R43)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.data.tiles import OVERLAP, Tile, tiles_of
from learner.detector.boxes import ScoredBox, in_pixels, merge
from learner.records import DetectionObject
from learner.tasks.detection.bins import to_bins

SIDES = st.integers(40, 700)


@given(SIDES, SIDES, st.integers(40, 300))
def test_tiles_cover_the_image_and_overlap(width: int, height: int, side: int) -> None:
    whole, *tiles = tiles_of(width, height, side)
    assert whole == (0, 0, width, height)
    if width <= side and height <= side:
        assert tiles == []
        return
    seen = np.zeros((height, width), dtype=int)
    ((wide, high),) = {(right - left, bottom - top) for left, top, right, bottom in tiles}
    assert max(wide, high) == side
    for left, top, right, bottom in tiles:
        seen[top:bottom, left:right] += 1
    assert seen.min() >= 1
    ends = (({t.left for t in tiles}, wide, width), ({t.top for t in tiles}, high, height))
    for starts, size, length in ((sorted(starts), size, length) for starts, size, length in ends):
        assert starts[0] == 0
        assert starts[-1] == length - size
        assert all(b - a <= size * (1 - OVERLAP) + 1 for a, b in pairwise(starts))


@pytest.mark.parametrize(
    ("width", "height", "side", "tile"),
    [
        (640, 480, 400, (400, 300)),
        (480, 640, 400, (300, 400)),
        (500, 500, 400, (400, 400)),
        (900, 90, 300, (300, 90)),
        (900, 300, 300, (300, 150)),
    ],
)
def test_a_tile_has_the_shape_of_its_photograph(width: int, height: int, side: int, tile: tuple[int, int]) -> None:
    """A model that learned photographs of one shape reads tiles of another badly: of 640 x 480, 0.87 of its boxes were
    right in tiles of 400 x 300, 0.36 in squares. A photograph longer than 2 : 1 has tiles of 2 : 1, or of its width."""
    _, *tiles = tiles_of(width, height, side)
    assert {(one.right - one.left, one.bottom - one.top) for one in tiles} == {tile}


def test_without_a_side_there_is_one_part() -> None:
    assert tiles_of(5000, 4000, None) == [Tile(0, 0, 5000, 4000)]


@given(st.integers(0, 500), st.integers(0, 500), st.integers(60, 400), st.integers(60, 400))
def test_bins_come_back_as_the_pixels_they_were_made_from(left: int, top: int, width: int, height: int) -> None:
    box = (width * 0.2, height * 0.25, width * 0.7, height * 0.9)
    tile = Tile(left, top, left + width, top + height)
    found, outline = in_pixels(DetectionObject("a", "bbox_2d", to_bins(box, width, height)), tile)
    wanted = [value + (left, top)[i % 2] for i, value in enumerate(box)]
    assert found == pytest.approx(wanted, abs=max(width, height) / 999)
    assert outline == ()


def test_an_object_cut_by_a_tile_is_the_one_that_another_tile_has_whole() -> None:
    left, right = Tile(0, 0, 100, 100), Tile(60, 0, 160, 100)
    whole = ScoredBox("a", 0.6, (70.0, 20.0, 120.0, 60.0))
    cut = ScoredBox("a", 0.9, (70.0, 20.0, 100.0, 60.0))
    other = ScoredBox("b", 0.5, (70.0, 20.0, 100.0, 60.0))
    assert merge([(left, [cut, other]), (right, [whole])], 160, 100) == [whole, other]


def test_the_better_of_two_views_stays_and_neighbours_stay_both() -> None:
    left, right = Tile(0, 0, 100, 100), Tile(60, 0, 160, 100)
    seen_twice = [ScoredBox("a", score, (65.0, 20.0, 95.0, 60.0)) for score in (0.4, 0.8)]
    neighbour = ScoredBox("a", 0.7, (80.0, 20.0, 97.0, 60.0))
    found = merge([(left, [seen_twice[0], neighbour]), (right, [seen_twice[1]])], 160, 100)
    assert found == [seen_twice[1], neighbour]
