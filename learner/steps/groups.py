"""Turns groups of rollouts into segments for policy gradients (`grpo`, R37).

    Sample x K -> Rollout x K -> rewards -> advantages -> Segment x K

A sample occurs K = `num_generations` times in a row in the data (`data.batches`). The K places of a sample, and their K
rollouts, are its group. Servers, syncs, packing and ranks are used in the same way as for other rollouts. A segment is
the prompt and the rollout's own tokens, with the stop token. The labels of a segment are the rollout's tokens, and each
token has an advantage (`target.advantages`) and the log-probability with which it was sampled. The loss is
`policy.policy_gradient`.

Invariants: one segment per rollout, in order. A group is scored when all of its rollouts have ended, so a stream yields
a group's segments together. Advantages do not depend on micro-batches or ranks (D21): `advantage: batch` subtracts the
mean over the whole step on all ranks, which is computed before the first segment is made.

An advantage is a reward minus a baseline: rollouts above the baseline are made more likely, and rollouts below the
baseline less likely. There are three baselines. `group`: the group's mean (GRPO, arXiv:2402.03300). `rloo`: the mean of
the group's other rollouts (arXiv:2402.14740); the result is the advantage of `group` times K / (K - 1). `batch`: the
mean of all rollouts of the optimizer step, on all ranks.

With `credit: object` each object gets an advantage. After j of its n objects an answer has earned the reward V[j]. The
answer's reward to go is the reward that it earns later: V[n] - V[j]. After the answer is closed, the reward to go is 0.
The baseline after j objects is the mean reward to go of the group's other answers that have at least j objects. The
baseline does not depend on the answer itself, so it favours no token. If no other answer has that many objects, the
advantage is 0: the longest answer of a group learns nothing from its last objects. An object without reward is made
less likely if other answers earned a reward after the same number of objects. Closing the answer is made less likely if
other answers continued and earned more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.loss import LossConfig
from learner.extensions import PrefixRewards, Task
from learner.journal.groups_log import ScoredAnswer
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import EncodedPrompt, PolicyTokens, Rollout, Segment, Target
from learner.rollout.backend import MicroStep, RolloutBackend, RolloutStream
from learner.steps.segments import RolloutSource, in_groups
from learner.tasks.rewards import Rewards
from learner.tasks.supervision import build_segment, own_target
from shared.errors import ConfigError
from shared.pixels import ImageProcessing

GROUPS, NO_SIGNAL, REWARD_STD = "grpo/groups", "grpo/no_signal", "grpo/reward_std"
Baseline = Literal["group", "rloo", "batch"]
_ROUNDING = 1e-9  # advantages up to this size count as 0: the mean of equal rewards may differ in the last bit


class _Scored:
    """One rollout with its rewards."""

    def __init__(self, rollout: Rollout, source: GroupSource) -> None:
        self.rollout = rollout
        self.assignment = source.task.match(source.task.parse(rollout))
        self.parts = source.rewards.parts(rollout, self.assignment)
        self.num_tokens = len(rollout.response_token_ids) + (rollout.stop_token_id is not None)
        self.reward = source.rewards.total(self.parts)
        self.by_object: PrefixRewards | None = None
        if source.grpo.credit == "object":
            self.by_object = source.rewards.by_object(self.assignment)
            if self.by_object is None:
                raise ConfigError(
                    "grpo.credit: object: the task cannot tell what each object earns",
                    found=type(source.task).__name__,
                    wanted="a task with prefix_rewards, such as detection",
                    remedy="set grpo.credit: sequence",
                )


class GroupSource(RolloutSource):
    """Makes the segments of groups of rollouts. With `advantage: batch` all ranks must make segments together, on the
    trainer's thread."""

    def __init__(
        self,
        backend: RolloutBackend,
        task: Task,
        rewards: Rewards,
        *,
        grpo: GrpoConfig,
        loss: LossConfig,
        ranks: Ranks,
        on_answer: Callable[[Any, Target], None] | None = None,
        on_group: Callable[[Sequence[ScoredAnswer]], None] | None = None,
        image_processing: ImageProcessing | None = None,
    ) -> None:
        super().__init__(backend, task, rewards, loss=loss, on_answer=on_answer, image_processing=image_processing)
        self._ranks, self._on_group = ranks, on_group
        self.task, self.rewards, self.grpo = task, rewards, grpo
        # With `advantage: batch`, this holds the window's groups by global_step and micro_step_idx, and the mean
        # reward of the step on all ranks.
        self._scored: dict[tuple[int, int], list[list[_Scored]]] = {}
        self._step_mean = 0.0

    def begin_window(self, window: Sequence[MicroStep], *, global_step: int, clock: PhaseClock) -> None:
        super().begin_window(window, global_step=global_step, clock=clock)
        if self.grpo.advantage == "batch":
            with clock.phase("target"):
                self._scored = {key: self._groups(rollouts) for key, rollouts in self._made.items()}
                self._step_mean = self._mean_of_step([group for part in self._scored.values() for group in part])

    def _groups(self, rollouts: Sequence[Rollout]) -> list[list[_Scored]]:
        scored = [_Scored(rollout, self) for rollout in rollouts]
        size = self.grpo.num_generations
        groups = [scored[i : i + size] for i in range(0, len(scored), size)]
        assert all(len({one.rollout.sample.sample_id for one in group}) == 1 for group in groups), "a group is torn"
        return groups

    def reinforced(self, rollouts: Sequence[Rollout], prompts: Sequence[EncodedPrompt]) -> list[Segment]:
        """Return the segment of each rollout, in order. `rollouts` are whole groups; `prompts` has one per rollout."""
        return self._reinforced(self._groups(rollouts), prompts, 0.0)

    def _reinforced(
        self,
        groups: Sequence[Sequence[_Scored]],
        prompts: Sequence[EncodedPrompt],
        step_mean: float,
    ) -> list[Segment]:
        """Return the segment of each rollout, in order. `prompts` has one per rollout. `step_mean`: the baseline of
        `advantage: batch`."""
        found: list[Segment] = []
        prompt = iter(prompts)
        for group, per_token in zip(groups, self._advantages(groups, step_mean), strict=True):
            segments = [self._segment(one, next(prompt), tokens) for one, tokens in zip(group, per_token, strict=True)]
            has_signal = any((np.abs(tokens) > _ROUNDING).any() for tokens in per_token)
            deviation = float(np.std([one.reward for one in group]))
            counts = {GROUPS: 1.0, NO_SIGNAL: float(not has_signal), REWARD_STD: deviation}
            # Only the group's first segment gets the group's counts, because the statistics of all segments are added
            # up.
            segments[0] = replace(segments[0], stats={**segments[0].stats, **counts})
            found += segments
            if self._on_group is not None:
                self._on_group([_scored_answer(*one) for one in zip(group, per_token, strict=True)])
        return found

    def _advantages(self, groups: Sequence[Sequence[_Scored]], step_mean: float) -> list[list[NDArray[np.float64]]]:
        """Return the advantage of each token [T], per group and rollout."""
        return [
            [_of_tokens(step, one) for step, one in zip(own, group, strict=True)]
            for own, group in zip(self._steps(groups, step_mean), groups, strict=True)
        ]

    def _steps(self, groups: Sequence[Sequence[_Scored]], step_mean: float) -> list[list[NDArray[np.float64]]]:
        """Return the advantages of each rollout of each group: [n + 1] for its n objects and for closing the answer, or
        [1] for the whole answer."""
        whole = [sequence_advantages(one[None], self.grpo.advantage, step_mean=step_mean)[0] for one in _rest(groups)]
        steps = [[np.array([advantage]) for advantage in base] for base in whole]
        if self.grpo.credit == "object":
            earned = [
                object_advantages([one.by_object.values for one in group if one.by_object is not None])
                for group in groups
            ]
            steps = [[a + b for a, b in zip(*both, strict=True)] for both in zip(steps, earned, strict=True)]
        return steps

    def _mean_of_step(self, groups: Sequence[Sequence[_Scored]]) -> float:
        """Return the mean reward of the step's rollouts on all ranks, without the rewards of single objects. `groups`:
        this rank's rollouts of the step. Collective."""
        parts = [part for own in self._ranks.all_gather_object(_rest(groups)) for part in own]
        return float(np.concatenate(parts).mean()) if parts else 0.0

    def _segment(self, one: _Scored, prompt: EncodedPrompt, advantages: NDArray[np.float64]) -> Segment:
        rollout = one.rollout
        self._check(prompt, rollout)
        target = own_target(rollout)
        if self._on_answer is not None:
            self._on_answer(one.assignment, target)
        stats = {
            **self.task.stats(one.assignment),
            "rollout_tokens": float(len(rollout.response_token_ids)),
            **self.rewards.counts(one.parts),
        }
        segment = build_segment(prompt, target, sample_id=rollout.sample.sample_id, ver=rollout.ver, stats=stats)
        return replace(segment, policy=_policy_tokens(segment, advantages, rollout.logprobs))

    # ---- segments --------------------------------------------------------------------------------------------------

    def segments(
        self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int, clock: PhaseClock
    ) -> list[Segment]:
        """Return the segment of each rollout, in order."""
        rollouts = self._rollouts(step, global_step=global_step, clock=clock)
        with clock.phase("target"):
            self._check.prepare(prompts, rollouts)
            groups = self._scored.pop((global_step, step.micro_step_idx), None)
            step_mean = self._step_mean
            if groups is None:  # no window was begun, so the step learns only this micro-step
                groups = self._groups(rollouts)
                step_mean = self._mean_of_step(groups) if self.grpo.advantage == "batch" else 0.0
            return self._reinforced(groups, prompts, step_mean)

    def _as_ready(self, rollouts: RolloutStream, prompts: Sequence[EncodedPrompt]) -> Iterator[tuple[int, Segment]]:
        """Yield the segments of a group together, when its last rollout has ended."""
        assert self.grpo.advantage != "batch", "a step's mean is known when its last rollout has ended"
        for places, group in in_groups(rollouts, size=self.grpo.num_generations, number=len(prompts)):
            yield from zip(places, self.reinforced(group, [prompts[i] for i in places]), strict=True)


