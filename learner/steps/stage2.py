"""Steps of `stage2_ab_training` (R26, R31, R35): the common part of both ways to make rollouts.

A Channel-A step learns ground truth. A Channel-B step learns rollouts, made within the step (`in_step`) or ahead of the
steps (`ahead`). In both cases a step has one micro-step, with all rows of the rank.

Invariants: rank 0 decides the channel and broadcasts it; the channel is fixed until the next `begin`. Every segment
that a step took is in exactly one row of the step, and is learned in this step. If a producer failed on one rank,
`begin` raises its error on all ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from learner.config.schedule import ChannelDecision, decide_channel, scheduled_channel
from learner.data.batches import Batches, MicroBatch, Shortfall
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import Channel, PackedRow
from learner.rollout.backend import MicroStep
from learner.steps.packing import RowMaker
from learner.steps.segments import SegmentSource
from learner.steps.source import StepSource, own_share

# `close` waits CLOSE_S seconds for a producer's thread. All other waits for the thread have the deadline of
# DEADLINE_KEY.
CLOSE_S = 10.0
DEADLINE_KEY = "training.collective_timeout_s"
# A step takes the longer of its rollouts and its learning, plus one call. With four calls per step, one call adds at
# most a quarter of the rollouts' time.
CALLS_PER_STEP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTotals:
    """The number of generation calls that have ended since the start, and the sum of their seconds. Failed calls count
    too."""

    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMetrics:
    """One rank's metrics of a step, by name. `means` are averaged over ranks, `sums` are added up."""

    means: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage2Parts:
    """The parts that `in_step` and `ahead` both need. Each batch of `batches` has all samples that this rank learns in
    a step. In a batch, a sample comes `places_per_sample` times in a row, once for each of its rollouts (`grpo`)."""

    b_ratio: float
    places_per_sample: int = 1
    packs_per_step: int  # packs that a Channel-B step takes from the queue: gradient_accumulation_steps
    ranks: Ranks
    batches: Batches
    ground_truth: SegmentSource
    rollouts: SegmentSource
    row_maker: RowMaker
    clock: PhaseClock


class Stage2Steps(StepSource):
    """The steps of `stage2_ab_training`. Subclasses make the rows of Channel-B in different ways."""

    def __init__(self, parts: Stage2Parts) -> None:
        self._parts, self._ranks, self._clock = parts, parts.ranks, parts.clock
        self._decision: ChannelDecision | None = None
        self._global_step = 0  # number of the step that began last
        self._executed_b = 0  # number of Channel-B steps since the run began, also before a resume.
        # Samples that a checkpoint of another trainer variant carried; they are never learned
        self._carried: list[str] = []

    # ---- abstract --------------------------------------------------------------------------------------------------

    def _channel_b(self) -> Generator[PackedRow]:
        """Yield this rank's rows of a Channel-B step, as they become ready."""
        raise NotImplementedError

    def _decide(self, global_step: int) -> ChannelDecision:
        """Choose the channel, the same on all ranks. Collective. Raises, on every rank, the error that ended the
        producer."""
        return self._ranks.broadcast_object(decide_channel(global_step, self._parts.b_ratio))

    def _next_batch(self) -> MicroBatch:
        """Return this rank's samples of the step, with their prompts."""
        return next(self._parts.batches)

    def _rank_metrics(self) -> RankMetrics:
        """Return this rank's metrics of the last step's rollouts."""
        return RankMetrics()

    # ---- StepSource ------------------------------------------------------------------------------------------------

    def begin(self, global_step: int) -> Channel:
        self._decision, self._global_step = self._decide(global_step), global_step
        self._executed_b += self._decision.channel == "B"
        return self._decision.channel

    def shortfall(self) -> Shortfall | None:
        return self._in_segments(self._parts.batches.shortfall(1))

    def micro_steps(self) -> Iterator[Generator[PackedRow]]:
        assert self._decision is not None, "micro_steps() before begin()"
        if self._decision.channel == "B":
            yield self._channel_b()
        else:  # a sample's ground truth is learned once, although Channel-B makes several rollouts of it
            yield self._share(self._parts.ground_truth, every=self._parts.places_per_sample)

    def metrics(self) -> Mapping[str, float]:
        assert self._decision is not None, "metrics() before begin()"
        parts = self._ranks.all_gather_object(self._rank_metrics())
        means = {name: fmean(p.means[name] for p in parts if name in p.means) for part in parts for name in part.means}
        # All ranks have the same names in `sums`, but a rank without packs lacks some names in `means`.
        sums = {name: sum(part.sums[name] for part in parts) for name in parts[0].sums}
        # `_global_step` counts from 0, so 1 is added to count the step just learned.
        share = self._executed_b / (self._global_step + 1)
        return {**self._decision.metrics(), "stage2_ab/executed_b_share": share, **means, **sums}

    def waiting(self) -> list[str]:
        return own_share(self._carried, self._ranks)

    def state(self) -> dict[str, object]:
        stage2 = {"executed_b": self._executed_b}
        return {"batches": self._parts.batches.state(), "carried": [self._carried], "stage2": stage2}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._parts.batches.restore(state["batches"])
        # The checkpoint may have been written on another number of ranks, so all ranks' samples are joined.
        self._carried = [sample_id for part in state["carried"] for sample_id in part]
        self._executed_b = int(state["stage2"]["executed_b"]) if "stage2" in state else 0

    def _wanted(self, global_step: int) -> Channel:
        return scheduled_channel(global_step, self._parts.b_ratio)

    def _in_segments(self, shortfall: Shortfall | None) -> Shortfall | None:
        """Convert `shortfall` from places (entries of the batch) to segments. Channel-B makes one segment per place.
        Channel-A makes one segment per sample, which may have several places."""
        assert self._decision is not None, "shortfall() before begin()"
        if shortfall is None or self._decision.channel == "B":
            return shortfall
        each = self._parts.places_per_sample
        return Shortfall(size=shortfall.size // each, whole=shortfall.whole // each)

    def _share(self, source: SegmentSource, *, every: int = 1) -> Generator[PackedRow]:
        """Yield the rows of all samples that this rank learns in the step. All samples are read and packed before the
        first row. `every`: one segment is made for every `every`-th place."""
        with self._clock.phase("data"):
            batch = self._next_batch()
        step = MicroStep(
            samples=batch.samples[::every],
            # Requests are numbered over the whole step, so that seeds do not depend on the number of ranks.
            micro_step_idx=0,
            first_req_idx=batch.first_req_idx,
        )
        segments = source.segments(step, batch.prompts[::every], global_step=self._global_step, clock=self._clock)
        with self._clock.phase("pack"):
            rows = self._parts.row_maker.rows(segments)
        yield from rows


_NO_CALLS = CallTotals()


def call_metrics(ended: CallTotals, before: CallTotals = _NO_CALLS) -> Mapping[str, float]:
    """Return how many generation calls ended since `before`, and the seconds that they took."""
    return {
        "stage2_ab/calls": float(ended.number - before.number),
        "stage2_ab/rollout_s": ended.seconds - before.seconds,
    }
