"""Matches predictions to ground truth, for training and for every score except COCO's AP.

Matches are one-to-one (Hungarian). A pair is allowed if its IoU is at least a threshold and, where names count, its
names are equal. Among all assignments of allowed pairs, one with the most pairs is chosen. If several assignments have
the most pairs, the assignment with the largest total IoU is chosen.

A prediction without a pair counts neither as right nor as wrong if it lies in an ignore region (`Sample.ignored`) of
its class: the part of its area in the region is at least the threshold. COCO treats crowd regions in the same way. No
side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from learner.records import Assignment, DetectionObject, ParsedRollout
from learner.tasks.detection.geometry import covered_share, iou_matrix

Floats = NDArray[np.float64]
RIGHT_IOU = 0.5


class Match(NamedTuple):
    """The matches of one sample. `pairs` are (index of the prediction, index of the object, IoU), sorted by prediction.
    `ignored` [P] is True for predictions that do not count."""

    pairs: list[tuple[int, int, float]]
    ignored: NDArray[np.bool_]

    @property
    def num_judged(self) -> int:
        """Return how many predictions count as right or wrong."""
        return len(self.ignored) - int(np.count_nonzero(self.ignored))


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """P predictions of one sample compared with its G objects and its ignore regions."""

    iou: Floats  # [P, G] IoU of prediction and object
    same: NDArray[np.bool_]  # [P, G] True: prediction and object have equal names
    inside: Floats  # [P] the largest fraction of a prediction's area that lies in one ignore region of its class
    inside_any: Floats  # [P] the largest fraction of a prediction's area that lies in one ignore region, of any class

    @classmethod
    def of(
        cls,
        predictions: Sequence[DetectionObject],
        truth: Sequence[DetectionObject],
        regions: Sequence[DetectionObject] = (),
    ) -> Overlaps:
        names, classes = _names(predictions)[:, None], _names(regions)[None, :]
        shares = covered_share(predictions, regions)
        own = np.where((names == classes) | (classes == ""), shares, 0.0)
        return cls(
            iou_matrix(predictions, truth),
            names == _names(truth)[None, :],
            own.max(axis=1, initial=0.0),
            shares.max(axis=1, initial=0.0),
        )

    def rows(self, chosen: slice | NDArray[np.int64]) -> Overlaps:
        """Return the comparison of only the predictions `chosen` with all objects and ignore regions."""
        return Overlaps(self.iou[chosen], self.same[chosen], self.inside[chosen], self.inside_any[chosen])

    def match(self, threshold: float = RIGHT_IOU, *, named: bool = True) -> Match:
        """Match the predictions at an IoU threshold. `named`: only equal names make a pair."""
        close = self.iou >= threshold
        pairs = assign(self.iou, close & self.same if named else close)
        ignored = (self.inside if named else self.inside_any) >= threshold
        ignored[[prediction for prediction, *_ in pairs]] = False
        return Match(pairs, ignored)


def match_objects(parsed: ParsedRollout, iou_threshold: float) -> Assignment:
    """Match `parsed.objects` to the objects of the sample by IoU alone."""
    truth = parsed.rollout.sample.objects
    pairs = Overlaps.of([p.object for p in parsed.objects], truth).match(iou_threshold, named=False).pairs
    predictions, truths = {p for p, _, _ in pairs}, {t for _, t, _ in pairs}
    return Assignment(
        parsed=parsed,
        pairs=tuple(pairs),
        missed=tuple([t for t in range(len(truth)) if t not in truths]),
        spurious=tuple([p for p in range(len(parsed.objects)) if p not in predictions]),
    )


def assign(iou: Floats, feasible: NDArray[np.bool_]) -> list[tuple[int, int, float]]:
    """Return the best one-to-one pairs (row, column, IoU) of a [P, G] matrix, sorted by row.

    scipy's rectangular solver (Crouse 2016) maximises the sum of the pairs' values.
    """
    rows, cols = np.nonzero(feasible)
    # If no row and no column has two feasible pairs, all pairs are taken without the solver.
    if len(set(rows.tolist())) < len(rows) or len(set(cols.tolist())) < len(cols):
        # The added constant is above any sum of IoUs, so a matching with one pair more always has the larger sum. Pairs
        # with value 0 are dropped.
        rows, cols = linear_sum_assignment(np.where(feasible, iou + (1 + min(iou.shape)), 0.0), maximize=True)
        chosen = feasible[rows, cols]
        rows, cols = rows[chosen], cols[chosen]
    return list(zip(rows.tolist(), cols.tolist(), iou[rows, cols].tolist(), strict=True))


class Gains(NamedTuple):
    """The contribution of each of N predictions to two counts, if predictions are added in the order of falling scores.
    So the predictions with a score of at least s have `right[scores >= s].sum()` pairs, and `judged[scores >= s].sum()`
    of these predictions count as right or wrong."""

    right: Floats  # [N] 1 if the prediction adds a right pair, else 0
    judged: Floats  # [N] 0 for a prediction that does not count

    def outcomes(self, scores: Floats) -> tuple[Floats, Floats]:
        """Return two arrays with an entry for each prediction that counts: 1 if it is right or 0, and its score."""
        counted = self.judged > 0
        return self.right[counted], scores[counted]


def gains(samples: Sequence[Overlaps], scores: Floats) -> Gains:
    """Return the gains, at IoU 0.5, of the predictions of all samples. Predictions are listed one sample after the
    other, as in `scores` [N]."""
    right, judged = np.zeros(len(scores)), np.ones(len(scores))
    ends = np.cumsum([len(one.inside) for one in samples])
    for one, end in zip(samples, ends.tolist(), strict=True):
        own = slice(end - len(one.inside), end)
        right[own], judged[own] = _gains(one, np.argsort(-scores[own], kind="stable"))
    return Gains(right, judged)


def _gains(one: Overlaps, order: NDArray[np.int64]) -> tuple[Floats, Floats]:
    number = len(order)
    feasible, inside = (one.iou >= RIGHT_IOU) & one.same, one.inside >= RIGHT_IOU
    if (inside & feasible.any(axis=1)).any():
        # A prediction in an ignore region can also pair with an object. IoU decides which prediction gets the object,
        # so the first k predictions are matched anew for each k.
        matches = [one.rows(np.sort(order[:k])).match() for k in range(number + 1)]
        counts = np.array([(len(found.pairs), found.num_judged) for found in matches], dtype=float)
        steps = np.empty((number, 2))
        steps[order] = np.diff(counts, axis=0)
        return steps[:, 0], steps[:, 1]
    # The sets of predictions that can all have a pair are a matroid. So if weights fall with the order, a set of
    # largest weight has the most pairs among the first k predictions, for every k (Edmonds 1971).
    weights = np.empty(number)
    weights[order] = np.arange(number, 0, -1)
    right = np.zeros(number)
    rows, cols = linear_sum_assignment(np.where(feasible, weights[:, None], 0.0), maximize=True)
    right[rows[feasible[rows, cols]]] = 1.0
    return right, (~inside).astype(np.float64)


def _names(objects: Sequence[DetectionObject]) -> NDArray[np.object_]:
    return np.array([obj.desc for obj in objects], dtype=object)
