"""Labels with gaps, completed by what several answers to the same image agree on (`labels.complete`, D20).

In: a sample, and the objects of K answers drawn from the model. Out: the sample with more labels.

1. The objects are clustered, one-to-one over answers (`agreement`). A cluster's votes are the answers that have it.
2. A cluster that overlaps a label *confirms* it (the same name, IoU >= 0.5, one-to-one) or *contradicts* it. One that
   overlaps no label is *free*. Clusters in ignore regions are left out.
3. Free clusters with at least `min_votes` votes become labels, those with most votes first, unless they overlap one
   that did. Each keeps its votes.

`min_votes: auto` needs to know how often free clusters are right, without the truth. Of clusters with v votes, over all
samples, let c confirm labels, d contradict them, and f be free:

    at labelled places     p = c / (c + d)                 name and box are right
    elsewhere              s = min(1, r (c + d) / f)       there is an object
    precision of v votes   p s

r is the number of objects without a label per labelled one. If labels are missing at random, objects without a label
are found with v votes as often as labelled ones, so f is r (c + d) and what the model invents. A model invents less of
what more of its answers have, so p, and the share of clusters at labelled places, do not fall with v: both are fitted
so (`_not_falling`), which takes out most of the noise of few clusters. r is f / (c + d) where that share is largest.
Every such ratio is an upper bound of r, and p s is an estimate from above: what the model invents as surely as it finds
real objects cannot be told from them. The threshold is the number of votes from which on the most labels are gained:
right ones minus wrong ones, as estimated. Nothing is completed if these clusters could as well be those of complete
labels.

Where labels are not missing at random, all this may say too little: if they stop after three objects, and the model
finds the first three most surely, free clusters look invented.

Invariants: labels are kept as they are; no two completed labels overlap, and none overlaps a label or an ignore region;
objects stay in canonical order. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
MIN_MISSING = 0.02  # share of the objects without a label; fewer are not worth the wrong ones

Relation = Literal["confirms", "contradicts", "free"]
_COLUMNS: tuple[Relation, ...] = ("confirms", "contradicts", "free")
Tally = NDArray[np.int64]  # [K + 1, 3] clusters by their votes and by relation


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelCandidate:
    """A cluster of a sample's answers outside of ignore regions. `object` has its votes; `names` are those that answers
    give it, and how many do. `agreement`, from 0 to 1, is the share of answers that have it, times the share of these
    that give it its name, times the mean IoU of their boxes with its own: those who review begin with the largest."""

    object: DetectionObject
    relation: Relation
    names: Mapping[str, int]
    agreement: float

    @property
    def votes(self) -> int:
        assert self.object.votes is not None
        return self.object.votes.found


def candidates(
    sample: Sample, answers: Sequence[Sequence[DetectionObject]], *, overlap: float = OVERLAP
) -> list[LabelCandidate]:
    """Return what the answers say about a sample, those with most votes first."""
    found = cluster_objects(answers)
    objects = [one.object._replace(votes=Votes(one.votes, len(answers))) for one in found]
    in_ignored = ignored_shares(objects, sample.ignored)[1] >= SAME_IOU
    return [
        LabelCandidate(object=obj, relation=relation, names=one.names, agreement=_agreement(one, len(answers)))
        for one, obj, relation, ignored in zip(
            found, objects, _relations(objects, sample.objects, overlap), in_ignored, strict=True
        )
        if not ignored
    ]


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
    """Count a sample's clusters with v votes and each relation. A cluster that contradicts counts once a label is
    confirmed too: an answer may be right and say something else besides."""
    counts = np.zeros((num_answers + 1, len(_COLUMNS)), dtype=np.int64)
    for one in found:
        counts[one.votes, _COLUMNS.index(one.relation)] += 1
    return counts


# ---- how many votes are enough --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionEstimate:
    """An estimate of completed labels, made without the truth. The lists are by votes, from 1 on."""

    min_votes: int | None  # None: nothing is completed, and `why` says why not
    why: str
    missing: float | None  # share of the objects without a label, at most; None: too little is known
    recall: tuple[float, ...]  # share of labels that are confirmed by clusters with at least so many votes
    precision: tuple[float, ...]  # largest share of right free clusters with exactly so many votes
    free: tuple[int, ...]  # free clusters with exactly so many votes

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

    def in_words(self, min_votes: int) -> str:
        """Return what is told after the number of completed labels; nothing if too little is known."""
        if self.missing is None:
            return ""
        right = f"about {self.free_right(min_votes):.0%} of these are right"
        return f"; estimate: {right}, and at most {self.missing:.0%} of the objects had no label"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def estimate(counts: Tally, num_labels: int) -> CompletionEstimate:
    """Estimate the threshold that `auto` takes. `counts`: the tallies of all samples, added up; `num_labels`: the
    number of their labels."""
    confirms, contradicts, free = (counts[1:, i].astype(float) for i in range(len(_COLUMNS)))
    near = confirms + contradicts
    recall = confirms[::-1].cumsum()[::-1] / max(1, num_labels)
    fit = _fit(confirms, near, free)
    min_votes, why = _threshold(fit, free)
    precision = fit.precision if fit is not None else np.zeros(len(near))
    return CompletionEstimate(
        min_votes=min_votes,
        why=why,
        missing=fit.missing if fit is not None else None,
        recall=tuple(recall.round(4).tolist()),
        precision=tuple(precision.round(4).tolist()),
        free=tuple(int(n) for n in free),
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
    enough = np.flatnonzero(near[::-1].cumsum()[::-1] >= MIN_CLUSTERS)
    if not len(enough):
        return None
    top = int(enough[-1])
    of_near, num_near = _not_falling(_joined(confirms, top), _joined(near, top))
    of_all, num_all = _not_falling(_joined(near, top), _joined(near + free, top))
    is_right, is_near = (of_near + 0.5) / (num_near + 1), (of_all + 0.5) / (num_all + 1)
    ratio = float((1 - is_near[-1]) / is_near[-1])
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


def _threshold(fit: _Fit | None, free: Counts) -> tuple[int | None, str]:
    if fit is None:
        return None, f"no number of votes has {MIN_CLUSTERS} clusters at labelled places: the answers say too little"
    unlabelled, surest = fit.surest
    if _least_share(unlabelled, surest) < MIN_MISSING:
        found = f"of the {surest:.0f} surest boxes {unlabelled:.0f} have no label"
        return None, f"at most {fit.missing:.1%} of the objects have no label, perhaps none: {found}"
    gained = (free * (2 * fit.precision - 1))[::-1].cumsum()[::-1]
    if gained.max() <= 0:
        return None, f"at most {fit.precision.max():.0%} of what could be completed would be right"
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
    overlap: float = OVERLAP,
    ignore_below: bool = False,
) -> Sample:
    """Return the sample with the free candidates that have enough votes as labels. `ignore_below`: those with fewer
    become ignore regions, which are neither taught nor counted as wrong."""
    free = sorted((one.object for one in found if one.relation == "free"), key=_votes_then_place)
    labels = _apart([obj for obj in free if obj.votes is not None and obj.votes.found >= min_votes], overlap)
    ignored = list(sample.ignored)
    if ignore_below:
        fewer = [obj for obj in free if obj.votes is not None and obj.votes.found < min_votes]
        near = iou_matrix(fewer, labels).max(axis=1, initial=0.0) >= overlap if fewer else []
        ignored += [obj._replace(desc="") for obj, taken in zip(fewer, near, strict=True) if not taken]
    return replace(sample, objects=canonical_order([*sample.objects, *labels]), ignored=tuple(ignored))


def _votes_then_place(obj: DetectionObject) -> tuple[int, tuple[int, ...], str]:
    return (-obj.votes.found if obj.votes else 0, obj.bins, obj.desc)


def _apart(objects: Sequence[DetectionObject], overlap: float) -> list[DetectionObject]:
    """Return the objects that overlap no earlier one that is kept."""
    iou, kept = iou_matrix(objects, objects), list[int]()
    for i in range(len(objects)):
        if all(iou[i, j] < overlap for j in kept):
            kept.append(i)
    return [objects[i] for i in kept]


def without_completed(sample: Sample) -> Sample:
    """Return the sample with its annotated labels only. Ignore regions of `ignore_below` have votes, too."""
    return replace(
        sample,
        objects=tuple(obj for obj in sample.objects if obj.votes is None),
        ignored=tuple(obj for obj in sample.ignored if obj.votes is None),
    )
