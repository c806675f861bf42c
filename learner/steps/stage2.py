"""What a step of `stage2_ab_training` runs, and where its rows come from (R26, R31, R35).

In: the step's number. Out: a channel that all ranks share, and this rank's rows of the step, all of them, to be learned
before one update. The trainer asks, in this order, once per step:

    wants_sync -> [fence around a sync] -> begin -> rows, to the last one -> metrics

Channel-A is ground truth, packed to completion; Channel-B is one of the ways of `channel_b.py`, or `ahead.py`.

Invariants: the channel is decided on rank 0 and broadcast; it is fixed until the next `begin`. Every segment of a
step is in exactly one of its rows; what a step took is learned in it. Where a producer failed on one rank, `begin`
raises its error on all.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from learner.config.schedule import ChannelDecision, decide_channel, scheduled_channel
from learner.data.batches import Batches
from learner.policy.parallel import Ranks
from learner.records import Channel, PackedRow
from learner.run.log import PhaseClock
from learner.steps.packing import RowMaker
from learner.steps.pipeline import Fence
from learner.steps.protocol import StreamState
from learner.steps.segments import SegmentSource
from shared.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMetrics:
    """One rank's numbers of a step, by metric name: those that are averaged over ranks, and those that add up."""

    means: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)


class ChannelB(Protocol):
    """One way to make Channel-B's rows. Only `fence` may wait for other ranks."""

    def wants_sync(self, wanted: Channel) -> bool:
        """Whether the servers should have the present weights before a step for which `wanted` is scheduled."""
        ...

    def fence(self) -> AbstractContextManager[Fence]:
        """No call of this rank is in flight inside; to be held around every sync and evaluation. Collective."""
        ...

    def eligible(self) -> int | None:
        """Packs that this rank could learn now; None where a step makes its own. Raises what ended the producer."""
        ...

    def rows(self, global_step: int, clock: PhaseClock) -> Generator[PackedRow]:
        """This rank's rows of a Channel-B step, as they become ready. Close it to give a step up."""
        ...

    def metrics(self) -> RankMetrics:
        """What the last step's rollouts took on this rank."""
        ...

    def stream_state(self) -> StreamState | None:
        """The rank's place in a sample stream of Channel-B's own, between steps; None where there is none."""
        ...

    def resume(self, stream: StreamState) -> None:
        """Go on from `stream_state()`; before the first fence."""
        ...

    def stop(self) -> None:
        """Begin no further call; waits for nothing."""
        ...

    def close(self) -> None:
        """Give everything back, after `stop` and after the backend was closed. Bounded in time."""
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
        """Choose the step's channel; on all ranks, which all get rank 0's choice.

        Raises, on all ranks, what ended a rank's producer.
        """
        decision = None
        eligible = [packs for packs in self._ranks.all_succeed(self._channel_b.eligible) if packs is not None]
        if self._ranks.is_main:
            decision = decide_channel(
                global_step,
                self._b_ratio,
                gradient_accumulation_steps=self._gradient_accumulation_steps,
                min_eligible_packs=min(eligible, default=None),
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
        """Of the step that ended, over all ranks; on all ranks."""
        assert self._decision is not None, "metrics() before begin()"
        parts = self._ranks.all_gather_object(self._channel_b.metrics())
        means = {name: sum(part.means[name] for part in parts) / len(parts) for name in parts[0].means}
        sums = {name: sum(part.sums[name] for part in parts) for name in parts[0].sums}
        share = self._executed_b / (self._global_step + 1)
        return {**self._decision.metrics(), "stage2_ab/executed_b_share": share, **means, **sums}

    def state(self) -> dict[str, Any]:
        """For a checkpoint between steps, as JSON, equal on all ranks; the batches' place is their own cursor's.
        Collective."""
        streams = self._ranks.all_gather_object(self._channel_b.stream_state())
        return {"executed_b": self._executed_b, "streams": [asdict(stream) for stream in streams if stream]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises CheckpointError where it is of another number of ranks."""
        self._executed_b = int(state["executed_b"])
        streams = state.get("streams") or []
        if self._channel_b.stream_state() is None or not streams:
            return
        if len(streams) != self._ranks.world_size:
            raise CheckpointError(
                "the checkpoint's rollouts ahead of learning are of another number of ranks",
                found=f"{len(streams)} sample streams in the checkpoint, {self._ranks.world_size} ranks",
                wanted="as many ranks, since each has a stream of its own",
                remedy=f"resume on {len(streams)} ranks, or once with stage2_ab.async_actor_learner.enabled: false",
            )
        own = streams[self._ranks.rank]
        self._channel_b.resume(StreamState(**{**own, "unlearned": tuple(own["unlearned"])}))

    def stop(self) -> None:
        """Begin no further rollout; waits for nothing. To be called before the backend is closed."""
        self._channel_b.stop()

    def close(self) -> None:
        """Give everything back; after the backend was closed. Bounded in time."""
        self._channel_b.close()


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
