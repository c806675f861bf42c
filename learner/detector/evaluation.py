"""Measures how good detectors' scored boxes are on an annotation file, and by how much the detectors differ.

In: for each detector, boxes with scores by image (COCO results, or a model's own). Out: F1@0.5 and F1@mIoU at a
threshold, AP, AP50, AUC and calibration error, each F1 and AP with an interval, and the paired difference of every two
detectors. Boxes are compared in pixels, without rounding.

The threshold has the best F1@0.5 on a validation set, if its results are given. Without a validation set the images are
split in five parts, and each part is scored at the best threshold of the other parts. So no image influences its own
threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, DetectionObject, ParsedRollout, PredictedObject, Rollout, Sample
from learner.report.records import Scene
from learner.report.scores import counts_by_class
from learner.report.sheet import Sheet
from learner.tasks.detection.agreement import SAME_IOU
from learner.tasks.detection.ap_interval import AP, AP50, ApDraws, RankedBoxes, ap_of
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.calibrate import Bin, auc, best_threshold, ece, reliability
from learner.tasks.detection.gaps import at_border
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import Gains, Overlaps, gains
from learner.tasks.detection.metrics import (
    CountTable,
    Interval,
    bootstrap_difference,
    bootstrap_interval,
    count_objects,
)
from learner.tasks.detection.parse import NO_COORDINATES
from learner.tasks.detection.reasons import Reason

FOLDS = 5
GRID = tuple(i / 50 for i in range(51))  # x values of the curves: recalls or scores
SHOWN_AP = (AP, AP50)
SHOWN = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5")


class Scored(NamedTuple):
    """A box with its score. The object's bins (0 to 999 over the image) are not rounded."""

    object: DetectionObject
    score: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """The boxes that one detector found, by sample id. `reason` explains an F1 near 0, if a reason is known."""

    name: str
    boxes: Mapping[str, Sequence[Scored]]
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves at IoU 0.5, with one value for each point of `GRID`. `precision`: mean over classes of the precision at
    that recall; empty without objects. `precision_by_class`: the precision of each class at these recalls. `f1`: F1 of
    the boxes with at least that score."""

    precision: Sequence[float]
    f1: Sequence[float]
    precision_by_class: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class DetectorResult:
    """The scores of one detector. `threshold` None: each part of the images has its own threshold. `pairs`: this
    detector's metrics minus each earlier detector's metrics, by the earlier detector's name and the metric.
    `differences`: this detector's metrics minus the first detector's metrics, by metric; {} for the first detector."""

    name: str
    threshold: float | None
    intervals: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    pairs: Mapping[str, Mapping[str, Interval]]
    ap: Mapping[str, float]
    auc: float
    ece: float
    bins: Sequence[Bin]
    classes: Mapping[str, Mapping[str, float]]
    num_boxes: int
    curves: Curves


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgedBoxes:
    """The N boxes that one detector found in all samples, judged at IoU 0.5 in the order of their scores."""

    line: Sequence[Sequence[Scored]]  # boxes of each sample, in the order of the samples
    samples: NDArray[np.int64]  # [N] index of the sample that each box belongs to
    scores: NDArray[np.float64]  # [N]
    gains: Gains  # [N] whether each box is right, and whether it counts
    num_truth: NDArray[np.int64]  # [samples] number of labelled objects in each sample

    @classmethod
    def of(cls, found: Found, samples: Sequence[Sample]) -> JudgedBoxes:
        line = [list(found.boxes.get(sample.sample_id, ())) for sample in samples]
        overlaps = [
            Overlaps.of([box.object for box in boxes], sample.objects, sample.ignored)
            for boxes, sample in zip(line, samples, strict=True)
        ]
        scores = np.array([box.score for boxes in line for box in boxes], dtype=np.float64)
        return cls(
            line=line,
            samples=np.repeat(np.arange(len(line)), [len(boxes) for boxes in line]),
            scores=scores,
            gains=gains(overlaps, scores),
            num_truth=np.array([len(sample.objects) for sample in samples], dtype=np.int64),
        )

    def threshold(self, chosen: NDArray[np.bool_] | None = None) -> float:
        """Return the threshold with the best F1@0.5 on the `chosen` samples [samples], or on all."""
        chosen = np.ones(len(self.line), dtype=bool) if chosen is None else chosen
        own = chosen[self.samples]
        found = Gains(self.gains.right[own], self.gains.judged[own])
        return best_threshold(found, self.scores[own], int(self.num_truth[chosen].sum()))

    def kept(self, threshold: float | None) -> list[list[Scored]]:
        """Return the boxes that reach the threshold, by sample. None: the samples are split in five parts, and each
        part has the threshold that is best on the others."""
        others = [np.arange(len(self.line)) % FOLDS != part for part in range(FOLDS)]
        by_part = [
            threshold if threshold is not None else self.threshold(some if some.any() else None) for some in others
        ]
        return [[box for box in boxes if box.score >= by_part[i % FOLDS]] for i, boxes in enumerate(self.line)]

    def f1_by_score(self) -> list[float]:
        """Return for each score in `GRID` the F1@0.5 of the boxes with at least that score."""
        f1 = []
        for score in GRID:
            kept = self.scores >= score
            judged = self.gains.judged[kept].sum() + self.num_truth.sum()
            f1.append(float(2 * self.gains.right[kept].sum() / max(judged, 1)))
        return f1


def without_border(found: Sequence[Found], samples: Sequence[Sample]) -> tuple[list[Found], list[Sample]]:
    """Return boxes and samples without the objects that touch the border of their photograph. Labels at the border
    become ignore regions. Boxes at the border are kept only if they are on a label that is not at the border."""
    line, inside = list(found), []
    for sample in samples:
        touching = _touching(sample.objects)
        kept = tuple(obj for obj, so in zip(sample.objects, touching, strict=True) if not so)
        # An ignore region without a name applies to every class.
        cut = (obj._replace(desc="") for obj, so in zip(sample.objects, touching, strict=True) if so)
        inside.append(replace(sample, objects=kept, ignored=(*sample.ignored, *cut)))
    labels = {sample.sample_id: sample.objects for sample in inside}
    for i, one in enumerate(line):
        line[i] = replace(one, boxes={name: _away(own, labels.get(name, ())) for name, own in one.boxes.items()})
    return line, inside


def _away(boxes: Sequence[Scored], labels: Sequence[DetectionObject]) -> list[Scored]:
    objects = [one.object for one in boxes]
    on_label = iou_matrix(objects, labels).max(axis=1, initial=0.0) >= SAME_IOU
    return [one for one, keep in zip(boxes, on_label | ~_touching(objects), strict=True) if keep]


def _touching(objects: Sequence[DetectionObject]) -> NDArray[np.bool_]:
    return at_border(np.array([bounding_box(obj) for obj in objects], dtype=float).reshape(-1, 4))


def evaluate_all(
    found: Sequence[Found], samples: Sequence[Sample], validation: Mapping[str, float] | None = None
) -> list[DetectorResult]:
    """Return one result per detector, in order. `validation`: thresholds by the detector's name."""
    earlier: dict[str, tuple[CountTable, ApDraws]] = {}
    results: list[DetectorResult] = []
    for one in found:
        threshold = (validation or {}).get(one.name)
        judged = JudgedBoxes.of(one, samples)
        kept = judged.kept(threshold)
        table = count_objects([assignment_of(boxes, sample) for boxes, sample in zip(kept, samples, strict=True)])
        # AP needs all boxes, also those below the threshold.
        everything = [assignment_of(boxes, sample) for boxes, sample in zip(judged.line, samples, strict=True)]
        precision = ApDraws.of(everything, [[box.score for box in boxes] for boxes in judged.line])
        pairs = {
            name: {m: bootstrap_difference(before, table, m) for m in SHOWN[:2]}
            | {m: precision.minus(precision_before, m) for m in SHOWN_AP}
            for name, (before, precision_before) in earlier.items()
        }
        outcomes = judged.gains.outcomes(judged.scores)
        results.append(
            DetectorResult(
                name=one.name,
                threshold=threshold,
                intervals={metric: bootstrap_interval(table, metric) for metric in SHOWN}
                | {name: precision.interval(name) for name in SHOWN_AP},
                differences=next(iter(pairs.values()), {}),
                pairs=pairs,
                ap=precision.whole,
                auc=auc(*outcomes),
                ece=ece(*outcomes),
                bins=reliability(*outcomes),
                classes=_by_class(scenes_of(kept, samples), precision.classes),
                num_boxes=len(judged.scores),
                curves=_curves(precision.classes, judged),
            )
        )
        earlier[one.name] = (table, precision)
    return results


