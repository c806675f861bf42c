"""Tests of what `bench.photographs` makes of a run's events."""

from __future__ import annotations

from bench.photographs import busy_shares


def test_rollouts_count_as_busy_beside_learning_and_before_it() -> None:
    ahead = {"step_s": 4.0, "learn_s": 3.0, "sync_s": 0.5, "stage2_ab/rollout_s": 3.6}
    in_turn = {"step_s": 4.0, "learn_s": 1.0, "rollout_s": 2.8}
    assert busy_shares([ahead]) == {"learner": 0.75, "rollouts": 0.9}
    assert busy_shares([ahead, in_turn]) == {"learner": 0.5, "rollouts": 0.8}
