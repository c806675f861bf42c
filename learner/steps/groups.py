"""Policy gradients on the line of rollout matching (`grpo`, R37): groups of rollouts to segments.

    Sample x K -> Rollout x K -> rewards -> advantages -> Segment x K

A sample comes K = `num_generations` times in a row (`data.batches`), and the K places are its group. Everything else
is as for other rollouts: servers, sync, packing, ranks, rollouts in step or ahead. A segment is the prompt and the
rollout's own tokens, the stop token included. Its labels are those tokens, and each has an advantage
(`target.advantages`) and the log-probability with which it was drawn. The loss is `policy.policy_gradient`.

Invariants: one segment per place, in order. A group is scored when all of its rollouts are there, so a stream hands on
its segments together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.config.schema import GrpoConfig, LossConfig
from learner.data.prompt import check_prompt_prefix
from learner.extensions import PrefixRewards, Task
from learner.records import EncodedPrompt, PolicyTokens, Rollout, Sample, Segment, Target
from learner.rollout.backend import RolloutBackend, RolloutStream
from learner.run.groups import ScoredAnswer
from learner.run.log import PhaseClock
from learner.steps.segments import RolloutSource, SegmentStream, in_groups, silent
from learner.target.advantages import object_advantages, overlong_penalty, sequence_advantages
from learner.target.target import build_segment, own_target
from learner.tasks.rewards import Rewards
from shared.errors import ConfigError

GROUPS, NO_SIGNAL, REWARD_STD = "grpo/groups", "grpo/no_signal", "grpo/reward_std"
TAUGHT = "grpo/taught"  # segments besides those of the rollouts (`sft_weight`, `matching_weight`)
_ROUNDING = 1e-9  # of advantages: the mean of equal rewards may differ from them in the last bit


class _Scored:
    """One rollout with its rewards."""

    def __init__(self, rollout: Rollout, prompt: EncodedPrompt, source: GroupSource) -> None:
        tokenizer, settings = source.rewards.tokenizer, source.grpo
        check_prompt_prefix(
            prompt.token_ids, rollout.prompt_token_ids, rollout.sample.sample_id, decode=tokenizer.decode
        )
        self.rollout, self.prompt = rollout, prompt
        self.assignment = source.task.match(source.task.parse(rollout))
        self.parts = source.rewards.parts(rollout, self.assignment)
        self.num_tokens = len(rollout.response_token_ids) + (rollout.stop_token_id is not None)
        penalty = overlong_penalty(
            len(rollout.response_token_ids),
            most=source.max_new_tokens,
            buffer=settings.overlong_tokens,
            penalty=settings.overlong_penalty,
        )
        self.reward = source.rewards.total(self.parts) - penalty
        self.by_object: PrefixRewards | None = None
        if settings.credit == "object":
            self.by_object = source.rewards.by_object(self.assignment)
            if self.by_object is None:
                raise ConfigError(
                    "grpo.credit: object: the task cannot tell what each object earns",
                    found=type(source.task).__name__,
                    wanted="a task with prefix_rewards, such as detection",
                    remedy="set grpo.credit: sequence",
                )


class GroupSource(RolloutSource):
    """`max_new_tokens` is the longest answer that is asked for."""

    def __init__(
        self,
        backend: RolloutBackend,
        task: Task,
        rewards: Rewards,
        *,
        grpo: GrpoConfig,
        max_new_tokens: int,
        loss: LossConfig,
        on_answer: Callable[[Any, Target], None] | None = None,
        on_group: Callable[[Sequence[ScoredAnswer]], None] | None = None,
    ) -> None:
        super().__init__(backend, task, rewards, loss=loss, on_answer=on_answer)
        self._on_group = on_group
        self.task, self.rewards, self.grpo, self.max_new_tokens = task, rewards, grpo, max_new_tokens

    def _groups(self, rollouts: Sequence[Rollout], prompts: Sequence[EncodedPrompt]) -> list[list[_Scored]]:
        scored = [_Scored(rollout, prompt, self) for rollout, prompt in zip(rollouts, prompts, strict=True)]
        size = self.grpo.num_generations
        groups = [scored[i : i + size] for i in range(0, len(scored), size)]
        assert all(len({one.rollout.sample.sample_id for one in group}) == 1 for group in groups), "a group is torn"
        return groups

    def reinforced(self, rollouts: Sequence[Rollout], prompts: Sequence[EncodedPrompt]) -> list[Segment]:
        """Of whole groups: the segment of each rollout, in order."""
        return self._reinforced(self._groups(rollouts, prompts))

    def _reinforced(self, groups: Sequence[Sequence[_Scored]]) -> list[Segment]:
        """Of each rollout, in order."""
        if not groups:
            return []
        rewards = np.array([[one.reward for one in group] for group in groups])
        advantages = self._advantages(groups, rewards)
        found: list[Segment] = []
        for group, own, per_token in zip(groups, rewards, advantages, strict=True):
            segments = [self._segment(one, tokens) for one, tokens in zip(group, per_token, strict=True)]
            has_signal = any((np.abs(tokens) > _ROUNDING).any() for tokens in per_token)
            counts = {GROUPS: 1.0, NO_SIGNAL: float(not has_signal), REWARD_STD: float(own.std())}
            segments[0] = replace(segments[0], stats={**segments[0].stats, **counts})
            found += segments if has_signal or not self.grpo.skip_no_signal else map(silent, segments)
            if self._on_group is not None:
                self._on_group([_scored_answer(*one) for one in zip(group, per_token, strict=True)])
        return found

    def _advantages(
        self, groups: Sequence[Sequence[_Scored]], rewards: NDArray[np.float64]
    ) -> list[list[NDArray[np.float64]]]:
        """Per group, per rollout: of each token [T]."""
        settings = self.grpo
        objects = [[one.by_object for one in group] for group in groups]
        # What objects earn one by one is compared object by object, and only the rest rollout by rollout.
        rest = rewards - np.array([[one.values[-1] if one else 0.0 for one in group] for group in objects])
        whole = sequence_advantages(rest, settings.advantage)
        steps = [[np.array([advantage]) for advantage in base] for base in whole]
        if settings.credit == "object":
            earned = [object_advantages([one.values for one in group if one is not None]) for group in objects]
            steps = [[a + b for a, b in zip(*both, strict=True)] for both in zip(steps, earned, strict=True)]
        if settings.normalize_std:
            deviations = self._deviations(steps, rewards)
            steps = [[step / by for step in group] for group, by in zip(steps, deviations, strict=True)]
        return [
            [_of_tokens(step, one) for step, one in zip(own, group, strict=True)]
            for own, group in zip(steps, groups, strict=True)
        ]

    def _deviations(
        self, steps: Sequence[Sequence[NDArray[np.float64]]], rewards: NDArray[np.float64]
    ) -> Sequence[float]:
        """What the advantages of each group are divided by. Objects differ also where rewards are equal, so by objects
        it is the deviation of what each of them gained."""
        compared = [np.concatenate(group) for group in steps] if self.grpo.credit == "object" else list(rewards)
        if self.grpo.advantage == "batch":
            compared = [np.concatenate(compared)] * len(compared)
        return [float(one.std()) + 1e-6 for one in compared]

    def _segment(self, one: _Scored, advantages: NDArray[np.float64]) -> Segment:
        rollout = one.rollout
        weight, extra = self._weights(one.num_tokens)
        target = own_target(rollout, weight)
        if self._on_answer is not None:
            self._on_answer(one.assignment, target)
        stats = {
            **self.task.stats(one.assignment),
            "rollout_tokens": float(len(rollout.response_token_ids)),
            **self.rewards.counts(one.parts),
        }
        segment = build_segment(one.prompt, target, sample_id=rollout.sample.sample_id, ver=rollout.ver, stats=stats)
        return replace(segment, policy=_policy_tokens(segment, advantages, rollout.logprobs), extra_weight=extra)

    def _weights(self, length: int) -> tuple[float, float]:
        """The weight of each token, and the weight that is no token's. A step's loss is divided by all of them."""
        if self.grpo.loss == "token":
            return 1.0, 0.0
        if self.grpo.loss == "sequence":
            return 1.0 / max(1, length), 0.0
        longest = self.max_new_tokens + 1  # the stop token
        return 1.0 / longest, 1.0 - length / longest

    # ---- as the step sources ask -----------------------------------------------------------------------------------

    def segments(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[EncodedPrompt],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
        clock: PhaseClock,
    ) -> list[Segment]:
        """Of each rollout, in order. Behind them, of each group, what is taught besides: the ground truth with
        `sft_weight`, and the best rollout, matched and corrected, with `matching_weight`."""
        rollouts = self._rollouts(
            samples, global_step=global_step, micro_step_idx=micro_step_idx, first_req_idx=first_req_idx, clock=clock
        )
        with clock.phase("target"):
            groups = self._groups(rollouts, prompts)
            segments = self._reinforced(groups)
            if self.grpo.sft_weight:
                segments += [one for group in groups for one in self._ground_truth(group)]
            if self.grpo.matching_weight:
                segments += [one for group in groups for one in self._matched(group)]
            return segments

    def _ground_truth(self, group: Sequence[_Scored]) -> list[Segment]:
        target = self.task.ground_truth(group[0].rollout.sample, self._loss)
        return self._taught(group, group[0], target, self.grpo.sft_weight)

    def _matched(self, group: Sequence[_Scored]) -> list[Segment]:
        best = max(group, key=lambda one: one.reward)  # of equal ones the first
        return self._taught(group, best, self.task.target(best.assignment, self._loss), self.grpo.matching_weight)

    def _taught(self, group: Sequence[_Scored], one: _Scored, target: Target, factor: float) -> list[Segment]:
        """A segment that weighs `factor` times its group, also if that is skipped for want of a signal; none if nothing
        of it has a weight."""
        lengths = [rollout.num_tokens for rollout in group]
        weight = sum(length * each + extra for length in lengths for each, extra in [self._weights(length)])
        segment = build_segment(one.prompt, target, sample_id=one.rollout.sample.sample_id, stats={TAUGHT: 1.0})
        scale = factor * weight / max(float(segment.loss_weights.sum()), 1e-6)
        if not scale or not segment.loss_weights.any():
            return []
        return [replace(segment, loss_weights=(segment.loss_weights * scale).astype(np.float32))]

    def _stream_of(self, rollouts: RolloutStream, prompts: Sequence[EncodedPrompt]) -> SegmentStream:
        together = len(prompts) if self.grpo.advantage == "batch" else self.grpo.num_generations
        return _GroupStream(self, rollouts, prompts, together)


class _GroupStream(SegmentStream):
    """The segments of `together` places in a row, when the last rollout of them has ended."""

    def __init__(
        self, source: GroupSource, rollouts: RolloutStream, prompts: Sequence[EncodedPrompt], together: int
    ) -> None:
        self._source, self._rollouts, self._prompts, self._together = source, rollouts, prompts, together

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        for places, group in in_groups(self._rollouts, size=self._together, number=len(self._prompts)):
            yield from zip(places, self._source.reinforced(group, [self._prompts[i] for i in places]), strict=True)

    def close(self) -> None:
        self._rollouts.close()


def _of_tokens(step: NDArray[np.float64], one: _Scored) -> NDArray[np.float64]:
    """The advantages of an answer's steps, [n + 1] for n objects or [1], as those of its tokens [T]."""
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
