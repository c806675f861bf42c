"""Scored boxes of any detectors on any annotation file: how good each is, and by how much they differ.

In: for each detector, boxes with scores by image (COCO results, or a model's own). Out: F1@0.5 and F1@mIoU at a
threshold, AP, AP50, AUC and calibration error, each F1 and AP with an interval, and paired differences of every two.
Boxes are compared in pixels, without rounding.

The threshold is the one with the best F1@0.5 on a validation set, if its results are given. Otherwise the images are
split in five parts, and each part is scored at the threshold that is best on the others: so no image chooses its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, DetectionObject, ParsedRollout, PredictedObject, Rollout, Sample
from learner.tasks.detection.agreement import SAME_IOU
from learner.tasks.detection.ap_interval import AP, AP50, ApDraws, RankedBoxes, ap_of
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.calibrate import Bin, auc, best_threshold, ece, reliability, right_boxes
from learner.tasks.detection.gaps import at_border
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.metrics import (
    METRICS,
    CountTable,
    Interval,
    bootstrap_difference,
    bootstrap_interval,
    coco_ap,
    columns_of,
    count_objects,
)
from learner.tasks.detection.parse import NO_COORDINATES
from learner.tasks.detection.reasons import Reason

FOLDS = 5
GRID = tuple(i / 50 for i in range(51))  # recalls, or scores
SHOWN_AP = (AP, AP50)
SHOWN = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5")


class Scored(NamedTuple):
    """A box in the sample's scale of 999 by 999, unrounded."""

    object: DetectionObject
    score: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """The boxes that one detector found, by sample id. `reason`: why a model's are near F1 0, if anything is known."""

    name: str
    boxes: Mapping[str, Sequence[Scored]]
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Values at IoU 0.5 at each of `GRID`: precision by recall, mean over classes and of each; F1 of all boxes with a
    score of at least so much. Empty without objects."""

    precision: Sequence[float]
    f1: Sequence[float]
    precision_by_class: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class DetectorResult:
    """`threshold` None: one for each part of the images. `pairs`: differences from each earlier detector by its name,
    by metric; `differences` are those from the first, {} for the first itself."""

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


def kept_boxes(one: Found, samples: Sequence[Sample], threshold: float | None) -> list[list[Scored]]:
    """Return a detector's boxes that reach the threshold, by sample; None: each part of the images has its own."""
    line = [list(one.boxes.get(sample.sample_id, ())) for sample in samples]
    thresholds = np.full(len(samples), threshold) if threshold is not None else fold_thresholds(line, samples)
    return [[b for b in boxes if b.score >= t] for boxes, t in zip(line, thresholds, strict=True)]


def without_border(found: Sequence[Found], samples: Sequence[Sample]) -> tuple[list[Found], list[Sample]]:
    """Return both without what touches the photograph's border. Labels there become ignore regions, and boxes there
    count only if they are on another label."""
    line, inside = list(found), []
    for sample in samples:
        touching = _touching(sample.objects)
        kept = tuple(obj for obj, so in zip(sample.objects, touching, strict=True) if not so)
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
    """Return one result a detector, in order. `validation`: thresholds by name."""
    earlier: dict[str, tuple[CountTable, ApDraws]] = {}
    results: list[DetectorResult] = []
    for one in found:
        threshold = (validation or {}).get(one.name)
        line = [list(one.boxes.get(sample.sample_id, ())) for sample in samples]
        kept = kept_boxes(one, samples, threshold)
        assignments = [assignment_of(boxes, sample) for boxes, sample in zip(kept, samples, strict=True)]
        table = count_objects(assignments)
        right, scores = judged(line, samples)
        everything = [assignment_of(boxes, sample) for boxes, sample in zip(line, samples, strict=True)]
        all_scores = [[box.score for box in boxes] for boxes in line]
        precision = ApDraws.of(everything, all_scores)
        once = np.ones((1, len(samples)))
        ap_by_class = {
            one.name: {metric: float(values[0]) for metric, values in ap_of([one], once).items()}
            for one in precision.classes
        }
        intervals = {metric: bootstrap_interval(table, metric) for metric in SHOWN}
        pairs = {
            name: {m: bootstrap_difference(before, table, m) for m in SHOWN[:2]}
            | {m: precision.minus(precision_before, m) for m in SHOWN_AP}
            for name, (before, precision_before) in earlier.items()
        }
        results.append(
            DetectorResult(
                name=one.name,
                threshold=threshold,
                intervals=intervals | {name: precision.interval(name) for name in SHOWN_AP},
                differences=next(iter(pairs.values()), {}),
                pairs=pairs,
                ap=coco_ap(everything, all_scores),
                auc=auc(right, scores),
                ece=ece(right, scores),
                bins=reliability(right, scores),
                classes={
                    name: own | ap_by_class.get(name, dict.fromkeys(SHOWN_AP, 0.0))
                    for name, own in by_class(kept, samples).items()
                },
                num_boxes=sum(map(len, line)),
                curves=curves_of(precision.classes),
            )
        )
        earlier[one.name] = (table, precision)
    return results


