"""Syncs into colocated engines on two ranks that are threads, over engines that are dictionaries (R08, R09,
R24).

Real engines: tests/integration/test_colocate.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from learner.policy.canary_scores import CanaryScores
from learner.policy.parallel import Ranks
from learner.records import SyncReceipt
from learner.sync.canary import Canary
from learner.sync.colocated import EngineDelivery
from learner.sync.sync import Sync
from shared.errors import CanaryError, CoverageError, DigestError, ProjectError, RolloutError, SyncError
from shared.generation import Scores
from tests.syncs import scorer_of
from tests.unit.learner.sync.fakes import PROMPT_IDS, Adapter, Merged, Weights, canary_items, logprobs
from tests.unit.learner.trainer_world import Meeting, ThreadRanks


class Engine:
    """Scores with the tensors that it was given."""

    dtype = torch.float32
    max_lora_rank = 8
    leaves_training = False

    def __init__(self) -> None:
        self.ver: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.events: list[str] = []
        self.misses = ""
        self.refuses_adapter = False
        self.score_delta = 0.0

    @contextmanager
    def awake(self, *, after_update: bool = False) -> Iterator[None]:
        self.events.append("awake")
        try:
            yield
        finally:
            self.events.append("asleep")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.ver = None
        self.events.append("load")
        given = dict(weights)
        if self.misses:
            raise CoverageError(f"{self.misses} did not come")
        self.tensors = {name: tensor.clone() for name, tensor in given.items()}

    def load_adapter(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.ver = None
        self.events.append("load_adapter")
        given = dict(weights)
        if self.refuses_adapter:
            raise CoverageError("layer has no place")
        self.tensors |= {name: tensor.clone() for name, tensor in given.items()}

    def score(self, prompts: Sequence[Any], responses: Sequence[Sequence[int]]) -> list[Scores]:
        self.events.append("score")
        return [
            Scores(
                prompt_token_ids=list(PROMPT_IDS),
                logprobs=[value + self.score_delta for value in logprobs(self.tensors, response)],
            )
            for response in responses
        ]


class Encoder:
    image_processing = None

    def for_engine(self, sample: Any) -> None: ...


def sync_of(
    engine: Engine,
    weights: Weights | Merged,
    ranks: Ranks,
    adapter: Adapter | None = None,
    *,
    fallback_to_full: bool = True,
) -> Sync:
    def learner_logprobs() -> list[list[float]]:
        engine.events.append("learner")
        return [logprobs(weights.tensors, item.response_token_ids) for item in canary_items()]

    def scorer(dtype: torch.dtype | None, merged: bool) -> CanaryScores:
        scores = scorer_of(learner_logprobs)(dtype, merged)

        def read() -> list[list[float]]:
            engine.events.append("read")
            return scores.logprobs

        return CanaryScores(read=read, merge_gap=0.0, join=lambda: engine.events.append("join"))

    canary = Canary(items=canary_items(), scorer=scorer, tolerance=0.1)
    delivery = EngineDelivery(engine, Encoder(), canary=canary, ranks=ranks)  # type: ignore[arg-type]
    sync = Sync(delivery, weights, adapter=adapter, fallback_to_full=fallback_to_full)
    sync.connect()
    return sync


class World:
    """`num_ranks` engines and policies; a sync's outcome is its receipt, or the error, per rank."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.engines = [Engine() for _ in range(num_ranks)]
        self.weights = [Weights() for _ in range(num_ranks)]
        meeting = Meeting(num_ranks)
        self.syncs = [self._sync(i, meeting if num_ranks > 1 else None) for i in range(num_ranks)]

    def _sync(self, rank: int, meeting: Meeting | None) -> Sync:
        ranks = ThreadRanks(rank=rank, world_size=len(self.engines), meeting=meeting) if meeting else Ranks()
        return sync_of(self.engines[rank], self.weights[rank], ranks)

    def run(self) -> list[SyncReceipt | ProjectError]:
        def outcome(sync: Sync) -> SyncReceipt | ProjectError:
            try:
                return sync.sync()
            except ProjectError as error:
                return error

        with ThreadPoolExecutor(len(self.syncs)) as pool:
            return list(pool.map(outcome, self.syncs))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sync_raises_the_version_and_is_counted(num_ranks: int) -> None:
    """R09: every rank has the same receipt, and every engine the policy's tensors."""
    world = World(num_ranks)
    for ver in (1, 2):
        receipts = world.run()
        for receipt, engine, weights in zip(receipts, world.engines, world.weights, strict=True):
            assert isinstance(receipt, SyncReceipt)
            assert (receipt.ver, receipt.num_tensors, receipt.mode) == (ver, 4, "full")
            assert receipt.num_bytes == sum(tensor.nbytes for tensor in weights.tensors.values())
            assert receipt.canary_gap == 0.0
            assert receipt.parts.keys() == {"scores", "wake", "merge", "load", "canary", "sleep"}
            assert 0.0 < sum(receipt.parts.values()) <= receipt.seconds
            assert engine.ver == ver
            assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in weights.tensors.items())
            weights.step()


