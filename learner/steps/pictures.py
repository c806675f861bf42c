"""Pictures of an evaluation for trackers: the first scenes, with ground truth in green and predictions in orange.

In: an evaluation of the detection task. Out: Pillow images of at most MAX_SIDE pixels, side by side if a scene has
several. A scene without an image that
can be read, or of another task, has none. The report draws more, and better: it knows which prediction is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from learner.data.drawing import draw_object, side_by_side
from learner.records import GeometryKind
from learner.steps.evaluation import Evaluation
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
            pictures = [images.load(image).convert("RGB") for image in sample.images]
        except MediaError:
            continue
        for number, picture in enumerate(pictures, start=1):
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            _draw(picture, number, scene)
        drawn.append((sample.sample_id, side_by_side(pictures)))
    return drawn


def _draw(picture: Image.Image, number: int, scene: Mapping[str, Any]) -> None:
    """Draw what a scene has in its image with this number."""
    for objects, color in ((scene["truth"], TRUTH), (scene["predictions"], PREDICTED)):
        for item in objects:
            kind: GeometryKind = "bbox_2d" if "bbox_2d" in item else "poly"
            if item.get("image", number) == number:
                draw_object(picture, str(item["desc"]), kind, item[kind], color)
