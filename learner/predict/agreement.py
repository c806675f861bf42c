"""The objects that K answers to one image agree on, and the share of objects that probably have no label.

In: the objects of K answers drawn at temperature 1, and the labels of the image. Pure.

1. Of each answer, repetitions are left out: objects with the same description and IoU >= 0.5 with an earlier one.
2. Objects of different answers with the same description and IoU >= 0.5 are one *finding*; its votes are the answers
   that have it. Pairs are one-to-one.
3. A finding with votes >= `agreement` x K is *agreed on*. That many draws of one thing is how confidence shows.
4. A finding that is agreed on is *labelled* if it can be paired with a label of the same description at IoU >= 0.5. It
   is *unlabelled* if it lies apart from every label (IoU < 0.3, whatever the description) and from ignore regions.
   Others are left out: a label is there, but says something else.

The estimate of `missing labels` is unlabelled / (labelled + unlabelled). Objects that the model does not find are in
neither number, so a model that finds only half of them gives the same estimate, if labels are missing at random. A
model that invents the same object again and again makes the estimate too large. A model that has learned to leave out
what has no label makes it too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, DetectionObject, PredictedObject, Sample
from learner.tasks.detection.completion import candidates, tally
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import assign
from learner.tasks.detection.metrics import count_objects, ignored_shares

SAME_IOU = 0.5
APART_IOU = 0.3
AGREEMENT = 0.5  # share of the answers
MAJORITY = 0.5
Counts = NDArray[np.float64]  # [..., len(metrics.COLUMNS)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """K answers to each of N scenes, as counts of the detection metrics."""

    sampled: Counts  # [N, K, columns]
    union: Counts  # [N, columns] every finding once
    majority: Counts  # [N, columns] the findings of at least half of the answers
    agreed: NDArray[np.float64]  # [N, 2] findings agreed on with a label, and without one
    tallies: NDArray[np.float64]  # [N, K + 1, 3] what `labels.complete` counts: clusters by votes and relation


def drawn_of(groups: Sequence[Sequence[Assignment]], agreement: float = AGREEMENT) -> Drawn:
    """Counts of each scene's answers: all groups have the same size, and there is at least one."""
    size = len(groups[0])
    samples = [group[0].parsed.rollout.sample for group in groups]
    answers = [[_objects(one) for one in group] for group in groups]
    found = [findings(own) for own in answers]
    labels = [
        labelled_and_unlabelled(agreed(one, size, agreement), sample)
        for one, sample in zip(found, samples, strict=True)
    ]
    tallies = [tally(candidates(sample, own), size) for sample, own in zip(samples, answers, strict=True)]
    return Drawn(
        sampled=np.stack([count_objects(group).values for group in groups]),
        union=_counts(groups, [agreed(one, size, 0.0) for one in found]),
        majority=_counts(groups, [agreed(one, size, MAJORITY) for one in found]),
        agreed=np.array(labels, dtype=np.float64),
        tallies=np.array(tallies, dtype=np.float64),
    )


class AgreedObject(NamedTuple):
    """One thing that answers say, as the first of them said it, and how many do."""

    object: DetectionObject
    votes: int


def findings(answers: Sequence[Sequence[DetectionObject]]) -> list[AgreedObject]:
    """Return what the answers say, each thing once, in the order in which it was first said."""
    found: list[DetectionObject] = []
    votes: list[int] = []
    for answer in answers:
        objects = _without_repetitions(answer)
        known = {p: f for p, f, _ in _pairs(objects, found)}
        for f in known.values():
            votes[f] += 1
        new = [obj for p, obj in enumerate(objects) if p not in known]
        found += new
        votes += [1] * len(new)
    return [AgreedObject(obj, count) for obj, count in zip(found, votes, strict=True)]


def agreed(found: Sequence[AgreedObject], num_answers: int, share: float = AGREEMENT) -> list[DetectionObject]:
    """Return the findings that at least this share of the answers has."""
    return [finding.object for finding in found if finding.votes >= math.ceil(share * num_answers - 1e-9)]


def labelled_and_unlabelled(objects: Sequence[DetectionObject], sample: Sample) -> tuple[int, int]:
    """Return how many of the objects agreed on have a label, and how many have none."""
    paired = {p for p, *_ in _pairs(objects, sample.objects)}
    near_label = iou_matrix(objects, sample.objects).max(axis=1, initial=0.0) >= APART_IOU
    near = near_label | (ignored_shares(objects, sample.ignored)[1] >= SAME_IOU)
    return len(paired), sum(p not in paired and not near[p] for p in range(len(objects)))


def _without_repetitions(objects: Sequence[DetectionObject]) -> list[DetectionObject]:
    close = iou_matrix(objects, objects) >= SAME_IOU
    repeats = np.tril(close & _same(objects, objects), k=-1)
    return [obj for obj, earlier in zip(objects, repeats, strict=True) if not earlier.any()]


def _pairs(a: Sequence[DetectionObject], b: Sequence[DetectionObject]) -> list[tuple[int, int, float]]:
    iou = iou_matrix(a, b)
    return assign(iou, (iou >= SAME_IOU) & _same(a, b)) if iou.size else []


def _same(a: Sequence[DetectionObject], b: Sequence[DetectionObject]) -> NDArray[np.bool_]:
    return np.array([[x.desc == y.desc for y in b] for x in a], dtype=bool).reshape(len(a), len(b))


def _objects(assignment: Assignment) -> list[DetectionObject]:
    return [predicted.object for predicted in assignment.parsed.objects]


def _counts(groups: Sequence[Sequence[Assignment]], said: Sequence[Sequence[DetectionObject]]) -> Counts:
    """The counts of answers that say these objects, one answer per group."""
    answers = []
    for group, objects in zip(groups, said, strict=True):
        predicted = tuple(PredictedObject(obj, range(0)) for obj in objects)
        answers.append(replace(group[0], parsed=replace(group[0].parsed, objects=predicted)))
    return count_objects(answers).values