def test_the_learner_scores_before_the_engine_wakes() -> None:
    """R20: the trained model is away while the engine has the device."""
    world = World(1)
    world.run()
    assert world.engines[0].events == ["learner", "awake", "load", "score", "read", "asleep", "join"]


def test_both_sides_score_at_the_same_time_where_the_policy_stays() -> None:
    """R09: the learner's pass begins when the load is on its way, and is read when the engine has scored. With more
    ranks the order is the same for all."""
    world = World(1)
    world.engines[0].leaves_training = True
    (receipt,) = world.run()
    assert world.engines[0].events == ["awake", "load", "learner", "score", "read", "asleep", "join"]
    assert isinstance(receipt, SyncReceipt)
    assert receipt.parts.keys() == {"scores", "wake", "merge", "load", "canary", "sleep"}
    assert min(receipt.parts.values()) >= 0.0
    assert 0.0 < sum(receipt.parts.values()) <= receipt.seconds
    two = World(2)
    two.engines[0].leaves_training = True
    two.run()
    assert [engine.events[:2] for engine in two.engines] == 2 * [["learner", "awake"]]


@pytest.mark.parametrize("beside", [False, True])
def test_what_follows_a_failure_waits_for_the_learner_s_pass(beside: bool) -> None:
    """Nobody reads its scores then, and the next optimizer step would change what it reads."""
    world = World(1)
    (engine,) = world.engines
    engine.leaves_training = beside

    def fail(prompts: Sequence[Any], responses: Sequence[Sequence[int]]) -> list[Scores]:
        raise RolloutError("the engine failed")

    engine.score = fail  # type: ignore[method-assign]
    (outcome,) = world.run()
    assert isinstance(outcome, RolloutError)
    assert "read" not in engine.events
    assert engine.events.index("learner") < engine.events.index("join")
    assert engine.ver is None


def test_an_adapter_s_scores_are_not_waited_for_by_a_full_sync() -> None:
    """R08: scores are begun for what is delivered, and all of them end with the sync."""
    world = AdapterWorld(1)
    (engine,) = world.engines
    engine.leaves_training, engine.refuses_adapter = True, True
    (receipt,) = world.run()
    assert isinstance(receipt, SyncReceipt)
    assert receipt.mode == "full"
    assert engine.events == ["awake", "load", "load_adapter", "load", "learner", "score", "read", "asleep", "join"]


def one_bit_off(world: World) -> None:
    world.weights[1].tensors["layer.bias"].view(torch.int32)[3] ^= 1


def missing_a_tensor(world: World) -> None:
    world.engines[1].misses = "embed"


def other_probabilities(world: World) -> None:
    world.engines[1].score_delta = 0.5


@pytest.mark.parametrize(
    ("break_rank_1", "error"),
    [(one_bit_off, DigestError), (missing_a_tensor, CoverageError), (other_probabilities, CanaryError)],
)
def test_what_fails_on_one_rank_is_told_on_all(
    break_rank_1: Callable[[World], None], error: type[ProjectError]
) -> None:
    """R09, R24: no engine may generate afterwards; the next complete sync mends all."""
    world = World()
    world.run()
    break_rank_1(world)
    assert [type(outcome) for outcome in world.run()] == [error, error]
    assert [engine.ver for engine in world.engines] == [None, None]
    assert [engine.events[-2:] for engine in world.engines] == 2 * [["asleep", "join"]]
    world.weights[1].tensors = world.weights[0].tensors
    world.engines[1].misses, world.engines[1].score_delta = "", 0.0
    assert [outcome.ver for outcome in world.run() if isinstance(outcome, SyncReceipt)] == [2, 2]


