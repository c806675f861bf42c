"""Fits a `Calibration`, which gives boxes their scores, and measures how good the scores are.

Candidates (boxes in validation images, with features) are sorted by falling score. A candidate is right if, with it,
the boxes so far match one more object, at IoU 0.5 (`gains` in `match.py`). So at every threshold, the right boxes are
the true positives of F1. A candidate in an ignore region that matches no object is left out. scipy's L-BFGS minimises
the log loss plus a penalty. The images are cut into 5 parts, and each part gets scores from a fit to the other four.
The penalty of `PENALTIES` whose held-out scores have the least log loss is used. The held-out scores also give the
threshold and the measured quality (`auc`, `ece`).

`auc` is the probability that a right box has a higher score than a wrong one. `ece` is the expected calibration error
(Guo et al. 2017). The scores are put into ten bins of equal width. In each bin, the error is the distance between the
mean score and the fraction of right boxes. `ece` is the mean error, weighted by the number of boxes. No side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import rankdata
from threadpoolctl import threadpool_limits

from learner.records import Sample
from learner.tasks.detection.match import Gains, Overlaps, gains
from learner.tasks.detection.scores import (
    FEATURES,
    Calibration,
    ScoreCandidate,
    design,
    raw_scores,
    scores_of,
)
from shared.errors import DataError

PENALTIES = (10.0, 3.0, 1.0, 0.3)  # candidate strengths of the L2 penalty; held-out images choose one
FOLDS = 5
BINS = 10
NUM_KNOTS = 5  # knots of each feature's piecewise linear function
FEWEST_IMAGES, FEWEST_BOXES = 5, 30
Floats = NDArray[np.float64]

# A fit multiplies small matrices thousands of times. If other programs use the cores, several BLAS threads mostly wait
# for each other: several threads took 53 s, one thread 6 s (two cores, four busy programs).
_one_thread = threadpool_limits.wrap(limits=1, user_api="blas")


class Bin(NamedTuple):
    """A bin of a reliability diagram: the `number` boxes with a score between `low` and `high`."""

    low: float
    high: float
    score: float  # mean score of the bin's boxes
    right: float  # fraction of the bin's boxes that are right
    number: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Boxes:
    """All candidates of several images, one after the other. `gains` say which boxes are right. If several boxes are on
    one object, the order of scores decides which of them is right."""

    features: Floats  # [N, len(FEATURES)]
    names: list[str]
    images: NDArray[np.int64]  # [N] the index of each box's image
    overlaps: list[Overlaps]  # one per image
    num_truth: int
    gains: Gains

    @classmethod
    def of(cls, found: Sequence[Sequence[ScoreCandidate]], samples: Sequence[Sample]) -> Boxes:
        """Return the candidates, ranked by their scores without a calibration. `found[i]` are the candidates of
        `samples[i]`."""
        line = [one for own in found for one in own]
        features = np.array([one.features for one in line]).reshape(-1, len(FEATURES))
        overlaps = [
            Overlaps.of([one.object for one in own], sample.objects, sample.ignored)
            for own, sample in zip(found, samples, strict=True)
        ]
        return cls(
            features=features,
            names=[one.object.desc for one in line],
            images=np.repeat(np.arange(len(found)), [len(own) for own in found]),
            overlaps=overlaps,
            num_truth=sum(len(sample.objects) for sample in samples),
            gains=gains(overlaps, raw_scores(features)),
        )

    def ranked(self, scores: Floats) -> Boxes:
        """Return the boxes ranked by other scores [N]."""
        return replace(self, gains=gains(self.overlaps, scores))


@_one_thread
def fit_calibration(
    found: Sequence[Sequence[ScoreCandidate]], samples: Sequence[Sample], *, num_drawn: int
) -> tuple[Calibration, Floats, Boxes]:
    """Return the calibration, the held-out scores [N], and the boxes ranked by these scores.

    Raises DataError if there is too little to learn from.
    """
    calibration, boxes = _fit_twice(found, samples, num_drawn=num_drawn)
    # Held-out scores choose the threshold, because scores of the boxes in a fit look too good.
    scores = _held_out(boxes, calibration, _best_penalty(boxes, calibration))
    boxes = boxes.ranked(scores)
    outcomes = boxes.gains.outcomes(scores)
    measured = {"auc": auc(*outcomes), "ece": ece(*outcomes)}
    threshold = best_threshold(boxes.gains, scores, boxes.num_truth)
    return calibration.model_copy(update={"threshold": threshold, "measured": measured}), scores, boxes


@_one_thread
def cross_fitted(found: Sequence[Sequence[ScoreCandidate]], samples: Sequence[Sample]) -> list[Floats]:
    """Return the held-out scores [N] of each greedy answer's candidates. Image i is in part i modulo `FOLDS`, and its
    scores come from a fit without that part. So the labels of an image never decide its own scores.

    Raises DataError if there is too little to learn from.
    """
    scores = [np.zeros(0)] * len(found)
    for part in range(FOLDS):
        others = [i for i in range(len(found)) if i % FOLDS != part]
        calibration, _ = _fit_twice([found[i] for i in others], [samples[i] for i in others], num_drawn=0)
        for i in range(part, len(found), FOLDS):
            scores[i] = scores_of(found[i], calibration) if found[i] else scores[i]
    return scores


def _fit_twice(
    found: Sequence[Sequence[ScoreCandidate]], samples: Sequence[Sample], *, num_drawn: int
) -> tuple[Calibration, Boxes]:
    """Return a calibration, and the boxes it was fitted on. The second fit ranks the boxes by the scores of the first.

    Raises DataError if there is too little to learn from.
    """
    boxes = Boxes.of(found, samples)
    _require_enough(boxes)
    # Scores decide which of several boxes of one object is right. So boxes are ranked by a first fit, whose scores are
    # better than scores without a calibration, and then fitted again.
    boxes = boxes.ranked(_fit(boxes, num_drawn=num_drawn).scores(boxes.features, boxes.names))
    return _fit(boxes, num_drawn=num_drawn), boxes


def _require_enough(boxes: Boxes) -> None:
    images, number, right = len(boxes.overlaps), int((boxes.gains.judged > 0).sum()), int(boxes.gains.right.sum())
    if images < FEWEST_IMAGES or number < FEWEST_BOXES or right in (0, number):
        raise DataError(
            "too little to calibrate scores with",
            found=f"{images} images with {number} boxes, {right} of them right",
            wanted=f"at least {FEWEST_IMAGES} images and {FEWEST_BOXES} boxes, some right and some wrong",
            remedy="name a larger validation set, or a model that finds more",
        )


def _fit(boxes: Boxes, *, num_drawn: int) -> Calibration:
    counted = boxes.gains.judged > 0
    names = Counter(name for name, counts in zip(boxes.names, counted, strict=True) if counts)
    empty = Calibration(
        samples=num_drawn,
        # The columns of a class with few boxes would fit noise, so only frequent classes get columns.
        names=sorted(name for name, number in names.items() if number >= FEWEST_BOXES),
        knots=_knots(boxes.features[counted]),
        weights=[],
        threshold=0.0,
        num_images=len(boxes.overlaps),
        num_boxes=int(counted.sum()),
    )
    columns = _design(boxes, empty)[counted]
    weights = _regress(columns, boxes.gains.right[counted], _best_penalty(boxes, empty))
    return empty.model_copy(update={"weights": [round(float(w), 6) for w in weights]})


def _design(boxes: Boxes, calibration: Calibration) -> Floats:
    return design(boxes.features, boxes.names, knots=calibration.knots, classes=calibration.names)


def _knots(features: Floats) -> dict[str, list[float]]:
    """Return quantiles of each feature that is not constant."""
    found = {}
    for i, name in enumerate(FEATURES):
        # The outer 1% are left out, so that a few extreme values do not move the knots.
        ends = np.unique(np.quantile(features[:, i], np.linspace(0.01, 0.99, NUM_KNOTS)).round(6))
        if len(ends) > 1:
            found[name] = ends.tolist()
    return found


def _best_penalty(boxes: Boxes, calibration: Calibration) -> float:
    losses = {p: log_loss(*boxes.gains.outcomes(_held_out(boxes, calibration, p))) for p in PENALTIES}
    return min(losses, key=lambda penalty: losses[penalty])


def _held_out(boxes: Boxes, calibration: Calibration, penalty: float) -> Floats:
    """Return the scores [N] of the boxes. A box's score comes from a fit without the images of its part (`FOLDS`)."""
    columns, scores = _design(boxes, calibration), np.zeros(len(boxes.names))
    parts, counted = boxes.images % FOLDS, boxes.gains.judged > 0
    for part in range(FOLDS):
        out = parts == part
        if out.any():
            learned = counted & ~out
            weights = _regress(columns[learned], boxes.gains.right[learned], penalty)
            scores[out] = _sigmoid(columns[out] @ weights)
    return scores


