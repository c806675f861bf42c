"""Ranks models on photographs whose labels have gaps (R49, D22).

In: samples with labels, and each model's boxes. Out: how many boxes of each model are right, and F1@0.5 for any assumed
number of objects in the photographs.

1. A box is right if it matches a label of the same name, one-to-one (IoU >= 0.5). A box is wrong if it is near a label
   without matching it, or is a second box on one object. For any other box, the probability that it is right is
   estimated from the box's pixels (`appearance`) and from the fraction of right names among the model's boxes at
   labels. A person's verdicts (`audit`) may correct the estimate. For each model the fraction of these other boxes that
   are right is shrunk towards the fraction of the first model, because with a few hundred boxes its error is as large
   as the difference between models.
2. The number of objects is not known, because some have no label and no model found them. The number of objects,
   although unknown, is the same for all models. So F1 = 2 right / (boxes + objects) is computed for a range of numbers
   of objects: from the right boxes of all models together to `MOST_OBJECTS` times this number. If the order of two
   models changes within the range, their order is not decided.

F1 computed by labels with gaps ranks models wrongly: on blood cells, half of them without a label, it chose one of the
worst of eleven checkpoints. If labels are few, or objects look like their surroundings, labels with gaps cannot rank
models. Labels without gaps can rank models by plain F1. No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.records import DetectionObject, Sample
from learner.tasks.detection.appearance import Looks, Open, Shares, crops_of, share_of
from learner.tasks.detection.audit import AuditedFind, refitted
from learner.tasks.detection.completion import candidates
from learner.tasks.detection.gaps import right_names
from learner.tasks.detection.metrics import Interval, interval_of

# On blood cells the true number of objects per right box was 1.3.
MOST_OBJECTS = 2.0  # max number of objects in the photographs, per right box of all models together.
# Labels count as having gaps if there are at least this many right boxes without a label, per label.
GAPS = 0.1
# In tests with complete labels this fraction was at most 0.34.
CREDIBLE = 0.4  # min fraction of right boxes among the boxes without a label
MOST_SCENES = 300  # max scenes whose pixels are read; more scenes take time and change little
DRAWS = 2000
_THREADS = 4

Floats = NDArray[np.float64]
Boxes = Sequence[Sequence[DetectionObject]]


def drawn_places(number: int) -> range:
    """Return the indices of the samples whose pixels are read. The indices are evenly spaced."""
    return range(0, number, max(1, -(-number // MOST_SCENES)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GapScore:
    """Counts of one model's boxes, one number per scene: [N]. `right`: expected number of right boxes. `unlabelled`:
    expected number of right boxes without a label. `free`: number of boxes that overlap no label. `boxes`: number of
    all boxes."""

    right: Floats
    unlabelled: Floats
    free: Floats
    boxes: Floats

    def f1(self, objects: float) -> float:
        """Return F1@0.5 if the photographs have `objects` objects."""
        return float(2 * self.right.sum() / max(1e-9, self.boxes.sum() + objects))


class GapJudge:
    """Scores models on the same samples, whose labels have gaps. `why`: the reason if these labels cannot rank
    models."""

    def __init__(self, samples: Sequence[Sample], open_image: Open, audited: Sequence[AuditedFind] = ()) -> None:
        self._samples, self._open, self._audited = samples, open_image, audited
        self._looks: Looks | None = None
        self.shares: Shares = {}  # fractions of right and misplaced boxes of the first model (`appearance`)
        self.why = ""

    @property
    def num_labels(self) -> int:
        return sum(len(sample.objects) for sample in self._samples)

    def score(self, boxes: Boxes) -> GapScore | None:
        """Score one model's boxes. Return None if labels are too few, or if objects look like their surroundings.
        Raises the errors of `open_image`."""
        found = [candidates(sample, [own]) for sample, own in zip(self._samples, boxes, strict=True)]
        free = [[one for one in own if one.relation == "free"] for own in found]
        with ThreadPoolExecutor(_THREADS) as pool:
            share = share_of(self.num_labels)
            # All models have the same labels, so their crops and classifiers are made once.
            if self._looks is None:
                self._looks = Looks(list(pool.map(lambda one: crops_of(one, [], self._open, share), self._samples)))
            # With `share` 0, no crops of labels are read, because the first model's call has read them.
            boxed = [[one.object for one in own] for own in free]
            finds = list(pool.map(lambda one, own: crops_of(one, own, self._open, 0.0).finds, self._samples, boxed))
        looks = self._looks.judge(finds, [[1] * len(own) for own in free], self.shares or None)
        self.shares = self.shares or looks.shares
        self.why = looks.why
        if looks.why:
            return None
        right_name = right_names(self._samples, found, 1)
        right = [
            [box * right_name(one) for box, one in zip(*own, strict=True)]
            for own in zip(looks.probabilities, free, strict=True)
        ]
        if self._audited:
            better = iter(refitted(np.array([p for own in right for p in own]), None, self._audited).tolist())
            right = [[next(better) for _ in own] for own in right]
        unlabelled = np.array([sum(own) for own in right], dtype=float)
        return GapScore(
            right=unlabelled + [sum(one.relation == "confirms" for one in own) for own in found],
            unlabelled=unlabelled,
            free=np.array([len(own) for own in free], dtype=float),
            boxes=np.array([len(own) for own in found], dtype=float),
        )

    def objects(self, scores: Sequence[GapScore], boxes: Sequence[Boxes]) -> tuple[float, float]:
        """Return the least and the largest plausible number of objects. A box that overlaps no label (free) counts
        once, even if several models have it. The weight of a box is the mean probability that a free box is right."""
        line = [candidates(sample, [own[i] for own in boxes]) for i, sample in enumerate(self._samples)]
        free = sum(one.relation == "free" for own in line for one in own)
        share = sum(one.unlabelled.sum() for one in scores) / max(1.0, sum(one.free.sum() for one in scores))
        least = self.num_labels + max(free * share, *(float(one.unlabelled.sum()) for one in scores))
        return least, MOST_OBJECTS * least


def has_gaps(score: GapScore, num_labels: int) -> bool:
    """Return True if a model's right boxes without a label show that labels have gaps."""
    right, free = score.unlabelled.sum(), score.free.sum()
    return bool(right >= GAPS * num_labels and right >= CREDIBLE * free)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedModel:
    """One model's F1@0.5, for a range of the number of objects. `f1`: F1 for the middle of the range, with an interval
    over scenes. `low`: F1 for the most objects. `high`: F1 for the fewest objects. `right`: expected number of right
    boxes. `undecided`: names of earlier models that may be better or worse."""

    name: str
    f1: Interval
    low: float
    high: float
    right: float
    precision: float
    undecided: tuple[str, ...]


