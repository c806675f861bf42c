"""Labels with gaps, completed by what several answers to the same image agree on (`labels.complete`, D20).

In: a sample, and the objects of K answers drawn from the model. Out: the sample with more labels.

1. The objects are clustered, one-to-one over answers (`agreement`). A cluster's votes are the answers that have it.
2. A cluster that overlaps a label *confirms* it (the same name, IoU >= 0.5, one-to-one) or *contradicts* it. One that
   overlaps no label is *free*. Clusters in ignore regions are left out.
   A free cluster that overlaps one with more votes *repeats* it, and is not counted.
3. Free clusters become labels if they have at least `min_votes` votes, or if they are probably right (`probable`).
   Each keeps its votes.

Both need to know how often free clusters are right, without the truth. How they look says it (`gaps.py`). Where too
little is known of that, it is estimated from votes, which is right for labels that are missing at random. Of clusters
with v votes, over all samples, let c confirm labels, d contradict them, and f be free:

    at labelled places     p = c / (c + d)                 name and box are right
    elsewhere              s = min(1, r (c + d) / f)       there is an object
    precision of v votes   p s

r is the number of objects without a label per labelled one. If labels are missing at random, objects without a label
are found with v votes as often as labelled ones, so f is r (c + d) and what the model invents. Few clusters with many
votes are a matter of luck, so r is f / (c + d) of those with most votes that are `ENOUGH`, at most of those that half
of the answers have. A model invents less of what more of its answers have, so p and s do not fall with v: shares are
fitted so (`_not_falling`), which takes out most of the noise of few clusters. p s is an estimate from above: what the
model invents as surely as it finds real objects cannot be told from them. `auto` takes the number of votes from which
on the most labels are gained: right ones minus wrong ones, as estimated. Nothing is completed if these clusters could
as well be those of complete labels.

Invariants: labels are kept as they are; no two completed labels overlap, and none overlaps a label or an ignore region;
objects stay in canonical order. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learner.records import DetectionObject, Sample, Votes
from learner.tasks.detection.agreement import SAME_IOU, Cluster, cluster_objects
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from learner.tasks.detection.metrics import ignored_shares

OVERLAP = 0.3  # IoU from which on two boxes are about the same object
MIN_CLUSTERS = 20  # that overlap labels: fewer say too little
ENOUGH = 150  # clusters that overlap labels, to count what has none per label
MISSING = 0.10  # share of the objects without a label, from which on labels are said to have gaps
MIN_MISSING = 0.02  # share of the objects without a label; fewer are not worth the wrong ones

Relation = Literal["confirms", "contradicts", "free", "repeats"]
_COLUMNS: tuple[Relation, ...] = ("confirms", "contradicts", "free")
Source = Literal["votes", "appearance", "audit"]
Tally = NDArray[np.int64]  # [K + 1, 3] clusters by their votes and by relation


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCandidate:
    """A cluster of a sample's answers outside of ignore regions. `object` has its votes; `names` are those that answers
    give it, and how many do. `agreement`, from 0 to 1, is the share of answers that have it, times the share of these
    that give it its name, times the mean IoU of their boxes with its own. `probability`: that a free one is right, name
    and box; None: not known."""

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
    overlap: float = OVERLAP,
    can_be_label: Callable[[DetectionObject], bool] = lambda _: True,
) -> list[LabelCandidate]:
    """Return what the answers say about a sample, those with most votes first. Free ones that cannot be labels are left
    out."""
    found = cluster_objects(answers)
    objects = [one.object._replace(votes=Votes(one.votes, len(answers))) for one in found]
    relations = _relations(objects, sample.objects, overlap)
    in_ignored = ignored_shares(objects, sample.ignored)[1] >= SAME_IOU
    kept = [
        LabelCandidate(object=obj, relation=relation, names=one.names, agreement=_agreement(one, len(answers)))
        for one, obj, relation, ignored in zip(found, objects, relations, in_ignored, strict=True)
        if not ignored and (relation != "free" or can_be_label(obj))
    ]
    free = sorted((i for i, one in enumerate(kept) if one.relation == "free"), key=lambda i: _votes_then_place(kept[i]))
    apart = _apart([kept[i].object for i in free], overlap)
    repeating = {i for i, is_apart in zip(free, apart, strict=True) if not is_apart}
    return [replace(one, relation="repeats") if i in repeating else one for i, one in enumerate(kept)]


def _agreement(cluster: Cluster, num_answers: int) -> float:
    tightness = float(iou_matrix([cluster.object], [member.object for member in cluster.members]).mean())
    return max(cluster.names.values()) / num_answers * tightness


def _relations(objects: Sequence[DetectionObject], labels: Sequence[DetectionObject], overlap: float) -> list[Relation]:
    if not objects:
        return []
    iou = iou_matrix(objects, labels)
    same_name = np.array([[obj.desc == label.desc for label in labels] for obj in objects], dtype=bool)
    confirming = {row for row, *_ in assign(iou, (iou >= SAME_IOU) & same_name.reshape(iou.shape))}
    near = iou.max(axis=1, initial=0.0) >= overlap
    return ["confirms" if i in confirming else "contradicts" if near[i] else "free" for i in range(len(objects))]


def tally(found: Sequence[LabelCandidate], num_answers: int) -> Tally:
    """Count clusters with v votes and each relation. A cluster that contradicts counts once a label is
    confirmed too: an answer may be right and say something else besides."""
    counts = np.zeros((num_answers + 1, len(_COLUMNS)), dtype=np.int64)
    for one in found:
        if one.relation in _COLUMNS:
            counts[one.votes, _COLUMNS.index(one.relation)] += 1
    return counts


# ---- how many votes are enough --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionEstimate:
    """An estimate of completed labels, made without the truth. The lists are by votes, from 1 on. `source` is what it
    is made from: `votes` is right for labels that are missing at random only."""

    min_votes: int | None  # None: nothing is completed, and `why` says why not
    why: str
    missing: float | None  # share of the objects without a label; None: too little is known
    recall: tuple[float, ...]  # share of labels that are confirmed by clusters with at least so many votes
    precision: tuple[float, ...]  # share of right free clusters with exactly so many votes
    free: tuple[int, ...]  # free clusters with exactly so many votes
    source: Source = "votes"
    auc: float | None = None  # how well examples at labels are told apart by their looks; None: not tried
    may_be_complete: bool = False  # chance explains the surest finds without a label
    not_random: str = ""  # a sign that labels are not missing at random

    @property
    def invents(self) -> bool:
        """True if labels have gaps, and nothing that the answers say is sure enough to fill them."""
        gaps = bool(self.not_random) or (self.missing or 0.0) > MISSING
        return gaps and self.min_votes is None and not self.may_be_complete

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> CompletionEstimate:
        """Return what `to_json` wrote. Raises TypeError if it is something else."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
        }
        return cls(**fields)

    def free_right(self, min_votes: int = 1) -> float:
        """Return the estimated share of right ones among free clusters with enough votes; 0 if there are none."""
        free, precision = self.free[min_votes - 1 :], self.precision[min_votes - 1 :]
        return sum(f * p for f, p in zip(free, precision, strict=True)) / max(1, sum(free))

    def in_words(self, right: float) -> str:
        """Return what is told after the number of completed labels, of which a share is `right`."""
        if self.missing is None:
            return ""
        made = {
            "votes": "estimate, if labels are missing at random",
            "appearance": "estimate from the photographs",
            "audit": "estimate from the photographs and the audit",
        }[self.source]
        most = "at most" if self.source == "votes" else "at least"
        told = (
            f"; {made}: about {right:.0%} of these are right, and {most} {self.missing:.0%} of the objects had no label"
        )
        return told + (f"; labels are not missing at random: {self.not_random}" if self.not_random else "")

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def estimate(counts: Tally, num_labels: int) -> CompletionEstimate:
    """Estimate the threshold that `auto` takes. `counts`: the tallies of all samples, added up; `num_labels`: the
    number of their labels."""
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


