"""Channel-B ahead of its steps: the asynchronous actor-learner (R25, R27).

One producer per rank makes packs of its own sample stream, whatever the learner does meanwhile; a Channel-B step takes
`packs_per_step` of them, oldest first. A pack is one row of at most `samples_per_pack` samples, so that such a step
learns as many samples as one of any other kind, or fewer where they do not fit a row.

When weights move: after every executed Channel-B step, before the next step. So one version is one such step, a pack of
`version_window` versions' age is that many Channel-B steps behind, and a window of 0 still learns something (what was
made since the last sync, if the learner does not wait for it). Each rank stops calling before the ranks meet for it.

Invariants: those of `learner/pipeline/`; every rank enters a fence or none does; a step takes what `eligible` promised
without waiting. Called by `driver.py`.

The samples that one rank rolls out ahead of learning: a stream of its own, beside the batches of Channel-A (R25).

The stream of all ranks is epoch after epoch of a shuffled order; rank r of W takes every W-th sample of it, beginning
with the r-th. So each rank can go at its own pace, and an epoch of the stream still holds each sample exactly once over
all ranks. `read(positions)` is a pure function of the position: one that comes back gives the same sample again.

Called in the producer's thread, which shares nothing with the thread that learns: the encoder is the stream's own.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from learner.data.batches import DistributedSampler
from learner.data.encoding import EncoderPool
from learner.policy.parallel import Ranks
from learner.records import Channel, EncodedPrompt, PackedRow, Sample, Segment
from learner.run.log import PhaseClock
from learner.steps.in_step import CALLS_PER_STEP, CLOSE_S, DEADLINE_KEY, call_metrics
from learner.steps.packing import RowMaker
from learner.steps.pipeline import Fence, RolloutPipeline, Work, WorkItem
from learner.steps.protocol import Bounds, Counts, StreamState
from learner.steps.segments import SegmentSource
from learner.steps.stage2 import RankMetrics
from shared.seeds import base_seed

AHEAD = -1  # stands for the micro-step in seeds of what belongs to no step


class SampleStream:
    """`pool` encodes prompts, and is closed with the stream."""

    def __init__(
        self,
        samples: Sequence[Sample],
        pool: EncoderPool,
        *,
        seed: int,
        shuffle: bool,
        rank: int,
        num_ranks: int,
    ) -> None:
        self._samples, self._pool, self._rank, self._num_ranks = samples, pool, rank, num_ranks
        order_seed = base_seed(seed, 0, AHEAD)  # another order than Channel-A's
        self._sampler = DistributedSampler(
            len(samples), num_ranks=1, rank=0, samples_per_rank=1, seed=order_seed, shuffle=shuffle
        )

    def sample(self, position: int) -> Sample:
        """The sample at a position of this rank."""
        epoch, place = divmod(position * self._num_ranks + self._rank, len(self._samples))
        return self._samples[int(self._sampler.order(epoch)[place])]

    def read(self, positions: Sequence[int]) -> tuple[list[Sample], list[EncodedPrompt]]:
        """Samples and prompts, one each per position, in order. Raises DataError where a sample can't be encoded."""
        samples = [self.sample(position) for position in positions]
        size = self._pool.job_size
        jobs = [self._pool.submit(samples[i : i + size]) for i in range(0, len(samples), size)]
        return samples, [prompt for job in jobs for prompt in job.result()]

    def close(self) -> None:
        self._pool.close()


