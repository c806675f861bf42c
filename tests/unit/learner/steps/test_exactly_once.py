"""D11, D12, R11, R25: whole runs of the asynchronous actor-learner over real steps, producers and data, with a fake
source of segments and threads as ranks. Rollouts come late or never, queues are short, weights are synced for
evaluations too, and runs are interrupted and resumed on other numbers of ranks."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.data.batches import Batches, ShareReader
from learner.data.encoding import LocalPool
from learner.data.sampler import sampler_of
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import EncodedPrompt, Segment
from learner.rollout.backend import MicroStep
from learner.steps.ahead import Stage2Ahead, StarvedError
from learner.steps.packing import CompleteRows
from learner.steps.segments import SegmentSource
from learner.steps.shares import Bounds
from learner.steps.source import in_lockstep
from learner.steps.stage2 import Stage2Parts
from shared.errors import DeadlineError
from shared.seeds import request_seed
from tests.examples import examples
from tests.unit.learner.data.fakes import CountingEncoder, make_run, make_samples
from tests.unit.learner.steps.fakes import segment
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

ROW_SEGMENTS = 4  # that fit a row: segments have 4 tokens
SAMPLES_PER_PACK = 2
PACKS_PER_STEP = 2


@dataclass(frozen=True)
class Case:
    num_samples: int
    b_ratio: float
    window: int
    lag: int
    queue: int  # packs beyond a step's own
    chaos: int  # seed of delays and evaluations
    slow_s: float  # longest call
    pause_s: float = 0.002  # longest step
    deadline_s: float = 30.0
    every: int = 1  # Channel-B steps between two syncs
    ready: int = 1  # steps whose packs are kept ready
    evaluated: float = 0.2  # share of steps before which weights are synced for an evaluation


@dataclass(frozen=True)
class Learned:
    step: int
    channel: str
    sample_ids: tuple[str, ...]
    versions: tuple[int | None, ...]
    served: int  # version at that time


@dataclass
class World:
    """The state that all ranks of a run share."""

    case: Case
    ver: int = 0
    made_at: dict[int, int] = field(default_factory=dict)  # updates in a version's weights
    counted: list[int] = field(default_factory=list)  # versions that were synced for rollouts
    learned: list[Learned] = field(default_factory=list)
    seeds: dict[str, set[int]] = field(default_factory=dict)  # keys are samples
    metrics: list[dict[str, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    in_flight: int = 0
    errors: list[BaseException] = field(default_factory=list)  # the ranks' errors


class Rollouts(SegmentSource):
    """Takes its time."""

    channel = "B"
    needs_rollouts = True

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.chance = world, rank, random.Random(f"{world.case.chaos} {rank}")

    def segments(self, step: MicroStep, prompts: Sequence[EncodedPrompt], **place: Any) -> list[Segment]:
        world = self.world
        with world.lock:
            world.in_flight += 1
            ver = world.ver
        time.sleep(self.chance.random() * world.case.slow_s)
        with world.lock:
            world.in_flight -= 1
            assert ver == world.ver, "weights moved under a call in flight"
            for i, sample in enumerate(step.samples):
                index = {"global_step": place["global_step"], "micro_step_idx": step.micro_step_idx}
                seed = request_seed(run_seed=0, **index, req_idx=step.first_req_idx + i)
                world.seeds.setdefault(f"{place['global_step']} {sample.sample_id}", set()).add(seed)
        return [segment(sample.sample_id, ver) for sample in step.samples]


class Truth(SegmentSource):
    channel = "A"
    needs_rollouts = False

    def segments(self, step: MicroStep, prompts: Sequence[EncodedPrompt], **place: Any) -> list[Segment]:
        return [segment(sample.sample_id, None) for sample in step.samples]


def make_source(
    world: World, ranks: Ranks, *, total_steps: int, samples_per_step: int, stack: ExitStack, capacity: int = 3
) -> Any:
    case, samples = world.case, make_samples(world.case.num_samples)
    packs_per_step = samples_per_step // SAMPLES_PER_PACK // ranks.world_size
    config, plan = make_run(samples_per_rank=samples_per_step // ranks.world_size, ranks=ranks.world_size)
    batches = Batches(samples, config=config, plan=plan, rank=ranks.rank, encoder=CountingEncoder())
    sampler = sampler_of(len(samples), config=config, plan=plan, rank=ranks.rank)
    parts = Stage2Parts(
        b_ratio=case.b_ratio,
        packs_per_step=packs_per_step,
        ranks=ranks,
        batches=batches,
        ground_truth=Truth(),
        rollouts=Rollouts(world, ranks.rank),
        row_maker=CompleteRows(4 * ROW_SEGMENTS),
        clock=PhaseClock(),
    )
    bounds = Bounds(
        start_below=case.ready * packs_per_step,
        keep_at_most=packs_per_step + case.queue,
        version_window=case.window,
        max_update_lag=case.lag,
        sync_every=case.every,
    )
    source = Stage2Ahead(
        parts,
        ShareReader(samples, sampler, LocalPool(CountingEncoder())),
        bounds=bounds,
        samples_per_pack=SAMPLES_PER_PACK,
        capacity=capacity,
        total_steps=total_steps,
        max_starved_steps=10_000,
        deadline_s=case.deadline_s,
    )
    stack.callback(source.close)
    stack.callback(source.stop)
    return source, batches.per_epoch


def run_rank(world: World, ranks: Ranks, *, start: int, stop: int, total: int, step_size: int, state: Any) -> Any:
    """Steps `start` to `stop` on one rank; the state after the last of them."""
    case, chance = world.case, random.Random(f"{world.case.chaos} evaluations")
    with ExitStack() as stack:
        source, _ = make_source(world, ranks, total_steps=total, samples_per_step=step_size, stack=stack)
        if state is not None:
            source.restore(state)
        for step in range(start, stop):
            is_evaluated, wants = chance.random() < case.evaluated, source.wants_sync(step)
            waits = wants and not is_evaluated and source.postpones_sync(step)
            if is_evaluated or (wants and not waits):
                sync(world, ranks, source, step)
            channel, served = source.begin(step), world.ver
            rows = []
            for micro_step in source.micro_steps():
                for row in in_lockstep(micro_step, ranks, ROW_SEGMENTS, PhaseClock()):
                    rows += [row] if row.segments else []
                    time.sleep(chance.random() * case.pause_s / 4)
                    if waits and source.is_quiet():
                        waits = False
                        sync(world, ranks, source, step)
            if waits:
                sync(world, ranks, source, step)
            with world.lock:
                for row in rows:
                    ids = tuple(s.sample_id for s in row.segments)
                    world.learned.append(Learned(step, channel, ids, tuple(s.ver for s in row.segments), served))
            metrics = source.metrics()
            if ranks.is_main:
                world.metrics.append(dict(metrics))
            time.sleep(chance.random() * case.pause_s)
            state = json.loads(json.dumps(source.state()))
        return state


def sync(world: World, ranks: Ranks, source: Any, step: int) -> None:
    counts = source._learned_since_sync > source._learned_meanwhile
    with source.fence() as fence:
        ranks.barrier()
        if ranks.is_main:
            with world.lock:
                assert world.in_flight == 0, "weights moved under a call in flight"
                world.ver += 1
                world.made_at[world.ver] = step
                world.counted += [world.ver] * counts
        ranks.barrier()
        fence.synced(world.ver, updates=step)


def run_all(world: World, world_size: int, **settings: Any) -> Any:
    if world_size == 1:
        return run_rank(world, Ranks(), **settings)
    meeting = Meeting(world_size)

    def one(rank: int) -> Any:
        try:
            ranks = ThreadRanks(rank=rank, world_size=world_size, meeting=meeting)
            return run_rank(world, ranks, **settings)
        except BaseException:
            meeting.fail()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        ended = [pool.submit(one, rank) for rank in range(world_size)]
    world.errors = [error for future in ended if (error := future.exception()) is not None]
    for error in sorted(world.errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return ended[0].result()


CASES = st.builds(
    Case,
    num_samples=st.integers(1, 110),
    b_ratio=st.sampled_from([0.0625, 0.3, 0.5, 0.75, 1.0]),
    window=st.integers(0, 2),
    lag=st.integers(1, 5),
    every=st.integers(1, 3),
    queue=st.integers(0, 3),
    chaos=st.integers(0, 10_000),
    slow_s=st.sampled_from([0.0, 0.006, 0.02]),
    pause_s=st.sampled_from([0.002, 0.02]),
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES, sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3), cuts=st.tuples(st.floats(0, 1)))
def test_each_sample_is_learned_once_in_each_of_three_epochs(case: Case, sizes: list[int], cuts: tuple[float]) -> None:
    """D11: in A or in B, whatever is dropped, synced and resumed, on 1, 2 and 4 ranks in turn. And R25, D12: what is
    learned is fresh, of one version per row, and no row is opened while another has room."""
    step_size = 4 * SAMPLES_PER_PACK * PACKS_PER_STEP
    per_epoch = -(-case.num_samples // step_size)
    total = 3 * per_epoch
    places = sorted({0, total, *(int(cuts[0] * total * i / len(sizes)) for i in range(1, len(sizes)))})
    world, state = World(case), None
    for world_size, start, stop in zip(sizes, places, places[1:], strict=False):
        world.ver += 10  # stands for servers that went on without this run
        state = run_all(world, world_size, start=start, stop=stop, total=total, step_size=step_size, state=state)
    last = places[min(len(sizes), len(places) - 1)]
    if last < total:
        world.ver += 10
        run_all(world, 1, start=last, stop=total, total=total, step_size=step_size, state=state)
    check_counts(world, per_epoch)
    check_freshness(world)
    assert all(len(seeds) == 1 for seeds in world.seeds.values()), "a sample's seed changed with ranks or calls"


def check_counts(world: World, per_epoch: int) -> None:
    everyone = Counter(sample.sample_id for sample in make_samples(world.case.num_samples))
    for epoch in range(3):
        rows = [row for row in world.learned if row.step // per_epoch == epoch]
        assert Counter(i for row in rows for i in row.sample_ids) == everyone, f"epoch {epoch}"


def check_freshness(world: World) -> None:
    for row in world.learned:
        assert (row.channel == "B") == (row.versions[0] is not None)
        if row.channel == "B":
            (ver,) = set(row.versions)
            assert ver is not None
            assert row.step - world.made_at[ver] <= world.case.lag, "more updates old than max_update_lag"
            counted = [v for v in world.counted if ver < v <= row.served]
            assert len(counted) <= world.case.window, "more syncs old than version_window"
    for metrics in world.metrics:
        if "stage2_ab/async/age_updates" in metrics:
            assert 0 <= metrics["stage2_ab/async/age_updates"] <= world.case.lag
            assert 0 <= metrics["stage2_ab/async/age_versions"] <= world.case.window


def case_of(**changes: Any) -> Case:
    plain: dict[str, Any] = {"num_samples": 32, "b_ratio": 0.5, "window": 1, "lag": 4, "queue": 2, "chaos": 1}
    return Case(**{**plain, "slow_s": 0.0, **changes})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rare_channel_b_steps_get_a_sync_of_their_own(world_size: int) -> None:
    """D12: with one Channel-B step in 16 and a lag of 4, its rollouts are of weights that are 4 updates old at most.
    Nevertheless it runs."""
    world = World(case_of(b_ratio=0.0625, num_samples=16 * 48))
    patient(world, world_size, total=48)
    steps = {row.step for row in world.learned if row.channel == "B"}
    assert steps == {15, 31, 47}
    synced = sorted(step for step in world.made_at.values())
    assert any(11 <= step <= 15 for step in synced)
    check_freshness(world)


def patient(world: World, world_size: int, *, total: int) -> None:
    """Run it as `run_all` does, but each step lasts until nothing is left to make."""
    hasty = Stage2Ahead._ready

    def ready(self: Stage2Ahead, step: int) -> Any:
        deadline = time.monotonic() + 60.0
        hasty(self, step)
        while self._producer and self._producer._thread is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        return hasty(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage2Ahead, "_ready", ready)
        run_all(world, world_size, start=0, stop=total, total=total, step_size=16, state=None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_steps_are_learned_while_a_sync_waits(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync comes after the first or the second row of a step, or after the last one. All that holds without it
    holds."""
    asked, is_quiet, answers = Counter[int](), Stage2Ahead.is_quiet, list[bool]()

    def late(self: Stage2Ahead) -> bool:
        """As if a call were in flight twice out of three times."""
        asked[id(self)] += 1
        return is_quiet(self) and asked[id(self)] % 3 == 0

    def told(self: Stage2Ahead, step: int) -> bool:
        answers.append(postpones(self, step))
        return answers[-1]

    postpones = Stage2Ahead.postpones_sync
    monkeypatch.setattr(Stage2Ahead, "is_quiet", late)
    monkeypatch.setattr(Stage2Ahead, "postpones_sync", told)
    world = World(case_of(num_samples=16 * 24, pause_s=0.01, queue=4))
    run_all(world, world_size, start=0, stop=24, total=24, step_size=16, state=None)
    assert answers.count(True) > world_size
    learned = Counter(sample_id for row in world.learned for sample_id in row.sample_ids)
    assert learned == Counter(sample.sample_id for sample in make_samples(16 * 24))
    check_freshness(world)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_hold_as_much_as_they_can(world_size: int) -> None:
    """Packs are of 2 samples, and a row holds 4: a Channel-B step of 16 samples of one version is 4 rows."""
    world = World(case_of(b_ratio=1.0, num_samples=64, window=0))
    patient(world, world_size, total=8)
    rows = Counter(row.step for row in world.learned if row.channel == "B")
    assert rows
    assert set(rows.values()) == {4}


