"""Writes detections as COCO results, the format in which the project writes boxes for other programs. `predict` and
evaluations use this module.

In: boxes in pixels with names and scores. Out: a JSON list of `image_id`, `category_id`, `bbox` (left, top, width,
height in pixels), `score`, and `segmentation` for a polygon. `category` and `file_name` are added to COCO's fields, so
that names and files are known without the annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class FoundBox(NamedTuple):
    """A box with its score. `box` is x1, y1, x2, y2; `outline` is a polygon's x1, y1, x2, y2, ...; both in pixels."""

    image_id: int | str
    file_name: str
    name: str
    score: float
    box: tuple[float, float, float, float]
    outline: tuple[float, ...] = ()


def image_id(sample_id: str) -> int | str:
    """Return a sample's id as a number if it is one, because COCO's ids are numbers; else unchanged."""
    # An id such as 007 would lose its zeros if it became a number.
    is_number = sample_id.isascii() and sample_id.isdigit() and str(int(sample_id)) == sample_id
    return int(sample_id) if is_number else sample_id


def coco_rows(found: Iterable[FoundBox], categories: Mapping[str, int]) -> list[dict[str, object]]:
    """Return the rows. Names that `categories` lacks get the next free numbers, in alphabetical order."""
    boxes, ids = list(found), {**categories}
    for name in sorted({one.name for one in boxes}):
        ids.setdefault(name, max(ids.values(), default=0) + 1)
    return [
        {
            "image_id": one.image_id,
            "category_id": ids[one.name],
            "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)],
            "score": round(one.score, 5),
            "category": one.name,
            "file_name": one.file_name,
            **({"segmentation": [list(one.outline)]} if one.outline else {}),
        }
        for one in boxes
        for x1, y1, x2, y2 in [one.box]
    ]


def coco_text(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the rows as a JSON list, with a line for each row."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
