"""Rewards that a task of the user's own gives, by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from learner.records import Rollout
from learner.tasks.rewards import Rewards
from shared.errors import RewardError
from tests.unit.learner.steps.test_segments import TASK, TOKENIZER, sample


class OwnTask(type(TASK)):  # type: ignore[misc]
    def rewards(self, assignment: Any, names: Collection[str]) -> dict[str, float]:
        return {name: 1.0 for name in names if name == "tidy"}


def test_a_name_that_the_task_does_not_score_ends_the_run() -> None:
    """Nobody can list the rewards of a user's task, so its first answer says which there are."""
    task = OwnTask(TASK.config, TOKENIZER)
    text = {"prompt_token_ids": (1,), "response_token_ids": (), "finish_reason": "stop"}
    rollout = Rollout(sample=sample(0), ver=1, seed=0, **text)
    known = Rewards(tokenizer=TOKENIZER, weights={"tidy": 2.0}, task=task)
    assert known.total(known.parts(rollout, None)) == 2.0
    with pytest.raises(RewardError) as caught:
        Rewards(tokenizer=TOKENIZER, weights={"tidy": 2.0, "tydi": 1.0}, task=task).parts(rollout, None)
    assert caught.value.found == "tydi"
    assert "reward.weights" in caught.value.remedy
