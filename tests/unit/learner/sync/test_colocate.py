"""The weight sync of colocated engines on two ranks that are threads, over engines that are dictionaries (R09, R24).

Real engines: tests/integration/test_colocate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from learner.config.schema import VllmConfig
from learner.policy.parallel import Ranks
from learner.records import SyncReceipt
from learner.sync import ColocateSync
from shared.errors import CanaryError, ConfigError, CoverageError, DigestError, ProjectError
from shared.generation import Scores
from tests.unit.learner.sync.fakes import PROMPT_IDS, Weights, canary_items, logprobs
from tests.unit.learner.trainer_world import Meeting, ThreadRanks


class Engine:
    """Scores with the tensors that it was given."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.ver: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.events: list[str] = []
        self.misses = ""
        self.score_delta = 0.0

    @contextmanager
    def awake(self) -> Iterator[None]:
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

    def score(self, prompts: Sequence[Any], responses: Sequence[Sequence[int]]) -> list[Scores]:
        return [
            Scores(
                prompt_token_ids=list(PROMPT_IDS),
                logprobs=[value + self.score_delta for value in logprobs(self.tensors, response)],
            )
            for response in responses
        ]


class Encoder:
    def for_engine(self, sample: Any) -> None: ...


class World:
    """`num_ranks` engines and policies; a sync's outcome is its receipt, or the error, per rank."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.engines = [Engine() for _ in range(num_ranks)]
        self.weights = [Weights() for _ in range(num_ranks)]
        meeting = Meeting(num_ranks)
        self.syncs = [self._sync(i, meeting if num_ranks > 1 else None) for i in range(num_ranks)]

    def _sync(self, rank: int, meeting: Meeting | None) -> ColocateSync:
        engine, weights = self.engines[rank], self.weights[rank]

        def learner_logprobs() -> list[list[float]]:
            engine.events.append("learner")
            return [logprobs(weights.tensors, item.response_token_ids) for item in canary_items()]

        return ColocateSync(
            engine,  # type: ignore[arg-type]
            weights,
            Encoder(),  # type: ignore[arg-type]
            config=VllmConfig(),
            canary=canary_items(),
            learner_logprobs=learner_logprobs,
            ranks=ThreadRanks(rank=rank, world_size=len(self.engines), meeting=meeting) if meeting else Ranks(),
        )

    def run(self) -> list[SyncReceipt | ProjectError]:
        def outcome(sync: ColocateSync) -> SyncReceipt | ProjectError:
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
            assert engine.ver == ver
            assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in weights.tensors.items())
            weights.step()


def test_the_learner_scores_before_the_engine_wakes() -> None:
    """R20: the trained model is away while the engine has the device."""
    world = World(1)
    world.run()
    assert world.engines[0].events == ["learner", "awake", "load", "asleep"]


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
    assert {engine.events[-1] for engine in world.engines} == {"asleep"}
    world.weights[1].tensors = world.weights[0].tensors
    world.engines[1].misses, world.engines[1].score_delta = "", 0.0
    assert [outcome.ver for outcome in world.run() if isinstance(outcome, SyncReceipt)] == [2, 2]


ADAPTERS = {"enable_lora": True, "sync": {"mode": "adapter", "fallback_to_full": False}}


def sync_of(vllm: dict[str, Any]) -> ColocateSync:
    return ColocateSync(
        Engine(),  # type: ignore[arg-type]
        Weights(),
        Encoder(),  # type: ignore[arg-type]
        config=VllmConfig.model_validate(vllm),
        canary=canary_items(),
        learner_logprobs=list,
        ranks=Ranks(),
    )


def test_adapters_alone_end_the_run_where_nothing_else_will_do() -> None:
    """R08"""
    with pytest.raises(ConfigError, match=r"sync\.mode") as caught:
        sync_of(ADAPTERS)
    assert caught.value.remedy == "set sync.mode: full"


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_adapters_fall_back_with_a_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """R08: once, for the whole run."""
    sync_of({"enable_lora": True, "sync": {"mode": mode}})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    sync_of({"sync": {"mode": "auto"}})  # which means full here
    assert len(caplog.records) == 1
