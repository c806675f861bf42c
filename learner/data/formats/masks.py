"""Turns COCO's segmentations into outlines. Polygons stay as they are. Run lengths (RLE) become their mask's outline.

`outline_of` raises ValueError, which says what is wrong. Run lengths as text are as in COCO's reference (`rleFrString`
in pycocotools): each character has five bits, and a run is stored as its difference from the run two before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from learner.data.formats.strict import numbers, whole
from learner.data.raw import ring_of
from learner.records import Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from shapely.geometry.base import BaseGeometry

_TOLERANCE = 1.0  # max distance in pixels between a polygon and the stepped edge of its mask.
# Reading a mask takes 33 us per run length.
MOST_RUNS = 1 << 16  # max run lengths of a mask
_MOST_CHARACTERS = 7  # max characters of one run length as text: 35 bits


def outline_of(segmentation: object, size: Size | None, max_pixels: int) -> list[float]:
    """Return x1, y1, x2, y2, ... of the segmentation's largest part, with holes filled. `size` is the image's size,
    which run lengths must state too; None if no annotation of the image states it. Raises ValueError."""
    import shapely

    if isinstance(segmentation, Mapping):
        if size is None:
            raise ValueError("a `size` that is not [height, width]")
        mask = mask_of(segmentation, *size, max_pixels)
        return ring_of(shapely.simplify(_shape_of(mask), _TOLERANCE)) or [0.0] * 6  # six zeros have no area
    if not isinstance(segmentation, list):
        raise ValueError("neither polygons nor run lengths")
    rings = [numbers(ring) for ring in segmentation]
    if any(len(ring) < 6 or len(ring) % 2 for ring in rings):
        raise ValueError("a polygon has an even number of at least 6 coordinates")
    if len(rings) == 1:
        return rings[0]
    return max(rings, key=lambda ring: shapely.Polygon(list(zip(ring[0::2], ring[1::2], strict=True))).area)


def size_of_mask(rle: Mapping[str, object]) -> Size | None:
    """Return (width, height) as the run lengths give them; None if they give no size."""
    size = rle.get("size")
    try:
        height, width = map(whole, size) if isinstance(size, list) else (0, 0)
    except ValueError:
        return None
    return (width, height) if width and height else None


def mask_of(rle: Mapping[str, object], width: int, height: int, max_pixels: int) -> NDArray[np.int8]:
    """Return a mask [height, width] of zeros and ones. Run lengths go down the columns, and the first counts zeros."""
    import numpy as np

    counts = rle.get("counts")
    if size_of_mask(rle) != (width, height):
        raise ValueError(f"a size other than [{height}, {width}], which is the image's")
    if width * height > max_pixels:  # a mask takes one byte per pixel, and a small file can name any size
        raise ValueError(f"a mask of more than data.max_image_pixels ({max_pixels}) pixels")
    if not isinstance(counts, list | str):
        raise ValueError("no run lengths (`counts`)")
    # Too many runs are refused by the length of the list or text, before they are read.
    if len(counts) > (MOST_RUNS if isinstance(counts, list) else MOST_RUNS * _MOST_CHARACTERS):
        raise ValueError(f"run lengths in more than {MOST_RUNS} runs")
    runs = [whole(value) for value in counts] if isinstance(counts, list) else _runs_in(counts)
    if len(runs) > MOST_RUNS:
        raise ValueError(f"run lengths in more than {MOST_RUNS} runs")
    if sum(runs) != width * height:
        raise ValueError(f"run lengths of {sum(runs)} pixels in all, of an image of {width * height}")
    # Runs are numbered in int8 to save memory. int8 wraps around after 127, but even numbers stay even, and odd numbers
    # stay odd.
    return np.repeat(np.arange(len(runs), dtype=np.int8) % 2, runs).reshape(width, height).T


def _runs_in(text: str) -> list[int]:
    runs: list[int] = []
    value = num_characters = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or num_characters == _MOST_CHARACTERS:
            raise ValueError("a text that is not run lengths")
        value |= (bits & 0x1F) << 5 * num_characters
        num_characters += 1
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << 5 * num_characters
        if len(runs) > 2:
            value += runs[-2]
        if value < 0:
            raise ValueError("a negative run length")
        runs.append(value)
        value = num_characters = 0
    if num_characters:
        raise ValueError("run lengths that end in the middle of one")
    return runs


def _shape_of(mask: NDArray[np.int8]) -> BaseGeometry:
    """Return the exact union of the mask's runs, column by column. The edges of the union have a step at every
    pixel."""
    import numpy as np
    import shapely

    steps = np.diff(np.pad(mask, ((1, 1), (0, 0))), axis=0)
    x, top = np.nonzero(steps.T == 1)
    _, bottom = np.nonzero(steps.T == -1)
    return shapely.union_all(shapely.box(x, top, x + 1, bottom))
