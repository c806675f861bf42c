"""Gated one-to-one matching (SPEC.md "Words"): against trying every assignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from learner.tasks.detection.match import assign
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