log = logging.getLogger("learner.stage2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much a call, a pack and a step hold on one rank."""

    samples_per_pack: int
    packs_per_step: int
    call_size: int  # samples

    @classmethod
    def of(cls, bounds: Bounds, *, samples_per_pack: int, packs_per_step: int, capacity: int) -> Sizes:
        """Calls of whole packs, at least one: as many as the servers decode at once (`capacity` samples), or a part of
        a step's where that is more, for within a call they are refilled as answers come; a step's at most, because a
        sync waits for the call in flight; and none that the queue would drop at once."""
        assert bounds.keep_at_most is not None, "a queue that runs ahead is bounded"
        room = bounds.keep_at_most - bounds.start_below + 1
        packs = min(max(capacity // samples_per_pack, packs_per_step // CALLS_PER_STEP), packs_per_step, room)
        return cls(
            samples_per_pack=samples_per_pack,
            packs_per_step=packs_per_step,
            call_size=max(1, packs) * samples_per_pack,
        )


class AheadB:
    """`deadline_s` bounds the wait for a call in flight; shorter than what the ranks wait for each other."""

    def __init__(
        self,
        stream: SampleStream,
        source: SegmentSource,
        row_maker: RowMaker,
        *,
        bounds: Bounds,
        sizes: Sizes,
        ranks: Ranks,
        deadline_s: float,
    ) -> None:
        self._stream, self._source, self._row_maker = stream, source, row_maker
        self._bounds, self._sizes, self._ranks, self._deadline_s = bounds, sizes, ranks, deadline_s
        self._pipeline: RolloutPipeline | None = None  # None: before the first sync
        self._resume: StreamState | None = None
        self._learned_since_sync = True  # Channel-B, by any rank's weights: the servers are to have the new ones
        self._depth = 0  # packs queued when the step's channel was chosen
        self._told = Counts()  # what the metrics have told
        log.info("rollouts run ahead: %s, %s", bounds, sizes)

    def wants_sync(self, wanted: Channel) -> bool:
        """After every executed Channel-B step, whatever comes next: the producer goes on with the new weights."""
        return self._learned_since_sync

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """No call is in flight on any rank inside. Collective. The first one with a sync starts the producer."""
        pipeline = self._pipeline
        with ExitStack() as stack:
            fences = [Fence()]
            if pipeline is not None:
                self._ranks.all_succeed(lambda: fences.append(stack.enter_context(pipeline.fence(self._deadline_s))))
            fence = fences[-1]
            yield fence
        if fence.ver is None:
            return
        self._learned_since_sync = False
        if pipeline is None:
            self._pipeline = self._make_pipeline(fence.ver).start()

    def eligible(self) -> int:
        """Fresh packs that wait; none before the first sync. Raises what ended the producer."""
        self._depth = self._pipeline.eligible() if self._pipeline else 0
        return self._depth

    def rows(self, global_step: int, clock: PhaseClock) -> Generator[PackedRow]:
        """A step's packs, oldest first. They were promised by `eligible`, so the clock's phase `wait` is short."""
        pipeline, number = self._pipeline, self._sizes.packs_per_step
        assert pipeline is not None, "Channel-B before the first sync"
        for left in range(number, 0, -1):
            # The sync after this step waits for the call in flight: begin none whose packs would only become stale.
            if pipeline.eligible() >= left + number * self._bounds.version_window:
                pipeline.request_fence()
            with clock.phase("wait"):
                row = pipeline.next_pack(self._deadline_s)
            assert row is not None, "an endless stream ended"
            yield row
        self._learned_since_sync = True

    def metrics(self) -> RankMetrics:
        """Of the step that ended: what was queued, how old it was, what was dropped, how long calls took."""
        if self._pipeline is None:
            return RankMetrics()
        now, told = self._pipeline.stats().counts, self._told
        self._told = now
        learned = now.packs_learned - told.packs_learned
        means = {"stage2_ab/async/queue_depth": float(self._depth), **call_metrics(self._pipeline.drain_spans())}
        if learned:
            means["stage2_ab/async/age_versions"] = (now.age_versions - told.age_versions) / learned
        sums = {
            "stage2_ab/async/packs_made": now.packs_made - told.packs_made,
            "stage2_ab/async/packs_learned": learned,
            "stage2_ab/async/packs_dropped_oldest": now.packs_dropped_oldest - told.packs_dropped_oldest,
            "stage2_ab/async/packs_dropped_stale": now.packs_dropped_stale - told.packs_dropped_stale,
            "stage2_ab/async/samples_returned": now.samples_returned - told.samples_returned,
        }
        return RankMetrics(means=means, sums={name: float(count) for name, count in sums.items()})

    def stream_state(self) -> StreamState:
        if self._pipeline is None:
            return self._resume or StreamState()
        return self._pipeline.stream_state()

    def resume(self, stream: StreamState) -> None:
        assert self._pipeline is None, "resumed after the producer had started"
        self._resume = stream

    def stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._stream.close()

    # ---- the producer's part ---------------------------------------------------------------------------------------

    def _make_pipeline(self, ver: int) -> RolloutPipeline:
        return RolloutPipeline(
            Work(load=self._stream.read, make_segments=self._make_segments, pack=self._pack),
            self._bounds,
            ver=ver,
            call_size=self._sizes.call_size,
            end=None,
            deadline_key=DEADLINE_KEY,
            close_deadline_s=CLOSE_S,
            resume=self._resume,
        )

    def _make_segments(self, item: WorkItem) -> list[Segment]:
        """Seeds follow from the number of the rank's call, so a sample that is rolled out again is sampled anew."""
        return self._source.segments(
            item.samples,
            item.prompts,
            global_step=item.call.index,
            micro_step_idx=AHEAD,
            first_req_idx=self._ranks.rank * self._sizes.call_size,
            clock=PhaseClock(),  # the trainer's own belongs to the thread that learns
        )

    def _pack(self, segments: list[Segment]) -> list[PackedRow]:
        size = self._sizes.samples_per_pack
        groups = (segments[i : i + size] for i in range(0, len(segments), size))
        return [row for group in groups for row in self._row_maker.rows(group)]
