"""Estimates how often boxes without a label are right, and whether labels are missing at random (R49).

In: samples, clusters of the answers to them (`completion.candidates`), and the pixels of labels and of clusters without
a label (`appearance`). Out: a `CompletionEstimate`, and the clusters with their probabilities.

Pixels give the best estimate, for any kind of gap: a classifier of pixels gives the probability that a box is on an
object. The probability that a box's name is right comes from clusters at labels: the fraction of right names among
clusters with the same number of votes and the same agreement. If labels are too few, or a classifier cannot separate
objects from their surroundings, only the votes are used. Votes are misleading if labels are not missing at random,
because a model that learned labels has learned their gaps (D22). Two signs show that labels are not missing at random.
Only clusters that at least half of the answers have are searched for these signs:

    features        a logistic regression separates clusters without a label from those with one, by border, size,
                    shape, position and class, on held-out photographs
    photographs     the share of clusters without a label varies more between photographs than chance allows

If there is such a sign, the estimate from votes is neither reported nor used to choose anything. No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, mannwhitneyu

from learner.records import Sample
from learner.tasks.detection.agreement import SAME_IOU
from learner.tasks.detection.appearance import FOLDS, Looks, Open, SampleCrops, crops_of, logistic
from learner.tasks.detection.audit import AuditedFind, refitted
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.completion import (
    CompletionEstimate,
    LabelCandidate,
    Source,
    best_threshold,
    estimate,
    not_falling,
    tally,
)
from learner.tasks.detection.geometry import iou_matrix

# On photographs of cells, labels with a probability of at least 0.5 gain 577 (right labels minus wrong labels). Labels
# chosen by a min number of votes gain at most 496.
PROBABLE = 0.5  # min probability of a new label; less probable labels harm more than they help.
# Min clusters with a label, and min clusters without a label. With fewer it is not tested whether gaps are random.
_FEWEST = 20
_AUC, _CHANCE = 0.6, 0.001  # gaps depend on a box's features if AUC > `_AUC` and p-value < `_CHANCE`.
# Gaps depend on the photograph if chi2 / degrees of freedom > `_SPREAD` and p-value < `_SPREAD_CHANCE`.
_SPREAD, _SPREAD_CHANCE = 1.8, 0.001
_BORDER = 12.5  # bins; a box nearer than this to the photograph's border touches it
_PENALTY = 3.0

Found = Sequence[Sequence[LabelCandidate]]


def cluster_crops(sample: Sample, found: Sequence[LabelCandidate], open_image: Open, share: float) -> SampleCrops:
    """Return the pixels that `estimate_gaps` needs of a sample's clusters. `share`, and errors: see `crops_of`."""
    # A model's misplaced boxes at labels would be examples, too. But where labels are missing, many are right: with
    # them completed labels of cells gained 536 (right labels minus wrong ones), without them 598.
    return crops_of(sample, [one.object for one in found if one.relation == "free"], open_image, share)


def estimate_gaps(
    samples: Sequence[Sample],
    found: Found,
    crops: Sequence[SampleCrops],
    num_answers: int,
    audited: Sequence[AuditedFind] = (),
) -> tuple[CompletionEstimate, list[list[LabelCandidate]]]:
    """Return the estimate, and the clusters with their probabilities. `crops` has each sample's `cluster_crops`.
    `audited` has a person's verdicts on some of the clusters,
    which correct the estimate."""
    num_labels = sum(len(sample.objects) for sample in samples)
    known = estimate(tally([one for own in found for one in own], num_answers), num_labels)
    free = [[one for one in own if one.relation == "free"] for own in found]
    # The classifiers (`Looks`) judge only positions. In a test where they judged names too (digits, 60% without a
    # label), the estimated fraction of right boxes was 0.91, the true fraction 0.74.
    looks = Looks(crops).judge([one.finds for one in crops], [[one.votes for one in own] for own in free])
    probabilities: Sequence[Sequence[float]] = ()
    if looks.probabilities:
        right_name = right_names(samples, found, num_answers)
        probabilities = [
            [box * right_name(one) for box, one in zip(*own, strict=True)]
            for own in zip(looks.probabilities, free, strict=True)
        ]
    if audited:
        votes = [one.object.votes for own in free for one in own if one.object.votes is not None]
        before = np.array([p for own in probabilities for p in own]) if probabilities else None
        after = iter(refitted(before, votes, audited).tolist())
        probabilities = [[next(after) for _ in own] for own in free]
    if probabilities:
        found = _with(found, probabilities)
        known = _by_probabilities(known, found, num_labels, "audit" if audited else "appearance")
    known = replace(known, auc=looks.auc, not_random=not_random(found, num_answers))
    if known.source != "votes":
        return known, [list(own) for own in found]
    # A model that learned the labels has learned their gaps, so its votes are misleading.
    if known.not_random:
        why = (
            f"labels are not missing at random ({known.not_random}), so votes do not say what is right, and {looks.why}"
        )
        nothing = tuple(0.0 for _ in known.precision)
        known = replace(known, min_votes=None, why=why, missing=None, precision=nothing)
    return known, _with(found, [[known.precision[one.votes - 1] for one in own] for own in free])


