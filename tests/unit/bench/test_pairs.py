"""Pairs of runs with and without kills: which kills are drawn, and what their figures say."""

from __future__ import annotations

import random
from typing import Any

from bench.pairs import STEPS, broken, differences, kills_of


def row(f1: float, loss: float, weights: str = "a") -> dict[str, Any]:
    return {"f1@0.5": f1, "loss": loss, "weights": weights}


def test_each_run_loses_a_server_and_the_learner_while_it_learns() -> None:
    drawn = [kills_of(random.Random(seed)) for seed in range(20)]
    assert all(sorted(kills.values()) == ["learner", "server"] for kills in drawn)
    assert {step for kills in drawn for step in kills} == set(range(1, STEPS - 1))


def test_a_killed_run_may_differ_by_what_unkilled_ones_do() -> None:
    rows = {"1 first": row(0.6, 0.3), "1 again": row(0.61, 0.3, "b"), "1 killed": row(0.59, 0.3)}
    found = differences(rows | {"2 first": row(0.5, 0.2)}, range(1, 4))
    assert found["again"] == {"f1@0.5": [0.01], "loss": [0.0], "pairs": 1, "equal_weights": 0}
    assert found["killed"] == {"f1@0.5": [-0.01], "loss": [0.0], "pairs": 1, "equal_weights": 1}
    assert broken(found) == []
    assert broken(differences(rows | {"1 killed": row(0.6, 0.4)}, [1])) == [
        "loss differs by 0.1 under kills, by 0 without"
    ]
