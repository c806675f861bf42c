"""One segment of several rollouts of a sample (`rollout_matching.best_of`): best of K, union of K, rejection sampling.

    Sample -> Rollout x K -> ParsedRollout x K -> Assignment x K, rewards x K -> the best one -> Segment

To everything but the backend a sample is one place: batches, packing, shares and resumes count samples, and a sample
has one segment. The backend is asked for K places in a row for each, so their seeds follow from the sample's place over
all ranks, as for one rollout.

`best` and `union` teach a target that the task makes, as `RolloutSource` does. `rejection` teaches the best rollout
itself, as teacher forcing would. `union` is in `learner.target.union`.

Invariants: with K = 1 the segments are those of `RolloutSource`, except for the counts `best_of/...`. A sample of which
nothing is learned has a segment without weight, so it is used up like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from learner.config.schema import BestOfConfig, LossConfig
from learner.data.prompt import check_prompt_prefix
from learner.extensions import Task
from learner.records import EncodedPrompt, Rollout, Sample, Segment, Target
from learner.rollout.backend import MicroStep, RolloutBackend, RolloutStream
from learner.run.log import PhaseClock
from learner.steps.segments import RolloutSource, SegmentStream, in_groups, silent
from learner.target.target import build_segment, own_target
from learner.tasks.rewards import Rewards
from shared.errors import ConfigError

T = TypeVar("T")
SAMPLES, REWARD, LEARNED, AGREED = "best_of/samples", "best_of/reward", "best_of/learned", "best_of/agreed"
_ROUNDING = 1e-9  # of rewards: the mean of equal ones may differ from them in the last bit


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scored:
    """One rollout with its rewards."""

    rollout: Rollout
    assignment: Any
    parts: Mapping[str, float]
    total: float


class BestOfSource(RolloutSource):
    """See above. `rewards` has at least one reward: the best rollout is the one with the largest sum."""

    def __init__(
        self,
        backend: RolloutBackend,
        task: Task,
        rewards: Rewards,
        *,
        best_of: BestOfConfig,
        loss: LossConfig,
        on_answer: Callable[[Any, Target], None] | None = None,
    ) -> None:
        super().__init__(backend, task, rewards, loss=loss, on_answer=on_answer)
        self._best_of, self._number = best_of, best_of.rollouts_per_sample

    # ---- K places for each sample ----------------------------------------------------------------------------------

    def begin_window(self, window: Sequence[MicroStep], *, global_step: int, clock: PhaseClock) -> None:
        places = [
            MicroStep(
                samples=self._repeated(step.samples),
                micro_step_idx=step.micro_step_idx,
                first_req_idx=step.first_req_idx * self._number,
            )
            for step in window
        ]
        super().begin_window(places, global_step=global_step, clock=clock)

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
        rollouts = self._rollouts(
            self._repeated(samples),
            global_step=global_step,
            micro_step_idx=micro_step_idx,
            first_req_idx=first_req_idx * self._number,
            clock=clock,
        )
        with clock.phase("target"):
            groups = [rollouts[i : i + self._number] for i in range(0, len(rollouts), self._number)]
            return [self.segment_of(group, prompt) for group, prompt in zip(groups, prompts, strict=True)]

    def stream(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[EncodedPrompt],
        *,
        global_step: int,
        micro_step_idx: int,
        first_req_idx: int,
    ) -> SegmentStream:
        return super().stream(
            self._repeated(samples),
            prompts,
            global_step=global_step,
            micro_step_idx=micro_step_idx,
            first_req_idx=first_req_idx * self._number,
        )

    def _stream_of(self, rollouts: RolloutStream, prompts: Sequence[EncodedPrompt]) -> SegmentStream:
        return _BestStream(self.segment_of, rollouts, prompts, self._number)

    def _repeated(self, items: Sequence[T]) -> list[T]:
        return [item for item in items for _ in range(self._number)]

    # ---- one segment of them ---------------------------------------------------------------------------------------

    def segment_of(self, rollouts: Sequence[Rollout], prompt: EncodedPrompt) -> Segment:
        """Of all rollouts of a sample, in the order of their places. Raises as `segment` does."""
        scored = [self._scored(rollout, prompt) for rollout in rollouts]
        best = max(scored, key=lambda one: one.total)  # of equal ones the first
        target, counts = self._target(best, scored)
        is_learned = self._best_of.use != "rejection" or self._accepts(best, scored)
        if self._on_answer is not None:
            self._on_answer(best.assignment, target)
        stats = {
            **self._task.stats(best.assignment),
            "rollout_tokens": float(sum(len(one.rollout.response_token_ids) for one in scored)),
            **_summed(self._rewards.counts(one.parts) for one in scored),
            SAMPLES: 1.0,
            REWARD: best.total,
            LEARNED: float(is_learned),
            **counts,
        }
        sample_id, ver = best.rollout.sample.sample_id, best.rollout.ver
        segment = build_segment(prompt, target, sample_id=sample_id, ver=ver, stats=stats)
        return segment if is_learned else silent(segment)

    def _scored(self, rollout: Rollout, prompt: EncodedPrompt) -> _Scored:
        sample_id, decode = rollout.sample.sample_id, self._rewards.tokenizer.decode
        check_prompt_prefix(prompt.token_ids, rollout.prompt_token_ids, sample_id, decode=decode)
        assignment = self._task.match(self._task.parse(rollout))
        parts = self._rewards.parts(rollout, assignment)
        return _Scored(rollout=rollout, assignment=assignment, parts=parts, total=self._rewards.total(parts))

    def _target(self, best: _Scored, scored: Sequence[_Scored]) -> tuple[Target, Mapping[str, float]]:
        """What is learned, and counts of it."""
        if self._best_of.use == "rejection":
            return own_target(best.rollout), {}
        if self._best_of.use == "best":
            return self._task.target(best.assignment, self._loss), {}
        ranked = sorted(scored, key=lambda one: -one.total)  # stable, so the best one is the first
        union = self._task.union([one.assignment for one in ranked], self._loss)
        if union is None:
            raise ConfigError(
                "best_of.use: union: the task cannot merge answers",
                found=type(self._task).__name__,
                wanted="a task with union, such as detection",
                remedy="set custom.extra.rollout_matching.best_of.use: best",
            )
        return union.target, {AGREED: float(union.agreed)}

    def _accepts(self, best: _Scored, scored: Sequence[_Scored]) -> bool:
        """Whether rejection sampling learns the best rollout."""
        if best.rollout.stop_token_id is None:  # it was cut, and would teach an answer without an end
            return False
        if self._best_of.min_reward is not None:
            return best.total >= self._best_of.min_reward
        return best.total > fmean(one.total for one in scored) + _ROUNDING


class _BestStream(SegmentStream):
    """The segment of each sample when the last of its rollouts has ended, made by the thread that iterates."""

    def __init__(
        self,
        segment_of: Callable[[Sequence[Rollout], EncodedPrompt], Segment],
        rollouts: RolloutStream,
        prompts: Sequence[EncodedPrompt],
        number: int,
    ) -> None:
        self._segment_of, self._rollouts, self._prompts, self._number = segment_of, rollouts, prompts, number

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        total = len(self._prompts) * self._number
        for places, group in in_groups(self._rollouts, size=self._number, number=total):
            place = places.start // self._number
            yield place, self._segment_of(group, self._prompts[place])

    def close(self) -> None:
        self._rollouts.close()


def best_of_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Sums over samples as means, under the same names; {} where no sample had several rollouts."""
    samples = counts.get(SAMPLES, 0.0)
    return {name: counts.get(name, 0.0) / samples for name in (REWARD, LEARNED)} if samples else {}


def _summed(parts: Iterator[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
