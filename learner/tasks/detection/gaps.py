"""What is known about labels with gaps: how often finds without a label are right, and whether gaps are random (R49).

In: samples, what answers say about them (`completion.candidates`), and the pixels of labels and finds (`appearance`).
Out: `CompletionEstimate`, and the candidates with their probabilities.

How finds look says most, and holds for any kind of gap. Where too few labels are known for it, or a classifier does
not tell objects from what is beside them, votes are left, which say too little if labels are not missing at random: a
model that learned labels has learned their gaps (D22). Two signs show it, among finds that half of the answers have:

    features        a logistic regression tells finds without a label from those with one, by their border, size,
                    shape, place and class, on photographs that it was not fitted on
    photographs     the share of finds without a label differs from photograph to photograph more than chance allows

Then the estimate from votes is not told, and nothing is chosen by it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, mannwhitneyu

from learner.records import Sample
from learner.tasks.detection.appearance import FOLDS, Looks, SampleCrops, logistic
from learner.tasks.detection.audit import AuditedFind, refitted
from learner.tasks.detection.bins import bounding_box
from learner.tasks.detection.completion import (
    CompletionEstimate,
    LabelCandidate,
    Source,
    best_threshold,
    estimate,
    tally,
)

PROBABLE = 0.5  # from this probability on, a find adds more than it spoils
_FEWEST = 20  # finds with a label, and without one
_AUC, _CHANCE = 0.6, 0.001  # of the features
_SPREAD, _SPREAD_CHANCE = 1.8, 0.001  # chi2 over its degrees of freedom, over photographs
_BORDER = 12.5  # bins
_PENALTY = 3.0

Found = Sequence[Sequence[LabelCandidate]]


def estimate_gaps(
    samples: Sequence[Sample],
    found: Found,
    crops: Sequence[SampleCrops],
    num_answers: int,
    audited: Sequence[AuditedFind] = (),
) -> tuple[CompletionEstimate, list[list[LabelCandidate]]]:
    """Return the estimate, and the candidates with their probabilities. `crops` have the free candidates of each
    sample, in their order. `audited`: a person's verdicts on finds like these; they correct any estimate."""
    num_labels = sum(len(sample.objects) for sample in samples)
    known = estimate(tally([one for own in found for one in own], num_answers), num_labels)
    free = [[one for one in own if one.relation == "free"] for own in found]
    looks = Looks(crops).judge([one.finds for one in crops], [[one.votes for one in own] for own in free])
    probabilities: Sequence[Sequence[float]] = looks.probabilities
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
    if known.not_random:
        why = (
            f"labels are not missing at random ({known.not_random}), so votes do not say what is right, and {looks.why}"
        )
        nothing = tuple(0.0 for _ in known.precision)
        known = replace(known, min_votes=None, why=why, missing=None, precision=nothing)
    return known, _with(found, [[known.precision[one.votes - 1] for one in own] for own in free])


def _with(found: Found, probabilities: Sequence[Sequence[float]]) -> list[list[LabelCandidate]]:
    """Give the free candidates their probabilities. What repeats another find is not right."""
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
    """Put what the photographs or a person say in the place of what votes say."""
    free = np.array(known.free, dtype=float)
    right = np.zeros(len(free))
    for own in found:
        for one in own:
            if one.probability is not None:
                right[one.votes - 1] += one.probability
    precision = right / np.maximum(free, 1)
    # The surest finds may all be labelled because labels stop at what is found most surely. Where labels are complete,
    # the photographs have said 0.34 at most.
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


# ---- are gaps random ------------------------------------------------------------------------------------------------


def not_random(found: Found, num_answers: int) -> str:
    """Say in which way labels are not missing at random; "": nothing shows it. Only finds of half of the answers count,
    and where their probabilities are known those without a label that are probably right."""
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
    """Return [N, features]: border, size, shape, place and class."""
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
    """Return True if the features tell finds without a label from others, on photographs that were not fitted."""
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
    """Name the feature in which finds without a label differ most from those with one."""
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
    """Compare the shares of finds without a label between photographs."""
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
