"""R20: whatever a colocated engine does (start, take weights, roll out), training state is away, and back afterwards.

The product's engine, backend and sync; a fake stands in for vLLM's `LLM` and for the offload, and each time that vLLM
would take memory it asks where the training state is. Real ones: tests/gpu/test_colocate_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.parallel import Ranks
from learner.rollout import colocate
from learner.rollout.colocate import ColocateBackend, ColocatedEngine
from learner.sync.canary import Canary
from learner.sync.colocated import EngineDelivery
from learner.sync.sync import Sync
from shared.errors import RolloutError
from shared.generation import Generation, Scores
from tests.syncs import scorer_of
from tests.unit.learner.rollout.fakes import sample
from tests.unit.learner.sync.fakes import PROMPT_IDS, Weights, canary_items, logprobs


class Recorded:
    """An `Offload` that moves nothing. `seen`: what vLLM did, and whether training state was away then."""

    def __init__(self) -> None:
        self.is_away = self.moves = False
        self.seen: list[tuple[str, bool]] = []

    @contextmanager
    def away(self) -> Iterator[None]:
        assert not self.is_away, "the offload was entered twice"
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False

    def saw(self, what: str) -> None:
        self.seen.append((what, self.is_away))


class Llm:
    """vLLM's `LLM`, as far as `ColocatedEngine` uses it here."""

    def __init__(self, offload: Recorded) -> None:
        self._offload = offload
        offload.saw("start")
        cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.worker = Worker()
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=512),
            renderer=None,  # nobody asks for pixels
            vllm_config=SimpleNamespace(cache_config=cache_config),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=self.worker)),
        )
        self.fails = self.is_sleeping = False

    def get_tokenizer(self) -> None: ...

    def wake_up(self) -> None:
        if self.is_sleeping:  # else vLLM does nothing
            self.worker.has_memory, self.is_sleeping = True, False

    def sleep(self, level: int) -> None:
        self.worker.sleep(level=level)
        self.is_sleeping = True

    def generate(self, prompts: list[Any], *_: Any, **__: Any) -> list[Any]:
        self._offload.saw("generate")
        assert self.worker.has_memory
        if self.fails:
            raise RuntimeError("CUDA error")
        return [SimpleNamespace(prompt_token_ids=[1]) for _ in prompts]


class Worker:
    """vLLM's `gpu_worker.Worker`, as far as it sleeps. `fails_with`: its own assertion, after the memory is free."""

    has_memory, fails_with = True, ""

    def sleep(self, level: int = 1) -> None:
        self.has_memory = False
        assert not self.fails_with, self.fails_with


class Engine(ColocatedEngine):
    """Without vLLM's loader and scores: they take memory when they are called."""

    tensors: dict[str, torch.Tensor]

    def _start(self, folder: str) -> Any:
        assert isinstance(self._offload, Recorded)
        return Llm(self._offload)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._offload.saw("load")
        self.ver, self.tensors = None, dict(weights)

    def score(self, prompts: Any, responses: Any) -> list[Scores]:
        self._offload.saw("score")
        return [Scores(prompt_token_ids=list(PROMPT_IDS), logprobs=logprobs(self.tensors, one)) for one in responses]


class Encoder:
    image_processing = None

    def for_engine(self, sample: Any) -> Any:
        return SimpleNamespace(token_ids=[1], images=[], for_engine=dict)


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    generation = Generation(prompt_token_ids=[1], response_token_ids=[2], text="", finish_reason="stop")
    monkeypatch.setattr(colocate, "model_folder", lambda *_: "")
    monkeypatch.setattr(colocate, "stop_token_ids", lambda *_: ())
    monkeypatch.setattr(colocate, "sampling_params", lambda *_: None)
    monkeypatch.setattr(colocate, "read_generation", lambda *_: generation)
    return Recorded()


def engine_with(offload: Recorded) -> Engine:
    config = RolloutMatchingConfig.model_validate({"decoding": {"max_new_tokens": 8}})
    return Engine(
        config,
        model="m",
        dtype=torch.float32,
        ranks=Ranks(),
        tensor_parallel_size=1,
        offload=offload,  # type: ignore[arg-type]
    )


