"""What a step of `stage2_ab_training` runs, and where its rows come from (R26, R31, R35).

In: the step's number. Out: a channel that all ranks share, and this rank's rows of the step, all of them, to be learned
before one update. The trainer asks, in this order, once per step:

    wants_sync -> [fence around a sync] -> begin -> rows, to the last one -> metrics

Channel-A is ground truth, packed to completion; Channel-B is one of the ways of `channel_b.py`.

Invariants: the channel is decided on rank 0 and broadcast; it is fixed until the next `begin`. Every segment of a
step is in exactly one of its rows; nothing is carried to another step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from learner.data import Batches
from learner.metrics import PhaseClock
from learner.pipeline.queue import Fence
from learner.policy.parallel import Ranks
from learner.records import Channel, PackedRow
from learner.rows import RowMaker
from learner.schedule import ChannelDecision, decide_channel, scheduled_channel
from learner.segments import SegmentSource


class ChannelB(Protocol):
    """One way to make Channel-B's rows. Everything here is the rank's own: nothing waits for another one."""

    def wants_sync(self, wanted: Channel) -> bool:
        """Whether the servers should have the present weights before a step for which `wanted` is scheduled."""
        ...

    def fence(self) -> AbstractContextManager[Fence]:
        """No call of this rank is in flight inside; to be held around every sync."""
        ...

    def rows(self, global_step: int, clock: PhaseClock) -> Generator[PackedRow]:
        """This rank's rows of a Channel-B step, as they become ready. Close it to give a step up."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What the last step's rollouts took on this rank; to be averaged over ranks."""
        ...


class Stage2Driver:
    """Built by `learner.build`, asked by the trainer. `batches` gives one whole step's share at a time."""

    def __init__(
        self,
        *,
        b_ratio: float,
        gradient_accumulation_steps: int,
        ranks: Ranks,
        batches: Batches,
        channel_a: SegmentSource,
        row_maker: RowMaker,
        channel_b: ChannelB,
    ) -> None:
        self._b_ratio, self._gradient_accumulation_steps = b_ratio, gradient_accumulation_steps
        self._ranks, self._batches = ranks, batches
        self._channel_a, self._row_maker, self._channel_b = channel_a, row_maker, channel_b
        self._decision: ChannelDecision | None = None
        self._global_step = 0  # of the step that began last
        self._executed_b = 0  # Channel-B steps since the run began, also across resumes

    def wants_sync(self, global_step: int) -> bool:
        """Whether to sync before this step: equal on all ranks, since it follows from the schedule and what was run."""
        return self._channel_b.wants_sync(scheduled_channel(global_step, self._b_ratio))

    def fence(self) -> AbstractContextManager[Fence]:
        return self._channel_b.fence()

    def begin(self, global_step: int) -> ChannelDecision:
        """Choose the step's channel; on all ranks, which all get rank 0's choice."""
        decision = None
        if self._ranks.is_main:
            decision = decide_channel(
                global_step, self._b_ratio, gradient_accumulation_steps=self._gradient_accumulation_steps
            )
        self._decision, self._global_step = self._ranks.broadcast_object(decision), global_step
        self._executed_b += self._decision.channel == "B"
        return self._decision

    def rows(self, clock: PhaseClock) -> Generator[PackedRow]:
        """This rank's rows of the step that began; ranks may have different numbers of them."""
        assert self._decision is not None, "rows() before begin()"
        if self._decision.channel == "B":
            return self._channel_b.rows(self._global_step, clock)
        return step_rows(self._batches, self._channel_a, self._row_maker, self._global_step, clock)

    def metrics(self) -> dict[str, float]:
        """Of the step that ended; on all ranks. Numbers of the ranks are averaged."""
        assert self._decision is not None, "metrics() before begin()"
        parts = self._ranks.all_gather_object(dict(self._channel_b.metrics()))
        local = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        share = self._executed_b / (self._global_step + 1)
        return {**self._decision.metrics(), "stage2_ab/executed_b_share": share, **local}

    def state(self) -> dict[str, Any]:
        """For a checkpoint between steps, as JSON, equal on all ranks; the place in the data is its cursor's."""
        return {"executed_b": self._executed_b}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self._executed_b = int(state["executed_b"])


def step_rows(
    batches: Batches, source: SegmentSource, row_maker: RowMaker, global_step: int, clock: PhaseClock
) -> Generator[PackedRow]:
    """A whole step's share at once: read, made into segments, packed to completion, then learned row by row."""
    with clock.phase("data"):
        batch = next(batches)
    segments = source.segments(
        batch.samples,
        batch.prompts,
        global_step=global_step,
        micro_step_idx=0,  # requests are numbered over the whole step, so that seeds do not depend on the ranks
        first_req_idx=batch.first_req_idx,
        clock=clock,
    )
    with clock.phase("pack"):
        rows = row_maker.rows(segments)
    yield from rows