Counts = NDArray[np.float64]  # [K] by votes, from 1 on


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    missing: float  # share of the objects without a label, at most
    surest: tuple[float, float]  # clusters where the share at labelled places is largest: without a label, and all
    precision: Counts  # p s


def _fit(confirms: Counts, near: Counts, free: Counts) -> _Fit | None:
    """Fit the model; None if too few clusters are near labels. The highest numbers of votes count as one, so that there
    are enough."""
    from_top = near[::-1].cumsum()[::-1]
    enough = np.flatnonzero(from_top >= MIN_CLUSTERS)
    if not len(enough):
        return None
    top, half = int(enough[-1]), (len(near) - 1) // 2
    of_near, num_near = _not_falling(_joined(confirms, top), _joined(near, top))
    of_all, num_all = _not_falling(_joined(near, top), _joined(near + free, top))
    is_right, is_near = (of_near + 0.5) / (num_near + 1), (of_all + 0.5) / (num_all + 1)
    counted = max(min(half, top), int(np.flatnonzero(from_top >= ENOUGH).max(initial=0)))
    ratio = float((free[counted:].sum() + 0.5) / (near[counted:].sum() + 0.5))
    precision = is_right * np.minimum(1.0, ratio * is_near / (1 - is_near))
    return _Fit(
        missing=ratio / (1 + ratio),
        surest=(float(num_all[-1] - of_all[-1]), float(num_all[-1])),
        precision=np.append(precision, [precision[-1]] * (len(near) - 1 - top)),
    )


