"""Computes rewards of detection answers, and the part of each object (`reward.weights`, `grpo.credit: object`).

In: an assignment. Only its parsed answer is used, because each reward makes its own one-to-one matching. Out: numbers
from 0 to 1 by name, larger for better answers.

    f1          F1 at IoU 0.5 of objects with the same description
    f1_miou     mean of F1 at IoU 0.50, 0.55, ..., 0.95, of objects with the same description
    soft_iou    2 x the largest total IoU of one-to-one pairs with the same description / (predictions + truth)
    count       1 - |predictions - truth| / the larger of the two
    class_only  F1 of the descriptions without the boxes; descriptions match only within an image
    format      1 if the answer is one closed container without a dropped object, else 0

Every match is one-to-one, so a duplicate is a false prediction. Predictions in ignore regions that match nothing do not
count. An empty answer to a scene without objects is right: 1. The formulas of `metrics.py` are applied to one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from learner.extensions import PrefixRewards
from learner.records import Assignment, ParsedRollout
from learner.tasks.detection.match import Overlaps
from learner.tasks.detection.metrics import THRESHOLDS
from learner.tasks.tokens import TokenPieces, TokenText

BY_OBJECT = ("f1", "f1_miou", "soft_iou", "count", "class_only")  # rewards that can be computed after each object


def answer_rewards(parsed: ParsedRollout, names: Collection[str]) -> dict[str, float]:
    """Return the rewards in `names` that this task has, by name."""
    view = _RewardView.of(parsed)
    found = {name: view.reward(name, len(parsed.objects)) for name in BY_OBJECT if name in names}
    if "format" in names:
        whole = parsed.usable and parsed.closed and not parsed.truncated and not any(parsed.drops.values())
        found["format"] = float(whole)
    return found


def prefix_rewards(assignment: Assignment, weights: Mapping[str, float], pieces: TokenPieces) -> PrefixRewards:
    """Return the weighted sum of the rewards in BY_OBJECT after each object, and the token where each object ends:
    after its last coordinate and its description."""
    parsed = assignment.parsed
    view, numbers = _RewardView.of(parsed), range(len(parsed.objects) + 1)
    values = np.zeros(len(numbers))
    for name in BY_OBJECT:
        if weight := weights.get(name, 0.0):
            values += weight * np.array([view.reward(name, number) for number in numbers])
    return PrefixRewards(values=values, ends=_ends(parsed, pieces.text(parsed.rollout.response_token_ids)))


def _ends(parsed: ParsedRollout, text: TokenText) -> NDArray[np.int64]:
    found = [
        max(int(parsed.slots.end[predicted.slots[-1]]), text.tokens_until(predicted.desc_bytes[1]))
        for predicted in parsed.objects
    ]
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _RewardView:
    """The P predictions and G true objects of an answer, as rewards need them."""

    overlaps: Overlaps
    predicted: tuple[tuple[int | None, str], ...]  # (number of the image, description) of each prediction
    true: tuple[tuple[int | None, str], ...]

    @classmethod
    def of(cls, parsed: ParsedRollout) -> _RewardView:
        sample, predictions = parsed.rollout.sample, [p.object for p in parsed.objects]
        predicted, true = (tuple((obj.image, obj.desc) for obj in those) for those in (predictions, sample.objects))
        return cls(Overlaps.of(predictions, sample.objects, sample.ignored), predicted, true)

    def reward(self, name: str, number: int) -> float:
        """Return the reward `name` of an answer that ends after its first `number` predictions."""
        first = self.overlaps.rows(slice(number))
        if name == "f1":
            return self._f1(first, THRESHOLDS[0])
        if name == "f1_miou":
            return float(np.mean([self._f1(first, threshold) for threshold in THRESHOLDS]))
        return {"soft_iou": self._soft_iou, "count": self._count, "class_only": self._class_only}[name](first)

    def _f1(self, first: Overlaps, threshold: float) -> float:
        found = first.match(threshold)
        return _ratio(2 * len(found.pairs), found.num_judged + len(self.true))

    def _soft_iou(self, first: Overlaps) -> float:
        value = np.where(first.same, first.iou, 0.0)
        rows, columns = linear_sum_assignment(value, maximize=True)
        overlaps, ignored = value[rows, columns], first.inside >= THRESHOLDS[0]
        ignored[rows[overlaps > 0]] = False
        return _ratio(2 * float(overlaps.sum()), len(ignored) - int(np.count_nonzero(ignored)) + len(self.true))

    def _count(self, first: Overlaps) -> float:
        inside = (first.inside_any >= THRESHOLDS[0]) & ~(first.iou > 0).any(axis=1)
        found, wanted = len(inside) - int(np.count_nonzero(inside)), len(self.true)
        return 1.0 - abs(found - wanted) / max(found, wanted, 1)

    def _class_only(self, first: Overlaps) -> float:
        inside = (first.inside >= THRESHOLDS[0]) & ~(first.iou > 0).any(axis=1)
        names = [name for name, skipped in zip(self.predicted, inside, strict=False) if not skipped]
        common = Counter(names) & Counter(self.true)
        return _ratio(2 * common.total(), len(names) + len(self.true))


def _ratio(above: float, below: float) -> float:
    """Return `above / below`; 1 if there are neither objects nor predictions."""
    return above / below if below else 1.0
