"""Advantages of rollouts and of their objects, from rewards. Pure, numpy alone.

A group is the rollouts of one sample. An advantage is a reward minus what was to be expected: rollouts above it are
made more likely, those below it less. `group`: the group's mean (GRPO, arXiv:2402.03300). `rloo`: the mean of the
group's other rollouts (arXiv:2402.14740), which is the same times K / (K - 1). `batch`: the mean of all rollouts of the
optimizer step, on all ranks.

Objects. After j objects an answer with n of them has earned V[j]; what is still to come is V[n] - V[j], and 0 once it
closes. This reward to go is compared, object by object, with the mean of those of the group's other answers that came
so far. The mean depends on the others and on the place alone, so it favours no token. Where no other came so far there
is nothing to compare, and the advantage is 0: the longest answer of a group learns nothing from its last objects. An
object that adds nothing is made less likely where others found something at its place, and so is closing where others
went on and gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["group", "rloo", "batch"]


def sequence_advantages(
    rewards: NDArray[np.float64], baseline: Baseline, *, step_mean: float = 0.0
) -> NDArray[np.float64]:
    """[G, K] rewards of G groups to [G, K] advantages. `step_mean`: what `batch` compares with."""
    if baseline == "batch":
        return rewards - step_mean
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    return advantages * rewards.shape[1] / (rewards.shape[1] - 1) if baseline == "rloo" else advantages


def object_advantages(values: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return per rollout the advantage [n + 1] of each object, and of closing. `values`: V[0..n] of each rollout of a
    group."""
    longest = max(map(len, values))
    to_go = np.full((len(values), longest), np.nan)
    for row, value in zip(to_go, values, strict=True):
        row[: len(value)] = value[-1] - value
    came = ~np.isnan(to_go)
    others = came.sum(axis=0) - came
    totals = np.nansum(to_go, axis=0) - np.where(came, to_go, 0.0)
    expected = np.divide(totals, others, out=np.where(came, to_go, 0.0), where=others > 0)  # alone: nothing to tell
    return [(row - wanted)[: len(value)] for row, wanted, value in zip(to_go, expected, values, strict=True)]
