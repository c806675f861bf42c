"""Runs Channel-B within the step: the weights that a step updates also make the step's rollouts (R31, R32).

There are two ways. In the simple way, all samples of the rank are rolled out, and then learned. With servers and
packing, rows are learned while other samples are rolled out (D9). A second thread makes a segment of each rollout when
the rollout ends. The learning thread takes each row as soon as the row is closed. With and without overlap, a step's
requests are numbered over all ranks. So a sample has the same seed, and therefore the same rollout, in both ways and on
any number of ranks.

Finished segments wait in an unlimited queue, so no server waits for the learner. Which segments share a row depends on
the order in which rollouts end, unless `training.deterministic` is set. The samples that a step learns do not depend on
the order in which rollouts end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from learner.data.batches import MicroBatch
from learner.records import PackedRow, Segment
from learner.rollout.backend import MicroStep
from learner.steps.packing import ArrivingRows
from learner.steps.segments import RolloutSource, SegmentStream
from learner.steps.source import Fence
from learner.steps.stage2 import CLOSE_S, DEADLINE_KEY, CallTotals, RankMetrics, Stage2Parts, Stage2Steps, call_metrics
from shared.errors import DeadlineError, RolloutError
from shared.waits import wait_for

log = logging.getLogger("learner.stage2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The settings for learning rows during rollouts. `capacity`: max tokens of a row. `in_order` and `share_prompts`:
    see `ArrivingRows`."""

    rollouts: RolloutSource
    capacity: int
    in_order: bool
    share_prompts: bool = False


class Stage2InStep(Stage2Steps):
    """Channel-B within the step. If `overlap` is None, rows are learned after all rollouts. `deadline_s` is the longest
    wait for a row."""

    def __init__(self, parts: Stage2Parts, *, overlap: Overlap | None, deadline_s: float) -> None:
        super().__init__(parts)
        self._overlap, self._deadline_s = overlap, deadline_s
        self._calls = CallTotals()  # totals of the step that was learned last
        self._ver: int | None = None  # the version that the servers serve; None before the first sync

    def wants_sync(self, global_step: int) -> bool:
        return self._wanted(global_step) == "B"

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """Yield a `Fence` at once, without waiting: between steps no rollout is in flight."""
        fence = Fence()
        yield fence
        self._ver = fence.ver if fence.ver is not None else self._ver

    def _channel_b(self) -> Generator[PackedRow]:
        return self._share(self._parts.rollouts) if self._overlap is None else self._overlapped(self._overlap)

    def _overlapped(self, overlap: Overlap) -> Generator[PackedRow]:
        """Yield rows while other samples are rolled out. The clock's phase `wait` is the time without a row to
        learn."""
        with self._clock.phase("data"):
            batch = next(self._parts.batches)
        # At the end of an epoch a rank may have no samples. A rank without samples learns only the empty rows that the
        # trainer adds.
        if not batch.samples:
            return
        step = MicroStep(samples=batch.samples, micro_step_idx=0, first_req_idx=batch.first_req_idx)
        segments = overlap.rollouts.stream(step, batch.prompts, global_step=self._global_step)
        rows = ArrivingRows(
            overlap.capacity,
            number=len(batch.samples),
            in_order=overlap.in_order,
            share_prompts=overlap.share_prompts,
        )
        with StepRollouts(segments, rows, check=self._checked(batch)) as rollouts:
            while True:
                with self._clock.phase("wait"):
                    row = rollouts.next_row(self._deadline_s)
                if row is None:
                    break
                yield row
        self._calls = CallTotals(number=1, seconds=rollouts.seconds)

    def _checked(self, batch: MicroBatch) -> Callable[[int, Segment], None]:
        """Return a check that raises RolloutError for a segment that is not of the step's samples and version."""
        ver = self._ver
        assert ver is not None, "Channel-B before the first sync"

        def check(place: int, segment: Segment) -> None:
            wanted = batch.samples[place].sample_id
            # Another version shows that a second learner syncs the same servers.
            if (segment.sample_id, segment.ver) != (wanted, ver):
                raise RolloutError(
                    "a segment is not the one that was asked for",
                    found=f"sample {segment.sample_id}, rolled out by ver {segment.ver}",
                    wanted=f"sample {wanted}, rolled out by ver {ver}, the last that was synced",
                    remedy="is another learner syncing the same servers? every learner needs servers of its own",
                )

        return check

    def _rank_metrics(self) -> RankMetrics:
        """Return how many seconds the step's rollouts took. During most of this time rows are learned. Without
        `overlap` there are no metrics."""
        if self._overlap is None:
            return RankMetrics()
        calls, self._calls = self._calls, CallTotals()
        return RankMetrics(means=call_metrics(calls))


class StepRollouts:
    """One step's segments, made by a second thread and packed as they arrive. Use it as a context manager.

    Invariants: each of the step's segments is in one row, or an error is raised; `next_row` raises the first error;
    every wait has a deadline.
    """

    def __init__(self, segments: SegmentStream, rows: ArrivingRows, *, check: Callable[[int, Segment], None]) -> None:
        self._segments, self._rows, self._check = segments, rows, check
        self._changed = threading.Condition()  # lock of `_rows` and of the fields below, which two threads use
        self._ended = False
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self.seconds = 0.0  # time that the rollouts took; 0 until they have ended.
        # A daemon thread: after an error the interpreter exits without waiting for an answer.
        self._thread = threading.Thread(target=self._produce, name="rollout-producer", daemon=True)

    def next_row(self, deadline_s: float) -> PackedRow | None:
        """Return the next row to learn; None after the last. Waits up to `deadline_s` seconds.

        Raises DeadlineError, or the error that ended the rollouts.
        """
        with self._changed:
            # The learning thread must also wake if the rollouts end without a closed row, because the cause may be an
            # error.
            arrived = wait_for(self._changed, lambda: self._ended or self._rows.closed, deadline_s)
            if self._error is not None:
                raise self._error
            if not arrived:
                raise self._late("waiting for the next packed row", deadline_s)
            row = self._rows.take()
            # If a row is missing, the step would silently learn fewer samples.
            if row is None and not self._rows.complete:
                raise RolloutError(
                    "a step's rollouts ended early",
                    found=f"{self._rows.num_arrived} segments",
                    wanted="a segment of every sample",
                    remedy="no sample may be skipped; this is a bug of the rollout backend",
                )
            return row

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing ends the iteration of the second thread, which would otherwise continue to wait for rollouts.
        self._segments.close()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            late = self._late("waiting for the rollouts to end", CLOSE_S)
            if error is None:
                raise late
            # A later error is only logged, so that the first error is raised.
            log.warning("%s", late)

    def _produce(self) -> None:
        """Add each segment to the rows as it arrives. The body of the second thread."""
        error: BaseException | None = None
        try:
            for place, segment in self._segments:
                self._check(place, segment)
                with self._changed:
                    # The number of waiting segments needs no limit: it is at most the number of the rank's samples in
                    # this step, and the samples' prompts are in memory anyway.
                    self._rows.add(place, segment)
                    self._changed.notify_all()
        # An error of any type is kept, and `next_row` raises it in the thread that learns.
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self.seconds = time.perf_counter() - self._began
            self._changed.notify_all()

    def _late(self, what: str, deadline_s: float) -> DeadlineError:
        age_s = time.perf_counter() - self._began
        return DeadlineError(
            f"{what} passed its deadline",
            found=f"{self._rows.num_arrived} segments {age_s:.1f} s after the rollouts began",
            wanted=f"at most {deadline_s:g} s",
            remedy=f"look at the rollout servers' /status/, or raise {DEADLINE_KEY}",
        )