def _curves(classes: Sequence[RankedBoxes], judged: JudgedBoxes) -> Curves:
    """Return the curves of boxes at IoU 0.5. `precision` is COCO's: the best at this recall or a higher one."""
    by_class = {one.name: _precision_by_recall(one) for one in classes if one.truth.sum()}
    mean = np.mean(list(by_class.values()), axis=0).tolist() if by_class else []
    by_name = {name: own.tolist() for name, own in by_class.items()}
    return Curves(precision=mean, f1=judged.f1_by_score(), precision_by_class=by_name)


def _precision_by_recall(one: RankedBoxes) -> NDArray[np.float64]:
    """Return the precision of a class at each recall in `GRID`. The class must have objects."""
    right, wrong = one.right[0].cumsum(), one.wrong[0].cumsum()
    precision = np.append(np.maximum.accumulate((right / np.maximum(right + wrong, 1))[::-1])[::-1], 0.0)
    found: NDArray[np.float64] = precision[np.searchsorted(right / one.truth.sum(), GRID, side="left")]
    return found


def _by_class(scenes: Sequence[Scene], ranked: Sequence[RankedBoxes]) -> dict[str, dict[str, float]]:
    """Return F1, precision and recall at IoU 0.5, AP, AP50, and the number of objects of each class of the truth."""
    ap = {one.name: ap_of([one], np.ones((1, len(scenes)))) for one in ranked}
    return {
        name: {
            "f1@0.5": counts.f1,
            "precision@0.5": counts.precision if counts.predictions else 0.0,
            "recall@0.5": counts.recall,
            "objects": float(counts.truth),
            **{metric: float(ap[name][metric][0]) if name in ap else 0.0 for metric in SHOWN_AP},
        }
        for name, counts in sorted(counts_by_class(scenes).items())
        if counts.truth
    }