def _joined(counts: Counts, top: int) -> Counts:
    return np.append(counts[:top], counts[top:].sum())


def _not_falling(parts: Counts, wholes: Counts) -> tuple[Counts, Counts]:
    """Neighbours are added up until their shares, parts / wholes, do not fall. Then the shares are the likeliest ones
    that do not (isotonic regression by pooling adjacent violators)."""
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
    """Return the number of votes from which on most labels are gained, and why there is none. Both are by votes."""
    gained = (free * (2 * precision - 1))[::-1].cumsum()[::-1]
    if gained.max() <= 0:
        return None, f"at most {precision.max():.0%} of what could be completed would be right"
    return int(gained.argmax()) + 1, ""


def _least_share(part: float, whole: float) -> float:
    """Return a share's lower bound: one standard deviation, by Wilson's score interval."""
    whole += 1
    share = (part + 0.5) / whole
    spread = math.sqrt((share * (1 - share) + 1 / (4 * whole)) / whole)
    return (share + 1 / (2 * whole) - spread) / (1 + 1 / whole)


# ---- the completed sample -------------------------------------------------------------------------------------------


def completed(
    sample: Sample,
    found: Sequence[LabelCandidate],
    min_votes: int,
    *,
    probable: float = 0.0,
) -> Sample:
    """Return the sample with the free candidates as labels that have enough votes, and at least the probability
    `probable`."""
    labels = [
        one.object
        for one in found
        if one.relation == "free" and one.votes >= min_votes and (one.probability or 0.0) >= probable
    ]
    return replace(sample, objects=canonical_order([*sample.objects, *labels]))


def _votes_then_place(one: LabelCandidate) -> tuple[int, tuple[int, ...], str]:
    return (-one.votes, one.object.bins, one.object.desc)


def _apart(objects: Sequence[DetectionObject], overlap: float) -> list[bool]:
    """Return which objects overlap no earlier one that does not."""
    near, apart = iou_matrix(objects, objects) >= overlap, np.zeros(len(objects), dtype=bool)
    for i in range(len(objects)):
        apart[i] = not near[i, apart].any()
    return apart.tolist()


def without_completed(sample: Sample) -> Sample:
    """Return the sample with its annotated labels only."""
    return replace(sample, objects=tuple(obj for obj in sample.objects if obj.votes is None))
