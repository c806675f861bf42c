"""The user's reward functions (`reward.functions`), called for each rollout.

In: a rollout, and what the task made of it. Out: each function's number by its name. Today they are metrics only. A
step reports the mean of each over its rollouts, an evaluation over its samples. Several threads may call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.extensions import Answer, Reward, where_raised
from learner.records import Rollout
from learner.tasks.task import Tokenizer
from shared.errors import RewardError

SCORED = "scored"  # how many rollouts have rewards: the count that sums of rewards are divided by
PREFIX = "reward/"


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """`functions` by name; none: no rewards."""

    tokenizer: Tokenizer
    functions: Mapping[str, Reward] = field(default_factory=dict)

    def sums(self, rollout: Rollout, assignment: Any) -> dict[str, float]:
        """`reward/NAME` of one rollout and `scored` 1, to be added up; {} without functions. Raises RewardError."""
        if not self.functions:
            return {}
        text = self.tokenizer.decode(list(rollout.response_token_ids), skip_special_tokens=True)
        answer = Answer(sample=rollout.sample, rollout=rollout, text=text, assignment=assignment)
        return {SCORED: 1.0, **{PREFIX + name: _score(name, f, answer) for name, f in self.functions.items()}}

    def means(self, rollouts: Sequence[Rollout], assignments: Sequence[Any]) -> dict[str, float]:
        """The mean of each function over some rollouts, and `reward`, the mean of their sum. Raises RewardError."""
        totals: dict[str, float] = {}
        for rollout, assignment in zip(rollouts, assignments, strict=True):
            for name, value in self.sums(rollout, assignment).items():
                totals[name] = totals.get(name, 0.0) + value
        return mean_rewards(totals)


def mean_rewards(counts: Mapping[str, float]) -> dict[str, float]:
    """Sums over rollouts as means: `reward/NAME`, and `reward` for all together; {} if nothing was scored."""
    scored = counts.get(SCORED, 0.0)
    means = {name: value / scored for name, value in counts.items() if name.startswith(PREFIX) and scored}
    return {"reward": sum(means.values()), **means} if means else {}


def _score(name: str, function: Reward, answer: Answer) -> float:
    try:
        value = function(answer)
    except Exception as error:
        raise _error(name, answer, where_raised(error)) from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _error(name, answer, f"it returned {value!r:.100}")
    return float(value)


def _error(name: str, answer: Answer, found: str) -> RewardError:
    return RewardError(
        f"the reward function {name} failed",
        found=f"{found}, for sample {answer.sample.sample_id}: {answer.text!r:.200}",
        wanted="a finite number for any answer",
        remedy="correct the function, or remove it from reward.functions",
    )