def rank(names: Sequence[str], scores: Sequence[GapScore], objects: tuple[float, float]) -> list[RankedModel]:
    """Return the models in the given order, with their F1 for the range `objects`."""
    least, most = objects
    middle = (least * most) ** 0.5
    num_scenes = len(scores[0].right)
    weights = np.random.default_rng(0).multinomial(num_scenes, np.full(num_scenes, 1 / num_scenes), size=DRAWS)
    ranked: list[RankedModel] = []
    for i, one in enumerate(scores):
        drawn = 2 * (weights @ one.right) / (weights @ one.boxes + middle)
        ranked.append(
            RankedModel(
                name=names[i],
                f1=interval_of(one.f1(middle), drawn, 0.95),
                low=one.f1(most),
                high=one.f1(least),
                right=float(one.right.sum()),
                precision=float(one.right.sum() / max(1.0, one.boxes.sum())),
                undecided=tuple(names[k] for k in range(i) if not is_decided(one, scores[k], objects)),
            )
        )
    return ranked


def is_decided(a: GapScore, b: GapScore, objects: tuple[float, float]) -> bool:
    """Return True if the same model is better at both ends of the range. Inside the range the order of two models
    changes at most once."""
    first, last = (a.f1(number) - b.f1(number) for number in objects)
    return first * last > 0
