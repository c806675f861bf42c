"""Clusters boxes on which several answers to one sample agree.

In: the objects of K answers. Out: every object in exactly one cluster. A cluster has at most one object of each answer.
The votes of a cluster are the number of answers that have the object. No side effects; IoU is exact.

Two clusters are joined if no answer has objects in both, and the mean IoU between their objects is at least `SAME_IOU`.
Pairs with the same name are joined first, then pairs with different names; in both groups the highest IoU goes first.
So two objects at the same position keep their names, and answers with different names for one object still make one
cluster. The order of the answers matters only among equal pairs.

If an answer repeats an object, the repetition begins another cluster at the same position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import DetectionObject
from learner.tasks.detection.bins import canonical_key
from learner.tasks.detection.geometry import iou_matrix

SAME_IOU = 0.5


class ClusterMember(NamedTuple):
    """One answer's object in a cluster. `answer`: the answer's index. `place`: the object's index in the answer."""

    answer: int
    place: int
    object: DetectionObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Objects of different answers that count as one object. `members` are sorted by answer; there is at least one
    member, and at most one per answer.

    `object` has the most frequent name (of equally frequent names, the first answer's name) and the median of the
    boxes. If a member is a polygon, `object` has the geometry of the member that overlaps the others most.
    """

    members: tuple[ClusterMember, ...]
    object: DetectionObject

    @property
    def votes(self) -> int:
        """Return how many answers found the object."""
        return len(self.members)

    @property
    def names(self) -> dict[str, int]:
        """Return how many answers give each name, the most frequent first."""
        return dict(Counter(member.object.desc for member in self.members).most_common())


def cluster_objects(answers: Sequence[Sequence[DetectionObject]]) -> list[Cluster]:
    """Return the clusters of the objects of K answers: most votes first, then in canonical order."""
    members = [ClusterMember(k, place, obj) for k, answer in enumerate(answers) for place, obj in enumerate(answer)]
    iou = iou_matrix([m.object for m in members], [m.object for m in members])
    groups = _groups(members, iou)
    clusters = [
        Cluster(members=tuple(members[i] for i in g), object=_agreed([members[i] for i in g], iou[np.ix_(g, g)]))
        for g in groups
    ]
    return sorted(clusters, key=lambda cluster: (-cluster.votes, canonical_key(cluster.object)))


def _groups(members: Sequence[ClusterMember], iou: NDArray[np.float64]) -> list[list[int]]:
    """Return the indices of each cluster's members, ascending. `iou` is [N, N]."""
    group_of = list(range(len(members)))
    groups = {i: [i] for i in range(len(members))}
    answers = {i: {member.answer} for i, member in enumerate(members)}
    for i, j in _pairs(members, iou):
        a, b = group_of[i], group_of[j]
        # Two boxes of one answer never count as two votes: they are two objects, or a repetition.
        if a == b or answers[a] & answers[b] or iou[np.ix_(groups[a], groups[b])].mean() < SAME_IOU:
            continue
        for k in groups[b]:
            group_of[k] = a
        groups[a] += groups.pop(b)
        answers[a] |= answers.pop(b)
    return [sorted(group) for group in groups.values()]


def _pairs(members: Sequence[ClusterMember], iou: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the indices of overlapping objects of different answers as pairs, in the order in which they are joined.
    Equally good pairs are sorted by index in the answers: if two answers repeat one box, their first copies are joined,
    then their second copies."""
    rows, columns = np.nonzero((np.triu(iou, k=1) >= SAME_IOU) & (np.triu(iou, k=1) > 0))
    found = []
    for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
        a, b = members[i], members[j]
        if a.answer != b.answer:
            places = sorted((a.place, b.place), reverse=True)
            # Pairs of one name come first, so two objects at the same position keep their names.
            found.append((a.object.desc != b.object.desc, -float(iou[i, j]), places, i, j))
    return [(i, j) for *_, i, j in sorted(found)]


def _agreed(members: Sequence[ClusterMember], iou: NDArray[np.float64]) -> DetectionObject:
    """Return the object of a cluster. `iou` [M, M] has the rows and columns of `members`."""
    desc = Counter(member.object.desc for member in members).most_common(1)[0][0]
    # Polygons have different numbers of points, so they have no median.
    if any(member.object.kind != "bbox_2d" for member in members):
        return members[int(iou.sum(axis=1).argmax())].object._replace(desc=desc)
    # The median is nearer to the true box than the mean on digits (IoU 0.959 and 0.954), and as near on photographs of
    # cells. A mean weighted by probabilities is nearer (0.961), but needs log-probabilities.
    corners = np.sort([member.object.bins for member in members], axis=0)  # [M, 4], each column is sorted.
    # The medians of x1 and x2 are both rounded down, so x1 < x2 stays true. In the same way y1 < y2 stays true.
    middle = (corners[(len(members) - 1) // 2] + corners[len(members) // 2]) // 2
    return DetectionObject(desc, "bbox_2d", tuple(middle.tolist()), image=members[0].object.image)
