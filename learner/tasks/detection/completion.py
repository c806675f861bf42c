"""Adds objects to labels that have gaps, if several answers agree on these objects (`labels.complete`, D20).

In: a sample, and the objects of K answers to it, sampled from the model. Out: the sample with more labels.

1. The objects are clustered (`agreement`). A cluster has at most one object per answer, and its votes are the number of
   answers that have an object in it.
2. A cluster *confirms* a label if both have the same name and IoU >= 0.5, one-to-one. A cluster *contradicts* a label
   if it overlaps the label without confirming it. A cluster is *free* if it overlaps no label. Clusters in ignore
   regions are left out. A free cluster that overlaps another free cluster with more votes *repeats* it, and is not
   counted.
3. Free clusters become labels if they have at least `min_votes` votes, or if they are probably right (`probable`). A
   completed label keeps its votes.

The rules `min_votes` and `probable` need an estimate of how often free clusters are right. `gaps.py` makes the estimate
from the pixels. If pixels give no estimate, it comes from votes, and is correct only if labels are missing at random.
Over all samples, let c clusters with v votes confirm labels, d clusters contradict labels, and f clusters be free:

    at labelled places     p = c / (c + d)                 name and box are right
    elsewhere              s = min(1, r (c + d) / f)       there is an object
    precision of v votes   p s

r is the number of objects without a label per labelled object. If labels are missing at random, unlabelled objects get
v votes as often as labelled ones, so f is r (c + d) plus the boxes that the model invents. So r is f / (c + d) over the
clusters with the most votes. Because a few clusters may be chance, clusters with fewer votes are included until
`ENOUGH` of the clusters are near labels, but no number below about half of the answers. Invented boxes are rarer among
clusters with more votes. So p and s do not fall with v, and they are fitted under this condition (`not_falling`). The
condition removes most of the noise of small counts. The product p s is an upper bound, because a box that the model
invents with many votes counts as a real object. `auto` takes the number of votes with the largest gain: the estimated
number of right labels minus the estimated number of wrong ones. Nothing is completed if complete labels could have
given the same clusters.

Invariants: labels are not changed. No two completed labels overlap, and none overlaps a label or an ignore region.
Objects stay in canonical order. No side effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from learner.records import DetectionObject, Sample, Votes
from learner.tasks.detection.agreement import SAME_IOU, Cluster, cluster_objects
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import Overlaps

# All figures of `labels.complete` were measured with this value.
OVERLAP = 0.3  # min IoU of two boxes that count as the same object
MIN_CLUSTERS = 20  # min clusters that overlap labels; fewer give no estimate
ENOUGH = 150  # min number of clusters that overlap labels from which r (see the module) is computed.
# For complete labels the estimate was at most 0.05. For labels of which 40% were removed it was at least 0.38.
MISSING = 0.10  # if more than this fraction of the objects has no label, a message says that labels have gaps
MIN_MISSING = 0.02  # if less than this fraction of the objects has no label, nothing is completed

Relation = Literal["confirms", "contradicts", "free", "repeats"]
_COLUMNS: tuple[Relation, ...] = ("confirms", "contradicts", "free")
Source = Literal["votes", "appearance", "audit"]
Tally = NDArray[np.int64]  # [K + 1, 3] number of clusters by votes and relation


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCandidate:
    """A cluster: objects in several answers to one sample that count as one object, outside of ignore regions. `object`
    has the cluster's votes. `names` counts the answers that give each name. `agreement`, from 0 to 1, is a product of
    three numbers: the fraction of the answers that have the object, the fraction of these answers that give its name,
    and the mean IoU of their boxes with its box. `probability`, for free clusters, is the probability that box and name
    are right; None: not known."""

    object: DetectionObject
    relation: Relation
    names: Mapping[str, int]
    agreement: float
    probability: float | None = None

    @property
    def votes(self) -> int:
        assert self.object.votes is not None
        return self.object.votes.found


def candidates(
    sample: Sample,
    answers: Sequence[Sequence[DetectionObject]],
    *,
    can_be_label: Callable[[DetectionObject], bool] = lambda _: True,
) -> list[LabelCandidate]:
    """Cluster the objects of the answers to a sample, and return the clusters, most votes first. A free cluster (it
    overlaps no label) is left out if it cannot become a label."""
    found = cluster_objects(answers)
    objects = [one.object._replace(votes=Votes(one.votes, len(answers))) for one in found]
    overlaps = Overlaps.of(objects, sample.objects, sample.ignored)
    relations, in_ignored = _relations(overlaps), overlaps.inside_any >= SAME_IOU
    kept = [
        LabelCandidate(object=obj, relation=relation, names=one.names, agreement=_agreement(one, len(answers)))
        for one, obj, relation, ignored in zip(found, objects, relations, in_ignored, strict=True)
        if not ignored and (relation != "free" or can_be_label(obj))
    ]
    free = [i for i, one in enumerate(kept) if one.relation == "free"]
    # Clusters with the most votes come first, because `_apart` keeps the first of several overlapping clusters.
    free.sort(key=lambda i: (-kept[i].votes, kept[i].object.bins, kept[i].object.desc))
    apart = _apart([kept[i].object for i in free])
    repeating = {i for i, is_apart in zip(free, apart, strict=True) if not is_apart}
    return [replace(one, relation="repeats") if i in repeating else one for i, one in enumerate(kept)]


def _agreement(cluster: Cluster, num_answers: int) -> float:
    tightness = float(iou_matrix([cluster.object], [member.object for member in cluster.members]).mean())
    return max(cluster.names.values()) / num_answers * tightness


def _relations(overlaps: Overlaps) -> list[Relation]:
    confirming = {row for row, *_ in overlaps.match(SAME_IOU).pairs}
    near = overlaps.iou.max(axis=1, initial=0.0) >= OVERLAP
    return ["confirms" if i in confirming else "contradicts" if near[i] else "free" for i in range(len(near))]


def tally(found: Sequence[LabelCandidate], num_answers: int) -> Tally:
    """Count clusters by votes and relation. An answer may have a right box and a wrong box near the same label. So a
    cluster may contradict a label that another cluster confirms, and both clusters count."""
    counts = np.zeros((num_answers + 1, len(_COLUMNS)), dtype=np.int64)
    for one in found:
        if one.relation in _COLUMNS:
            counts[one.votes, _COLUMNS.index(one.relation)] += 1
    return counts


# ---- estimate -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionEstimate:
    """The quality that completed labels would have, estimated without the true objects. In each tuple, entry v - 1 is
    for v votes, from 1 on. `source`: the kind of data behind the estimate (`pixels`, `votes`, ...). An estimate from
    `votes` is correct only if labels are missing at random."""

    min_votes: int | None  # min votes of a cluster that becomes a label; None: no labels are added (see `why`)
    why: str
    missing: float | None  # fraction of the objects that have no label; None: not known
    recall: tuple[float, ...]  # fraction of the labels that are confirmed by a cluster with at least v votes
    precision: tuple[float, ...]  # the fraction that is right of the clusters without a label with exactly v votes
    free: tuple[int, ...]  # number of clusters without a label with exactly v votes
    source: Source = "votes"
    auc: float | None = None  # AUC with which pixels separate right from wrong boxes near labels; None: not tried.
    # True if labels may be complete: even the clusters without a label that have the most votes may be invented.
    may_be_complete: bool = False
    not_random: str = ""  # the sign that labels are not missing at random, as a sentence; empty: there is no sign

    @property
    def cannot_complete(self) -> bool:
        """Return True if labels have gaps that cannot be filled: `min_votes` is None, so no labels are added, and
        `may_be_complete` is False."""
        # A sign that labels are not missing at random shows gaps, even if the estimate finds few missing labels.
        gaps = bool(self.not_random) or (self.missing or 0.0) > MISSING
        return gaps and self.min_votes is None and not self.may_be_complete

    def free_right(self, min_votes: int = 1) -> float:
        """Return the estimated fraction that is right of the free clusters (they overlap no label) with at least
        `min_votes` votes; 0 if there are none."""
        free, precision = self.free[min_votes - 1 :], self.precision[min_votes - 1 :]
        return sum(f * p for f, p in zip(free, precision, strict=True)) / max(1, sum(free))

    def in_words(self, right: float) -> str:
        """Return the text for a log line, after the number of completed labels. `right`: fraction of these labels that
        are right."""
        if self.missing is None:
            return ""
        made = {
            "votes": "estimate, if labels are missing at random",
            "appearance": "estimate from the photographs",
            "audit": "estimate from the photographs and the audit",
        }[self.source]
        # An estimate from votes also counts invented boxes as missing labels (an upper bound). An estimate from pixels
        # counts only objects that the model found (a lower bound).
        most = "at most" if self.source == "votes" else "at least"
        told = (
            f"; {made}: about {right:.0%} of these are right, and {most} {self.missing:.0%} of the objects had no label"
        )
        return told + (f"; labels are not missing at random: {self.not_random}" if self.not_random else "")

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def estimate(counts: Tally, num_labels: int) -> CompletionEstimate:
    """Estimate from votes how many completed labels would be right, and choose the votes that a cluster needs to become
    a label (`min_votes: auto`). `counts`: number of clusters by votes and relation, summed over all samples.
    `num_labels`: number of all labels of the samples."""
    confirms, contradicts, free = (counts[1:, i].astype(float) for i in range(len(_COLUMNS)))
    near = confirms + contradicts
    recall = confirms[::-1].cumsum()[::-1] / max(1, num_labels)
    fit = _fit(confirms, near, free)
    precision = fit.precision if fit is not None else np.zeros(len(near))
    may_be_complete = fit is not None and _least_share(*fit.surest) < MIN_MISSING
    if fit is None:
        few = f"no number of votes has {MIN_CLUSTERS} clusters at labelled places: the answers say too little"
        min_votes, why = None, few
    elif may_be_complete:
        unlabelled, surest = fit.surest
        complete = f"labels may be complete: of the {surest:.0f} surest boxes {unlabelled:.0f} have no label"
        min_votes, why = None, complete
    else:
        min_votes, why = best_threshold(free, precision)
    return CompletionEstimate(
        min_votes=min_votes,
        why=why,
        missing=fit.missing if fit is not None else None,
        recall=tuple(recall.round(4).tolist()),
        precision=tuple(precision.round(4).tolist()),
        free=tuple(int(n) for n in free),
        may_be_complete=may_be_complete,
    )


Counts = NDArray[np.float64]  # [K], one value for each number of votes, 1 to K


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    missing: float  # upper bound of the fraction of the objects that have no label
    surest: tuple[float, float]  # (number without a label, number of all) of the clusters with the most votes
    precision: Counts  # probability that a cluster without a label is right: p s in the module's docstring


def _fit(confirms: Counts, near: Counts, free: Counts) -> _Fit | None:
    """Fit the estimate; None if fewer than `MIN_CLUSTERS` clusters are near labels. Clusters are grouped by votes. The
    groups with the most votes are merged into one, which has at least `MIN_CLUSTERS` clusters near labels."""
    from_top = near[::-1].cumsum()[::-1]
    enough = np.flatnonzero(from_top >= MIN_CLUSTERS)
    if not len(enough):
        return None
    top, half = int(enough[-1]), (len(near) - 1) // 2
    of_near, num_near = not_falling(_joined(confirms, top), _joined(near, top))
    of_all, num_all = not_falling(_joined(near, top), _joined(near + free, top))
    # Half a cluster of each kind is added, so that fractions of few clusters are never exactly 0 or 1.
    is_right, is_near = (of_near + 0.5) / (num_near + 1), (of_all + 0.5) / (num_all + 1)
    # The ratio is computed from the clusters with the most votes, at least ENOUGH of them, because fewer may be chance.
    # Clusters with the votes of fewer than half of the answers are not counted, because invented boxes are too frequent
    # among them.
    counted = max(min(half, top), int(np.flatnonzero(from_top >= ENOUGH).max(initial=0)))
    ratio = float((free[counted:].sum() + 0.5) / (near[counted:].sum() + 0.5))
    precision = is_right * np.minimum(1.0, ratio * is_near / (1 - is_near))
    return _Fit(
        missing=ratio / (1 + ratio),
        surest=(float(num_all[-1] - of_all[-1]), float(num_all[-1])),
        # All numbers of votes in the merged group get the precision of the group.
        precision=np.append(precision, [precision[-1]] * (len(near) - 1 - top)),
    )


def _joined(counts: Counts, top: int) -> Counts:
    return np.append(counts[:top], counts[top:].sum())


def not_falling(parts: Counts, wholes: Counts) -> tuple[Counts, Counts]:
    """Return `parts` and `wholes` with neighbouring entries added up, until the ratios parts / wholes do not fall.
    The results are the likeliest ratios that do not fall (isotonic regression by pooling adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True):
        length = 1
        while blocks and blocks[-1][0] * whole >= part * blocks[-1][1]:
            earlier = blocks.pop()
            part, whole, length = part + earlier[0], whole + earlier[1], length + earlier[2]
        blocks.append((part, whole, length))
    lengths = [length for *_, length in blocks]
    return np.repeat([part for part, *_ in blocks], lengths), np.repeat([whole for _, whole, _ in blocks], lengths)


