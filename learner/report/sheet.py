"""Lays out several images of a scene on one sheet, in rows of equal cells, so that the report draws one picture.

In: the images' sizes in pixels. Out: the sheet's size, the position of each image on the sheet, and objects in bins of
the sheet (coordinates 0 to 999 over its width and height).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.records import DetectionObject, Rect, Size
from learner.tasks.detection.bins import to_bins, to_pixels


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture of several images. `size`: its width and height in pixels. `places`: each image's rectangle on the
    sheet, in the images' order."""

    size: Size
    places: tuple[Rect, ...]

    @classmethod
    def of(cls, sizes: Sequence[Size]) -> Sheet:
        """Return a sheet for images of these `sizes`; there must be at least one."""
        columns = math.ceil(math.sqrt(len(sizes)))
        rows = math.ceil(len(sizes) / columns)
        across, down = max(width for width, _ in sizes), max(height for _, height in sizes)
        corners = [(i % columns * across, i // columns * down) for i in range(len(sizes))]
        places = [(x, y, x + width, y + height) for (x, y), (width, height) in zip(corners, sizes, strict=True)]
        return cls((columns * across, rows * down), tuple(places))

    def placed(self, obj: DetectionObject) -> DetectionObject:
        """Return the object with its coordinates in bins of the sheet instead of its image. `obj.image` must be set."""
        assert obj.image is not None
        left, top, right, bottom = self.places[obj.image - 1]
        pixels = to_pixels(obj.bins, right - left, bottom - top)
        return obj._replace(bins=to_bins([value + (left, top)[i % 2] for i, value in enumerate(pixels)], *self.size))
