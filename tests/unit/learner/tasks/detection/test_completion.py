"""Labels completed by what answers agree on (R48, D20)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from learner.records import DetectionObject, Sample
from learner.tasks.detection.agreement import cluster_objects
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.completion import (
    MIN_CLUSTERS,
    CompletionEstimate,
    LabelCandidate,
    candidates,
    completed,
    estimate,
    not_falling,
    tally,
    without_completed,
)
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.write import validate_sample
from tests.unit.learner.tasks.detection.test_agreement import boxes

OVERLAP = 0.3


LABELS = st.lists(boxes(), max_size=5)
ANSWERS = st.lists(st.lists(boxes(), max_size=5), min_size=1, max_size=4)


def sample_with(labels: Sequence[DetectionObject], ignored: Sequence[DetectionObject] = ()) -> Sample:
    return Sample(
        sample_id="s",
        messages=(),
        images=(),
        objects=canonical_order(labels),
        width=999,
        height=999,
        ignored=tuple(ignored),
    )


def box(desc: str, *bins: int) -> DetectionObject:
    return DetectionObject(desc, "bbox_2d", bins)


def overlap_of(a: DetectionObject, b: DetectionObject) -> float:
    return float(iou_matrix([a], [b])[0, 0])


def slowly_completed(sample: Sample, answers: Sequence[Sequence[DetectionObject]], min_votes: int) -> set[tuple]:
    """Return the reference: one cluster after the other, compared with one label after the other."""
    kept: list[DetectionObject] = []
    clusters = sorted(cluster_objects(answers), key=lambda one: (-one.votes, one.object.bins, one.object.desc))
    for cluster in clusters:
        if cluster.votes < min_votes:
            continue
        if all(overlap_of(cluster.object, other) < OVERLAP for other in [*sample.objects, *kept]):
            kept.append(cluster.object)
    return {(obj.desc, obj.bins) for obj in kept}


@given(LABELS, ANSWERS, st.integers(1, 4))
def test_what_is_added_is_what_the_slow_reference_adds(
    labels: list[DetectionObject], answers: list[list[DetectionObject]], min_votes: int
) -> None:
    sample = sample_with(labels)
    found = completed(sample, candidates(sample, answers), min_votes)
    added = [obj for obj in found.objects if obj.votes is not None]
    assert {(obj.desc, obj.bins) for obj in added} == slowly_completed(sample, answers, min_votes)
    assert [obj for obj in found.objects if obj.votes is None] == list(sample.objects)
    assert all(obj.votes.found >= min_votes and obj.votes.answers == len(answers) for obj in added if obj.votes)
    validate_sample(found, None)
    assert without_completed(found) == sample


@given(LABELS, ANSWERS)
def test_fewer_votes_add_no_fewer_labels(labels: list[DetectionObject], answers: list[list[DetectionObject]]) -> None:
    sample = sample_with(labels)
    found = candidates(sample, answers)
    sizes = [len(completed(sample, found, votes).objects) for votes in range(1, len(answers) + 2)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(sample.objects)


@given(LABELS, ANSWERS)
def test_completed_labels_confirm_themselves(
    labels: list[DetectionObject], answers: list[list[DetectionObject]]
) -> None:
    """A second completion by the same answers finds nothing more."""
    sample = sample_with(labels)
    once = completed(sample, candidates(sample, answers), 1)
    assert completed(once, candidates(once, answers), 1) == once


def test_boxes_in_an_ignore_region_are_no_labels() -> None:
    region, inside = box("", 0, 0, 200, 200), box("a", 10, 10, 100, 100)
    sample = sample_with([], [region])
    assert candidates(sample, [[inside], [inside]]) == []


def test_a_cluster_confirms_a_label_or_contradicts_it_or_is_free() -> None:
    sample = sample_with([box("a", 0, 0, 100, 100), box("b", 500, 500, 600, 600)])
    answer = [box("a", 0, 0, 100, 100), box("a", 500, 500, 600, 600), box("a", 300, 0, 400, 100)]
    found = {one.object.bins: one.relation for one in candidates(sample, [answer])}
    assert list(found.values()).count("free") == 1
    assert found[0, 0, 100, 100] == "confirms"
    assert found[500, 500, 600, 600] == "contradicts"
    assert tally(candidates(sample, [answer]), 1).tolist() == [[0, 0, 0], [1, 1, 1]]


# ---- the threshold -------------------------------------------------------------------------------------------------


def drawn(
    missing: float, seed: int, *, num_answers: int = 4, invented: float = 0.0, scenes: int = 600
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """Tallies of scenes in which each answer has an object with a chance of its own, labels are missing at random, and
    answers invent boxes on their own. Then, by votes: the free clusters, and those of them that are real."""
    rng = np.random.default_rng(seed)
    counts, num_labels = np.zeros((num_answers + 1, 3), dtype=np.int64), 0
    free, real = np.zeros(num_answers + 1), np.zeros(num_answers + 1)
    for _ in range(scenes):
        for labelled in rng.random(5) >= missing:
            num_labels += int(labelled)
            votes = rng.binomial(num_answers, rng.beta(4, 1.5))
            if votes:
                counts[votes, 0 if labelled else 2] += 1
                free[votes] += not labelled
                real[votes] += not labelled
        for _ in range(rng.poisson(invented)):
            votes = max(1, rng.binomial(num_answers, 0.2))
            counts[votes, 2] += 1
            free[votes] += 1
    return counts, num_labels, free[1:], real[1:]


@pytest.mark.parametrize("missing", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("invented", [0.0, 3.0])
def test_the_estimate_is_near_the_truth_where_labels_are_missing_at_random(missing: float, invented: float) -> None:
    counts, num_labels, free, real = drawn(missing, seed=1, invented=invented)
    found = estimate(counts, num_labels)
    assert found.missing == pytest.approx(missing, abs=0.06)
    right = real / np.maximum(free, 1)
    for is_so, said, number in zip(right, found.precision, free, strict=True):
        assert number < 50 or said == pytest.approx(is_so, abs=0.2)
    assert found.min_votes is not None
    assert all(right[found.min_votes - 1 :] >= 0.4)
    assert list(found.recall) == sorted(found.recall, reverse=True)


def test_nothing_is_completed_where_labels_are_complete() -> None:
    counts, num_labels, *_ = drawn(0.0, seed=2)
    found = estimate(counts, num_labels)
    assert found.min_votes is None
    assert found.why


def test_nothing_is_completed_by_a_model_that_reads_names_wrong() -> None:
    counts, num_labels, *_ = drawn(0.4, seed=3)
    counts[:, 1] = 2 * counts[:, 0]  # two of three clusters at a labelled place have another name
    found = estimate(counts, num_labels)
    assert found.min_votes is None
    assert max(found.precision) < 0.5


def test_nothing_is_completed_by_a_few_clusters() -> None:
    counts = np.zeros((5, 3), dtype=np.int64)
    counts[4] = MIN_CLUSTERS - 1, 0, 50
    found = estimate(counts, 100)
    assert (found.min_votes, found.missing) == (None, None)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7))
def test_shares_that_do_not_fall_are_the_slow_reference_s(counts: list[tuple[int, int]]) -> None:
    """The likeliest ones: at each place the largest, over all beginnings, of the smallest mean over all ends."""
    parts, wholes = np.array([a for a, _ in counts], float), np.array([a + b for a, b in counts], float)
    parts, wholes = parts[wholes > 0], wholes[wholes > 0]
    of, all_ = not_falling(parts, wholes)

    def share(first: int, last: int) -> float:
        return float(parts[first : last + 1].sum() / wholes[first : last + 1].sum())

    n = len(parts)
    slow = [max(min(share(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert (of / all_).tolist() == pytest.approx(slow)


def test_more_votes_are_no_less_sure() -> None:
    """A handful of clusters does not make the estimate fall where more answers agree."""
    counts, num_labels, *_ = drawn(0.4, seed=5, num_answers=8, scenes=60)
    counts[6] = 3, 9, 30
    precision = estimate(counts, num_labels).precision
    assert list(precision) == sorted(precision)


@pytest.mark.parametrize(("near", "free", "completes"), [(59, 1, False), (580, 20, True)])
def test_what_complete_labels_show_by_chance_completes_nothing(near: int, free: int, completes: bool) -> None:
    """One of 60 sure boxes without a label may be chance, 20 of 600 are not."""
    counts = np.zeros((5, 3), dtype=np.int64)
    counts[4] = near, 0, free
    found = estimate(counts, near)
    assert (found.min_votes is not None) == completes
    assert bool(found.why) != completes


@pytest.mark.parametrize("scenes", [30, 300])
def test_the_threshold_gains_nearly_what_the_best_one_would(scenes: int) -> None:
    """Right labels minus wrong ones, against the best threshold in hindsight, over 20 draws."""
    gained, best = 0.0, 0.0
    for seed in range(20):
        counts, num_labels, free, real = drawn(0.4, seed, num_answers=8, invented=2.0, scenes=scenes)
        found = estimate(counts, num_labels)
        gains = [float((2 * real - free)[votes:].sum()) for votes in range(8)]
        gained += gains[found.min_votes - 1] if found.min_votes else 0.0
        best += max(gains)
    assert gained >= 0.93 * best


def test_candidates_keep_what_answers_call_them() -> None:
    here = (0, 0, 100, 100)
    answers = [[box("a", *here)], [box("b", *here)], [box("a", *here)]]
    (found,) = candidates(sample_with([]), answers)
    assert isinstance(found, LabelCandidate)
    assert (found.object.desc, found.votes, found.names) == ("a", 3, {"a": 2, "b": 1})


def test_the_share_of_right_clusters_is_of_those_with_enough_votes() -> None:
    known = CompletionEstimate(
        min_votes=2, why="", missing=0.3, recall=(), precision=(0.1, 0.5, 0.9), free=(100, 10, 30)
    )
    assert TypeAdapter(CompletionEstimate).validate_json(json.dumps(known.to_json())) == known
    assert known.free_right(2) == (10 * 0.5 + 30 * 0.9) / 40
    assert known.free_right() == pytest.approx((10 + 5 + 27) / 140)