def test_a_loader_may_walk_through_the_weights_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is captured is loaded once and recorded once. It counts once."""
    world = World(1)
    engine, load = world.engines[0], world.engines[0].load

    def twice(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert [name for name, _ in weights] == list(world.weights[0].tensors)
        load(weights)

    monkeypatch.setattr(engine, "load", twice)
    (receipt,) = world.run()
    assert isinstance(receipt, SyncReceipt)
    assert receipt.num_tensors == 4
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in world.weights[0].tensors.values())


def test_a_walk_that_is_broken_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that finds no memory ends in the middle, after a load that was whole."""
    world = World(1)
    engine, load = world.engines[0], world.engines[0].load

    def and_a_half(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load(weights)
        next(iter(weights))

    monkeypatch.setattr(engine, "load", and_a_half)
    (receipt,) = world.run()
    assert isinstance(receipt, SyncReceipt)
    assert receipt.num_tensors == 4
    assert receipt.num_bytes == sum(tensor.nbytes for tensor in world.weights[0].tensors.values())


# ---- adapters --------------------------------------------------------------------------------------------------------


class AdapterWorld(World):
    """Each rank's policy is an adapter on the same weights."""

    def __init__(self, num_ranks: int = 2, *, fallback_to_full: bool = True) -> None:
        self.adapters = [Adapter(Weights()) for _ in range(num_ranks)]
        self._fallback_to_full = fallback_to_full
        super().__init__(num_ranks)

    def _sync(self, rank: int, meeting: Meeting | None) -> Sync:
        ranks = ThreadRanks(rank=rank, world_size=len(self.engines), meeting=meeting) if meeting else Ranks()
        adapter = self.adapters[rank]
        return sync_of(self.engines[rank], Merged(adapter), ranks, adapter, fallback_to_full=self._fallback_to_full)

    def step(self) -> None:
        for adapter in self.adapters:
            adapter.step()

    def loads(self, rank: int) -> list[str]:
        """Return a rank's loads since the last time that it was asked."""
        loads = [event for event in self.engines[rank].events if event.startswith("load")]
        self.engines[rank].events.clear()
        return loads


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_weights_below_are_loaded_once_and_then_the_adapter_alone(num_ranks: int) -> None:
    """R08: a receipt counts what the adapter weighs; nothing merged is ever asked for."""
    world = AdapterWorld(num_ranks)
    for ver in (1, 2, 3):
        world.step()
        for receipt in world.run():
            assert isinstance(receipt, SyncReceipt)
            assert (receipt.ver, receipt.mode, receipt.fallback) == (ver, "adapter", "")
            assert (receipt.num_tensors, receipt.num_bytes) == (2, 2 * 8 * 8 * 4)
            assert receipt.canary_gap == pytest.approx(0.0, abs=1e-4)
    for rank in range(num_ranks):
        assert world.loads(rank) == ["load", *3 * ["load_adapter"]]


def refused(world: AdapterWorld) -> None:
    world.engines[1].refuses_adapter = True


def other_scores(world: AdapterWorld) -> None:
    world.engines[1].score_delta = 0.5


def another_adapter(world: AdapterWorld) -> None:
    world.adapters[1].step()


@pytest.mark.parametrize(
    ("break_rank_1", "error"),
    [(refused, CoverageError), (other_scores, CanaryError), (another_adapter, DigestError)],
)
def test_without_falling_back_a_failure_on_one_rank_ends_the_sync_on_all(
    break_rank_1: Callable[[AdapterWorld], None], error: type[ProjectError]
) -> None:
    """R08, R09: no engine may generate; the next sync begins with the weights below the adapter again."""
    world = AdapterWorld(fallback_to_full=False)
    world.run()
    break_rank_1(world)
    assert [type(outcome) for outcome in world.run()] == [error, error]
    assert [engine.ver for engine in world.engines] == [None, None]
    world.loads(0)
    world.engines[1].refuses_adapter, world.engines[1].score_delta = False, 0.0
    world.adapters[0].step()
    if error is not DigestError:
        world.adapters[1].step()
    assert [(o.ver, o.mode) for o in world.run() if isinstance(o, SyncReceipt)] == [(2, "adapter"), (2, "adapter")]
    assert world.loads(0) == ["load", "load_adapter"]


def test_a_failure_on_one_rank_falls_back_on_all_for_good(caplog: pytest.LogCaptureFixture) -> None:
    """R08, R24: the same call ends with merged weights; the reason stands in one receipt and one warning per rank."""
    world = AdapterWorld()
    world.run()
    refused(world)
    world.step()
    first = world.run()
    assert world.loads(0) == ["load", "load_adapter", "load_adapter", "load"]
    world.engines[1].refuses_adapter = False
    second = world.run()
    assert world.loads(0) == ["load"]
    for outcome in first + second:
        assert isinstance(outcome, SyncReceipt)
        assert (outcome.mode, outcome.num_tensors) == ("full", 4)
        assert ("has no place" in outcome.fallback) == (outcome.ver == 2)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == [
        "WARNING",
        "WARNING",
    ]


@pytest.mark.parametrize(("rank", "obstacle", "word"), [(8, "the adapter is a DoRA", "DoRA"), (9, "", "rank 9")])
def test_an_adapter_that_does_not_fit_is_told_before_the_first_step(
    rank: int, obstacle: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R08: an error without falling back; else one warning, and full syncs which never tried it."""
    adapter = Adapter(Weights())
    adapter.rank, adapter.obstacle = rank, obstacle
    with pytest.raises(SyncError, match=word):
        sync_of(Engine(), Merged(adapter), Ranks(), adapter, fallback_to_full=False)
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)
    engine = Engine()
    sync = sync_of(engine, Merged(adapter), Ranks(), adapter)
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1
    receipt = sync.sync()
    assert (receipt.mode, word in receipt.fallback) == ("full", True)
    assert "load_adapter" not in engine.events