def curves_of(classes: Sequence[RankedBoxes]) -> Curves:
    """Return the curves of boxes at IoU 0.5. `precision` is COCO's: the best at this recall or a higher one."""
    with_truth = [one for one in classes if one.truth.sum()]
    by_class = {one.name: _precision_by_recall(one) for one in with_truth}
    mean = np.mean(list(by_class.values()), axis=0).tolist() if by_class else []
    scores, right, wrong = (
        (
            np.concatenate([np.zeros(0), *own])
            for own in zip(*((one.scores, one.right[0], one.wrong[0]) for one in classes), strict=True)
        )
        if classes
        else (np.zeros(0),) * 3
    )
    truth = sum(one.truth.sum() for one in classes)
    f1 = []
    for score in GRID:
        hits, misses = right[scores >= score].sum(), wrong[scores >= score].sum()
        f1.append(float(2 * hits / max(hits + misses + truth, 1)))
    return Curves(precision=mean, f1=f1, precision_by_class={name: own.tolist() for name, own in by_class.items()})


def _precision_by_recall(one: RankedBoxes) -> NDArray[np.float64]:
    """[GRID] precision of a class with objects."""
    right, wrong = one.right[0].cumsum(), one.wrong[0].cumsum()
    precision = np.append(np.maximum.accumulate((right / np.maximum(right + wrong, 1))[::-1])[::-1], 0.0)
    found: NDArray[np.float64] = precision[np.searchsorted(right / one.truth.sum(), GRID, side="left")]
    return found


def judged(
    line: Sequence[Sequence[Scored]], samples: Sequence[Sample]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Says of each box [N] that counts if it is right, and its score."""
    right, scores = [np.zeros(0)], [np.zeros(0)]
    for boxes, sample in zip(line, samples, strict=True):
        own = np.array([box.score for box in boxes])
        hits, ignored = right_boxes([box.object for box in boxes], own, sample)
        right.append(hits[~ignored].astype(np.float64))
        scores.append(own[~ignored])
    return np.concatenate(right), np.concatenate(scores)


def threshold_of(line: Sequence[Sequence[Scored]], samples: Sequence[Sample]) -> float:
    """Return the best threshold for F1@0.5."""
    right, scores = judged(line, samples)
    return best_threshold(right, scores, sum(len(sample.objects) for sample in samples))


def fold_thresholds(line: Sequence[Sequence[Scored]], samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Return for each image [images] the threshold that is best on the other parts."""
    parts = np.arange(len(samples)) % FOLDS
    found = np.zeros(len(samples))
    for part in set(parts.tolist()):
        others = [i for i in range(len(samples)) if parts[i] != part] or list(range(len(samples)))
        found[parts == part] = threshold_of([line[i] for i in others], [samples[i] for i in others])
    return found


def by_class(line: Sequence[Sequence[Scored]], samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return F1, precision and recall at IoU 0.5, and objects, of each class of the truth."""
    shown: dict[str, dict[str, float]] = {}
    for name in sorted({obj.desc for sample in samples for obj in sample.objects}):
        own = [
            assignment_of(
                [box for box in boxes if box.object.desc == name],
                _of_class(sample, name),
            )
            for boxes, sample in zip(line, samples, strict=True)
        ]
        totals = columns_of(count_objects(own).values.sum(axis=0))
        shown[name] = {metric: float(METRICS[metric](totals)) for metric in ("f1@0.5", "precision@0.5", "recall@0.5")}
        shown[name]["objects"] = float(totals["truth"])
    return shown


def _of_class(sample: Sample, name: str) -> Sample:
    return replace(sample, objects=tuple(obj for obj in sample.objects if obj.desc == name))


def assignment_of(boxes: Sequence[Scored], sample: Sample) -> Assignment:
    """The boxes as if an answer had them, for the metrics of answers."""
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
