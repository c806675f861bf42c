"""Converts boxes and polygons from pixels to bins and back, checks them, and sorts them in canonical order.

This module has no side effects, uses no arrays, and is quick to import, because `--check` uses it. Areas and IoU are in
`geometry.py`. Polygons are cut with shapely, which is imported only for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from learner.records import DetectionObject, GeometryKind, Rect, Sample
from learner.tasks.detection.grammar import NUM_BINS

if TYPE_CHECKING:
    from shapely.geometry.base import BaseGeometry

_LAST_BIN = NUM_BINS - 1


def to_bins(coords: Iterable[float], width: int, height: int) -> tuple[int, ...]:
    """Return pixel coordinates x, y, x, y, ... as bins: `round(999 * pixel / size)`, clamped to 0..999."""
    sizes = (width, height)
    scaled = [round(_LAST_BIN * value / size) for value, size in zip(coords, itertools.cycle(sizes), strict=False)]
    if scaled and min(scaled) >= 0 and max(scaled) <= _LAST_BIN:
        return tuple(scaled)
    return tuple(min(max(bin_, 0), _LAST_BIN) for bin_ in scaled)


def to_pixels(bins: Iterable[int], width: int, height: int) -> tuple[float, ...]:
    """Return bins x, y, x, y, ... as pixel coordinates: `bin * size / 999`. The result is within half a bin of the
    pixels that `to_bins` got."""
    sizes = (width, height)
    return tuple(bin_ * sizes[i % 2] / _LAST_BIN for i, bin_ in enumerate(bins))


def bounding_box(obj: DetectionObject) -> tuple[int, int, int, int]:
    """Return (x1, y1, x2, y2) in bins."""
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = obj.bins
        return x1, y1, x2, y2
    xs, ys = obj.bins[0::2], obj.bins[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def canonical_order(objects: Iterable[DetectionObject]) -> tuple[DetectionObject, ...]:
    """Return the objects top to bottom, then left to right, by the (y1, x1) of the bounding box. Ties keep their order.
    With several images, the objects of the first image come first."""
    return tuple(sorted(objects, key=canonical_key))


def canonical_key(obj: DetectionObject) -> tuple[int, ...]:
    """Return the sort key of `canonical_order`."""
    x1, y1, _, _ = bounding_box(obj)
    return (y1, x1) if obj.image is None else (obj.image, y1, x1)


def rounded(sample: Sample) -> Sample:
    """Return a sample with exact bins rounded to whole ones. Objects that have no area after that are left out."""

    def whole(objects: Iterable[DetectionObject]) -> list[DetectionObject]:
        found = [obj._replace(bins=tuple(map(round, obj.bins))) for obj in objects]
        return [obj for obj in found if has_area(obj.kind, obj.bins)]

    return replace(sample, objects=canonical_order(whole(sample.objects)), ignored=tuple(whole(sample.ignored)))


def arity_is_right(kind: GeometryKind, bins: Sequence[int]) -> bool:
    """Return True if a box has four numbers, or a polygon at least three points."""
    return len(bins) == 4 if kind == "bbox_2d" else len(bins) >= 6 and len(bins) % 2 == 0


def encloses_something(kind: GeometryKind, bins: Sequence[float]) -> bool:
    """Return True if x1 < x2 and y1 < y2 for a box, or for the bounding box of a polygon."""
    if kind == "bbox_2d":
        return bins[0] < bins[2] and bins[1] < bins[3]
    xs, ys = bins[0::2], bins[1::2]
    return min(xs) < max(xs) and min(ys) < max(ys)


def has_area(kind: GeometryKind, coords: Sequence[float]) -> bool:
    """Return True if a box or polygon has an area. `coords` may be pixels or bins."""
    return encloses_something(kind, coords) and (kind == "bbox_2d" or _outline(coords).area > 0)


def within(kind: GeometryKind, coords: Sequence[float], bounds: Rect) -> list[float]:
    """Return the part inside `bounds`; [] if nothing is inside. If a polygon has several parts inside, return the
    largest one."""
    cut = [min(max(value, float(bounds[i % 2])), float(bounds[2 + i % 2])) for i, value in enumerate(coords)]
    if kind == "bbox_2d" or cut == list(coords):
        return cut if encloses_something(kind, cut) else []
    import shapely

    return ring_of(shapely.intersection(_outline(coords), shapely.box(*bounds)))


def _outline(coords: Sequence[float]) -> BaseGeometry:
    import shapely

    return shapely.make_valid(shapely.Polygon(list(zip(coords[0::2], coords[1::2], strict=True))))


def ring_of(shape: BaseGeometry) -> list[float]:
    """Return x1, y1, x2, y2, ... of the outline of a shape's largest part, without holes; [] if it has no area."""
    import shapely

    parts = shapely.get_parts(shape)
    areas = shapely.area(parts)
    if not len(parts) or areas.max() <= 0:
        return []
    # shapely repeats a ring's first point at its end.
    ring = shapely.get_coordinates(parts[areas.argmax()].exterior)[:-1]
    return [float(value) for point in ring for value in point]