def test_an_evaluation_s_sync_makes_no_pack_stale() -> None:
    """D12: with `version_window: 0`, a sync for an evaluation between a pack's making and its step."""
    world = World(case_of(window=0, lag=8, num_samples=160))
    with ExitStack() as stack:
        source, _ = make_source(world, Ranks(), total_steps=40, samples_per_step=16, stack=stack)
        sync(world, Ranks(), source, 0)
        for step in range(2):  # A, B
            if source.wants_sync(step):
                sync(world, Ranks(), source, step)
            if step == 1:
                until_ready(source, step)
                sync(world, Ranks(), source, step)  # nothing was learned from packs since the last one
            source.begin(step)
            for rows in source.micro_steps():
                list(rows)
            metrics = source.metrics()
            assert metrics["stage2_ab/async/packs_dropped_stale"] == 0.0
        assert source._executed_b == 1


def until_ready(source: Stage2Ahead, step: int) -> None:
    deadline = time.monotonic() + 60.0
    while not source._ready(step).complete:
        assert time.monotonic() < deadline, "the producer makes nothing"
        time.sleep(0.001)


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_many_channel_b_steps_without_packs_end_the_run(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D16: the error names the key, its value and what the producers do, and advises what makes steps wait instead."""
    world = World(case_of(b_ratio=0.5, num_samples=320, lag=100, evaluated=0.0, ready=2, queue=8))
    with pytest.raises(StarvedError, match=r"3 Channel-B steps.*in flight.*max_starved_steps.*prefetch_target_packs"):
        starve(world, world_size, monkeypatch)
    assert [m["stage2_ab/async/starved_steps"] for m in world.metrics] == [0.0, 1.0, 1.0, 2.0, 2.0]


def starve(world: World, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it although no rollout ever comes back."""
    held = threading.Event()

    def never(self: Rollouts, *_: Any, **__: Any) -> list[Segment]:
        assert held.wait(60.0)
        raise ZeroDivisionError

    monkeypatch.setattr(Rollouts, "segments", never)
    monkeypatch.setattr(Stage2Ahead, "stop", lambda self: held.set())
    init = Stage2Ahead.__init__

    def limited(self: Stage2Ahead, *args: Any, **settings: Any) -> None:
        init(self, *args, **{**settings, "max_starved_steps": 3})

    monkeypatch.setattr(Stage2Ahead, "__init__", limited)
    run_all(world, world_size, start=0, stop=20, total=20, step_size=16, state=None)


def test_a_fence_that_one_rank_cannot_close_is_entered_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """R24: rank 1's call does not end in time. Rank 0, whose fence is closed, must not go on into the sync and wait
    there for rank 1: both raise rank 1's error, and no weights move."""
    world = World(case_of(b_ratio=0.5, num_samples=160, deadline_s=0.5, evaluated=1.0))
    held, honest = threading.Event(), Rollouts.segments

    def hang(self: Rollouts, *args: Any, **place: Any) -> list[Segment]:
        if self.rank == 1:
            assert held.wait(60.0)
        return honest(self, *args, **place)

    stop = Stage2Ahead.stop

    def release(self: Stage2Ahead) -> None:
        held.set()
        stop(self)

    monkeypatch.setattr(Rollouts, "segments", hang)
    monkeypatch.setattr(Stage2Ahead, "stop", release)
    with pytest.raises(DeadlineError):
        run_all(world, 2, start=0, stop=20, total=20, step_size=16, state=None)
    assert [type(error) for error in world.errors] == [DeadlineError] * 2, world.errors
    assert all("call in flight before a weight sync" in str(error) for error in world.errors)
    assert world.ver == 1, "weights moved"