def _regress(columns: Floats, right: Floats, penalty: float) -> Floats:
    """Return the weights [D] of the columns. The weight of the constant column is not penalised."""
    shrunk = np.full(columns.shape[1], penalty)
    # The constant column determines the mean probability, which a penalty would pull towards 0.5.
    shrunk[0] = 0.0
    sign = 2 * right - 1

    def loss(weights: Floats) -> tuple[float, Floats]:
        margin = sign * (columns @ weights)
        value = np.logaddexp(0, -margin).sum() + 0.5 * (shrunk * weights**2).sum()
        return float(value), -columns.T @ (sign * _sigmoid(-margin)) + shrunk * weights

    result: Floats = minimize(loss, np.zeros(columns.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x
    return result


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))


# ---- quality -------------------------------------------------------------------------------------------------------


def log_loss(right: Floats, scores: Floats) -> float:
    # A single wrong score of 0 or 1 would make the loss infinite.
    inside = np.clip(scores, 1e-6, 1 - 1e-6)
    return float(-np.mean(right * np.log(inside) + (1 - right) * np.log(1 - inside)))


def auc(right: Floats, scores: Floats) -> float:
    """Return the area under the ROC curve; 0.5 if all boxes are right, or all are wrong."""
    num_right, number = right.sum(), len(right)
    if not 0 < num_right < number:
        return 0.5
    # The AUC is computed as the Mann-Whitney statistic: equal scores count one half.
    ranks = rankdata(scores)[right == 1].sum()
    return float((ranks - num_right * (num_right + 1) / 2) / (num_right * (number - num_right)))


