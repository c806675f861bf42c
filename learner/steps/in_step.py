"""Channel-B within the step: rollouts are made, packed and learned in it, by the weights that it updates (R31, R32).

`BufferedB` waits for all rollouts of the rank's share, then packs. `OverlappedB` learns the rows of one generation call
while the next call runs, in as few or as many calls as have been fastest. Both take the step's samples from the data's
own cursor, and number a step's requests over all ranks, so that a sample's seed, and its rollout, are the same either
way, on any number of ranks.

How much of a step's rollouts one generation call brings, by what steps took (R32).

Learning runs beside the calls that follow, so small calls hide more of it. But a server needs about as long for few
answers as for many, up to what it decodes at once: there small calls, one after the other, cost more than they hide.
Which it is depends on model, answers and GPUs, so it is measured: sizes take turns, then the fastest stays.

In: the seconds of each step's rollouts and learning. Out: samples per call. Only time depends on it: a sample's seed
and place do not. Called by `channel_b.py`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from learner.data.batches import Batches, MicroBatch
from learner.records import Channel, EncodedPrompt, PackedRow, Sample, Segment
from learner.run.log import PhaseClock
from learner.steps.packing import RowMaker
from learner.steps.pipeline import CallSpan, Fence, RolloutPipeline, Work, WorkItem
from learner.steps.protocol import Bounds, StreamState
from learner.steps.segments import SegmentSource
from learner.steps.stage2 import RankMetrics, step_rows

# A step takes max(rollout, learning) plus what one call brings, so four calls leave at most a quarter of it bare.
CALLS_PER_STEP = 4
TRY_AGAIN_AFTER = 50  # steps, for answers grow and shrink in training
_NEW_SHARE = 0.5  # of the latest step in a size's mean: one that was slow by chance is soon forgotten


def sizes(share: int, capacity: int) -> tuple[int, ...]:
    """Samples of a call that are worth trying, smallest first: a quarter of the share, half of it, all; as far as the
    servers decode `capacity` at once."""
    parts = (CALLS_PER_STEP, CALLS_PER_STEP // 2, 1)
    return tuple(sorted({max(1, min(capacity, -(-share // part))) for part in parts}))


class CallSize:
    """Of one rank. The first step's seconds do not count: in it everything warms up."""

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


DEADLINE_KEY = "training.collective_timeout_s"
CLOSE_S = 10.0


class BufferedB:
    """One generation call for the rank's whole share; learning begins when it is complete."""

    def __init__(self, batches: Batches, source: SegmentSource, row_maker: RowMaker) -> None:
        self._batches, self._source, self._row_maker = batches, source, row_maker
        self._ver: int | None = None  # what the servers serve; None before the first sync

    def wants_sync(self, wanted: Channel) -> bool:
        return wanted == "B"

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """Between steps no call is in flight here."""
        fence = Fence()
        yield fence
        self._ver = fence.ver if fence.ver is not None else self._ver

    def eligible(self) -> int | None:
        """None: rollouts are made within the step."""
        return None

    def rows(self, global_step: int, clock: PhaseClock) -> Generator[PackedRow]:
        return step_rows(self._batches, self._source, self._row_maker, global_step, clock)

    def metrics(self) -> RankMetrics:
        return RankMetrics()

    def stream_state(self) -> StreamState | None:
        """None: the place in the data is that of the batches."""
        return None

    def resume(self, stream: StreamState) -> None:
        """A run that was begun ahead of its steps goes on within them: what it had not learned comes in its epoch."""

    def stop(self) -> None:
        """A producer lives within its step."""

    def close(self) -> None:
        """Nothing is held between steps."""


class OverlappedB(BufferedB):
    """`capacity`: how many samples the servers decode at once for this rank; `deadline_s` bounds the wait for a row."""

    def __init__(
        self, batches: Batches, source: SegmentSource, row_maker: RowMaker, *, capacity: int, deadline_s: float
    ) -> None:
        super().__init__(batches, source, row_maker)
        self._capacity, self._deadline_s = capacity, deadline_s
        self._call_size = CallSize()
        self._spans: list[CallSpan] = []  # of the last step, while it was a Channel-B step

    def rows(self, global_step: int, clock: PhaseClock) -> Generator[PackedRow]:
        """See `ChannelB`. The time that learning had to wait for rollouts is the clock's phase `wait`."""
        with clock.phase("data"):
            batch = next(self._batches)
        assert self._ver is not None, "Channel-B before the first sync"
        share = len(batch.samples)
        call_size = self._call_size.choose(sizes(share, self._capacity))
        began = time.perf_counter()
        pipeline = RolloutPipeline(
            self._work(batch, global_step),
            Bounds.in_step(),
            ver=self._ver,
            call_size=call_size,
            end=share,
            deadline_key=DEADLINE_KEY,
            close_deadline_s=CLOSE_S,
        )
        with pipeline:
            while True:
                with clock.phase("wait"):
                    row = pipeline.next_pack(self._deadline_s)
                if row is None:
                    break
                yield row
            self._spans = pipeline.drain_spans()
        self._call_size.tell(call_size, time.perf_counter() - began)

    def metrics(self) -> RankMetrics:
        """Seconds in which a call of the step was under way; most of them are hidden behind learning."""
        spans, self._spans = self._spans, []
        return RankMetrics(means=call_metrics(spans))

    def _work(self, batch: MicroBatch, global_step: int) -> Work:
        """The producer's part: stream position i is the batch's sample i."""

        def load(positions: Sequence[int]) -> tuple[Sequence[Sample], Sequence[EncodedPrompt]]:
            return [batch.samples[i] for i in positions], [batch.prompts[i] for i in positions]

        def make_segments(item: WorkItem) -> list[Segment]:
            return self._source.segments(
                item.samples,
                item.prompts,
                global_step=global_step,
                micro_step_idx=0,
                first_req_idx=batch.first_req_idx + item.call.positions[0],
                clock=PhaseClock(),  # the trainer's own belongs to the thread that learns
            )

        return Work(load=load, make_segments=make_segments, pack=self._row_maker.rows)


def call_metrics(spans: Sequence[CallSpan]) -> Mapping[str, float]:
    """How many generation calls ended, and the seconds that they took."""
    return {
        "stage2_ab/calls": float(len(spans)),
        "stage2_ab/rollout_s": sum(span.ended_s - span.started_s for span in spans),
    }
