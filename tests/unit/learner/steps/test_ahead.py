"""Whole runs of the asynchronous actor-learner on threads as ranks, real but for the servers (R25, R26, R27)."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.load import config_of
from learner.config.schedule import B_STEP_SKIPPED, scheduled_channel
from learner.config.schema import RunConfig
from learner.config.sections.stage2_ab import AsyncActorLearnerConfig
from learner.policy.load import Policy
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.records import PackedRow, Rollout, Sample, SyncReceipt
from learner.rollout.backend import AHEAD_OF_STEPS
from learner.steps.ahead import NOTHING, Sizes, Stage2Ahead, StarvedError
from learner.steps.shares import Bounds, Outlook, ServedVersion, ShareQueue
from learner.steps.stage2 import CALLS_PER_STEP
from shared.errors import RolloutError
from tests.tiers import slow
from tests.unit.learner import trainer_world
from tests.unit.learner.steps.test_completing import EXTRA_BINS, answer_of
from tests.unit.learner.steps.test_stage2 import stage2_config, steps_of
from tests.unit.learner.trainer_log import events_of
from tests.unit.learner.trainer_world import FakeBackend, Meeting, Seen, ThreadRanks, run, trainer

NUM_SAMPLES = 40
DEADLINE_S = 60.0
RunAhead = Callable[..., list[Seen]]


class Servers:
    """The state that all ranks' fake backends share: it knows when weights move under a call, and can hold a rank's
    calls."""

    def __init__(self, world_size: int) -> None:
        self._lock = threading.Lock()
        self._ahead = 0  # calls in flight that run ahead
        self.everyone = threading.Barrier(world_size, timeout=DEADLINE_S)
        self.open = threading.Event()  # cleared: calls that run ahead do not return
        self.open.set()

    @contextmanager
    def call(self, *, ahead: bool) -> Iterator[None]:
        with self._lock:
            assert ahead or self._ahead == 0, "an evaluation beside rollouts that run ahead"
            self._ahead += ahead
        try:
            assert not ahead or self.open.wait(DEADLINE_S), "never released"
            yield
        finally:
            with self._lock:
                self._ahead -= ahead

    def move_weights(self) -> None:
        with self._lock:
            assert self._ahead == 0, "weights moved under a call in flight"


@pytest.fixture
def servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Puts backends that run ahead into the world; made for as many ranks as the test's `world_size`."""
    params = getattr(request.node, "callspec", None)
    shared = Servers(params.params.get("world_size", 1) if params else 1)

    class AheadBackend(FakeBackend):
        chunk = 4

        def generate(self, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
            if place["micro_step_idx"] != AHEAD_OF_STEPS:
                with shared.call(ahead=False):
                    return super().generate(samples, **place)
            ids = tuple(sample.sample_id for sample in samples)
            self.seen.events.append(trainer_world.Generate(ids, **{"greedy": False, **place}))
            with shared.call(ahead=True):
                seed = 1000 * place["global_step"] + place["first_req_idx"]
                return [self._answer(sample, seed + i) for i, sample in enumerate(samples)]

        def close(self) -> None:
            shared.open.set()  # closing a real one ends its calls, too

    class MeetingSync(trainer_world.FakeSync):
        def sync(self) -> SyncReceipt:
            shared.everyone.wait()
            shared.move_weights()
            receipt = super().sync()
            shared.everyone.wait()
            return receipt

    monkeypatch.setattr(trainer_world, "FakeBackend", AheadBackend)
    monkeypatch.setattr(trainer_world, "FakeSync", MeetingSync)
    return shared


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a channel waits for the producer, so that what is scheduled is what runs."""
    hasty = Stage2Ahead._ready

    def ready(self: Stage2Ahead, step: int) -> Outlook:
        if scheduled_channel(step, self._parts.b_ratio) == "A":
            return hasty(self, step)
        deadline = time.monotonic() + DEADLINE_S
        while not (found := hasty(self, step)).complete:
            assert time.monotonic() < deadline, "the producer makes nothing"
            time.sleep(0.005)
        return found

    monkeypatch.setattr(Stage2Ahead, "_ready", ready)


def ahead_config(model: Path, folder: Path, *, queue: dict[str, int] | None = None, **settings: Any) -> RunConfig:
    """Steps of 8 samples over all ranks, in packs of 2."""
    settings = {"per_device_train_batch_size": 2, "num_samples": NUM_SAMPLES, "max_length": 512, **settings}
    values = stage2_config(model, folder, **settings).model_dump(exclude_unset=True)
    values["stage2_ab"]["async_actor_learner"] = {"enabled": True, **(queue or {})}
    return config_of(values)


@pytest.fixture
def run_ahead(servers: Servers, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunAhead:
    """Return a function that runs `ahead_config` with these settings into `tmp_path`."""

    def start(world_size: int = 1, **settings: Any) -> list[Seen]:
        return run(ahead_config(tiny_text, tmp_path, **settings), monkeypatch, world_size)

    return start


def learned_ahead(rank: Seen) -> list[str]:
    """Samples of Channel-B, in the order in which they were learned."""
    rows = zip(rank.rows, rank.versions, strict=True)
    return [i for row, versions in rows if versions and versions[0] is not None for i in row]


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_both_channels_of_a_run_ahead(world_size: int, run_ahead: RunAhead, patient: None, tmp_path: Path) -> None:
    """R25, R26: the schedule runs; packs are whole, of one version, fresh; weights move after each Channel-B step and
    never under a call (the servers would say); evaluations have the servers to themselves."""
    seen = run_ahead(world_size, b_ratio=0.5, max_steps=5, eval_steps=3)
    steps = steps_of(tmp_path)
    assert [step["channel"] for step in steps] == [scheduled_channel(i, 0.5) for i in range(5)] == list("ABABA")
    assert [step["num_segments"] for step in steps] == [8] * 5
    for rank in seen:
        assert rank.events.count("sync") == 1 + 1 + 1, "at the start, after a Channel-B step, and to evaluate"
        ahead = [versions for versions in rank.versions if versions and versions[0] is not None]
        assert sum(len(versions) for versions in ahead) == 2 * 8 // world_size
        assert all(len(set(versions)) == 1 for versions in ahead)
    learned = Counter(i for rank in seen for i in rank.learned)
    assert learned == {f"s{i}": 1 for i in range(NUM_SAMPLES)}, "five steps are an epoch, which has each sample once"
    for metric in ("queue_depth", "packs_made", "packs_dropped_stale", "packs_dropped_oldest", "starved_steps"):
        assert all(f"stage2_ab/async/{metric}" in step["metrics"] for step in steps)
    assert all(step["metrics"]["stage2_ab/async/starved_steps"] == 0 for step in steps), "all of them found packs"
    assert sum(step["metrics"]["stage2_ab/async/packs_learned"] for step in steps) == 8
    assert all(0 <= step["metrics"]["stage2_ab/async/age_versions"] <= 1 for step in steps[1::2])
    assert all(0 <= step["metrics"]["stage2_ab/async/age_updates"] <= 4 for step in steps[1::2])
    assert all(step["metrics"][B_STEP_SKIPPED] == 0 for step in steps)
    assert sorted(step["metrics"]["stage2_ab/async/share"] for step in steps) == list(range(5))
    made = {call.global_step for call in seen[0].calls if call.micro_step_idx == AHEAD_OF_STEPS}
    assert made == {step["metrics"]["stage2_ab/async/share"] for step in steps if step["channel"] == "B"}


def test_producers_stop_for_a_sync(run_ahead: RunAhead, patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: each sync runs inside the fence."""
    log: list[str] = []
    fence, sync = Stage2Ahead.fence, trainer_world.FakeSync.sync

    @contextmanager
    def fence_told(self: Stage2Ahead) -> Iterator[Any]:
        with fence(self) as held:
            log.append("closed")
            yield held
        log.append("open")

    def sync_told(self: trainer_world.FakeSync) -> SyncReceipt:
        log.append("sync")
        return sync(self)

    monkeypatch.setattr(Stage2Ahead, "fence", fence_told)
    monkeypatch.setattr(trainer_world.FakeSync, "sync", sync_told)
    run_ahead(b_ratio=0.5, max_steps=5, eval_steps=3)
    assert log.count("sync") == 3
    around = [log[i - 1 : i + 2] for i, what in enumerate(log) if what == "sync"]
    assert around == [["closed", "sync", "open"]] * 3


def _assert_fresh(rank: Seen, *, window: int) -> None:
    ver, versions = 0, iter(rank.versions)
    for event in rank.events:
        if event == "sync":
            ver += 1
        elif isinstance(event, tuple):
            made = next(versions)
            assert all(v is None or ver - window <= v <= ver for v in made), f"ver {made} learned at {ver}"


@pytest.mark.parametrize(("before", "after"), [slow(1, 1), (2, 2), (1, 2), slow(2, 1)])
def test_a_resume_goes_on_exactly_once(
    before: int, after: int, servers: Servers, run_ahead: RunAhead, patient: None, tmp_path: Path
) -> None:
    """D11, R12: an epoch of five steps, interrupted after three, also on another number of ranks."""

    def part(world_size: int, **settings: Any) -> list[Seen]:
        servers.everyone = threading.Barrier(world_size, timeout=DEADLINE_S)
        settings |= {"b_ratio": 0.5, "save_on_end": True, "lr_scheduler_type": "constant"}
        settings["per_device_train_batch_size"] = 2 // world_size
        return run_ahead(world_size, **settings)

    first = part(before, max_steps=3)
    second = part(after, max_steps=5, resume_from_checkpoint="latest")
    assert Counter(i for rank in (*first, *second) for i in rank.learned) == {f"s{i}": 1 for i in range(NUM_SAMPLES)}
    assert [step["global_step"] for step in steps_of(tmp_path)] == list(range(1, 6))
    assert [step["channel"] for step in steps_of(tmp_path)] == list("ABABA")
    assert steps_of(tmp_path)[-1]["metrics"]["stage2_ab/executed_b_share"] == 0.4


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_labels_are_completed_between_calls(
    world_size: int,
    servers: Servers,
    patient: None,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R48: no call that runs ahead is in flight meanwhile (the servers would say). Both channels learn the completed
    labels from the first step on, each sample once."""
    values = ahead_config(tiny_text, tmp_path, b_ratio=0.5, max_steps=5).model_dump(exclude_unset=True)
    values["labels"] = {"complete": {"rollouts": 2, "min_votes": 2, "refresh": 2}}
    name_one(Path(values["data"]["train"]), "seven")
    generate, backward, texts = trainer_world.FakeBackend.generate, Policy.backward, list[str]()

    def find_one_more(self: FakeBackend, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
        rollouts = generate(self, samples, **place)
        if place.get("temperature") is None:
            return rollouts
        return [answer_of(rollout, self._task, self.policy.tokenizer) for rollout in rollouts]

    def told(self: Policy, row: PackedRow) -> RowLoss:
        texts.extend(self.tokenizer.decode(one.input_ids[one.prompt_length :]) for one in row.segments)
        return backward(self, row)

    monkeypatch.setattr(trainer_world.FakeBackend, "generate", find_one_more)
    monkeypatch.setattr(Policy, "backward", told)
    seen = run(config_of(values), monkeypatch, world_size)
    assert [step["channel"] for step in steps_of(tmp_path)] == list("ABABA")
    assert Counter(i for rank in seen for i in rank.learned) == {f"s{i}": 1 for i in range(NUM_SAMPLES)}
    place = re.compile(r"\D+".join(map(str, EXTRA_BINS)))
    assert [len(place.findall(text)) for text in texts] == [1] * NUM_SAMPLES
    completions = events_of(tmp_path, "labels")
    assert [(one["global_step"], one["added"]) for one in completions] == [(i, NUM_SAMPLES) for i in (0, 2, 4)]


def name_one(path: Path, name: str) -> None:
    """Names that no label has are not completed."""
    first, *rest = path.read_text().splitlines()
    row = json.loads(first)
    row["objects"].append({"desc": name, "bbox_2d": [0, 60, 9, 69]})
    path.write_text("\n".join([json.dumps(row), *rest]) + "\n")


def test_a_run_within_the_step_goes_on_from_one_ahead(
    run_ahead: RunAhead, patient: None, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: what was learned out of order ahead of the steps is not learned again."""
    settings: dict[str, Any] = {"b_ratio": 0.5, "save_on_end": True, "lr_scheduler_type": "constant"}
    (first,) = run_ahead(**settings, max_steps=3)
    settings |= {"num_samples": NUM_SAMPLES, "max_length": 512, "max_steps": 5, "resume_from_checkpoint": "latest"}
    (second,) = run(stage2_config(tiny_text, tmp_path, **settings), monkeypatch)
    assert Counter(first.learned + second.learned) == {f"s{i}": 1 for i in range(NUM_SAMPLES)}


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_an_epoch_s_short_step_makes_a_part_of_an_update(
    world_size: int, run_ahead: RunAhead, patient: None, tmp_path: Path
) -> None:
    """D11: 17 samples in steps of 8: the epoch has a step of one. Its gradient and its learning rate are an eighth."""
    settings: dict[str, Any] = {"b_ratio": 1.0, "num_samples": 17, "max_steps": 3, "lr_scheduler_type": "constant"}
    run_ahead(world_size, **settings)
    steps = steps_of(tmp_path)
    assert sorted(step["num_segments"] for step in steps) == [1, 8, 8]
    for step in steps:
        share = step["num_segments"] / 8
        assert step["learning_rate"] == pytest.approx(1e-3 * share)
        assert step["metrics"].get("batch_share", 1.0) == share


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_without_packs_channel_a_runs(world_size: int, servers: Servers, run_ahead: RunAhead, tmp_path: Path) -> None:
    """R27, D16: no rollout comes back, so every step that wanted Channel-B runs A, says so, and waits for nothing; too
    many of them end the run although a call is in flight."""
    servers.open.clear()
    queue = {"prefetch_target_packs": 8, "max_update_lag": 16, "max_starved_steps": 3}
    with pytest.raises(StarvedError):
        run_ahead(world_size, b_ratio=0.5, max_steps=20, num_samples=4 * NUM_SAMPLES, queue=queue)
    steps = steps_of(tmp_path)
    assert [step["channel"] for step in steps] == ["A"] * 5
    assert [step["metrics"][B_STEP_SKIPPED] for step in steps] == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert steps[-1]["metrics"]["stage2_ab/executed_b_share"] == 0.0
    assert len(events_of(tmp_path, "sync")) == 1, "nothing was learned that the producer should see"
    assert not producers()


def test_a_run_of_rollouts_alone_learns_no_ground_truth(run_ahead: RunAhead, tmp_path: Path) -> None:
    """R27: with `b_ratio: 1` the first step waits for its rollouts, at the start and after a resume."""
    settings: dict[str, Any] = {"b_ratio": 1.0, "save_on_end": True, "lr_scheduler_type": "constant"}
    run_ahead(max_steps=2, **settings)
    run_ahead(max_steps=4, resume_from_checkpoint="latest", **settings)
    assert [step["channel"] for step in steps_of(tmp_path)] == ["B"] * 4


def test_one_rank_without_packs_holds_all_back(
    servers: Servers, run_ahead: RunAhead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R27: rank 1 alone has none ready; both ranks run A."""
    servers.everyone = threading.Barrier(2, timeout=DEADLINE_S)
    hasty = Stage2Ahead._ready
    monkeypatch.setattr(
        Stage2Ahead, "_ready", lambda self, step: NOTHING if self._ranks.rank == 1 else hasty(self, step)
    )
    seen = run_ahead(2, b_ratio=1.0, max_steps=2)
    assert [step["channel"] for step in steps_of(tmp_path)] == ["A", "A"]
    assert [learned_ahead(rank) for rank in seen] == [[], []]


def test_stale_packs_are_dropped_counted_and_made_again(run_ahead: RunAhead, patient: None, tmp_path: Path) -> None:
    """R25, R12: with a window of 0 only packs of the newest version are learned; what had been made before each sync
    is rolled out again, in the order of the stream."""
    queue = {"version_window": 0, "queue_limit": 8, "prefetch_target_packs": 8}
    (seen,) = run_ahead(b_ratio=1.0, max_steps=4, queue=queue, save_on_end=True)
    steps = steps_of(tmp_path)
    assert [step["channel"] for step in steps] == ["B"] * 4
    _assert_fresh(seen, window=0)
    assert [step["metrics"]["stage2_ab/async/age_versions"] for step in steps] == [0.0] * 4
    assert max(Counter(learned_ahead(seen)).values()) == 1
    dropped = sum(step["metrics"]["stage2_ab/async/packs_dropped_stale"] for step in steps)
    returned = sum(step["metrics"]["stage2_ab/async/samples_returned"] for step in steps)
    rolled_out = [i for call in seen.calls if call.micro_step_idx == AHEAD_OF_STEPS for i in call.sample_ids]
    assert returned == 2 * dropped
    assert len(rolled_out) >= len(set(rolled_out)) + returned


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_failed_producer_ends_the_run(world_size: int, run_ahead: RunAhead, monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: its error is the run's, with its type; no producer is left."""
    generate = trainer_world.FakeBackend.generate

    def fail_third(self: FakeBackend, samples: Sequence[Sample], **place: Any) -> list[Rollout]:
        if place["global_step"] == 5 and bool(place["first_req_idx"]) == (world_size == 2):  # true on the last rank
            raise RolloutError("the third call broke", found="", wanted="", remedy="")
        return generate(self, samples, **place)

    monkeypatch.setattr(trainer_world.FakeBackend, "generate", fail_third)
    with pytest.raises(RolloutError, match="third call broke"):
        run_ahead(world_size, b_ratio=0.5, max_steps=50)
    assert not producers()


def test_a_producer_that_hangs_does_not_hide_what_ended_the_run(
    servers: Servers, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner fails while a call is in flight that closing the backend does not end: the first error is raised."""
    servers.open.clear()
    monkeypatch.setattr(trainer_world.FakeBackend, "close", lambda self: None)
    monkeypatch.setattr("learner.steps.ahead.CLOSE_S", 0.01)
    config = ahead_config(tiny_text, tmp_path, b_ratio=0.5, max_steps=3)

    def fail(row: PackedRow) -> None:
        raise ZeroDivisionError

    def train() -> None:
        with trainer(config, Ranks(), monkeypatch, Seen()) as made:
            made.policy.backward = fail  # type: ignore[assignment, method-assign]
            made.run()

    try:
        with pytest.raises(ZeroDivisionError):
            train()
    finally:
        servers.open.set()


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rollout-producer"]


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_all_ranks_raise_what_one_of_them_met() -> None:
    """R24: the first rank's error, on every rank; and nobody raises where nobody failed."""
    meeting = Meeting(3)
    ranks = [ThreadRanks(rank=rank, world_size=3, meeting=meeting) for rank in range(3)]

    def work(rank: int, fails: set[int]) -> int:
        if rank in fails:
            raise RolloutError(f"rank {rank} failed", found="", wanted="", remedy="")
        return rank

    def outcomes(fails: set[int]) -> list[list[int] | str]:
        def one(rank: int) -> list[int] | str:
            try:
                return ranks[rank].all_succeed(lambda: work(rank, fails))
            except RolloutError as error:
                return error.what

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(one, range(3)))

    assert outcomes(set()) == [[0, 1, 2]] * 3
    assert outcomes({1, 2}) == ["rank 1 failed"] * 3


@given(samples_per_pack=st.integers(1, 9), packs_per_step=st.integers(1, 40), capacity=st.integers(1, 300))
def test_calls_are_whole_packs_that_fill_the_servers(samples_per_pack: int, packs_per_step: int, capacity: int) -> None:
    """R25: a call brings a step's packs at most, and otherwise asks for at least half of what is decoded at once."""
    sizes = Sizes.of(samples_per_pack=samples_per_pack, packs_per_step=packs_per_step, capacity=capacity)
    packs, rest = divmod(sizes.call_size, samples_per_pack)
    assert rest == 0 < packs
    assert packs <= max(1, capacity // samples_per_pack, packs_per_step // CALLS_PER_STEP)
    assert packs == packs_per_step or 2 * packs >= min(packs_per_step, capacity // samples_per_pack)


def test_a_call_refills_servers_that_decode_few_at_once() -> None:
    """R25: calls of what they decode at once would each wait for its longest answer with the others' places empty."""
    assert Sizes.of(samples_per_pack=1, packs_per_step=32, capacity=2).call_size == 8
    assert Sizes.of(samples_per_pack=1, packs_per_step=32, capacity=16).call_size == 16


def test_a_step_of_as_many_packs_as_the_queue_holds_is_one_call() -> None:
    """R25: with 8 packs of 8 samples in a queue of 8, each pack was a call of its own, and the servers decoded 8 of the
    64 samples that they could."""
    queue = AsyncActorLearnerConfig()
    sizes = Sizes.of(samples_per_pack=8, packs_per_step=queue.queue_limit, capacity=64)
    made = ShareQueue(
        Bounds.run_ahead(queue, packs_per_step=queue.queue_limit),
        served=ServedVersion(ver=1, updates=0),
        size=lambda _: 64,
        samples_per_pack=8,
        call_size=sizes.call_size,
    )
    made.want([0, 1])
    assert len(made.start_call().places) == 64
