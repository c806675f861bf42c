"""R25, R27: rollouts that take longer than a step. Real steps, shares, queues and data; ranks are threads. A clock that
only the test moves stands in for the producers' threads, so every run is the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from learner.policy.parallel import Ranks
from learner.records import Segment
from learner.steps import ahead
from learner.steps.producer import CallStages, ProducerStats
from learner.steps.shares import Outlook, PackCounts, ServedVersion, ShareQueue
from learner.steps.source import Fence
from learner.steps.stage2 import CallTotals
from tests.tiers import slow
from tests.unit.learner.steps.fakes import segment
from tests.unit.learner.steps.test_exactly_once import SAMPLES_PER_PACK, World, case_of, make_source
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

STEP_S, SYNC_S, NUM_STEPS = 1.0, 0.05, 120
SAMPLES, NUM_ROWS = 16, 8  # of a rank's step


class Clock(threading.local):
    """The rank's seconds; whoever meets the others has the latest one's. `share_s`: seconds of all calls of a share."""

    now, share_s, busy_s = 0.0, 0.0, 0.0


clock = Clock()


@dataclass(frozen=True, kw_only=True)
class ClockRanks(ThreadRanks):
    def all_gather_object(self, value: Any) -> list[Any]:
        found = super().all_gather_object((value, clock.now))
        clock.now = max(now for _, now in found)
        return [other for other, _ in found]

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]


class LateProducer:
    """Makes the calls that `Producer` makes, one after the other."""

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

    def outlook(self, step: int) -> Outlook:
        self._go_on()
        self._queue.expire(step)
        self._go_on()
        return self._queue.outlook()

    def take(self, share: int, step: int) -> list[list[Segment]]:
        packs = self._queue.take(share, step)
        self._go_on()
        return [self._segments[pack.index] for pack in packs]

    def await_call(self, deadline_s: float) -> None:
        if self._queue.outlook().is_making:
            clock.now = max(clock.now, self._ends)
            self._go_on()

    @contextmanager
    def fence(self, deadline_s: float, *, counts: bool = True) -> Iterator[Fence]:
        self._go_on()
        self._queue.request_fence()
        if self._queue.in_flight is not None:
            clock.now = max(clock.now, self._ends)
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
        at = clock.now
        while True:
            call = self._queue.in_flight
            if call is not None and self._ends <= clock.now:
                at = self._ends
                ids = [sample.sample_id for sample in self._stages.read(call.share, call.places).samples]
                for pack in self._queue.finish_call()[0]:
                    places = [place - call.places.start for place in pack.places]
                    self._segments[pack.index] = [segment(ids[place], call.by.ver) for place in places]
            elif self._queue.may_start:
                seconds = clock.share_s * len(self._queue.start_call().places) / SAMPLES
                self._ends = at + seconds
                clock.busy_s += seconds
            else:
                return


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A run of one rank."""

    channels: str
    now: float
    busy_s: float
    counts: PackCounts


ISSUE = [
    {"b_ratio": 0.75, "calls": 4, "share_s": 1.8, "per_epoch": 60},  # 30 of 72, before
    {"b_ratio": 0.75, "calls": 4, "share_s": 2.5, "per_epoch": 3},  # none
    {"b_ratio": 0.75, "calls": 4, "share_s": 3.5, "per_epoch": 60},  # none
    {"b_ratio": 0.5, "calls": 2, "share_s": 1.8, "per_epoch": 2},  # none
    {"b_ratio": 0.5, "calls": 2, "share_s": 3.5, "per_epoch": 2},  # none
    {"b_ratio": 0.75, "calls": 1, "share_s": 3.5, "per_epoch": 60},
    {"b_ratio": 1.0, "calls": 4, "share_s": 2.0, "per_epoch": 2},  # none
    {"b_ratio": 1.0, "calls": 4, "share_s": 2.0, "per_epoch": 12, "every": 2},
]


