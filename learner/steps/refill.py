"""Dynamic sampling for `grpo` (DAPO, arXiv:2503.14476): a step goes on until it has enough groups with a signal.

A group whose rollouts all earn the same teaches nothing. Where that happens, the step takes further micro-batches of
the data, one at a time: each is rolled out with the same weights, scored and learned in the same update. It stops when
as many groups of all ranks have a signal as a step has groups, after `max_refills` micro-batches, or at the epoch's
end, because no step goes beyond it.

What counts as used: every sample that was drawn, with or without a signal. It does not come again in the epoch, and an
epoch has fewer steps, so the length of the run is `training.max_steps`. Groups beyond those that were missing are
learned too, as they are there.

Invariants: all ranks take equally many micro-batches, because they decide by the sum over ranks, at the same point. No
two requests of a step share a seed: a refill is a micro-step of its own. Between steps the place in the data says it
all, so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from learner.data.batches import Batches
from learner.records import Channel, PackedRow, Segment
from learner.steps.groups import GROUPS, NO_SIGNAL
from learner.steps.source import FreshSteps

REFILLS = "grpo/refills"


class RefilledSteps(FreshSteps):
    """`groups_per_step`: of all ranks, in a step that no epoch's end cuts short."""

    def __init__(self, batches: Batches, *args: Any, max_refills: int, groups_per_step: int, **settings: Any) -> None:
        super().__init__(batches, *args, **settings)
        self._data, self._max_refills, self._groups_per_step = batches, max_refills, groups_per_step
        self._with_signal = 0  # groups of this rank in the step
        self._refills = 0  # micro-batches of the step beyond the planned ones

    def begin(self, global_step: int) -> Channel:
        self._with_signal = self._refills = 0
        return super().begin(global_step)

    def micro_steps(self) -> Iterator[Generator[PackedRow]]:
        yield from super().micro_steps()
        while self._refills < self._max_refills and not self._ended_epoch and self._lacks_groups():
            self._refills += 1
            yield self._micro_step(self._gradient_accumulation_steps + self._refills)

    def metrics(self) -> Mapping[str, float]:
        return {REFILLS: float(self._refills)}

    @property
    def _ended_epoch(self) -> bool:
        """True if the last micro-batch of an epoch was taken. Equal on all ranks."""
        return self._data.num_taken % self._data.per_epoch == 0

    def _lacks_groups(self) -> bool:
        """Return True if the step needs more groups. Collective: every rank has learned the rows of the step's
        micro-batches so far."""
        return sum(self._ranks.all_gather_object(self._with_signal)) < self._groups_per_step

    def _segments(self, *args: Any) -> list[Segment]:
        segments = super()._segments(*args)
        self._with_signal += sum(int(one.stats.get(GROUPS, 0.0) - one.stats.get(NO_SIGNAL, 0.0)) for one in segments)
        return segments
