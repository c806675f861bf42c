"""Pictures of an evaluation for trackers: the first scenes, with ground truth in green and predictions in orange.

In: an evaluation of the detection task. Out: Pillow images of at most MAX_SIDE pixels. A scene without an image that
can be read, or of another task, has none. The report draws more, and better: it knows which prediction is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageDraw

from learner.run.evaluation import Evaluation
from learner.tasks.detection.bins import NUM_BINS
from shared.errors import MediaError
from shared.images import ImageRules, Images

NUM_PICTURES = 4
MAX_SIDE = 640  # pixels
TRUTH, PREDICTED = (0, 150, 60), (230, 90, 0)


def draw_scenes(evaluation: Evaluation, rules: ImageRules) -> list[tuple[str, Image.Image]]:
    """(sample id, picture) of the first NUM_PICTURES scenes that have an image."""
    images = Images(rules)
    drawn: list[tuple[str, Image.Image]] = []
    for rollout, scene in zip(evaluation.rollouts, evaluation.scenes, strict=True):
        sample = rollout.sample
        if len(drawn) == NUM_PICTURES or "predictions" not in scene or not sample.images:
            break
        try:
            picture = images.load(sample.images[0]).convert("RGB")
        except MediaError:
            continue
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        for objects, color in ((scene["truth"], TRUTH), (scene["predictions"], PREDICTED)):
            for item in objects:
                _draw(ImageDraw.Draw(picture), item, picture.size, color)
        drawn.append((sample.sample_id, picture))
    return drawn


def _draw(canvas: ImageDraw.ImageDraw, item: Mapping[str, Any], size: tuple[int, int], color: tuple[int, ...]) -> None:
    """One object: a box, or a polygon's outline, with its name."""
    bins = item.get("bbox_2d") or item["poly"]
    x, y = ([bin_ * side / (NUM_BINS - 1) for bin_ in bins[axis::2]] for axis, side in enumerate(size))
    points = list(zip(x, y, strict=True))
    if "bbox_2d" in item:
        (x1, y1), (x2, y2) = points
        points = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
    canvas.line([*points, points[0]], fill=color, width=2)
    name = str(item["desc"]).encode("latin-1", "replace").decode("latin-1")  # what Pillow's own font has
    canvas.text((min(x) + 2, min(y)), name, fill=color)
