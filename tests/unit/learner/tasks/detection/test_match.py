"""Gated one-to-one matching (SPEC.md "Words"): against trying every assignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linear_sum_assignment

from learner.records import DetectionObject
from learner.tasks.detection.calibrate import best_threshold
from learner.tasks.detection.match import Overlaps, assign, gains
from tests.examples import examples
from tests.unit.learner.tasks.fakes import box, make_rollout, make_task

MATRICES = hnp.arrays(
    np.float64,
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    elements=st.integers(0, 20).map(lambda v: v / 20),
)


def best_by_trying(iou: np.ndarray, feasible: np.ndarray) -> tuple[int, float]:
    """(pairs, total IoU) of the best one-to-one choice of feasible pairs."""
    allowed = [(p, t) for p, t in itertools.product(*map(range, iou.shape)) if feasible[p, t]]
    best = (0, 0.0)
    for size in range(1, min(iou.shape) + 1):
        for chosen in itertools.combinations(allowed, size):
            if len({p for p, _ in chosen}) == len({t for _, t in chosen}) == size:
                best = max(best, (size, sum(iou[pair] for pair in chosen)))
    return best


@given(MATRICES, st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
def test_most_pairs_then_most_overlap_among_feasible_ones(iou: np.ndarray, threshold: float) -> None:
    pairs = assign(iou, iou >= threshold)
    assert [p for p, _, _ in pairs] == sorted({p for p, _, _ in pairs})
    assert len({t for _, t, _ in pairs}) == len(pairs)
    assert all(value == iou[p, t] >= threshold for p, t, value in pairs)
    count, total = best_by_trying(iou, iou >= threshold)
    assert len(pairs) == count
    assert sum(value for _, _, value in pairs) == pytest.approx(total)


def test_infeasible_pairs_are_out_before_the_assignment() -> None:
    """Filtering afterwards would give one pair here: 0.9 + 0.4 beats 0.6 + 0.6 in sum, and 0.4 is below the gate."""
    iou = np.array([[0.9, 0.6], [0.6, 0.4]])
    assert [(p, t) for p, t, _ in assign(iou, iou >= 0.5)] == [(0, 1), (1, 0)]


def test_one_pair_more_is_worth_any_overlap() -> None:
    """Two pairs of 0.3 leave less unmatched than one of 1.0."""
    iou = np.array([[1.0, 0.3], [0.3, 0.1]])
    assert [(p, t) for p, t, _ in assign(iou, iou >= 0.25)] == [(0, 1), (1, 0)]


def test_descriptions_do_not_gate_and_the_rest_is_missed_or_spurious() -> None:
    task, tokenizer = make_task(coordinates="digits")
    truth = [box("one", 0, 0, 100, 100), box("two", 300, 300, 400, 400)]
    text = task.serialize([box("nine", 500, 500, 600, 600), box("seven", 0, 0, 100, 90)], after=None).text
    assignment = task.match(task.parse(make_rollout(tokenizer.encode(text), truth)))
    assert assignment.pairs == ((1, 0, 0.9),)
    assert assignment.missed == (1,)
    assert assignment.spurious == (0,)


@pytest.mark.parametrize(("truth", "predicted"), [(0, 0), (2, 0), (0, 2)])
def test_either_side_may_be_empty(truth: int, predicted: int) -> None:
    task, tokenizer = make_task(coordinates="digits")
    objects = [box("one", i, i, i + 9, i + 9) for i in range(2)]
    text = task.serialize(objects[:predicted], after=None).text
    assignment = task.match(task.parse(make_rollout(tokenizer.encode(text), objects[:truth])))
    assert assignment.pairs == ()
    assert assignment.missed == tuple(range(truth))
    assert assignment.spurious == tuple(range(predicted))


# ---- F1 by score ---------------------------------------------------------------------------------------------------

# Boxes of one row, each 100 wide: many lie on several objects.
BOXES = st.tuples(st.sampled_from("ab"), st.integers(0, 40)).map(
    lambda drawn: box(drawn[0], 7 * drawn[1], 0, 7 * drawn[1] + 100, 50)
)
REGIONS = st.tuples(st.sampled_from(["a", ""]), st.integers(0, 300)).map(
    lambda drawn: box(drawn[0], drawn[1], 0, drawn[1] + 150, 60)
)
SCORES = st.one_of(st.sampled_from([0.5, 0.25, -1.0]), st.floats(0, 1))
IMAGES = st.lists(
    st.tuples(
        st.lists(st.tuples(BOXES, SCORES), max_size=7), st.lists(BOXES, max_size=4), st.lists(REGIONS, max_size=1)
    ),
    min_size=1,
    max_size=3,
)
Image = tuple[list[tuple[DetectionObject, float]], list[DetectionObject], list[DetectionObject]]


def shared(a: DetectionObject, b: DetectionObject) -> float:
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.bins, b.bins
    return max(0, min(ax2, bx2) - max(ax1, bx1)) * max(0, min(ay2, by2) - max(ay1, by1))


def area(a: DetectionObject) -> float:
    return shared(a, a)


def counted(image: Image, threshold: float) -> tuple[int, int]:
    """Return the numbers of right and of judged boxes with this score or more, by one assignment of these boxes."""
    scored, truth, regions = image
    kept = [one for one, score in scored if score >= threshold]
    iou = np.array([[shared(p, t) / (area(p) + area(t) - shared(p, t)) for t in truth] for p in kept])
    iou = iou.reshape(len(kept), len(truth))
    fits = np.array([[p.desc == t.desc for t in truth] for p in kept], dtype=bool).reshape(iou.shape) & (iou >= 0.5)
    rows, columns = linear_sum_assignment(np.where(fits, iou + 1 + min(iou.shape), 0.0), maximize=True)
    right = {p for p, t in zip(rows, columns, strict=True) if fits[p, t]}
    ignored = [
        i
        for i, p in enumerate(kept)
        if i not in right and any(r.desc in (p.desc, "") and shared(p, r) >= 0.5 * area(p) for r in regions)
    ]
    return len(right), len(kept) - len(ignored)


@given(IMAGES)
@settings(deadline=None, max_examples=examples(300))
def test_gains_add_up_to_the_match_of_every_threshold(images: list[Image]) -> None:
    """R43: the counts of any threshold, and the threshold with the best F1, as one assignment a threshold has them."""
    overlaps = [Overlaps.of([one for one, _ in scored], truth, regions) for scored, truth, regions in images]
    scores = np.array([score for scored, _, _ in images for _, score in scored])
    found, num_truth = gains(overlaps, scores), sum(len(truth) for _, truth, _ in images)

    def f1(threshold: float) -> float:
        right, judged = (sum(each) for each in zip(*(counted(image, threshold) for image in images), strict=True))
        kept = scores >= threshold
        assert (found.right[kept].sum(), found.judged[kept].sum()) == (right, judged)
        return 2 * right / max(judged + num_truth, 1)

    best = max(map(f1, scores.tolist()), default=0.0)
    assert f1(best_threshold(found, scores, num_truth)) == pytest.approx(best)
