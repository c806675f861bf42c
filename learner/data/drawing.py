"""Draws labels on photographs, as outlines with names, and puts pictures side by side, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from learner.records import GeometryKind
from learner.tasks.detection.bins import to_pixels

_GAP = 12  # pixels between two neighbouring pictures


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return one white picture with all pictures in a row."""
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    made = Image.new("RGB", (max(1, width), max([1, *(picture.height for picture in pictures)])), "white")
    left = 0
    for picture in pictures:
        made.paste(picture, (left, 0))
        left += picture.width + _GAP
    return made


def draw_object(
    picture: Image.Image, name: str, kind: GeometryKind, bins: Sequence[int], color: tuple[int, int, int]
) -> None:
    """Draw a box, or a polygon's outline, with its name."""
    canvas, pixels = ImageDraw.Draw(picture), to_pixels(bins, *picture.size)
    x, y = pixels[0::2], pixels[1::2]
    points = list(zip(x, y, strict=True))
    if kind == "bbox_2d":
        (x1, y1), (x2, y2) = points
        points = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
    canvas.line([*points, points[0]], fill=color, width=2)
    printable = name.encode("latin-1", "replace").decode("latin-1")  # Pillow's built-in font has only these characters
    canvas.text((min(x) + 2, min(y)), printable, fill=color)
