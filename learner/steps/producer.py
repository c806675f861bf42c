"""The thread that makes rollouts ahead of learning (R24, R25). A call rolls out some samples of one share (the samples
of one optimizer step). `shares.ShareQueue` decides which call comes next. The producer makes the calls, and keeps their
segments in packs (a few segments each) until they are learned.

    producer.want([7, 9])                                    # only these shares may be rolled out
    if 7 in producer.outlook(step).complete:
        packs = producer.take(7, step)                       # each pack: its segments, in the order of their places
    with producer.fence(deadline_s) as fence:                # on every rank; this rank has no call in flight now
        ranks.barrier()                                      # and now no rank has one
        fence.synced(sync_and_broadcast_ver(), updates=step)

The producer makes one generation call after another, and never waits between them. When no call is permitted, its
thread ends. Taking a share or ending a fence permits calls again, and starts a new thread.

Invariants: the invariants of `ShareQueue` hold, and a lock guards the queue. A call makes one segment for each of its
samples, in order, with the weights that the servers have now; otherwise it raises RolloutError. After the first error,
in the producer's thread or in the learning thread, every method raises that error. Every wait has a deadline, and its
DeadlineError names the awaited event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from learner.data.batches import MicroBatch
from learner.records import Segment
from learner.steps.shares import Call, Drop, Outlook, PackCounts, ServedVersion, ShareQueue
from learner.steps.source import Fence
from learner.steps.stage2 import CallTotals
from shared.errors import DeadlineError, RolloutError
from shared.waits import wait_for

log = logging.getLogger("learner.pipeline")

_WHY = {
    "oldest": "too many wait; made again later",
    "stale": "too old; made again",
    "unwanted": "no Channel-B step is left for it; learned as ground truth",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerStats:
    """One rank's queue now, and its producer's totals since the start."""

    queued: int  # number of packs that wait to be learned
    counts: PackCounts
    calls: CallTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStages:
    """The two stages that make the segments of a call. The stages run one after the other in the producer's thread.

    `read(share, places)` returns this rank's samples and prompts. Equal arguments always give equal samples.
    `roll_out(call, part)` returns one segment per sample of `part`, in order.
    """

    read: Callable[[int, range], MicroBatch]
    roll_out: Callable[[Call, MicroBatch], list[Segment]]

    def run(self, call: Call) -> list[Segment]:
        """Return the call's segments. Raises RolloutError if a segment belongs to another sample or version than the
        call."""
        part = self.read(call.share, call.places)
        segments = self.roll_out(call, part)
        check_segments(call, [sample.sample_id for sample in part.samples], segments)
        return segments


def check_segments(call: Call, wanted_ids: Sequence[str], segments: Sequence[Segment]) -> None:
    """Check that there is one segment per sample, in order, and that all segments have the version of the call. Raises
    RolloutError."""
    found_ids = [segment.sample_id for segment in segments]
    if found_ids != wanted_ids or len(wanted_ids) != len(call.places):
        raise RolloutError(
            "a call's segments are not those of its samples",
            found=f"{found_ids} for {len(call.places)} places",
            wanted=f"{wanted_ids}",
            remedy="no sample may be skipped; this is a bug of the segment source",
        )
    versions = {segment.ver for segment in segments}
    if versions != {call.by.ver}:
        raise RolloutError(
            "a call was answered by other weights than it was sent to",
            found=f"ver {sorted(versions, key=str)} for samples {', '.join(found_ids)}",
            wanted=f"ver {call.by.ver} throughout, because no sync may run while a call is in flight",
            remedy="is another learner syncing the same servers? every learner needs servers of its own",
        )


class Producer:
    """One rank's producer. `deadline_key`: the configuration key that sets the deadlines, named in errors. `close_s`:
    how long `close` waits for the thread, in seconds."""

    def __init__(
        self,
        queue: ShareQueue,
        stages: CallStages,
        *,
        deadline_key: str,
        close_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._stages = queue, stages
        self._deadline_key, self._close_s, self._clock = deadline_key, close_s, clock
        self._changed = threading.Condition()  # lock of the queue and of the fields below
        self._segments: dict[int, list[Segment]] = {}  # pack index -> the pack's segments.
        # The producer's thread; None: no thread runs, because no call is permitted.
        self._thread: threading.Thread | None = None
        self._call_started_s = 0.0
        self._calls = CallTotals()

    # ---- consumer --------------------------------------------------------------------------------------------------

    def want(self, shares: Sequence[int]) -> None:
        """From now on roll out only the samples of `shares` (see `ShareQueue.want`)."""
        with self._changed:
            self._forget(self._queue.want(shares))
            self._wake()

    def outlook(self, step: int) -> Outlook:
        """Drop the packs that are too old for `step`, the next step, and return `ShareQueue.outlook`. Raises the error
        that ended the producer."""
        with self._changed:
            self._queue.check()
            self._forget(self._queue.expire(step))
            self._wake()
            return self._queue.outlook()

    def take(self, share: int, step: int) -> list[list[Segment]]:
        """Take a share with all its rollouts out of the queue, to be learned in `step`. Returns its packs, each a list
        of segments."""
        with self._changed:
            packs = self._queue.take(share, step)
            self._wake()
            return [self._segments.pop(pack.index) for pack in packs]

    def await_call(self, deadline_s: float) -> None:
        """Wait up to `deadline_s` seconds until a call ends. Return at once if the most urgent share has all its
        rollouts. Raises DeadlineError, or the error that ended the producer."""
        with self._changed:
            queue, ended = self._queue, self._calls.number
            if not wait_for(
                self._changed,
                lambda: queue.ended or self._calls.number > ended or not queue.outlook().is_making,
                deadline_s,
            ):
                what, remedy = "waiting for the rollouts of a Channel-B step", f"raise {self._deadline_key}"
                raise self._deadline_error(what, deadline_s, remedy)
            queue.check()

    def request_fence(self) -> bool:
        """Let no call start until the next `fence` has ended. Return True if no call is in flight. Raises the error
        that ended the producer."""
        with self._changed:
            self._queue.request_fence()
            return self._queue.quiet

    @contextmanager
    def fence(self, deadline_s: float, *, counts: bool = True) -> Iterator[Fence]:
        """Enclose work during which no call of this rank is in flight or starts. Waits up to `deadline_s` seconds for
        the call in flight. `counts`: True if a sync inside the `with` block makes the waiting packs one sync older. A
        sync for an evaluation does not.

        Raises DeadlineError, the error that ended the producer, or PipelineStoppedError. An exception inside the `with`
        block ends the producer, because the version of the servers' weights is then unknown.
        """
        with self._changed:
            queue = self._queue
            queue.request_fence()
            wait_for(self._changed, lambda: queue.ended or queue.quiet, deadline_s)
            queue.check()
            if not queue.quiet:
                what, remedy = "waiting for the call in flight before a weight sync", f"raise {self._deadline_key}"
                error = self._deadline_error(what, deadline_s, remedy)
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
            served = None
            if fence.ver is not None:
                syncs = queue.served.syncs + counts
                served = ServedVersion(ver=fence.ver, updates=fence.updates, syncs=syncs)
            # Packs that the sync made too old are dropped before the next call starts, which may then make them again.
            self._forget(queue.complete_fence(served))
            self._wake()

    def stats(self) -> ProducerStats:
        with self._changed:
            return ProducerStats(queued=len(self._queue.queue), counts=self._queue.counts, calls=self._calls)

    def describe(self) -> str:
        """Return the producer's state in words, for an error."""
        with self._changed:
            queue, call = self._queue, self._queue.in_flight
            flying = "no call in flight"
            if call is not None:
                age_s = self._clock() - self._call_started_s
                flying = f"a call of {len(call.places)} samples of share {call.share} in flight for {age_s:.1f} s"
            return f"{flying}, {len(queue.queue)} packs queued, ver {queue.served.ver}"

    # ---- end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Prevent further calls, and return at once. Must be called before the backend is closed."""
        with self._changed:
            self._queue.stop()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the thread to leave. Raises DeadlineError after `close_s` seconds."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(self._close_s)
            if thread.is_alive():
                what = "waiting for the rollout producer's thread to end"
                raise self._deadline_error(what, self._close_s, "report it: this limit is not configured")

    # ---- producer --------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        """Make calls while they are permitted. The body of the producer's thread."""
        while (call := self._begin_call()) is not None:
            try:
                segments = self._stages.run(call)
            # An error of any type is kept, and the thread that learns raises it.
            except BaseException as error:
                self._fail_call(error)
            else:
                self._finish_call(call, segments)

    def _begin_call(self) -> Call | None:
        """Return the next call to make. Return None if no call is permitted. Then the thread ends, and `_wake` starts
        another thread later."""
        with self._changed:
            if not self._queue.may_start:
                # `_thread` changes only under the lock. So `_wake` sees either no thread, or a thread that will ask for
                # a call again.
                self._thread = None
                return None
            self._call_started_s = self._clock()
            return self._queue.start_call()

    def _finish_call(self, call: Call, segments: Sequence[Segment]) -> None:
        with self._changed:
            self._count_call()
            packs, drops = self._queue.finish_call()
            for pack in packs:
                self._segments[pack.index] = [segments[place - call.places.start] for place in pack.places]
            self._forget(drops)
            self._changed.notify_all()

    def _fail_call(self, error: BaseException) -> None:
        with self._changed:
            self._count_call()
            self._queue.abandon_call()
            self._end(error)

    # ---- locked ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Start the producer's thread if a call is permitted and no thread runs."""
        if self._thread is None and self._queue.may_start:
            # A daemon thread: after an error the interpreter exits without waiting for an answer.
            self._thread = threading.Thread(target=self._produce, name="rollout-producer", daemon=True)
            self._thread.start()

    def _end(self, error: BaseException) -> None:
        if not self._queue.fail(error):
            log.warning("after the producer had ended: %s: %s", type(error).__name__, error)
        self._changed.notify_all()

    def _forget(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            pack, ids = drop.pack, [segment.sample_id for segment in self._segments.pop(drop.pack.index)]
            served = self._queue.served
            log.info(
                "dropped a pack (%s: %s), made at ver %d after %d updates, now ver %d after %d: %s",
                drop.reason,
                _WHY[drop.reason],
                pack.by.ver,
                pack.by.updates,
                served.ver,
                served.updates,
                ", ".join(ids),
            )

    def _count_call(self) -> None:
        calls, seconds = self._calls, self._clock() - self._call_started_s
        self._calls = CallTotals(number=calls.number + 1, seconds=calls.seconds + seconds)

    def _deadline_error(self, what: str, deadline_s: float, remedy: str) -> DeadlineError:
        return DeadlineError(
            f"{what} passed its deadline",
            found=self.describe(),
            wanted=f"at most {deadline_s:g} s",
            remedy=f"look at the rollout servers' /status/, or {remedy}",
        )
