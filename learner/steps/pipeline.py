"""Rollout ahead of learning: packed rows arrive from a producer thread while the learner learns (R25, R31, R32).

One mechanism, two bounds (`protocol.Bounds`). Synchronous Channel-B: one pipeline per step over the step's share, which
makes the next call while the learner learns the last one's rows, and ends with the share. Asynchronous actor-learner:
one pipeline per run over an endless stream. It runs ahead across steps, and only fresh packs are learned.

    with RolloutPipeline(...) as pipeline:
        while (row := pipeline.next_pack(deadline_s)) is not None:
            learn(row)
        with pipeline.fence(deadline_s) as fence:  # on every rank; this rank has no call in flight now
            ranks.barrier()                        # and now none has
            fence.synced(sync_and_broadcast_ver())

The producer makes one generation call after another: permitted positions of the rank's sample stream become samples,
segments, and packed rows. It never waits. It works while it is permitted to and then leaves its thread; whoever makes
room (a pack taken, a fence opened) starts it again.

Invariants: those of `protocol`, of which this is the thread-safe shell; a call's rows hold exactly its samples, each
once, all made by the served version, or the call fails with a RolloutError; the rows in memory are those of the
protocol's queue and no others; the first error of either side is what every later call raises; every wait has a
deadline and names itself. Nothing here decides for other ranks: `Stage2Steps.begin` compares what is eligible.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from learner.records import EncodedPrompt, PackedRow, Sample, Segment
from learner.steps.protocol import Bounds, Call, Counts, Drop, RankProtocol, StreamState
from shared.errors import DeadlineError, RolloutError

log = logging.getLogger("learner.pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTotals:
    """The generation calls that have ended since the start, failed ones too: from permission to rows."""

    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """One rank's pipeline at one moment. `counts` are totals since its start."""

    ver: int
    samples_in_flight: int
    counts: Counts
    calls: CallTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSamples:
    """What one call rolls out. `call.positions[i]` is the stream position of `samples[i]`."""

    call: Call
    samples: tuple[Sample, ...]
    prompts: tuple[EncodedPrompt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerStages:
    """How a call becomes rows. All three run in the producer's thread, never two at once.

    `load(positions)` reads samples and prompts of the rank's own stream, one each per position, in order, the same at
    every reading: a position comes back when its pack was dropped, and after a resume. `make_segments(asked)` rolls
    out, parses, matches and encodes: one segment per sample, in order. `pack(segments)` lays all of them in rows.
    """

    load: Callable[[Sequence[int]], tuple[Sequence[Sample], Sequence[EncodedPrompt]]]
    make_segments: Callable[[CallSamples], list[Segment]]
    pack: Callable[[list[Segment]], list[PackedRow]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MadeRow:
    """A packed row and the stream positions of its segments, in the row's order."""

    row: PackedRow
    positions: tuple[int, ...]


def make_rows(call: Call, stages: ProducerStages) -> list[MadeRow]:
    """One call from stream positions to packed rows. Raises RolloutError where samples or versions do not add up."""
    samples, prompts = stages.load(call.positions)
    asked = CallSamples(call=call, samples=tuple(samples), prompts=tuple(prompts))
    segments = stages.make_segments(asked)
    check_segments(asked, segments)
    rows = stages.pack(segments)
    positions = dict(zip(segments, call.positions, strict=True))  # segments compare by identity
    laid = [segment for row in rows for segment in row.segments]
    if len(laid) != len(segments) or set(laid) != set(segments) or not all(row.segments for row in rows):
        raise RolloutError(
            "packing changed the segments of a call",
            found=f"{len(laid)} segments in {len(rows)} rows, made of {len(segments)}",
            wanted="every segment in exactly one row, and no empty row",
            remedy="this is a bug of the packer",
        )
    return [MadeRow(row=row, positions=tuple(positions[s] for s in row.segments)) for row in rows]


def check_segments(asked: CallSamples, segments: Sequence[Segment]) -> None:
    """One segment per sample, in order, all of the version that the call was permitted under; else RolloutError."""
    wanted_ids = [sample.sample_id for sample in asked.samples]
    found_ids = [segment.sample_id for segment in segments]
    if found_ids != wanted_ids or len(wanted_ids) != len(asked.call.positions):
        raise RolloutError(
            "a call's segments are not those of its samples",
            found=f"{found_ids} for {len(asked.call.positions)} stream positions",
            wanted=f"{wanted_ids}",
            remedy="no sample may be skipped; this is a bug of the segment source",
        )
    versions = {segment.ver for segment in segments}
    if versions != {asked.call.ver}:
        raise RolloutError(
            "a call was answered by other weights than it was sent to",
            found=f"ver {sorted(versions, key=str)} for samples {', '.join(found_ids)}",
            wanted=f"ver {asked.call.ver} throughout, because no sync may run while a call is in flight",
            remedy="is another learner syncing the same servers? every learner needs servers of its own",
        )


class Fence:
    """In the hands of whoever holds a closed fence, to say what happened behind it."""

    ver: int | None = None
    updates = 0  # optimizer updates in the weights that were synced

    def synced(self, ver: int, *, updates: int = 0) -> None:
        """A sync completed, and `ver` is what every server serves now. Unsaid: no weights moved."""
        self.ver, self.updates = ver, updates


class RolloutPipeline:
    """One rank's pipeline. `ver` is what the servers serve at the start, `call_size` how many samples a call rolls out,
    `end` the length of the stream (None: endless), `deadline_key` the configuration key that deadlines come from."""

    def __init__(
        self,
        stages: ProducerStages,
        bounds: Bounds,
        *,
        ver: int,
        call_size: int,
        end: int | None,
        deadline_key: str,
        close_deadline_s: float,
        resume: StreamState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stages, self._deadline_key, self._close_deadline_s = stages, deadline_key, close_deadline_s
        self._clock = clock
        self._protocol = RankProtocol(bounds, ver=ver, call_size=call_size, end=end, resume=resume)
        self._changed = threading.Condition()  # guards everything below and the protocol
        self._rows: dict[int, PackedRow] = {}  # by pack index
        self._thread: threading.Thread | None = None  # None: nobody is producing
        self._call_started_s = 0.0
        self._calls = CallTotals()

    def start(self) -> Self:
        """Let the producer begin."""
        with self._changed:
            self._wake()
        return self

    # ---- the consumer's side ---------------------------------------------------------------------------------------

    def next_pack(self, deadline_s: float) -> PackedRow | None:
        """The oldest fresh row, to be learned now; None after the stream's last. Waits up to `deadline_s` seconds.

        Raises DeadlineError, the producer's own error, or PipelineStoppedError.
        """
        with self._changed:
            protocol = self._protocol
            arrived = self._changed.wait_for(
                lambda: protocol.ended or protocol.queue or not protocol.can_arrive, timeout=deadline_s
            )
            pack = protocol.take()
            if pack is not None:
                self._wake()
                return self._rows.pop(pack.index)
            if not arrived:
                raise self._deadline_error("waiting for the next packed row", deadline_s)
            assert protocol.exhausted, "next_pack() while the fence is closed and the queue is empty"
            return None

    def eligible(self) -> int:
        """Packs that may be learned at the current version without waiting. Raises what ended the pipeline."""
        with self._changed:
            self._protocol.check()
            return len(self._protocol.queue)

    def request_fence(self) -> None:
        """Start no further call, so that `fence()`, which must follow, has less to wait for. Waits for nothing."""
        with self._changed:
            self._protocol.request_fence()

    @contextmanager
    def fence(self, deadline_s: float) -> Iterator[Fence]:
        """No call of this rank is in flight inside, and none starts. Waits up to `deadline_s` seconds for one that is.

        Raises DeadlineError, the producer's own error, or PipelineStoppedError. An exception inside ends the pipeline:
        what the servers serve is not known any more.
        """
        with self._changed:
            self._protocol.request_fence()
            self._changed.wait_for(lambda: self._protocol.ended or self._protocol.quiet, timeout=deadline_s)
            self._protocol.check()
            if not self._protocol.quiet:
                error = self._deadline_error("waiting for the call in flight before a weight sync", deadline_s)
                self._end(error)
                raise error
        fence = Fence()
        try:
            yield fence
        except BaseException as error:
            with self._changed:
                self._end(error)
            raise
        with self._changed:
            self._forget(self._protocol.complete_fence(fence.ver))
            self._wake()

    def stream_state(self) -> StreamState:
        """For the checkpoint, between optimizer steps: every row that `next_pack` gave counts as learned."""
        with self._changed:
            return self._protocol.stream_state()

    def stats(self) -> PipelineStats:
        with self._changed:
            protocol = self._protocol
            flying = len(protocol.in_flight.positions) if protocol.in_flight else 0
            return PipelineStats(ver=protocol.ver, samples_in_flight=flying, counts=protocol.counts, calls=self._calls)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Start nothing more and wait for nothing: to be called before the backend under a call in flight is closed."""
        with self._changed:
            self._protocol.stop()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the producer to leave. Raises DeadlineError after `close_deadline_s` seconds."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(self._close_deadline_s)
            if thread.is_alive():
                raise self._deadline_error("waiting for the producer to leave", self._close_deadline_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DeadlineError as late:
            if error is None:
                raise
            log.warning("%s", late)  # the first cause is already on its way, and must stay the one that is raised

    # ---- the producer's side ---------------------------------------------------------------------------------------

    def _produce(self) -> None:
        """Make calls while they are permitted. The body of the producer's thread."""
        while (call := self._begin_call()) is not None:
            try:
                rows = make_rows(call, self._stages)
            except BaseException as error:  # the thread's edge: the consumer raises it, with its type
                self._fail_call(error)
            else:
                self._finish_call(rows)

    def _begin_call(self) -> Call | None:
        """A permission, or None: the thread leaves, and will be started again. Every call then ends in one of the two
        below."""
        with self._changed:
            if not self._protocol.may_start:
                self._thread = None
                return None
            self._call_started_s = self._clock()
            return self._protocol.start_call()

    def _finish_call(self, rows: Sequence[MadeRow]) -> None:
        with self._changed:
            self._count_call()
            packs, drops = self._protocol.finish_call([made.positions for made in rows])
            self._rows.update({pack.index: made.row for pack, made in zip(packs, rows, strict=bool(packs))})
            self._forget(drops)
            self._changed.notify_all()

    def _fail_call(self, error: BaseException) -> None:
        with self._changed:
            self._count_call()
            self._protocol.abandon_call()
            self._end(error)

    # ---- under the lock --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start a producer if there is something to do and nobody is doing it."""
        if self._thread is None and self._protocol.may_start:
            # daemon: an interpreter that is leaving because of an error must not wait for an answer
            self._thread = threading.Thread(target=self._produce, name="rollout-producer", daemon=True)
            self._thread.start()

    def _end(self, error: BaseException) -> None:
        if not self._protocol.fail(error):
            log.warning("after the pipeline had ended: %s: %s", type(error).__name__, error)
        self._changed.notify_all()

    def _forget(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            row = self._rows.pop(drop.pack.index)
            log.info(
                "dropped a pack (%s: made at ver %d, now %d); its samples are rolled out again: %s",
                drop.reason,
                drop.pack.ver,
                self._protocol.ver,
                ", ".join(segment.sample_id for segment in row.segments),
            )

    def _count_call(self) -> None:
        calls, seconds = self._calls, self._clock() - self._call_started_s
        self._calls = CallTotals(number=calls.number + 1, seconds=calls.seconds + seconds)

    def _deadline_error(self, what: str, deadline_s: float) -> DeadlineError:
        protocol, call = self._protocol, self._protocol.in_flight
        flying = "no call in flight"
        if call is not None:
            age_s = self._clock() - self._call_started_s
            flying = f"call {call.index} of {len(call.positions)} samples in flight for {age_s:.1f} s"
        return DeadlineError(
            f"{what} passed its deadline",
            found=f"{flying}, {len(protocol.queue)} packs queued, ver {protocol.ver}",
            wanted=f"at most {deadline_s:g} s",
            remedy=f"look at the rollout servers' /status/, or raise {self._deadline_key}",
        )
