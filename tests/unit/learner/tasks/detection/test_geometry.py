"""IoU by exact geometry, bins, canonical order: against counting cells of a grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.records import DetectionObject
from learner.tasks.detection.bins import bounding_box, canonical_order, to_bins
from learner.tasks.detection.geometry import area, iou_matrix
from tests.unit.learner.tasks.fakes import box, poly

GRID = 12


@st.composite
def rectilinear(draw: st.DrawFn) -> DetectionObject:
    """Draw a box as `bbox_2d` or as a polygon, or an L-shape: all of whole grid cells."""
    x1, y1 = draw(st.integers(0, GRID - 2)), draw(st.integers(0, GRID - 2))
    x2, y2 = draw(st.integers(x1 + 1, GRID)), draw(st.integers(y1 + 1, GRID))
    xm, ym = draw(st.integers(x1, x2 - 1)), draw(st.integers(y1, y2 - 1))
    form = draw(st.sampled_from(["box", "poly", "reversed", "L"]))
    if form == "box":
        return box("a", x1, y1, x2, y2)
    if form == "poly":
        return poly("a", x1, y1, x2, y1, x2, y2, x1, y2)
    if form == "reversed":
        return poly("a", x1, y1, x1, y2, x2, y2, x2, y1)
    return poly("a", x1, y1, x2, y1, x2, ym, xm, ym, xm, y2, x1, y2)


def cells(obj: DetectionObject) -> np.ndarray:
    """Return the grid cells whose centre is inside, by the even-odd rule."""
    bins = obj.bins
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = bins
        bins = (x1, y1, x2, y1, x2, y2, x1, y2)
    points = list(zip(bins[0::2], bins[1::2], strict=True))
    inside = np.zeros((GRID, GRID), dtype=bool)
    for (xa, ya), (xb, yb) in zip(points, points[1:] + points[:1], strict=True):
        if xa == xb:  # a vertical edge flips every cell to its right
            inside[min(ya, yb) : max(ya, yb), xa:] ^= True
    return inside


@given(st.lists(rectilinear(), max_size=4), st.lists(rectilinear(), max_size=4))
def test_iou_equals_counted_cells(a: list[DetectionObject], b: list[DetectionObject]) -> None:
    matrix = iou_matrix(a, b)
    assert matrix.shape == (len(a), len(b))
    for i, left in enumerate(a):
        assert area(left) == cells(left).sum()
        for j, right in enumerate(b):
            both, either = (cells(left) & cells(right)).sum(), (cells(left) | cells(right)).sum()
            assert matrix[i, j] == pytest.approx(both / either if either else 0.0)


def test_polygon_that_crosses_itself_stands_for_its_two_lobes() -> None:
    bow_tie = poly("a", 0, 0, 10, 10, 10, 0, 0, 10)
    assert area(bow_tie) == pytest.approx(50)
    assert iou_matrix([bow_tie], [box("b", 0, 0, 10, 10)])[0, 0] == pytest.approx(0.5)


def test_polygon_with_a_spike_or_without_area_does_no_harm() -> None:
    spike = poly("a", 0, 0, 10, 0, 10, 10, 20, 20, 10, 10, 0, 10)
    line = poly("a", 0, 0, 5, 5, 9, 9)
    assert iou_matrix([spike, line], [box("b", 0, 0, 10, 10)])[:, 0].tolist() == pytest.approx([1.0, 0.0])
    assert iou_matrix([line], [line])[0, 0] == 0.0


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(-10, 6000), st.floats(-10, 6000))
def test_bins_are_rounded_per_axis_and_clamped(width: int, height: int, x: float, y: float) -> None:
    bins = to_bins([x, y], width, height)
    assert bins == (
        min(999, max(0, round(999 * x / width))),
        min(999, max(0, round(999 * y / height))),
    )


def test_corners_of_the_image_are_the_first_and_last_bin() -> None:
    assert to_bins([0, 0, 640, 480], 640, 480) == (0, 0, 999, 999)


@given(st.lists(rectilinear(), max_size=6))
def test_canonical_order_is_by_top_then_left_and_stable(objects: list[DetectionObject]) -> None:
    """R35: one order of the ground truth, whatever order it came in."""
    ordered = canonical_order(objects)
    keys = [(bounding_box(o)[1], bounding_box(o)[0]) for o in ordered]
    assert keys == sorted(keys)
    assert sorted(map(id, ordered)) == sorted(map(id, objects))
    assert canonical_order(ordered) == ordered
