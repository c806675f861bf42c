"""Areas and exact IoU of boxes and polygons in bins.

Boxes are (x1, y1, x2, y2), polygons (x1, y1, x2, y2, ...), with continuous coordinates: a box's area is
(x2 - x1) * (y2 - y1). A polygon that crosses itself is replaced by the result of `shapely.make_valid`. Objects in
different images of a sample do not overlap. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import shapely
from numpy.typing import NDArray

from learner.records import DetectionObject
from learner.tasks.detection.bins import bounding_box


def area(obj: DetectionObject) -> float:
    """Return the object's area in square bins."""
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = obj.bins
        return float((x2 - x1) * (y2 - y1))
    return float(_shape(obj).area)


def iou_matrix(a: Sequence[DetectionObject], b: Sequence[DetectionObject]) -> NDArray[np.float64]:
    """Return intersection over union [len(a), len(b)]; 0 where both areas are 0."""
    if not a or not b:
        return np.zeros((len(a), len(b)))
    overlap, area_a, area_b = _overlaps(a, b)
    return _ratio(overlap, area_a[:, None] + area_b[None, :] - overlap)


def covered_share(a: Sequence[DetectionObject], b: Sequence[DetectionObject]) -> NDArray[np.float64]:
    """Return the fraction of the area of each object in `a` that is inside each object in `b`, [len(a), len(b)]; 0 for
    an object in `a` without an area."""
    if not a or not b:
        return np.zeros((len(a), len(b)))
    overlap, area_a, _ = _overlaps(a, b)
    return _ratio(overlap, area_a[:, None])


def _overlaps(
    a: Sequence[DetectionObject], b: Sequence[DetectionObject]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the areas of the intersections [len(a), len(b)], of `a` and of `b`."""
    boxes_a, boxes_b = _boxes(a), _boxes(b)
    overlap = _box_intersections(boxes_a, boxes_b)
    images_a, images_b = [obj.image for obj in a], [obj.image for obj in b]
    if any(images_a) or any(images_b):
        overlap[np.array(images_a)[:, None] != np.array(images_b)] = 0.0
    poly_a, poly_b = _is_poly(a), _is_poly(b)
    if not (any(poly_a) or any(poly_b)):
        return overlap, _box_areas(boxes_a), _box_areas(boxes_b)
    shapes_a, shapes_b = _shapes(a), _shapes(b)
    # Polygons with disjoint bounding boxes do not intersect, and the overlap of two boxes is exact already.
    rows, cols = np.nonzero((np.array(poly_a)[:, None] | np.array(poly_b)) & (overlap > 0))
    overlap[rows, cols] = shapely.area(shapely.intersection(shapes_a[rows], shapes_b[cols]))
    return overlap, shapely.area(shapes_a), shapely.area(shapes_b)


def _ratio(overlap: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return overlap / np.maximum(whole, np.finfo(np.float64).tiny)


def _boxes(objects: Sequence[DetectionObject]) -> NDArray[np.float64]:
    boxes = [obj.bins if obj.kind == "bbox_2d" else bounding_box(obj) for obj in objects]
    return np.fromiter(chain.from_iterable(boxes), dtype=np.float64, count=4 * len(boxes)).reshape(-1, 4)


def _is_poly(objects: Sequence[DetectionObject]) -> list[bool]:
    return [obj.kind == "poly" for obj in objects]


def _box_areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _box_intersections(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    # Widths and heights are computed separately, on contiguous arrays: twice as fast as on arrays of (x, y) pairs.
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.T[:, :, None].copy(), b.T.copy()
    width, height = np.minimum(ax2, bx2), np.minimum(ay2, by2)
    width -= np.maximum(ax1, bx1)
    height -= np.maximum(ay1, by1)
    return np.maximum(width, 0.0, out=width) * np.maximum(height, 0.0, out=height)


def _shapes(objects: Sequence[DetectionObject]) -> NDArray[np.object_]:
    shapes = np.empty(len(objects), dtype=object)
    shapes[:] = [_shape(obj) for obj in objects]
    return shapes


def _shape(obj: DetectionObject) -> shapely.Geometry:
    if obj.kind == "bbox_2d":
        return shapely.box(*obj.bins)
    polygon = shapely.Polygon(np.array(obj.bins, dtype=np.float64).reshape(-1, 2))
    if polygon.is_valid:
        return polygon
    parts = shapely.get_parts(shapely.make_valid(polygon))  # `make_valid` may also return lines and points
    return shapely.union_all(parts[shapely.get_dimensions(parts) == 2])
