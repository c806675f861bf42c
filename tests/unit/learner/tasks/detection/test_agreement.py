"""Clusters of several answers' boxes (R43, R48)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.records import DetectionObject
from learner.tasks.detection.agreement import SAME_IOU, Cluster, cluster_objects
from learner.tasks.detection.geometry import iou_matrix


@st.composite
def boxes(draw: st.DrawFn) -> DetectionObject:
    x, y = draw(st.integers(0, 12)) * 20, draw(st.integers(0, 12)) * 20
    width, height = draw(st.integers(30, 120)), draw(st.integers(30, 120))
    return DetectionObject(draw(st.sampled_from("ab")), "bbox_2d", (x, y, x + width, y + height))


ANSWERS = st.lists(st.lists(boxes(), max_size=6), max_size=5)


def box(desc: str, *bins: int) -> DetectionObject:
    return DetectionObject(desc, "bbox_2d", bins)


def votes(clusters: Sequence[Cluster]) -> list[int]:
    return [cluster.votes for cluster in clusters]


@given(ANSWERS)
def test_every_object_is_in_one_cluster_and_an_answer_once_in_each(answers: list[list[DetectionObject]]) -> None:
    clusters = cluster_objects(answers)
    found = sorted((m.answer, m.place) for cluster in clusters for m in cluster.members)
    assert found == [(k, place) for k, answer in enumerate(answers) for place in range(len(answer))]
    for cluster in clusters:
        assert [m.answer for m in cluster.members] == sorted({m.answer for m in cluster.members})
        assert all(answers[m.answer][m.place] == m.object for m in cluster.members)
    assert votes(clusters) == sorted(votes(clusters), reverse=True)


@given(ANSWERS)
def test_what_a_cluster_says_is_a_box_in_the_midst_of_its_members(answers: list[list[DetectionObject]]) -> None:
    for cluster in cluster_objects(answers):
        bins = np.array([m.object.bins for m in cluster.members])
        x1, y1, x2, y2 = cluster.object.bins
        assert x1 < x2
        assert y1 < y2
        assert (bins.min(axis=0) <= cluster.object.bins).all()
        assert (cluster.object.bins <= bins.max(axis=0)).all()
        assert cluster.names[cluster.object.desc] == max(cluster.names.values())
        assert sum(cluster.names.values()) == cluster.votes


@given(ANSWERS)
def test_no_two_clusters_could_be_joined(answers: list[list[DetectionObject]]) -> None:
    clusters = cluster_objects(answers)
    for i, a in enumerate(clusters):
        for b in clusters[:i]:
            if {m.answer for m in a.members} & {m.answer for m in b.members}:
                continue
            between = iou_matrix([m.object for m in a.members], [m.object for m in b.members])
            assert between.mean() < SAME_IOU or between.max() < SAME_IOU


@given(st.lists(boxes(), max_size=6), st.integers(1, 5))
def test_equal_answers_agree_on_everything(answer: list[DetectionObject], number: int) -> None:
    clusters = cluster_objects([answer] * number)
    assert sorted(c.object for c in clusters) == sorted(answer)
    assert votes(clusters) == [number] * len(answer)


@given(st.lists(boxes(), max_size=6), st.randoms(use_true_random=False))
def test_the_order_inside_an_answer_does_not_matter(answer: list[DetectionObject], random: object) -> None:
    distinct = list(dict.fromkeys(answer))
    shuffled = list(distinct)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert votes(cluster_objects([distinct, shuffled])) == [2] * len(distinct)


def test_the_nearest_objects_are_joined_not_the_first() -> None:
    first, second = box("a", 0, 0, 100, 100), box("a", 30, 0, 130, 100)
    clusters = cluster_objects([[first, second], [second]])
    assert [[m.object for m in c.members] for c in clusters] == [[second, second], [first]]


def test_names_differ_in_a_cluster_but_equal_names_go_first() -> None:
    red, white = box("red", 0, 0, 100, 100), box("white", 0, 0, 100, 90)
    clusters = cluster_objects([[red], [white], [red]])
    assert [(c.object.desc, c.votes, c.names) for c in clusters] == [("red", 3, {"red": 2, "white": 1})]
    both = cluster_objects([[red, white], [red._replace(bins=(0, 0, 100, 95)), white._replace(bins=(0, 0, 100, 92))]])
    assert [c.names for c in both] == [{"red": 2}, {"white": 2}]


def test_a_repeated_object_is_a_cluster_of_its_own() -> None:
    one, other = box("a", 0, 0, 100, 100), box("a", 500, 500, 600, 600)
    clusters = cluster_objects([[one, one, other], [one]])
    assert [(c.object, c.votes) for c in clusters] == [(one, 2), (one, 1), (other, 1)]


def test_polygons_agree_on_the_one_that_overlaps_the_others_most() -> None:
    outlines = [
        DetectionObject("a", "poly", (0, 0, 100, 0, 100, 100, 0, 100)),
        DetectionObject("a", "poly", (5, 0, 105, 0, 105, 100, 5, 100)),
        DetectionObject("a", "poly", (20, 0, 120, 0, 120, 100, 20, 100)),
    ]
    (cluster,) = cluster_objects([[outline] for outline in outlines])
    assert cluster.object == outlines[1]


def test_no_answer_and_empty_answers_have_no_cluster() -> None:
    assert cluster_objects([]) == cluster_objects([[], []]) == []
