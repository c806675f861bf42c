"""Computes bootstrap intervals of COCO's AP, and of the difference in AP between two detectors on the same resamples.

Samples (one image each, or several images that belong together) are drawn at random with replacement. COCO's matches do
not depend on other images, so they are made once (pycocotools). A draw (one resample) weights each sample by the number
of times it was drawn. The weights give the same result as pycocotools with copies of a sample that was drawn several
times, because copies of a box have equal scores and are neighbours in the ranking. The results differ only if two boxes
in one image have equal scores. No side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pycocotools.cocoeval import COCOeval

from learner.records import Assignment
from learner.tasks.detection.metrics import (
    Interval,
    coco_matches,
    coco_stats,
    draws,
    interval_of,
    samples_of_images,
)

AP, AP50 = "coco/ap", "coco/ap50"
DRAWS = 500
MOST_BOXES = 100  # max boxes per image and class that COCO counts
_CONFIDENCE = 0.95
_VALUES_AT_ONCE = 4_000_000  # max draws x boxes in memory at a time


@dataclass(frozen=True, slots=True)
class RankedBoxes:
    """All D boxes of one class, highest score first. T is the number of COCO's IoU thresholds, ten."""

    name: str
    scores: NDArray[np.float64]  # [D]
    images: NDArray[np.int64]  # [D] index of the sample that each box belongs to
    right: NDArray[np.bool_]  # [T, D] True: at this threshold the box is matched with an object
    wrong: NDArray[np.bool_]  # [T, D] True: at this threshold the box is matched with no object and no ignore region
    truth: NDArray[np.float64]  # [samples] number of objects in each sample, without ignore regions


def _ranked_boxes(evaluation: COCOeval | None, owners: Sequence[int]) -> list[RankedBoxes]:
    """Return the ranked boxes of each class; [] if `evaluation` is None. `owners` has the index of each image's
    sample."""
    if evaluation is None:
        return []
    number = len(owners)
    return [
        _of_class(category["name"], evaluation.evalImgs[i * number : (i + 1) * number], owners)
        for i, category in enumerate(evaluation.cocoGt.dataset["categories"])
    ]


def _of_class(
    name: str, found: Sequence[Mapping[str, NDArray[np.float64]] | None], owners: Sequence[int]
) -> RankedBoxes:
    truth = np.zeros(owners[-1] + 1)
    scores, images, right, wrong = [np.zeros(0)], [np.zeros(0, np.int64)], [], []
    for i, image in zip(owners, found, strict=True):
        if image is None:
            continue
        own = np.asarray(image["dtScores"])[:MOST_BOXES]
        hits, ignored = (np.asarray(image[key])[:, :MOST_BOXES] != 0 for key in ("dtMatches", "dtIgnore"))
        truth[i] += np.count_nonzero(np.asarray(image["gtIgnore"]) == 0)
        scores.append(own)
        images.append(np.full(len(own), i))
        right.append(hits & ~ignored)
        wrong.append(~hits & ~ignored)
    line = np.concatenate(scores)
    # pycocotools sorts stably too, so equal scores keep the order of the images.
    order = np.argsort(-line, kind="stable")
    empty = np.zeros((10, 0), dtype=bool)
    right_all, wrong_all = (np.concatenate([empty, *parts], axis=1)[:, order] for parts in (right, wrong))
    return RankedBoxes(name, line[order], np.concatenate(images)[order], right_all, wrong_all, truth)


def ap_of(classes: Sequence[RankedBoxes], weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return AP and AP50 of each draw, [draws]. `weights` [draws, samples] says how often a draw has each sample."""
    sums, sums50, present = (np.zeros(len(weights)) for _ in range(3))
    for one in classes:
        num_truth = weights @ one.truth
        # COCO leaves a class without an object out of the mean.
        own = np.flatnonzero(num_truth)
        by_threshold = np.stack([_average(one, t, weights[own], num_truth[own]) for t in range(len(one.right))])
        sums[own] += by_threshold.mean(axis=0)
        sums50[own] += by_threshold[0]
        present[own] += 1
    return {AP: sums / np.maximum(present, 1), AP50: sums50 / np.maximum(present, 1)}


def _average(
    one: RankedBoxes, threshold: int, weights: NDArray[np.float64], num_truth: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return for each draw the mean, over 101 recalls, of the best precision at this or a higher recall."""
    found = np.zeros(len(weights))
    step = max(1, _VALUES_AT_ONCE // max(1, len(one.images)))
    recalls = np.linspace(0.0, 1.0, 101)
    for begin in range(0, len(weights), step):
        by_box = weights[begin : begin + step, one.images]
        right = np.cumsum(by_box * one.right[threshold], axis=1)
        wrong = np.cumsum(by_box * one.wrong[threshold], axis=1)
        precision = right / np.maximum(right + wrong, 1)
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # As in pycocotools, a recall that no box reaches has precision 0.
        best = np.append(best, np.zeros((len(best), 1)), axis=1)
        recall = right / num_truth[begin : begin + step, None]
        reached = np.stack([line.searchsorted(recalls) for line in recall])
        found[begin : begin + step] = np.take_along_axis(best, reached, axis=1).mean(axis=1)
    return found


@dataclass(frozen=True, slots=True)
class ApDraws:
    """COCO's AP and AR of one detector over all samples (`whole`), and AP and AP50 of each draw (`drawn`)."""

    whole: Mapping[str, float]
    drawn: Mapping[str, NDArray[np.float64]]
    classes: Sequence[RankedBoxes] = ()

    @classmethod
    def of(
        cls, assignments: Sequence[Assignment], scores: Sequence[Sequence[float]], *, n: int = DRAWS, seed: int = 0
    ) -> ApDraws:
        """Draw `n` times. Equal `n`, `seed` and number of samples give equal draws."""
        # COCO's matches of an image do not depend on other images, so all draws use the same matches.
        evaluation = coco_matches(assignments, scores)
        classes = _ranked_boxes(evaluation, samples_of_images(assignments))
        weights = np.concatenate(list(draws(len(assignments), n, seed))).astype(np.float64)
        return cls(coco_stats(evaluation), ap_of(classes, weights), classes)

    def interval(self, name: str) -> Interval:
        return interval_of(self.whole[name], self.drawn[name], _CONFIDENCE)

    def minus(self, other: ApDraws, name: str) -> Interval:
        """Return the interval of the difference in the metric `name`: this detector's value minus the value of `other`,
        on the same draws."""
        return interval_of(self.whole[name] - other.whole[name], self.drawn[name] - other.drawn[name], _CONFIDENCE)