def right_names(samples: Sequence[Sample], found: Found, num_answers: int) -> Callable[[LabelCandidate], float]:
    """Return a function that gives the probability of a right name for a cluster whose position is right. The
    probability is the fraction of right names among clusters at labels with the same number of votes. Clusters in which
    all answers give the same name are counted separately. The probability does not fall with more votes."""
    # First index: 0 for one name, 1 for several; second index: votes - 1
    right, whole = np.zeros((2, num_answers)), np.zeros((2, num_answers))
    for sample, own in zip(samples, found, strict=True):
        near = [one for one in own if one.relation in ("confirms", "contradicts")]
        for one, overlaps in zip(near, iou_matrix([one.object for one in near], sample.objects), strict=True):
            if overlaps.max(initial=0.0) >= SAME_IOU:
                at = int(len(one.names) > 1), one.votes - 1
                whole[at] += 1
                right[at] += sample.objects[overlaps.argmax()].desc == one.object.desc
    overall = (right.sum() + 1) / (whole.sum() + 1)
    pooled = [not_falling(*parts) for parts in zip(right, whole, strict=True)]
    # With few examples, a fraction is close to the fraction over all numbers of votes
    shares = [(parts + overall) / (wholes + 1) for parts, wholes in pooled]
    return lambda one: float(shares[len(one.names) > 1][one.votes - 1])


def _with(found: Found, probabilities: Sequence[Sequence[float]]) -> list[list[LabelCandidate]]:
    """Return the clusters with `probabilities` set for those that overlap no label (free). Clusters that repeat another
    cluster get 0."""
    left = [iter(own) for own in probabilities]
    return [
        [
            replace(one, probability=next(values) if one.relation == "free" else 0.0)
            if one.relation in ("free", "repeats")
            else one
            for one in own
        ]
        for own, values in zip(found, left, strict=True)
    ]