def reliability(right: Floats, scores: Floats, num_bins: int = BINS) -> list[Bin]:
    """Return the reliability diagram: scores from 0 to 1 are cut into bins of equal width, and bins without a box are
    left out."""
    place = np.minimum((scores * num_bins).astype(int), num_bins - 1)
    return [
        Bin(i / num_bins, (i + 1) / num_bins, float(scores[own].mean()), float(right[own].mean()), int(own.sum()))
        for i in range(num_bins)
        if (own := place == i).any()
    ]


def ece(right: Floats, scores: Floats, num_bins: int = BINS) -> float:
    found = reliability(right, scores, num_bins)
    return sum(abs(one.score - one.right) * one.number for one in found) / max(1, len(right))


def best_threshold(found: Gains, scores: Floats, num_truth: int) -> float:
    """Return the score threshold with the largest F1. The threshold is halfway between the lowest score that passes and
    the next lower score."""
    if not len(scores):
        return 0.0
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    f1 = 2 * found.right[order].cumsum() / np.maximum(found.judged[order].cumsum() + num_truth, 1)
    last = np.append(ranked[:-1] > ranked[1:], True)  # no threshold separates boxes with equal scores
    best = int(np.where(last, f1, -1.0).argmax())
    least = ranked[best]
    middle = (least + (ranked[best + 1] if best + 1 < len(ranked) else min(0.0, least))) / 2
    # The middle of two neighbouring floats is rounded, perhaps to the lower one. A threshold rounded down would also
    # accept boxes with the lower score.
    return float(middle if ((scores >= middle) == (scores >= least)).all() else least)
