"""R25, R27: rollouts that take longer than a step. Real steps, shares, queues and data on one rank; a clock that only
the test moves stands in for the producer's thread, so every run is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from learner.policy.parallel import Ranks
from learner.records import Segment
from learner.steps import ahead
from learner.steps.producer import CallStages, ProducerStats
from learner.steps.shares import ServedVersion, ShareQueue
from learner.steps.source import Fence
from learner.steps.stage2 import CallTotals
from tests.unit.learner.steps.fakes import segment
from tests.unit.learner.steps.test_exactly_once import World, case_of, make_source

STEP_S, SYNC_S, NUM_STEPS = 1.0, 0.05, 120
SAMPLES, NUM_ROWS = 16, 8  # of a step
WHOLE, PART = 16, 4  # samples of a call


class LateProducer:
    """Makes the calls that `Producer` makes, one after the other. `share_s`: seconds of all calls of a share."""

    now, share_s, busy_s = 0.0, 0.0, 0.0

    def __init__(self, queue: ShareQueue, stages: CallStages, **settings: Any) -> None:
        self._queue, self._stages, self._ends = queue, stages, 0.0
        self._segments: dict[int, list[Segment]] = {}

    def want(self, shares: Sequence[int]) -> None:
        self._go_on()
        self._queue.want(shares)
        self._go_on()

    def request_fence(self) -> bool:
        self._go_on()
        self._queue.request_fence()
        return self._queue.quiet

    def complete(self, step: int) -> dict[int, int]:
        self._go_on()
        self._queue.expire(step)
        self._go_on()
        return self._queue.complete()

    def take(self, share: int, step: int) -> list[list[Segment]]:
        packs = self._queue.take(share, step)
        self._go_on()
        return [self._segments[pack.index] for pack in packs]

    @contextmanager
    def fence(self, deadline_s: float, *, counts: bool = True) -> Iterator[Fence]:
        self._go_on()
        self._queue.request_fence()
        if self._queue.in_flight is not None:
            LateProducer.now = max(self.now, self._ends)
            self._go_on()
        fence = Fence()
        yield fence
        assert fence.ver is not None
        syncs = self._queue.served.syncs + counts
        self._queue.complete_fence(ServedVersion(ver=fence.ver, updates=fence.updates, syncs=syncs))
        self._go_on()

    def stats(self) -> ProducerStats:
        return ProducerStats(queued=len(self._queue.queue), counts=self._queue.counts, calls=CallTotals())

    def stop(self) -> None:
        self._queue.stop()

    def close(self) -> None:
        self.stop()

    def _go_on(self) -> None:
        """Let end what has ended by now, and start what may start, each at its time."""
        at = self.now
        while True:
            call = self._queue.in_flight
            if call is not None and self._ends <= self.now:
                at = self._ends
                ids = [sample.sample_id for sample in self._stages.read(call.share, call.places).samples]
                for pack in self._queue.finish_call()[0]:
                    places = [place - call.start for place in pack.places]
                    self._segments[pack.index] = [segment(ids[place], call.by.ver) for place in places]
            elif self._queue.may_start:
                seconds = self.share_s * len(self._queue.start_call().places) / SAMPLES
                self._ends = at + seconds
                LateProducer.busy_s += seconds
            else:
                return


@pytest.mark.parametrize("per_epoch", [3, 60])
@pytest.mark.parametrize(
    ("b_ratio", "share_s", "call", "wanted"),
    [
        (0.5, 0.8, PART, 1.0),
        (0.75, 1.3, PART, 0.95),
        (1.0, 1.1, PART, 0.95),
        (0.5, 1.3, PART, 0.95),  # half of them, before
        (0.5, 1.8, WHOLE, 0.95),
        (0.75, 2.5, WHOLE, 0.95),
        (0.75, 3.5, WHOLE, 0.95),  # none, before
        (1.0, 2.5, WHOLE, 0.95),
    ],
)
def test_rollouts_longer_than_a_step_are_learned(
    b_ratio: float, share_s: float, call: int, wanted: float, per_epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the shares that are scheduled, and could be rolled out in the time that the run took, nearly all are learned.
    A share that came a little late was learned a step later. The producer then waited for the next sync, and the next
    share came late as well, or had to be dropped again and again."""
    world = World(case_of(b_ratio=b_ratio, num_samples=per_epoch * SAMPLES, queue=8))
    channels, _ = run(world, monkeypatch, call=call, step_s=STEP_S, share_s=share_s, sync_s=SYNC_S)
    possible = min(int(b_ratio * NUM_STEPS), int(LateProducer.now / share_s))
    assert channels.count("B") >= wanted * possible - 1, channels


@pytest.mark.parametrize(
    ("every", "lag", "postpones", "least", "age"),
    [
        (1, 4, False, 0.8, 1.7),
        (2, 8, False, 0.87, 3.7),
        (4, 8, False, 0.92, 4.9),
        (1, 4, True, 0.86, 1.7),
        (2, 8, True, 0.94, 3.7),
        (4, 8, True, 0.95, 4.9),
    ],
)
def test_fewer_syncs_leave_less_waiting(
    every: int, lag: int, postpones: bool, least: float, age: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sync_every`: a sync waits for the call in flight. If it `postpones` the sync, the learner learns meanwhile.
    Seconds of a 4B model on photographs, 64 a step, on two GPUs: both sides are busy for at least this share of the
    time. `age`: of a rollout, in optimizer updates, on average."""
    step_s, share_s, sync_s = 3.92, 5.1, 0.25
    world = World(case_of(b_ratio=0.75, num_samples=60 * SAMPLES, queue=40, ready=every + 1, every=every, lag=lag))
    times = {"step_s": step_s, "share_s": share_s, "sync_s": sync_s}
    channels, found_age = run(world, monkeypatch, call=WHOLE, postpones=postpones, **times)
    assert channels.count("B") >= 0.75 * NUM_STEPS - 2
    assert NUM_STEPS * step_s / LateProducer.now >= least
    assert LateProducer.busy_s / LateProducer.now >= least
    assert found_age == pytest.approx(age, abs=0.1)


def run(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    *,
    call: int,
    step_s: float,
    share_s: float,
    sync_s: float,
    postpones: bool = True,
) -> tuple[str, float]:
    """Return the channel of each step, and how many updates old a learned rollout is on average."""
    monkeypatch.setattr(ahead, "Producer", LateProducer)
    for name, value in (("now", 0.0), ("busy_s", 0.0), ("share_s", share_s)):
        monkeypatch.setattr(LateProducer, name, value)
    channels = ""
    with ExitStack() as stack:
        source, _ = make_source(
            world, Ranks(), total_steps=NUM_STEPS, samples_per_step=SAMPLES, stack=stack, capacity=call
        )

        def sync(step: int) -> None:
            world.ver += 1
            with source.fence() as fence:
                LateProducer.now += sync_s
                fence.synced(world.ver, updates=step)

        for step in range(NUM_STEPS):
            waits = False
            if source.wants_sync(step):
                waits = postpones and source.postpones_sync(step)
                if not waits:
                    sync(step)
            channels += source.begin(step)
            for rows in source.micro_steps():
                list(rows)
            for row in range(1, NUM_ROWS + 1):
                LateProducer.now += step_s / NUM_ROWS
                if waits and (row == NUM_ROWS or source.is_quiet()):
                    waits = False
                    sync(step)
        counts = source._producer.stats().counts
    return channels, counts.age_updates / counts.packs_learned