def _by_probabilities(known: CompletionEstimate, found: Found, num_labels: int, source: Source) -> CompletionEstimate:
    """Return the estimate, with numbers from probabilities in place of the numbers from votes."""
    free = np.array(known.free, dtype=float)
    right = np.zeros(len(free))
    for own in found:
        for one in own:
            if one.probability is not None:
                right[one.votes - 1] += one.probability
    precision = right / np.maximum(free, 1)
    # `may_be_complete` from votes can be wrong, because annotators may have labelled exactly the objects that the model
    # finds most easily. With complete labels, pixels gave an estimate of at most 0.34 for the fraction of right ones
    # among the clusters without a label that have the most votes.
    sure = slice((len(free) - 1) // 2, None)
    is_complete = known.may_be_complete and not (
        free[sure].sum() >= _FEWEST and right[sure].sum() > free[sure].sum() / 2
    )
    min_votes, why = (None, known.why) if is_complete else best_threshold(free, precision)
    return replace(
        known,
        min_votes=min_votes,
        why=why,
        may_be_complete=is_complete,
        missing=float(right.sum() / max(1.0, num_labels + right.sum())),
        precision=tuple(precision.round(4).tolist()),
        source=source,
    )


# ---- randomness -----------------------------------------------------------------------------------------------------


def not_random(found: Found, num_answers: int) -> str:
    """Return a sentence that says in which way labels are not missing at random; "" if there is no sign. Only clusters
    that half of the answers have are counted. Of the clusters without a label, those with a known probability below 0.5
    are not counted either."""
    sure = [
        (place, one)
        for place, own in enumerate(found)
        for one in own
        if 2 * one.votes >= num_answers
        and (
            one.relation == "confirms"
            or (one.relation == "free" and (one.probability is None or one.probability >= 0.5))
        )
    ]
    is_free = np.array([one.relation == "free" for _, one in sure], dtype=bool)
    if min(is_free.sum(), (~is_free).sum()) < _FEWEST:
        return ""
    places = np.array([place for place, _ in sure])
    objects = [one for _, one in sure]
    if _differ(_features(objects), is_free, places):
        return _in_words(objects, is_free)
    return _spread(is_free, places)


def _features(sure: Sequence[LabelCandidate]) -> NDArray[np.float32]:
    """Return [N, features]: columns for border, size, shape, position and class."""
    boxes = np.array([bounding_box(one.object) for one in sure], dtype=float)
    width, height = (boxes[:, 2:] - boxes[:, :2]).clip(1).T
    middle = (boxes[:, :2] + boxes[:, 2:]) / 999 - 1
    names = np.array([one.object.desc for one in sure])
    kinds, counts = np.unique(names, return_counts=True)
    often = kinds[counts >= max(_FEWEST, 0.02 * len(names))]
    columns = [at_border(boxes), np.log(width * height), np.log(width / height), *middle.T, *(middle**2).T]
    return np.stack([*columns, *(names == kind for kind in often)], axis=1).astype(np.float32)


def at_border(boxes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which boxes [N, 4], in bins, touch the photograph's border."""
    return np.asarray(((boxes[:, :2] < _BORDER) | (boxes[:, 2:] > 999 - _BORDER)).any(axis=1))


def _differ(features: NDArray[np.float32], is_free: NDArray[np.bool_], places: NDArray[np.int64]) -> bool:
    """Return True if the features separate clusters without a label from the others, on held-out photographs."""
    scores = np.zeros(len(features))
    for part in range(FOLDS):
        judged = places % FOLDS == part
        fitted = ~judged
        if not (fitted & is_free).any() or not (fitted & ~is_free).any():
            return False
        scores[judged] = logistic(features[fitted & is_free], features[fitted & ~is_free], _PENALTY)(features[judged])
    test = mannwhitneyu(scores[is_free], scores[~is_free], alternative="greater")
    return bool(test.statistic / (is_free.sum() * (~is_free).sum()) > _AUC and test.pvalue < _CHANCE)


def _in_words(sure: Sequence[LabelCandidate], is_free: NDArray[np.bool_]) -> str:
    """Return a sentence about the feature that differs most between clusters without a label and clusters with one."""
    boxes = np.array([bounding_box(one.object) for one in sure], dtype=float)
    sizes, middle = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1), (boxes[:, :2] + boxes[:, 2:]) / 2
    usual, place = np.median(sizes[~is_free]), np.median(middle[~is_free], axis=0)
    names = np.array([one.object.desc for one in sure])
    ways = {
        "touch the border": at_border(boxes),
        "are smaller than most labelled objects": sizes < usual,
        "are larger than most labelled objects": sizes > usual,
        "lie further right than most labelled objects": middle[:, 0] > place[0],
        "lie further left than most labelled objects": middle[:, 0] < place[0],
        "lie further down than most labelled objects": middle[:, 1] > place[1],
        "lie further up than most labelled objects": middle[:, 1] < place[1],
    } | {f"are called {name}": names == name for name in sorted(set(names.tolist()))}
    way = max(ways, key=lambda name: float(ways[name][is_free].mean() - ways[name][~is_free].mean()))
    has = ways[way]
    return (
        f"{has[is_free].mean():.0%} of sure finds without a label {way}, {has[~is_free].mean():.0%} of those with one"
    )


def _spread(is_free: NDArray[np.bool_], places: NDArray[np.int64]) -> str:
    """Return a sentence if the fraction of clusters without a label varies between photographs more than by chance.
    Otherwise return ""."""
    number, free = np.bincount(places), np.bincount(places, weights=is_free)
    free, number = free[number > 0], number[number > 0]
    share, degrees = is_free.mean(), len(number) - 1
    value = float(((free - number * share) ** 2 / (number * share * (1 - share))).sum())
    if degrees < 1 or value / degrees <= _SPREAD or chi2.sf(value, degrees) >= _SPREAD_CHANCE:
        return ""
    low, high = np.quantile(free / number, [0.1, 0.9])
    return (
        f"the share of sure finds without a label differs between photographs more than chance allows "
        f"(a tenth has {low:.0%} or less, a tenth {high:.0%} or more)"
    )