def best_threshold(free: Counts, precision: Counts) -> tuple[int | None, str]:
    """Return the min number of votes for a cluster to become a label: the number with the largest gain (right new
    labels minus wrong ones). If no choice gains labels, return None and the reason."""
    # A cluster that is right with probability p adds p right labels and 1 - p wrong labels on average: a gain of 2 p -
    # 1.
    gained = (free * (2 * precision - 1))[::-1].cumsum()[::-1]
    if gained.max() <= 0:
        return None, f"at most {precision.max():.0%} of what could be completed would be right"
    return int(gained.argmax()) + 1, ""


def _least_share(part: float, whole: float) -> float:
    """Return a lower bound of the fraction `part` / `whole`, one standard deviation below it, by Wilson's score
    interval."""
    # Half a cluster is added to `part` and to the rest, so that an empty group has a bound too.
    whole += 1
    share = (part + 0.5) / whole
    spread = math.sqrt((share * (1 - share) + 1 / (4 * whole)) / whole)
    return (share + 1 / (2 * whole) - spread) / (1 + 1 / whole)


# ---- completion -----------------------------------------------------------------------------------------------------


def completed(
    sample: Sample,
    found: Sequence[LabelCandidate],
    min_votes: int,
    *,
    probable: float = 0.0,
) -> Sample:
    """Return the sample with more labels: the clusters that overlap no label (free), with at least `min_votes` votes
    and at least the probability `probable`."""
    labels = [
        one.object
        for one in found
        if one.relation == "free" and one.votes >= min_votes and (one.probability or 0.0) >= probable
    ]
    return replace(sample, objects=canonical_order([*sample.objects, *labels]))


def _apart(objects: Sequence[DetectionObject]) -> list[bool]:
    """Return for each object whether it is kept. An object that overlaps an earlier kept object is left out."""
    near, apart = iou_matrix(objects, objects) >= OVERLAP, np.zeros(len(objects), dtype=bool)
    for i in range(len(objects)):
        # Only kept objects are compared, so an object that was left out does not exclude later objects.
        apart[i] = not near[i, apart].any()
    return apart.tolist()


def without_completed(sample: Sample) -> Sample:
    """Return the sample without the labels that `completed` added."""
    # The model's answers gave the completed labels, so these labels would confirm any wrong object in the answers.
    return replace(sample, objects=tuple(obj for obj in sample.objects if obj.votes is None))