def scenes_of(line: Sequence[Sequence[Scored]], samples: Sequence[Sample]) -> list[Scene]:
    """Return for each sample a scene of the report, with the sample's boxes (`line`) as predictions."""
    scenes = []
    for sample, kept in zip(samples, line, strict=True):
        sheet = Sheet.of(sample.sizes) if len(sample.images) > 1 else None
        width, height = sheet.size if sheet else (sample.width, sample.height)
        scenes.append(
            Scene(
                scene_id=sample.sample_id,
                images=sample.images,
                width=width,
                height=height,
                truth=sample.objects,
                ignored=sample.ignored,
                predictions=tuple(box.object for box in kept),
                num_dropped=0,
                truncated=False,
                sheet=sheet,
            )
        )
    return scenes


def assignment_of(boxes: Sequence[Scored], sample: Sample) -> Assignment:
    """Return the boxes in the form of a parsed answer, which metrics take."""
    rollout = Rollout(sample=sample, prompt_token_ids=(), response_token_ids=(), finish_reason="stop", ver=0, seed=None)
    parsed = ParsedRollout(
        rollout=rollout,
        token_ids=np.empty(0, np.int64),
        objects=tuple(PredictedObject(box.object, range(0)) for box in boxes),
        slots=NO_COORDINATES.slots,
        drops={},
        prefix_length=0,
        tail_opening="",
        needs_separator=False,
        next_index=1,
        truncated=False,
        usable=True,
    )
    return Assignment(parsed=parsed, pairs=(), missed=(), spurious=())
