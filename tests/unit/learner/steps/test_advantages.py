"""Advantages against their definitions, written as loops (R37)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from learner.steps.groups import Baseline, object_advantages, sequence_advantages

REWARDS = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 4), st.integers(2, 8)), elements=st.integers(-10, 10).map(lambda v: v / 7)
)
VALUES = st.lists(st.lists(st.integers(0, 12).map(lambda v: v / 12), min_size=1, max_size=6), min_size=2, max_size=6)
BASELINES: list[Baseline] = ["group", "rloo", "batch"]


def by_hand(rewards: np.ndarray, baseline: Baseline) -> np.ndarray:
    found = np.zeros_like(rewards)
    for g, group in enumerate(rewards):
        for k, own in enumerate(group):
            others = [reward for i, reward in enumerate(group) if i != k]
            compared = {"group": list(group), "rloo": others, "batch": list(rewards.flatten())}[baseline]
            found[g, k] = own - sum(compared) / len(compared)
    return found


@pytest.mark.parametrize("baseline", BASELINES)
@given(rewards=REWARDS)
def test_a_reward_is_compared_with_its_baseline(baseline: Baseline, rewards: np.ndarray) -> None:
    found = sequence_advantages(rewards, baseline, step_mean=float(rewards.mean()))
    np.testing.assert_allclose(found, by_hand(rewards, baseline), atol=1e-12)
    sums = found.sum() if baseline == "batch" else found.sum(axis=1)
    np.testing.assert_allclose(sums, 0.0, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_rewards_tell_nothing(baseline: Baseline) -> None:
    """The mean of equal numbers may be off by a rounding error, which must not be blown up."""
    for size in range(2, 10):
        rewards = np.full((3, size), 0.1)
        found = sequence_advantages(rewards, baseline, step_mean=float(rewards.mean()))
        np.testing.assert_allclose(found, 0.0, atol=1e-9)


# ---- objects -------------------------------------------------------------------------------------------------------


def objects_by_hand(values: list[list[float]]) -> list[list[float]]:
    found = []
    for own, value in enumerate(values):
        steps = []
        for place in range(len(value)):
            others = [v[-1] - v[place] for i, v in enumerate(values) if i != own and place < len(v)]
            to_go = value[-1] - value[place]
            steps.append(to_go - sum(others) / len(others) if others else 0.0)
        found.append(steps)
    return found


@given(values=VALUES)
def test_reward_to_go_is_compared_place_by_place_with_the_other_answers(values: list[list[float]]) -> None:
    found = object_advantages([np.array(value) for value in values])
    for steps, wanted in zip(found, objects_by_hand(values), strict=True):
        np.testing.assert_allclose(steps, wanted, atol=1e-12)


def test_closing_too_early_costs_and_going_on_to_a_right_object_pays() -> None:
    closed, went_on = object_advantages([np.array([0.0, 0.67]), np.array([0.0, 0.67, 1.0])])
    assert closed[1] < 0 < went_on[1]
    assert went_on[2] == 0.0  # nobody else came so far


def test_a_duplicate_costs_and_closing_in_its_place_pays() -> None:
    closed, repeated = object_advantages([np.array([0.0, 1.0]), np.array([0.0, 1.0, 0.67])])
    assert repeated[1] < 0 < closed[1]


def test_one_answer_without_objects_beside_one_with() -> None:
    empty, found = object_advantages([np.array([0.0]), np.array([0.0, 1.0])])
    assert (empty.tolist(), found.tolist()) == ([-1.0], [1.0, 0.0])
