"""COCO average precision by pycocotools: an independent cross-check of our own F1.

In: assignments. Out: `coco/ap`, `coco/ap50`, `coco/ap75`, `coco/ar100`. Categories are descriptions. Geometry is
compared by bounding boxes, in bins (IoU does not change with the scale of an axis). A generated answer has no scores:
all are 1.0, so AP here is that of one operating point, and its value says less than its change. COCO matches greedily
and looks at 100 predictions per image and category at most.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from learner.records import Assignment, DetectionObject
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.grammar import NUM_BINS

_STATS = {"coco/ap": 0, "coco/ap50": 1, "coco/ap75": 2, "coco/ar100": 8}  # places in COCOeval.stats


def coco_ap(assignments: Sequence[Assignment]) -> dict[str, float]:
    """AP and AR as COCO defines them; all 0.0 without ground truth or without predictions."""
    truth = [(image, obj) for image, a in enumerate(assignments, 1) for obj in a.parsed.rollout.sample.objects]
    predicted = [(image, p.object) for image, a in enumerate(assignments, 1) for p in a.parsed.objects]
    if not truth or not predicted:
        return dict.fromkeys(_STATS, 0.0)
    categories = {desc: i for i, desc in enumerate(sorted({obj.desc for _, obj in truth + predicted}), 1)}
    dataset: dict[str, Any] = {
        "images": [{"id": i, "width": NUM_BINS, "height": NUM_BINS} for i in range(1, len(assignments) + 1)],
        "categories": [{"id": i, "name": desc} for desc, i in categories.items()],
        "annotations": [{"id": n, **_box(image, obj, categories)} for n, (image, obj) in enumerate(truth, 1)],
    }
    results = [{"score": 1.0, **_box(image, obj, categories)} for image, obj in predicted]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        reference = COCO()
        reference.dataset = dataset
        reference.createIndex()
        evaluation = COCOeval(reference, reference.loadRes(results), iouType="bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: max(0.0, float(evaluation.stats[i])) for name, i in _STATS.items()}


def _box(image: int, obj: DetectionObject, categories: dict[str, int]) -> dict[str, Any]:
    x1, y1, x2, y2 = bounding_box(obj)
    width, height = x2 - x1, y2 - y1
    return {
        "image_id": image,
        "category_id": categories[obj.desc],
        "bbox": [x1, y1, width, height],
        "area": width * height,
        "iscrowd": 0,
    }
