"""Makes segments (token sequences to learn) of samples: one segment per sample, in order, without gaps.

`GroundTruthSource` teaches the ground truth (trainer variant `sft`, Channel-A). `RolloutSource` runs the stages
Sample -> Rollout -> ParsedRollout -> Assignment -> Segment (`rollout_matching_sft`, Channel-B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from learner.config.sections.loss import LossConfig
from learner.data.prompt import PromptCheck
from learner.extensions import Task
from learner.journal.log import PhaseClock
from learner.records import Channel, EncodedPrompt, Rollout, Segment, Target
from learner.rollout.backend import MicroStep, RolloutBackend, RolloutStream
from learner.tasks.rewards import Rewards
from learner.tasks.supervision import build_segment
from shared.pixels import ImageProcessing


class SegmentSource(Protocol):
    """Makes a segment of each sample. Subclasses use the ground truth or rollouts."""

    channel: Channel
    needs_rollouts: bool

    def begin_window(self, window: Sequence[MicroStep], *, global_step: int, clock: PhaseClock) -> None:
        """Roll out several micro-steps together. `window`: all micro-steps whose `segments` are needed before the
        weights change. Sources without rollouts do nothing."""
        return

    def segments(
        self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int, clock: PhaseClock
    ) -> list[Segment]:
        """Return one segment per sample of the micro-step, in order."""
        ...


class SegmentStream:
    """An iterator of (index of the sample in the micro-step, segment) pairs, as segments become ready. One thread
    iterates, once. The iteration raises the error that ended the rollouts."""

    def __init__(self, rollouts: RolloutStream, segments: Iterator[tuple[int, Segment]]) -> None:
        """`segments` makes them of `rollouts` on the thread that iterates."""
        self._rollouts, self._segments = rollouts, segments

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        return self._segments

    def close(self) -> None:
        """End the iteration. Segments that are not ready are not made. Any thread may call this at any time."""
        self._rollouts.close()


class GroundTruthSource(SegmentSource):
    """Teacher forcing on the ground truth in canonical order; no rollout."""

    channel: Channel = "A"
    needs_rollouts = False

    def __init__(self, task: Task, *, loss: LossConfig) -> None:
        self._task, self._loss = task, loss

    def segments(
        self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int, clock: PhaseClock
    ) -> list[Segment]:
        with clock.phase("target"):
            return [
                build_segment(prompt, self._task.ground_truth(sample, self._loss), sample_id=sample.sample_id)
                for sample, prompt in zip(step.samples, prompts, strict=True)
            ]


class RolloutSource(SegmentSource):
    """The policy's own answers, corrected by the task and scored by `rewards`. `begin_window` rolls out several
    micro-steps together; without it, `segments` rolls out one micro-step. `stream` needs a backend that returns
    rollouts as they end."""

    channel: Channel = "B"
    needs_rollouts = True

    def __init__(
        self,
        backend: RolloutBackend,
        task: Task,
        rewards: Rewards,
        *,
        loss: LossConfig,
        on_answer: Callable[[Any, Target], None] | None = None,
        image_processing: ImageProcessing | None = None,
    ) -> None:
        """`on_answer` is called with every assignment and its target, on the thread that makes the segment.
        `image_processing`: the learner's image processing, for models that take images."""
        self._backend, self._task, self._rewards, self._loss = backend, task, rewards, loss
        self._check = PromptCheck(decode=rewards.tokenizer.decode, image_processing=image_processing)
        self._on_answer = on_answer
        self._made: dict[tuple[int, int], list[Rollout]] = {}  # (global_step, micro_step_idx) -> rollouts

    def begin_window(self, window: Sequence[MicroStep], *, global_step: int, clock: PhaseClock) -> None:
        with clock.phase("rollout"):
            made = self._backend.generate_window(window, global_step=global_step)
        self._made = {(global_step, step.micro_step_idx): rollouts for step, rollouts in zip(window, made, strict=True)}

    def segments(
        self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int, clock: PhaseClock
    ) -> list[Segment]:
        rollouts = self._rollouts(step, global_step=global_step, clock=clock)
        with clock.phase("target"):
            self._check.prepare(prompts, rollouts)
            return [self.segment(rollout, prompt) for rollout, prompt in zip(rollouts, prompts, strict=True)]

    def _rollouts(self, step: MicroStep, *, global_step: int, clock: PhaseClock) -> list[Rollout]:
        """Return the micro-step's rollouts. If `begin_window` has made them already, return these; otherwise make
        them."""
        rollouts = self._made.pop((global_step, step.micro_step_idx), None)
        if rollouts is None:
            with clock.phase("rollout"):
                rollouts = self._backend.generate(
                    step.samples,
                    global_step=global_step,
                    micro_step_idx=step.micro_step_idx,
                    first_req_idx=step.first_req_idx,
                )
        assert [rollout.sample for rollout in rollouts] == list(step.samples), "the window was of other samples"
        return rollouts

    def stream(self, step: MicroStep, prompts: Sequence[EncodedPrompt], *, global_step: int) -> SegmentStream:
        """Return the segments that `segments` returns, each as it becomes ready."""
        rollouts = self._backend.stream([step], global_step=global_step)
        return SegmentStream(rollouts, self._as_ready(rollouts, prompts))

    def _as_ready(self, rollouts: RolloutStream, prompts: Sequence[EncodedPrompt]) -> Iterator[tuple[int, Segment]]:
        for place, rollout in rollouts:
            yield place, self.segment(rollout, prompts[place])

    def segment(self, rollout: Rollout, prompt: EncodedPrompt) -> Segment:
        """Return the segment of one rollout. Raises PromptMismatchError or ServerMismatchError if the engine's prompt
        or images differ from the learner's, RewardError if a reward function fails."""
        self._check(prompt, rollout)
        assignment = self._task.match(self._task.parse(rollout))
        stats = {
            **self._task.stats(assignment),
            "rollout_tokens": float(len(rollout.response_token_ids)),
            **self._rewards.sums(rollout, assignment),
        }
        target = self._task.target(assignment, self._loss)
        if self._on_answer is not None:
            self._on_answer(assignment, target)
        return build_segment(prompt, target, sample_id=rollout.sample.sample_id, ver=rollout.ver, stats=stats)


def in_groups(
    rollouts: Iterable[tuple[int, Rollout]], *, size: int, number: int
) -> Iterator[tuple[range, list[Rollout]]]:
    """Yield (places, rollouts) of each group of `size` neighbouring places once all rollouts of the group have ended.
    There are `number` rollouts; the last group may be smaller. Rollouts are in the order of their places."""
    ended: dict[int, dict[int, Rollout]] = {}
    for place, rollout in rollouts:
        first = place - place % size
        group = ended.setdefault(first, {})
        group[place] = rollout
        places = range(first, min(first + size, number))
        if len(group) == len(places):
            del ended[first]
            yield places, [group[i] for i in places]
