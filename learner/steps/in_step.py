"""Channel-B within the step: rollouts are made, packed and learned in it, by the weights that it updates (R31, R32).

Either all rollouts of the rank's share are made in one call, and learning begins when it has ended; or, with servers
and packing, the rows of one call are learned while the next call runs. Both number a step's requests over all ranks, so
that a sample's seed, and its rollout, are the same either way, on any number of ranks.

How many samples an overlapped call rolls out is measured (`CallSize`). Learning runs beside the calls that follow, so
small calls hide more of it. But a server needs about as long for few answers as for many, up to what it decodes at
once: there small calls, one after the other, cost more than they hide. Which it is depends on model, answers and GPUs,
so sizes take turns, then the fastest stays. Only time depends on the size: a sample's seed and place do not.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from learner.data.batches import MicroBatch
from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from learner.run.log import PhaseClock
from learner.steps.pipeline import CallSamples, CallTotals, Fence, ProducerStages, RolloutPipeline
from learner.steps.protocol import Bounds
from learner.steps.stage2 import (
    CALLS_PER_STEP,
    CLOSE_S,
    DEADLINE_KEY,
    RankMetrics,
    Stage2Parts,
    Stage2Steps,
    call_metrics,
)

TRY_AGAIN_AFTER = 50  # steps, for answers grow and shrink in training
_NEW_SHARE = 0.5  # of the latest step in a size's mean: one that was slow by chance is soon forgotten


class Stage2InStep(Stage2Steps):
    """`capacity`: how many samples the servers decode at once for this rank; None: nothing overlaps. `deadline_s`
    bounds the wait for a row."""

    def __init__(self, parts: Stage2Parts, *, capacity: int | None, deadline_s: float) -> None:
        super().__init__(parts)
        self._capacity, self._deadline_s = capacity, deadline_s
        self._call_size = CallSize()
        self._calls = CallTotals()  # of the step that was learned last
        self._ver: int | None = None  # what the servers serve; None before the first sync

    def wants_sync(self, global_step: int) -> bool:
        return self._wanted(global_step) == "B"

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """Between steps no call is in flight here."""
        fence = Fence()
        yield fence
        self._ver = fence.ver if fence.ver is not None else self._ver

    def _channel_b(self) -> Generator[PackedRow]:
        return self._share(self._parts.rollouts) if self._capacity is None else self._overlapped(self._capacity)

    def _overlapped(self, capacity: int) -> Generator[PackedRow]:
        """The time that learning has to wait for rollouts is the clock's phase `wait`."""
        with self._clock.phase("data"):
            batch = next(self._parts.batches)
        assert self._ver is not None, "Channel-B before the first sync"
        share = len(batch.samples)
        call_size = self._call_size.choose(sizes(share, capacity))
        began = time.perf_counter()
        pipeline = RolloutPipeline(
            self._stages(batch),
            Bounds.in_step(),
            ver=self._ver,
            call_size=call_size,
            end=share,
            deadline_key=DEADLINE_KEY,
            close_deadline_s=CLOSE_S,
        )
        with pipeline:
            while True:
                with self._clock.phase("wait"):
                    row = pipeline.next_pack(self._deadline_s)
                if row is None:
                    break
                yield row
            self._calls = pipeline.stats().calls
        self._call_size.tell(call_size, time.perf_counter() - began)

    def _rank_metrics(self) -> RankMetrics:
        """Seconds in which a call of the step was under way; most of them are hidden behind learning."""
        if self._capacity is None:
            return RankMetrics()
        calls, self._calls = self._calls, CallTotals()
        return RankMetrics(means=call_metrics(calls))

    def _stages(self, batch: MicroBatch) -> ProducerStages:
        """The producer's part: stream position i is the batch's sample i."""

        def load(positions: Sequence[int]) -> tuple[Sequence[Sample], Sequence[EncodedPrompt]]:
            return [batch.samples[i] for i in positions], [batch.prompts[i] for i in positions]

        def make_segments(asked: CallSamples) -> list[Segment]:
            return self._parts.rollouts.segments(
                asked.samples,
                asked.prompts,
                global_step=self._global_step,
                micro_step_idx=0,
                first_req_idx=batch.first_req_idx + asked.call.positions[0],
                clock=PhaseClock(),  # the trainer's own belongs to the thread that learns
            )

        return ProducerStages(load=load, make_segments=make_segments, pack=self._parts.row_maker.rows)


def sizes(share: int, capacity: int) -> tuple[int, ...]:
    """Samples of a call that are worth trying, smallest first: a quarter of the share, half of it, all; as far as the
    servers decode `capacity` at once."""
    parts = (CALLS_PER_STEP, CALLS_PER_STEP // 2, 1)
    return tuple(sorted({max(1, min(capacity, -(-share // part))) for part in parts}))


class CallSize:
    """Which size was fastest on this rank. The first step's seconds do not count, because everything warms up in it."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # mean per step, by size; none: to be tried
        self._steps = 0

    def choose(self, candidates: Sequence[int]) -> int:
        """The first that has not been tried, else the fastest."""
        untried = [size for size in candidates if size not in self._seconds]
        return untried[0] if untried else min(candidates, key=self._seconds.__getitem__)

    def tell(self, size: int, seconds: float) -> None:
        """What a step of that size took, from its first call to its last row learned."""
        self._steps += 1
        if self._steps == 1:
            return
        mean = self._seconds.get(size, seconds)
        self._seconds[size] = mean + _NEW_SHARE * (seconds - mean)
        if self._steps % TRY_AGAIN_AFTER == 0:
            self._seconds = {size: self._seconds[size]}