def some_cases(seed: int, number: int) -> list[dict[str, Any]]:
    """Draw from the whole grid. `ready`: steps whose packs are kept ready. `slower`: of the last rank's rollouts."""
    chance = random.Random(seed)
    return [
        {
            "b_ratio": chance.choice([0.25, 0.5, 0.75, 0.9, 1.0]),
            "calls": chance.randint(1, 8),
            "share_s": round(chance.uniform(0.2, 6.0), 2),
            "per_epoch": chance.choice([1, 2, 3, 5, 12, 60]),
            "window": chance.randint(0, 2),
            "every": chance.randint(1, 4),
            "lag": chance.choice([1, 2, 4, 8, 16]),
            "ready": (ready := chance.randint(1, 4)),
            "queue": NUM_ROWS * chance.choice([ready - 1, 4]),
            "ranks": chance.choice([1, 1, 2]),
            "slower": chance.choice([1.0, 1.3]),
            "postpones": chance.random() < 0.7,
        }
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    "cases", [ISSUE, some_cases(0, 8), *(slow(some_cases(seed, 40)) for seed in range(1, 11))], ids=lambda _: ""
)
def test_rollouts_of_any_length_are_learned(cases: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """No rollout is made in vain for ever, and Channel-B runs at least 0.8 of what the slower side allows: of the
    shares that are scheduled, and could be rolled out in the time that the run took. With `b_ratio: 1` nothing else
    runs. Of 440 draws of seed 20271127, half of them with 1 to 60 steps an epoch, the least share was 0.85, and no
    rollout was made in vain."""
    for case in cases:
        ran = run(monkeypatch, num_steps=40, **case)
        possible = min(int(case["b_ratio"] * 40), int(ran.now / (case["share_s"] * case.get("slower", 1.0))))
        assert ran.channels.count("B") >= 0.8 * possible - 1, (case, ran)
        assert ran.counts.samples_returned <= 0.2 * ran.counts.packs_made * SAMPLES_PER_PACK, (case, ran)
        assert case["b_ratio"] < 1 or set(ran.channels) == {"B"}, (case, ran)


def test_where_rollouts_can_go_on_the_learner_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: a Channel-B step whose share comes late runs Channel-A, if both sides lose nothing by it."""
    ran = run(monkeypatch, b_ratio=0.75, calls=4, share_s=3.0, lag=16, ready=3, queue=3 * NUM_ROWS)
    assert ran.now < 1.2 * NUM_STEPS * STEP_S
    assert ran.busy_s > 0.95 * ran.now
    assert ran.channels.count("B") > 0.9 * ran.now / 3.0


def test_a_share_is_waited_for_if_the_producers_had_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: `max_update_lag` leaves the producers idle before each sync, so the share after it is late each time."""
    late = {"calls": 7, "share_s": 1.23, "every": 3, "lag": 8, "ready": 3, "queue": 4 * NUM_ROWS}
    ran = run(monkeypatch, b_ratio=0.5, **late)
    assert ran.channels.count("B") >= 0.5 * NUM_STEPS - 1
    assert ran.now < 1.1 * NUM_STEPS * STEP_S


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
    case = {"every": every, "lag": lag, "ready": every + 1, "queue": 40, "postpones": postpones}
    times = {"step_s": 3.92, "share_s": 5.1, "sync_s": 0.25}
    ran = run(monkeypatch, b_ratio=0.75, calls=1, **case, **times)
    assert ran.channels.count("B") >= 0.75 * NUM_STEPS - 2
    assert NUM_STEPS * times["step_s"] / ran.now >= least
    assert ran.busy_s / ran.now >= least
    assert ran.counts.age_updates / ran.counts.packs_learned == pytest.approx(age, abs=0.1)


def run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int = 1,
    per_epoch: int = 60,
    queue: int = 8,
    slower: float = 1.0,
    **case: Any,
) -> Ran:
    """Run the steps on all ranks. Returns what the last one did."""
    monkeypatch.setattr(ahead, "Producer", LateProducer)
    names = ("b_ratio", "window", "every", "lag", "ready")
    settings = {name: case.pop(name) for name in names if name in case}
    world = World(case_of(num_samples=per_epoch * SAMPLES * ranks, queue=queue, **settings))
    meeting = Meeting(ranks)
    if ranks == 1:
        return run_rank(world, Ranks(), **case)

    def one(rank: int) -> Ran:
        try:
            here = ClockRanks(rank=rank, world_size=ranks, meeting=meeting)
            return run_rank(world, here, **{**case, "share_s": case["share_s"] * (slower if rank else 1.0)})
        except BaseException:
            meeting.fail()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))[-1]


def run_rank(
    world: World,
    ranks: Ranks,
    *,
    calls: int,
    share_s: float,
    step_s: float = STEP_S,
    sync_s: float = SYNC_S,
    num_steps: int = NUM_STEPS,
    postpones: bool = True,
) -> Ran:
    clock.now, clock.busy_s, clock.share_s = 0.0, 0.0, share_s
    channels = ""
    with ExitStack() as stack:
        source, _ = make_source(
            world,
            ranks,
            total_steps=num_steps,
            samples_per_step=SAMPLES * ranks.world_size,
            stack=stack,
            capacity=-(-SAMPLES // calls),
        )

        def sync(step: int) -> None:
            with source.fence() as fence:
                world.ver += ranks.is_main
                ranks.all_gather_object(None)
                clock.now += sync_s
                fence.synced(world.ver, updates=step)

        for step in range(num_steps):
            waits = False
            if source.wants_sync(step):
                waits = postpones and source.postpones_sync(step)
                if not waits:
                    sync(step)
            channels += source.begin(step)
            for rows in source.micro_steps():
                list(rows)
            for row in range(1, NUM_ROWS + 1):
                clock.now += step_s / NUM_ROWS
                if waits and (source.is_quiet() or row == NUM_ROWS):
                    waits = False
                    sync(step)
        counts = source._producer.stats().counts
    return Ran(channels=channels, now=clock.now, busy_s=clock.busy_s, counts=counts)
