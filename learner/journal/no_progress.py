"""Warnings about runs that continue but cannot learn.

In: the result of each optimizer step, combined from all ranks. Out: a `RunWarning` when a condition, such as "every
reward is 0", has held for a number of steps in a row. Steps without rollouts (channel A) are ignored. A lasting
condition gives one warning. If a condition ends and comes back, there is another warning. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.records import StepResult

STEPS_WITHOUT_ANSWERS = 3
STEPS_WITHOUT_SIGNAL = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWarning:
    """A warning: what is wrong, in how many steps with rollouts in a row, and what the user can do."""

    what: str
    steps: int
    remedy: str

    def __str__(self) -> str:
        return f"warning: {self.what}, in {self.steps} steps in a row; {self.remedy}"


def _nothing_is_read(step: StepResult) -> bool:
    return step.metrics.get("unusable", 0.0) >= step.num_segments > 0


def _nothing_matches(step: StepResult) -> bool:
    """Return True if answers could be read and there were labels to find, but no prediction matched a label."""
    # The task `detection` counts matches as `matched`, the task `key_value` as `right`.
    right = step.metrics.get("matched", 0.0) + step.metrics.get("right", 0.0)
    return right == 0 and step.metrics.get("missed", 0.0) > 0 and not _nothing_is_read(step)


def _every_reward_is_zero(step: StepResult) -> bool:
    metrics = step.metrics
    return "grpo/groups" in metrics and metrics.get("reward", 0.0) == 0 and metrics.get("grpo/reward_std", 0.0) == 0


def _no_advantage(step: StepResult) -> bool:
    return step.metrics.get("grpo/no_signal", 0.0) == 1 and not _every_reward_is_zero(step)


CONDITIONS: Sequence[tuple[Callable[[StepResult], bool], RunWarning]] = (
    (
        _nothing_is_read,
        RunWarning(
            what="no answer can be read (parse rate 0)",
            steps=STEPS_WITHOUT_ANSWERS,
            remedy="compare an answer of the report with task.container and task.coordinates, raise "
            "decoding.max_new_tokens if answers are cut, and teach the format by trainer_variant: sft first",
        ),
    ),
    (
        _nothing_matches,
        RunWarning(
            what="no prediction matches a label",
            steps=STEPS_WITHOUT_ANSWERS,
            remedy="check in the report's pictures that annotations and answers have the same unit and order of "
            "coordinates, lower task.iou_threshold, or train with trainer_variant: sft first",
        ),
    ),
    (
        _every_reward_is_zero,
        RunWarning(
            what="every reward is 0",
            steps=STEPS_WITHOUT_SIGNAL,
            remedy="check reward.weights and reward.functions on an answer of the report, or train with "
            "trainer_variant: sft first",
        ),
    ),
    (
        _no_advantage,
        RunWarning(
            what="no answer has an advantage: all answers to a prompt have the same reward, so no reward is learned",
            steps=STEPS_WITHOUT_SIGNAL,
            remedy="raise grpo.num_generations, choose a reward that tells answers apart (f1_miou, soft_iou), or train "
            "with trainer_variant: sft first",
        ),
    ),
)


@dataclass
class ProgressWatch:
    """Counts for how many steps in a row each condition has held."""

    _rows: dict[str, int] = field(default_factory=dict)

    def after(self, step: StepResult) -> list[RunWarning]:
        """Count this step, and return the warnings whose condition has now held for their number of steps in a row."""
        if "rollout_tokens" not in step.metrics:
            return []
        found = []
        for holds, warning in CONDITIONS:
            self._rows[warning.what] = self._rows.get(warning.what, 0) + 1 if holds(step) else 0
            if self._rows[warning.what] == warning.steps:
                found.append(warning)
        return found