def backend_of(engine: Engine) -> ColocateBackend:
    return ColocateBackend(engine._config, engine, Encoder(), run_seed=0, ranks=Ranks())  # type: ignore[arg-type]


def synced(engine: Engine) -> None:
    weights, items = Weights(), canary_items()
    scorer = scorer_of(lambda: [logprobs(weights.tensors, item.response_token_ids) for item in items])
    canary = Canary(items=items, scorer=scorer, tolerance=0.1)
    delivery = EngineDelivery(engine, Encoder(), canary=canary, ranks=Ranks())  # type: ignore[arg-type]
    sync = Sync(delivery, weights, adapter=None, fallback_to_full=True)
    sync.connect()
    sync.sync()


def test_training_state_is_away_whenever_the_engine_takes_memory(offload: Recorded) -> None:
    engine = engine_with(offload)
    assert offload.seen == [("start", True)]
    synced(engine)
    assert offload.seen[1:] == [("load", True), ("score", True)]
    assert not offload.is_away, "learning needs it back"
    backend_of(engine).generate([sample(0), sample(1)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert offload.seen[3:] == [("generate", True)]
    assert not offload.is_away


def test_training_state_comes_back_after_a_failed_rollout(offload: Recorded) -> None:
    engine = engine_with(offload)
    synced(engine)
    engine._llm.fails = True
    with pytest.raises(RolloutError, match="CUDA error"):
        backend_of(engine).generate([sample(0)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert not offload.is_away


def test_another_program_that_takes_memory_of_the_gpu_ends_nothing(
    offload: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM compares the device's free memory before and after, whoever took it."""
    engine = engine_with(offload)
    synced(engine)
    engine._sleeps, engine._llm.worker.fails_with = True, "Memory usage increased after sleeping."
    for _ in range(2):
        backend_of(engine).generate([sample(0)], global_step=0, micro_step_idx=0, first_req_idx=0)
        assert not engine._llm.worker.has_memory
        assert engine._llm.is_sleeping
    assert "another program took memory" in caplog.text
    engine._llm.worker.fails_with = "something else"
    with pytest.raises(AssertionError, match="something else"):
        backend_of(engine).generate([sample(0)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert not offload.is_away


class Device:
    """A GPU of 100 bytes beside the engine. `held`: what training's allocator keeps, until vLLM wakes up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: Llm) -> None:
        self.free = self.held = 0
        wake_up = llm.wake_up

        def gives_back() -> None:
            wake_up()
            self.free, self.held = self.free + self.held, 0

        monkeypatch.setattr(llm, "wake_up", gives_back)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.held)


def asleep_engine(offload: Recorded, *, sleep: str = "auto") -> tuple[Engine, Llm]:
    """As on CUDA, after a first sync and a step of training."""
    engine = engine_with(offload)
    engine._config = RolloutMatchingConfig.model_validate({"vllm": {"sleep": sleep}})
    engine._sleeps, engine._num_loads = True, 1
    engine._sleep()
    return engine, engine._llm


def test_an_engine_with_room_beside_training_stays_awake(offload: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """R04: seen at a sync after training, whose memory vLLM had made it give back; until room becomes short."""
    engine, llm = asleep_engine(offload)
    device = Device(monkeypatch, llm)
    device.free, device.held = 10, 40
    with engine.awake(after_update=True):
        assert not llm.is_sleeping
    assert not llm.is_sleeping
    device.free = 10
    with engine.awake():
        pass
    assert not llm.is_sleeping
    device.free = 7
    with engine.awake():
        pass
    assert llm.is_sleeping


@pytest.mark.parametrize("why", ["short of memory", "always", "offloaded", "nothing was learned yet", "no sync"])
def test_an_engine_sleeps_otherwise(offload: Recorded, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    engine, llm = asleep_engine(offload, sleep="always" if why == "always" else "auto")
    device = Device(monkeypatch, llm)
    device.free, device.held = (7, 40) if why == "short of memory" else (50, 40)
    offload.moves = why == "offloaded"
    engine._num_loads = 0 if why == "nothing was learned yet" else 1
    with engine.awake(after_update=why != "no sync"):
        assert not llm.is_sleeping
    assert llm.is_sleeping
