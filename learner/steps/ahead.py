"""Channel-B ahead of its steps: the asynchronous actor-learner (R25, R27).

One producer per rank makes packs of its own sample stream while the learner learns. A Channel-B step takes
`packs_per_step` of them, oldest first. A pack is one row of at most `samples_per_pack` samples, so such a step learns
as many samples as any other step, or fewer if they do not fit a row.

Weights are synced after every executed Channel-B step, before the next step. So a pack that is n versions old is n
Channel-B steps behind, and with `version_window: 0` only packs made since the last sync are learned. Before a sync each
rank stops calling, and waits for its call in flight.

The stream of all ranks is epoch after epoch of a shuffled order; rank r of W takes every W-th sample of it, beginning
with the r-th. So each rank can go at its own pace, and an epoch of the stream still holds each sample exactly once over
all ranks.

Invariants: those of `protocol`; every rank enters a fence or none does; a step takes what `begin` found eligible,
without waiting. The producer's thread shares nothing with the thread that learns: the stream's encoder is its own.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from learner.data.batches import DistributedSampler
from learner.data.encoding import EncoderPool
from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from learner.run.log import PhaseClock
from learner.steps.pipeline import CallSamples, CallTotals, Fence, ProducerStages, RolloutPipeline
from learner.steps.protocol import Bounds, Counts, StreamState
from learner.steps.stage2 import (
    CALLS_PER_STEP,
    CLOSE_S,
    DEADLINE_KEY,
    RankMetrics,
    Stage2Parts,
    Stage2Steps,
    call_metrics,
)
from shared.errors import CheckpointError
from shared.seeds import base_seed

NO_MICRO_STEP = -1  # stands for the micro-step in seeds of what belongs to no step
# Fields of `Counts` that are metrics of a step, summed over ranks.
SUMMED_COUNTS = ("packs_made", "packs_learned", "packs_dropped_oldest", "packs_dropped_stale", "samples_returned")

log = logging.getLogger("learner.stage2")


class SampleStream:
    """The samples that one rank rolls out. `pool` encodes prompts, and is closed with the stream."""

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
        order_seed = base_seed(seed, 0, NO_MICRO_STEP)  # another order than Channel-A's
        self._sampler = DistributedSampler(
            len(samples), num_ranks=1, rank=0, samples_per_rank=1, seed=order_seed, shuffle=shuffle
        )

    def sample(self, position: int) -> Sample:
        """The sample at a position of this rank: a pure function, a position that comes back gives the same sample."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much a call, a pack and a step hold on one rank."""

    samples_per_pack: int
    packs_per_step: int
    call_size: int  # samples

    @classmethod
    def of(cls, bounds: Bounds, *, samples_per_pack: int, packs_per_step: int, capacity: int) -> Sizes:
        """A call is one or more whole packs: as many as the servers decode at once (`capacity` samples), or a quarter
        of a step's packs if that is more, because within a call the servers are refilled as answers come. It is a
        step's packs at most, because a sync waits for the call in flight, and never more than the queue can hold."""
        assert bounds.keep_at_most is not None, "a queue that runs ahead is bounded"
        room = bounds.keep_at_most - bounds.start_below + 1
        packs = min(max(capacity // samples_per_pack, packs_per_step // CALLS_PER_STEP), packs_per_step, room)
        return cls(
            samples_per_pack=samples_per_pack,
            packs_per_step=packs_per_step,
            call_size=max(1, packs) * samples_per_pack,
        )


class Stage2Ahead(Stage2Steps):
    """`capacity`: how many samples the servers decode at once for this rank. `deadline_s` bounds the wait for a call in
    flight; shorter than what the ranks wait for each other."""

    def __init__(
        self,
        parts: Stage2Parts,
        stream: SampleStream,
        *,
        bounds: Bounds,
        samples_per_pack: int,
        capacity: int,
        deadline_s: float,
    ) -> None:
        super().__init__(parts)
        self._stream, self._bounds, self._deadline_s = stream, bounds, deadline_s
        self._sizes = Sizes.of(
            bounds, samples_per_pack=samples_per_pack, packs_per_step=parts.packs_per_step, capacity=capacity
        )
        self._pipeline: RolloutPipeline | None = None  # None: before the first sync
        self._resume: StreamState | None = None
        self._learned_since_sync = True  # the servers do not have the weights of the last Channel-B step
        self._depth = 0  # packs queued when the step's channel was chosen
        self._reported = (Counts(), CallTotals())  # what earlier steps' metrics hold
        log.info("rollouts run ahead: %s, %s", bounds, self._sizes)

    def wants_sync(self, global_step: int) -> bool:
        """After every executed Channel-B step, whatever comes next: the producer goes on with the new weights."""
        return self._learned_since_sync

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """No call is in flight on any rank inside. Collective. The first fence with a sync starts the producer."""
        pipeline = self._pipeline
        with ExitStack() as stack:
            fences = [Fence()]
            if pipeline is not None:
                with self._clock.phase("wait"):
                    enter = pipeline.fence(self._deadline_s)
                    self._ranks.all_succeed(lambda: fences.append(stack.enter_context(enter)))
            fence = fences[-1]
            yield fence
        if fence.ver is None:
            return
        self._learned_since_sync = False
        if pipeline is None:
            self._pipeline = self._make_pipeline(fence.ver).start()

    def state(self) -> dict[str, Any]:
        """With every rank's place in its stream."""
        state = super().state()
        own = self._resume or StreamState() if self._pipeline is None else self._pipeline.stream_state()
        state["stage2"]["streams"] = [asdict(stream) for stream in self._ranks.all_gather_object(own)]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises CheckpointError where it is of another number of ranks."""
        assert self._pipeline is None, "restored after the producer had started"
        super().restore(state)
        streams = state.get("stage2", {}).get("streams")
        if not streams:
            return
        if len(streams) != self._ranks.world_size:
            raise CheckpointError(
                "the checkpoint's rollouts ahead of learning are of another number of ranks",
                found=f"{len(streams)} sample streams in the checkpoint, {self._ranks.world_size} ranks",
                wanted="as many ranks, since each has a stream of its own",
                remedy=f"resume on {len(streams)} ranks, or once with stage2_ab.async_actor_learner.enabled: false",
            )
        own = streams[self._ranks.rank]
        self._resume = StreamState(**{**own, "unlearned": tuple(own["unlearned"])})

    def stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()

    def close(self) -> None:
        """See `StepSource`. Raises DeadlineError if the producer does not end."""
        try:
            if self._pipeline is not None:
                self._pipeline.close()
        finally:
            self._stream.close()

    # ---- Channel-B -------------------------------------------------------------------------------------------------

    def _eligible(self) -> int:
        """Fresh packs that wait; none before the first sync. Raises what ended the producer."""
        self._depth = self._pipeline.eligible() if self._pipeline else 0
        return self._depth

    def _channel_b(self) -> Generator[PackedRow]:
        """A step's packs, oldest first. They were found eligible, so the clock's phase `wait` is short."""
        pipeline, number = self._pipeline, self._sizes.packs_per_step
        assert pipeline is not None, "Channel-B before the first sync"
        for left in range(number, 0, -1):
            # The sync after this step waits for the call in flight, so begin none whose packs would become stale.
            if pipeline.eligible() >= left + number * self._bounds.version_window:
                pipeline.request_fence()
            with self._clock.phase("wait"):
                row = pipeline.next_pack(self._deadline_s)
            assert row is not None, "an endless stream ended"
            yield row
        self._learned_since_sync = True

    def _rank_metrics(self) -> RankMetrics:
        """What was queued, how old it was, what was dropped, how long calls took."""
        if self._pipeline is None:
            return RankMetrics()
        stats, (counts, calls) = self._pipeline.stats(), self._reported
        self._reported = (stats.counts, stats.calls)

        def since(name: str) -> float:
            """What was added to a count since the last step."""
            return float(getattr(stats.counts, name) - getattr(counts, name))

        means = {"stage2_ab/async/queue_depth": float(self._depth), **call_metrics(stats.calls, calls)}
        if learned := since("packs_learned"):
            means["stage2_ab/async/age_versions"] = since("age_versions") / learned
        return RankMetrics(means=means, sums={f"stage2_ab/async/{name}": since(name) for name in SUMMED_COUNTS})

    # ---- the producer's part ---------------------------------------------------------------------------------------

    def _make_pipeline(self, ver: int) -> RolloutPipeline:
        return RolloutPipeline(
            ProducerStages(load=self._stream.read, make_segments=self._make_segments, pack=self._pack),
            self._bounds,
            ver=ver,
            call_size=self._sizes.call_size,
            end=None,
            deadline_key=DEADLINE_KEY,
            close_deadline_s=CLOSE_S,
            resume=self._resume,
        )

    def _make_segments(self, asked: CallSamples) -> list[Segment]:
        """Seeds follow from the number of the rank's call, so a sample that is rolled out again is sampled anew."""
        return self._parts.rollouts.segments(
            asked.samples,
            asked.prompts,
            global_step=asked.call.index,
            micro_step_idx=NO_MICRO_STEP,
            first_req_idx=self._ranks.rank * self._sizes.call_size,
            clock=PhaseClock(),  # the trainer's own belongs to the thread that learns
        )

    def _pack(self, segments: list[Segment]) -> list[PackedRow]:
        size = self._sizes.samples_per_pack
        groups = (segments[i : i + size] for i in range(0, len(segments), size))
        return [row for group in groups for row in self._parts.row_maker.rows(group)]