def _rest(groups: Sequence[Sequence[_Scored]]) -> list[NDArray[np.float64]]:
    """Return for each group the rewards [K] of its rollouts, without the rewards of single objects."""
    return [
        np.array([one.reward - (0.0 if one.by_object is None else one.by_object.values[-1]) for one in group])
        for group in groups
    ]


def _of_tokens(step: NDArray[np.float64], one: _Scored) -> NDArray[np.float64]:
    """Return the advantages of an answer's tokens [T]. `step`: the advantages [n + 1] of its n objects and of closing,
    or the advantage [1] of the whole answer."""
    if one.by_object is None:
        return np.full(one.num_tokens, step[0])
    return step[np.searchsorted(one.by_object.ends, np.arange(one.num_tokens), side="right")]


def _scored_answer(one: _Scored, advantages: NDArray[np.float64]) -> ScoredAnswer:
    return ScoredAnswer(
        sample=one.rollout.sample,
        assignment=one.assignment,
        reward=one.reward,
        advantages=advantages,
        ends=one.by_object.ends if one.by_object is not None else None,
    )


def _policy_tokens(segment: Segment, advantages: NDArray[np.float64], logprobs: Sequence[float] | None) -> PolicyTokens:
    start = segment.prompt_length
    aligned = [np.full(len(segment), fill, dtype=np.float32) for fill in (0.0, np.nan, np.nan)]
    aligned[0][start:] = advantages
    if logprobs is not None:
        aligned[1][start:] = logprobs
    return PolicyTokens(advantages=aligned[0], rollout_logprobs=aligned[1], first_logprobs=aligned[2])


def sequence_advantages(
    rewards: NDArray[np.float64], baseline: Baseline, *, step_mean: float = 0.0
) -> NDArray[np.float64]:
    """Return the advantages [G, K] of the rewards [G, K] of G groups. `step_mean`: the baseline of `batch`."""
    if baseline == "batch":
        return rewards - step_mean
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    return advantages * rewards.shape[1] / (rewards.shape[1] - 1) if baseline == "rloo" else advantages


def object_advantages(values: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return for each rollout of a group the advantages [n + 1] of its n objects and of closing the answer. `values`:
    for each rollout, the reward that it has earned after 0, 1, ..., n objects."""
    longest = max(map(len, values))
    to_go = np.full((len(values), longest), np.nan)
    for row, value in zip(to_go, values, strict=True):
        row[: len(value)] = value[-1] - value
    came = ~np.isnan(to_go)
    others = came.sum(axis=0) - came
    totals = np.nansum(to_go, axis=0) - np.where(came, to_go, 0.0)
    # If no other answer has as many objects, `out` makes the advantage 0.
    expected = np.divide(totals, others, out=np.where(came, to_go, 0.0), where=others > 0)
    return [(row - wanted)[: len(value)] for row, wanted, value in zip(to_go, expected, values, strict=True)]
