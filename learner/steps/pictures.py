"""Pictures of an evaluation for trackers: the first scenes, with ground truth in green and predictions in orange.

In: an evaluation of the detection task. Out: Pillow images of at most MAX_SIDE pixels. A scene without an image that
can be read, or of another task, has none. The report draws more, and better: it knows which prediction is right.
"""

from __future__ import annotations

from PIL import Image

from learner.data.drawing import draw_object
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
            picture = images.load(sample.images[0]).convert("RGB")
        except MediaError:
            continue
        picture.thumbnail((MAX_SIDE, MAX_SIDE))
        for objects, color in ((scene["truth"], TRUTH), (scene["predictions"], PREDICTED)):
            for item in objects:
                kind: GeometryKind = "bbox_2d" if "bbox_2d" in item else "poly"
                draw_object(picture, str(item["desc"]), kind, item[kind], color)
        drawn.append((sample.sample_id, picture))
    return drawn
