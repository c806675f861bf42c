"""Computes rewards of rollouts: the user's functions (`reward.functions`), the task's rewards, and a weighted sum.

In: a rollout, and its assignment by the task. Out: each reward's value by name. A step reports the mean of each reward
over its rollouts, an evaluation over its samples. `grpo` learns the weighted sum. Several threads may compute rewards
at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.extensions import Answer, PrefixRewards, Reward, Task, Tokenizer, where_raised
from learner.records import Rollout
from shared.errors import RewardError

# Key for the number of rollouts with rewards. Sums are divided by this number.
SCORED = "scored"
TOTAL = "rewarded"  # key for the weighted rewards, added up over rollouts
PREFIX = "reward/"


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The rewards of a run. `functions` are the user's, by name. `weights` has the weights of these functions (default
    1), and of the task's rewards."""

    tokenizer: Tokenizer
    functions: Mapping[str, Reward] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    task: Task | None = None

    def parts(self, rollout: Rollout, assignment: object) -> dict[str, float]:
        """Return each reward of one rollout, by name. Raises RewardError."""
        own = [name for name in self.weights if name not in self.functions]
        found = dict(self.task.rewards(assignment, own)) if self.task is not None and own else {}
        if unknown := sorted(set(own) - found.keys()):
            raise RewardError(
                "reward.weights names a reward that does not exist",
                found=", ".join(unknown),
                wanted="functions of reward.functions, and rewards that the task returns for every answer",
                remedy="correct the name, or remove it from reward.weights",
            )
        if self.functions:
            text = self.tokenizer.decode(list(rollout.response_token_ids), skip_special_tokens=True)
            answer = Answer(sample=rollout.sample, rollout=rollout, text=text, assignment=assignment)
            found |= {name: _score(name, function, answer) for name, function in self.functions.items()}
        return found

    def total(self, parts: Mapping[str, float]) -> float:
        """Return the weighted sum of the rewards `parts`, given by name."""
        return sum(self.weights.get(name, 1.0) * value for name, value in parts.items())

    def by_object(self, assignment: object) -> PrefixRewards | None:
        """Return the task's part of the total after each object of the answer; None if the task cannot divide it by
        objects."""
        weights = {name: weight for name, weight in self.weights.items() if name not in self.functions}
        return self.task.prefix_rewards(assignment, weights) if self.task is not None else None

    def sums(self, rollout: Rollout, assignment: object) -> dict[str, float]:
        """Compute the rewards of one rollout, and return their `counts`; {} if there are no rewards. Raises
        RewardError."""
        return self.counts(self.parts(rollout, assignment))

    def counts(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return numbers to be added up over rollouts: each reward in `parts` as `reward/NAME`, their weighted sum, and
        1 as the number of rollouts."""
        if not parts:
            return {}
        return {SCORED: 1.0, TOTAL: self.total(parts), **{PREFIX + name: value for name, value in parts.items()}}

    def means(self, rollouts: Sequence[Rollout], assignments: Sequence[object]) -> dict[str, float]:
        """Return the mean of each reward over some rollouts, and `reward`, the mean of their weighted sum. Raises
        RewardError."""
        totals: dict[str, float] = {}
        for rollout, assignment in zip(rollouts, assignments, strict=True):
            for name, value in self.sums(rollout, assignment).items():
                totals[name] = totals.get(name, 0.0) + value
        return mean_rewards(totals)


def mean_rewards(counts: Mapping[str, float]) -> dict[str, float]:
    """Return means from sums over rollouts: `reward/NAME`, and `reward` for the total; {} if no rollout was scored."""
    scored = counts.get(SCORED, 0.0)
    if not scored:
        return {}
    means = {name: value / scored for name, value in counts.items() if name.startswith(PREFIX)}
    return {"reward": counts[TOTAL] / scored, **means}


def _score(name: str, function: Reward, answer: Answer) -> float:
    try:
        value = function(answer)
    # The user's function may raise any error.
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
