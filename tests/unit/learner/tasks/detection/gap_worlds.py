"""Photographs with objects, labels with gaps of several kinds, and finds with votes: what estimates are tested on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from learner.records import DetectionObject, Sample, Votes
from learner.tasks.detection.bins import canonical_order, to_bins
from learner.tasks.detection.completion import LabelCandidate, Relation

SIZE = 240, 180  # pixels
ANSWERS = 8


@dataclass(frozen=True)
class World:
    """`right[i]` says of each free candidate of sample i, in its order, whether it is an object."""

    samples: list[Sample]
    found: list[list[LabelCandidate]]
    right: list[list[bool]]
    pictures: dict[str, Image.Image]

    def open_image(self, source: str) -> Image.Image:
        return self.pictures[source]

    def free(self, place: int) -> list[DetectionObject]:
        return [one.object for one in self.found[place] if one.relation == "free"]


Box = tuple[str, float, float, float, float]
Keep = Callable[[Box, int, np.random.Generator], bool]  # the object, its place in the photograph; True: labelled


def at_border(box: Box) -> bool:
    return min(box[1], box[2]) < 3 or box[3] > SIZE[0] - 3 or box[4] > SIZE[1] - 3


KINDS: dict[str, Keep] = {
    "20% at random": lambda box, place, rng: rng.random() >= 0.2,
    "60% at random": lambda box, place, rng: rng.random() >= 0.6,
    "border": lambda box, place, rng: not at_border(box) or rng.random() >= 0.9,
    "small": lambda box, place, rng: box[3] - box[1] > 24 or rng.random() >= 0.8,
    "a class": lambda box, place, rng: box[0] != "disc" or rng.random() >= 0.8,
    "after four": lambda box, place, rng: place < 4,
    "right third": lambda box, place, rng: box[1] < SIZE[0] * 2 / 3,
}


def world(
    seed: int,
    keep: Keep,
    *,
    photographs: int = 60,
    objects: int = 9,
    invented: float = 6.0,
    labelled_more: float = 0.15,
    draw: bool = True,
    misnamed: float = 0.0,
) -> World:
    """Make a world; without `draw` its photographs are grey. A find of an object has more votes than an invented one.
    `labelled_more`: how much more often an answer has an object with a label, as a model has that learned the gaps.
    `misnamed`: share of the finds with a wrong name, of ten classes that look like one of two; on these names answers
    mostly do not agree."""
    rng = np.random.default_rng(seed)
    samples, found, right, pictures = [], [], [], {}
    for number in range(photographs):
        picture, boxes = _photograph(rng, objects, draw)
        if misnamed:
            boxes = [(f"{box[0]} {rng.integers(5)}", *box[1:]) for box in boxes]
        labelled = [keep(box, place, rng) for place, box in enumerate(boxes)]
        name = f"{number}.png"
        pictures[name] = picture
        labels = [_object(box) for box, has in zip(boxes, labelled, strict=True) if has]
        samples.append(
            Sample(
                sample_id=name,
                messages=(),
                images=(name,),
                objects=canonical_order(labels),
                width=SIZE[0],
                height=SIZE[1],
            )
        )
        own: list[tuple[LabelCandidate, bool]] = []
        for box, has in zip(boxes, labelled, strict=True):
            votes = int(rng.binomial(ANSWERS, np.clip(rng.beta(4, 2) + (labelled_more if has else 0), 0, 1)))
            if votes and misnamed and rng.random() < misnamed:
                one = _candidate(_jittered((f"{box[0]}?", *box[1:]), rng), votes, "contradicts" if has else "free")
                own.append((_split(one, rng, 0.8), False))
            elif votes:
                one = _candidate(_jittered(box, rng), votes, "confirms" if has else "free")
                own.append((_split(one, rng, 0.2) if misnamed else one, True))
        for box in _invented(rng, boxes, int(rng.poisson(invented))):
            own.append((_candidate(box, max(1, int(rng.binomial(ANSWERS, rng.beta(1, 4)))), "free"), False))
        found.append([one for one, _ in own])
        right.append([is_right for one, is_right in own if one.relation == "free"])
    return World(samples, found, right, pictures)


def _candidate(box: Box, votes: int, relation: Relation) -> LabelCandidate:
    obj = _object(box)._replace(votes=Votes(votes, ANSWERS))
    return LabelCandidate(object=obj, relation=relation, names={obj.desc: votes}, agreement=votes / ANSWERS)


def _split(one: LabelCandidate, rng: np.random.Generator, chance: float) -> LabelCandidate:
    """Let answers not agree on the name."""
    if one.votes < 2 or rng.random() >= chance:
        return one
    return replace(one, names={one.object.desc: one.votes - 1, "another": 1})


def _object(box: Box) -> DetectionObject:
    return DetectionObject(box[0], "bbox_2d", to_bins(box[1:], *SIZE))


def _photograph(rng: np.random.Generator, objects: int, draw: bool) -> tuple[Image.Image, list[Box]]:
    """Draw discs and squares on a background that is lit unevenly, top ones first. Some are cut by the border."""
    y, x = np.mgrid[: SIZE[1], : SIZE[0]]
    picture = np.full((SIZE[1], SIZE[0], 3), 150.0)
    if draw:
        light = 30 * np.sin(x / 60 + rng.uniform(0, 6)) + rng.normal(0, 9, (SIZE[1], SIZE[0]))
        picture += light[:, :, None]
    boxes: list[Box] = []
    for _ in range(60):
        if len(boxes) == objects:
            break
        side = rng.uniform(14, 36)
        cx, cy = rng.uniform(0, SIZE[0]), rng.uniform(0, SIZE[1])
        box = (
            max(0.0, cx - side / 2),
            max(0.0, cy - side / 2),
            min(SIZE[0], cx + side / 2),
            min(SIZE[1], cy + side / 2),
        )
        if min(box[2] - box[0], box[3] - box[1]) < 9 or any(_overlap(box, other[1:]) for other in boxes):
            continue
        is_disc = rng.random() < 0.5
        if draw:
            far = np.hypot(x - cx, y - cy) if is_disc else np.maximum(abs(x - cx), abs(y - cy))
            picture[far < side / 2] += rng.normal([-70, -20, 10] if is_disc else [20, -20, -70], 8)
        boxes.append(("disc" if is_disc else "square", *box))
    boxes.sort(key=lambda one: (one[2], one[1]))
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8)), boxes


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) - 2 and min(a[3], b[3]) > max(a[1], b[1]) - 2


def _jittered(box: Box, rng: np.random.Generator) -> Box:
    side = max(box[3] - box[1], box[4] - box[2])
    x1, y1, x2, y2 = np.clip(np.array(box[1:]) + rng.normal(0, 0.06 * side, 4), 0, [*SIZE, *SIZE])
    return (box[0], x1, y1, max(x2, x1 + 4), max(y2, y1 + 4))


def _invented(rng: np.random.Generator, boxes: Sequence[Box], number: int) -> list[Box]:
    """Boxes beside objects, and on nothing, that overlap no box much."""
    found: list[Box] = []
    for _ in range(30 * number):
        if len(found) == number:
            break
        side, near = rng.uniform(14, 36), boxes[rng.integers(len(boxes))]
        middle = np.array([(near[1] + near[3]) / 2, (near[2] + near[4]) / 2]) + rng.normal(0, 30, 2)
        x1, y1 = (middle - side / 2).clip(0, np.array(SIZE) - side)
        box = (near[0], float(x1), float(y1), float(x1 + side), float(y1 + side))
        if all(_iou(box, other) < 0.28 for other in [*boxes, *found]):
            found.append(box)
    return found


def _iou(a: Box, b: Box) -> float:
    width, height = min(a[3], b[3]) - max(a[1], b[1]), min(a[4], b[4]) - max(a[2], b[2])
    both = max(0.0, width) * max(0.0, height)
    areas = (a[3] - a[1]) * (a[4] - a[2]) + (b[3] - b[1]) * (b[4] - b[2])
    return both / (areas - both)
