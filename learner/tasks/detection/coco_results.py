"""COCO results, the one form in which this project writes detections for other programs: of `predict`, and of a run's
evaluations.

In: boxes in pixels with names and scores. Out: a JSON list of `image_id`, `category_id`, `bbox` (left, top, width,
height in pixels), `score`, and `segmentation` of a polygon. `category` and `file_name` stand beside what COCO wants, so
that the file explains itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class FoundBox(NamedTuple):
    """`box` is x1, y1, x2, y2, `outline` the x1, y1, x2, y2, ... of a polygon, both in pixels."""

    image_id: int | str
    file_name: str
    name: str
    score: float
    box: tuple[float, float, float, float]
    outline: tuple[float, ...] = ()


def image_id(sample_id: str) -> int | str:
    """Return a number where the annotations have one, as COCO's do."""
    is_number = sample_id.isascii() and sample_id.isdigit() and str(int(sample_id)) == sample_id
    return int(sample_id) if is_number else sample_id


def coco_rows(found: Iterable[FoundBox], categories: Mapping[str, int]) -> list[dict[str, object]]:
    """Names that `categories` lacks get the next numbers, in alphabetical order."""
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
    """Return the text, a line per row."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
