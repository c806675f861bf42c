"""One test scene of an evaluation, as `learner.run.evaluation.write_evaluation` wrote it, and what each prediction was.

By the evaluation's own definition: a prediction is *correct* when the best one-to-one assignment among pairs of IoU >=
0.5 and the same description takes it. Of the others, one that can be paired at IoU >= 0.5 with an object that is left
is of the *wrong class*; the rest are *false positives*. True positives are the correct ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from learner.records import DetectionObject, GeometryKind
from learner.tasks.detection.bins import arity_is_right
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign

Verdict = Literal["correct", "wrong_class", "false_positive"]
IOU_THRESHOLD = 0.5
_KINDS: tuple[GeometryKind, ...] = ("bbox_2d", "poly")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Objects are in bins 0..999, `width` and `height` in pixels."""

    scene_id: str
    images: tuple[str, ...]
    width: int
    height: int
    truth: tuple[DetectionObject, ...]
    predictions: tuple[DetectionObject, ...]
    num_dropped: int
    truncated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """`verdicts[i]` and `ious[i]`, its best IoU with any object, belong to prediction i; `found` are the ground-truth
    objects that a correct prediction covers."""

    verdicts: tuple[Verdict, ...]
    ious: tuple[float, ...]
    found: frozenset[int]
    num_truth: int

    @property
    def f1(self) -> float:
        """Of this scene alone; 1 where there was nothing to find and nothing was claimed."""
        total = len(self.verdicts) + self.num_truth
        return 2 * len(self.found) / total if total else 1.0


@lru_cache(maxsize=100_000)  # several sections of a page ask about the same scene
def judge(scene: Scene) -> Judgement:
    """What each prediction of a scene was."""
    iou = iou_matrix(scene.predictions, scene.truth)
    close = iou >= IOU_THRESHOLD
    same = np.array([[p.desc == t.desc for t in scene.truth] for p in scene.predictions], dtype=bool).reshape(iou.shape)
    correct = {p: t for p, t, _ in assign(iou, close & same)}
    left = close.copy()
    left[list(correct.keys()), :] = False
    left[:, list(correct.values())] = False
    confused = {p for p, _, _ in assign(iou, left)}
    verdicts: list[Verdict] = [
        "correct" if p in correct else "wrong_class" if p in confused else "false_positive"
        for p in range(len(scene.predictions))
    ]
    return Judgement(
        verdicts=tuple(verdicts),
        ious=tuple(iou.max(axis=1, initial=0.0).tolist()),
        found=frozenset(correct.values()),
        num_truth=len(scene.truth),
    )


def read_scene(line: Mapping[str, Any]) -> Scene | None:
    """One line of an evaluation file; None where it is not a scene or contradicts itself."""
    try:
        scene = Scene(
            scene_id=str(line["id"]),
            images=tuple(map(str, line["images"])),
            width=int(line["width"]),
            height=int(line["height"]),
            truth=tuple(map(_object, line["truth"])),
            predictions=tuple(map(_object, line["predictions"])),
            num_dropped=sum(int(count) for count in line.get("drops", {}).values()),
            truncated=bool(line.get("truncated")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return scene if scene.width > 0 and scene.height > 0 else None


def _object(fields: Mapping[str, Any]) -> DetectionObject:
    kind = _KINDS[0] if _KINDS[0] in fields else _KINDS[1]
    bins = tuple(int(b) for b in fields[kind])
    if not arity_is_right(kind, bins):
        raise ValueError(f"{kind} of {len(bins)} numbers")
    return DetectionObject(desc=str(fields["desc"]), kind=kind, bins=bins)
