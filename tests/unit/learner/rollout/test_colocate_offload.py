"""Tests of R20: whatever a colocated engine does (start, take weights, roll out), training state is away, and back
afterwards.

Also how the engine is set up, what its errors become, and who gets which answer of an engine that ranks share.

The product's engine, backend and sync; a fake stands in for `vllm.LLM`, for the offload and for a GPU's memory. Each
time that vLLM would take memory it asks where the training state is. Real engines load and score in
tests/integration/test_colocate.py, on a GPU in tests/gpu/test_colocate_cuda.py.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.parallel import Ranks
from learner.records import RolloutCallLog
from learner.rollout.backend import MicroStep
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.engine_start import COMPILER_VARIABLES
from learner.sync.canary import Canary
from learner.sync.colocated import EngineDelivery
from learner.sync.sync import Sync
from shared.errors import PromptTooLongError, RolloutError
from shared.generation import Generation, Scores
from shared.wire import RequestConfig
from tests.syncs import scorer_of
from tests.unit.learner.rollout.fakes import sample
from tests.unit.learner.sync.fakes import PROMPT_IDS, Weights, canary_items, logprobs

CUDA = Ranks(device=torch.device("cuda"))
FREE_BESIDE_OTHERS = 8  # bytes of a device of 100 that stay free beside an engine that stays awake


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
    """vLLM's `LLM`, as far as `ColocatedEngine` uses it here. Answer i to a call is the token i."""

    def __init__(self, offload: Recorded, args: dict[str, Any]) -> None:
        self.offload, self.args = offload, args
        offload.saw("start")
        self.worker, self.told = Worker(), list[str]()
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=512, try_get_generation_config=dict),
            renderer=None,  # nobody asks for pixels
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True)),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=self.worker)),
            engine_core=SimpleNamespace(shutdown=lambda: self.told.append(f"shutdown {self.is_sleeping}")),
            reset_prefix_cache=lambda: self.told.append("prefixes") or True,
            reset_encoder_cache=lambda: self.told.append("images"),
            itself=self,  # vLLM's objects hold each other
        )
        self.is_sleeping, self.error = False, None
        self.asked: list[list[Any]] = []  # the settings of each call's requests

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(eos_token_id=9)

    def wake_up(self) -> None:
        if self.is_sleeping:  # vLLM does nothing if it is awake
            self.worker.has_memory, self.is_sleeping = True, False

    def sleep(self, level: int) -> None:
        self.worker.sleep(level=level)
        self.is_sleeping = True

    def generate(self, prompts: list[Any], params: list[Any], *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.offload.saw("generate")
        self.asked.append(params)
        assert not use_tqdm
        for draw in (random.random, np.random.random, lambda: torch.rand(1)):
            draw()  # vLLM may, and training must not notice
        assert self.worker.has_memory
        if self.error is not None:
            raise self.error
        answers = [SimpleNamespace(token_ids=[i], text="", finish_reason="stop") for i in range(len(prompts))]
        return [SimpleNamespace(prompt_token_ids=[1], outputs=[one]) for one in answers]


class Worker:
    """vLLM's `gpu_worker.Worker`, as far as it sleeps. `fails_with`: its own assertion, after the memory is free."""

    has_memory, fails_with = True, ""

    def sleep(self, level: int = 1) -> None:
        self.has_memory = False
        assert not self.fails_with, self.fails_with


class Engine(ColocatedEngine):
    """An engine without vLLM's loader and scores: they take memory when they are called."""

    tensors: dict[str, torch.Tensor]
    looks: Any = None

    @property
    def llm(self) -> Llm:
        return self._llm  # type: ignore[return-value]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.llm.offload.saw("load")
        self.ver, self.tensors = None, dict(weights)
        self._num_loads += 1

    def score(self, prompts: Any, responses: Any) -> list[Scores]:
        self.llm.offload.saw("score")
        return [Scores(prompt_token_ids=list(PROMPT_IDS), logprobs=logprobs(self.tensors, one)) for one in responses]

    def generate(self, prompts: Any, config: Any, seeds: Any, *, looks: Any = None) -> list[Generation]:
        self.looks = looks
        return super().generate(prompts, config, seeds, looks=looks)


class Encoder:
    image_processing = None

    def for_engine(self, sample: Any) -> Any:
        return SimpleNamespace(token_ids=[1], images=[], for_engine=dict)


@pytest.fixture
def offload() -> Recorded:
    return Recorded()


def config_of(temperature: float = 1.0, **vllm_keys: Any) -> RolloutMatchingConfig:
    decoding = {"max_new_tokens": 8, "temperature": temperature}
    return RolloutMatchingConfig.model_validate({"decoding": decoding, "vllm": vllm_keys})


@pytest.fixture
def start(offload: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Engine]:
    """Return what starts an engine. `keys`: of the section `vllm`."""
    monkeypatch.setattr(vllm, "LLM", lambda **args: Llm(offload, args))

    def started(keys: dict[str, Any] | None = None, **changes: Any) -> Engine:
        settings = {"ranks": Ranks(), "tensor_parallel_size": 1, "offload": offload} | changes
        return Engine(config_of(**(keys or {})), model=str(tmp_path), dtype=torch.float32, **settings)

    return started


def backend_of(engine: Engine, temperature: float = 1.0, **changes: Any) -> ColocateBackend:
    settings = {"run_seed": 0, "ranks": Ranks()} | changes
    return ColocateBackend(config_of(temperature), engine, Encoder(), **settings)  # type: ignore[arg-type]


def step_of(*samples: Any) -> MicroStep:
    return MicroStep(samples=samples, micro_step_idx=0, first_req_idx=0)


def roll_out(engine: Engine) -> None:
    assert len(backend_of(engine).generate_window([step_of(sample(0), sample(1))], global_step=0)[0]) == 2


def synced(engine: Engine) -> Engine:
    weights, items = Weights(), canary_items()
    scorer = scorer_of(lambda: [logprobs(weights.tensors, item.response_token_ids) for item in items])
    canary = Canary(items=items, scorer=scorer, tolerance=0.1)
    delivery = EngineDelivery(engine, Encoder(), canary=canary, ranks=Ranks())  # type: ignore[arg-type]
    sync = Sync(delivery, weights, adapter=None, fallback_to_full=True)
    sync.connect()
    sync.sync()
    return engine


def test_training_state_is_away_whenever_the_engine_takes_memory(
    offload: Recorded, start: Callable[..., Engine]
) -> None:
    engine = start()
    assert offload.seen == [("start", True)]
    synced(engine)
    assert offload.seen[1:] == [("load", True), ("score", True)]
    assert not offload.is_away, "learning needs it back"
    roll_out(engine)
    assert offload.seen[3:] == [("generate", True)]
    assert not offload.is_away


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("CUDA error"), "the colocated engine failed"),
        (ValueError("no such token"), "refuses a request"),
    ],
)
def test_training_state_comes_back_after_an_error_that_says_what_to_do(
    offload: Recorded, start: Callable[..., Engine], error: Exception, words: str
) -> None:
    engine = synced(start())
    engine.llm.error = error
    with pytest.raises(RolloutError, match=words) as raised:
        roll_out(engine)
    assert str(error)[:20] in str(raised.value)
    assert ("decode_batch_size" in raised.value.remedy) == (words == "out of memory")
    assert not offload.is_away


# ---- a GPU ---------------------------------------------------------------------------------------------------------


class Device:
    """A GPU of 100 bytes beside the engine. `held`: what training's allocator keeps, until vLLM wakes up."""

    free = held = 0

    def beside(self, engine: Engine, *, free: int, held: int = 40) -> Engine:
        self.free, self.held, wake_up = free, held, engine.llm.wake_up

        def gives_back() -> None:
            wake_up()
            self.free, self.held = self.free + self.held, 0

        engine.llm.wake_up = gives_back  # type: ignore[method-assign]
        return engine


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())  # there is no CUDA here
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device.free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: device.held)
    return device


def test_another_program_that_takes_memory_of_the_gpu_ends_nothing(
    offload: Recorded, start: Callable[..., Engine], device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM compares the device's free memory before and after, whoever took it."""
    engine = synced(start(ranks=CUDA))
    engine.llm.worker.fails_with = "Memory usage increased after sleeping."
    for _ in range(2):
        roll_out(engine)
        assert not engine.llm.worker.has_memory
        assert engine.llm.is_sleeping
    assert "another program took memory" in caplog.text
    engine.llm.worker.fails_with = "something else"
    with pytest.raises(AssertionError, match="something else"):
        roll_out(engine)
    assert not offload.is_away


@pytest.mark.parametrize(("size", "resets"), [(1, []), (2, ["prefixes", "images"])])
def test_an_engine_with_room_beside_training_stays_awake(
    start: Callable[..., Engine], device: Device, size: int, resets: list[str]
) -> None:
    """R04: seen at a sync after training, whose memory vLLM had made it give back; until room becomes short. The
    learner then scores while the engine does (R09). Ranks of one engine forget the same prefixes: one of them may have
    slept, and ranks that know other prefixes would schedule other tokens, and wait for each other."""
    engine = device.beside(synced(start(ranks=CUDA, tensor_parallel_size=size)), free=10)
    assert engine.llm.is_sleeping
    assert not engine.leaves_training
    with engine.awake(after_update=True):
        assert not engine.llm.is_sleeping
    assert engine.leaves_training
    assert engine.llm.told == []
    for device.free in (10, FREE_BESIDE_OTHERS):
        with engine.awake():
            assert engine.llm.told == resets
        assert not engine.llm.is_sleeping
        engine.llm.told.clear()
    device.free = FREE_BESIDE_OTHERS - 1
    with engine.awake():
        pass
    assert engine.llm.is_sleeping


@pytest.mark.parametrize("why", ["short of memory", "always", "offloaded", "nothing was learned yet", "no sync"])
def test_an_engine_sleeps_otherwise(offload: Recorded, start: Callable[..., Engine], device: Device, why: str) -> None:
    engine = start({"sleep": "always" if why == "always" else "auto"}, ranks=CUDA)
    if why != "nothing was learned yet":
        synced(engine)
    device.beside(engine, free=7 if why == "short of memory" else 50)
    offload.moves = why == "offloaded"
    with engine.awake(after_update=why != "no sync"):
        assert not engine.llm.is_sleeping
        assert engine.leaves_training == (why != "offloaded")
    assert engine.llm.is_sleeping


@pytest.mark.parametrize(
    ("settings", "moves", "sleeps"),
    [
        ({}, False, True),
        ({"keeps_awake": True}, False, False),
        ({"learning_bytes": 20}, False, False),  # one and a half times as much, and 8 more, are free
        ({"learning_bytes": 21}, False, True),
        ({"learning_bytes": 1}, True, True),
    ],
)
def test_an_engine_on_cuda_sleeps_from_its_start_unless_there_is_room(
    offload: Recorded,
    start: Callable[..., Engine],
    device: Device,
    settings: dict[str, Any],
    moves: bool,
    sleeps: bool,
) -> None:
    device.free, offload.moves = 38, moves
    engine = start(ranks=CUDA, **settings)
    assert engine.llm.args["enable_sleep_mode"] == (not settings.get("keeps_awake"))
    assert engine.llm.is_sleeping == sleeps
    with engine.awake():
        assert not engine.llm.is_sleeping
    assert engine.llm.is_sleeping == sleeps


@pytest.mark.parametrize("asleep", [False, True])
def test_a_closed_engine_has_let_go_of_everything(
    start: Callable[..., Engine], device: Device, monkeypatch: pytest.MonkeyPatch, asleep: bool
) -> None:
    told = list[str]()
    names = ("destroy_distributed_environment", "destroy_model_parallel")
    groups = {name: lambda name=name: told.append(name) for name in names}
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(**groups))
    engine = start(ranks=CUDA, keeps_awake=not asleep)
    assert engine.llm.is_sleeping == asleep
    said, memory, threads = engine.llm.told, weakref.ref(engine.llm.worker), engine._threads
    engine.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(print)
    assert said == ["shutdown False"], "vLLM frees no memory that is not mapped"
    assert told == sorted(names, reverse=True)
    assert memory() is None, "training gets it now, and not when Python next looks"
    told.clear()
    start(ranks=Ranks(world_size=2)).close()
    assert told == [], "the job's group is not the engine's"


# ---- settings, answers, shares -------------------------------------------------------------------------------------


def test_an_engine_takes_adapters_if_it_is_to_serve_any(start: Callable[..., Engine]) -> None:
    """R08: with the rank that the run has, or the next that vLLM takes."""
    assert "enable_lora" not in start().llm.args
    for lora_rank, taken in ((1, 8), (8, 8), (9, 16), (129, 256), (256, 256), (257, 512), (513, 512)):
        args = start(lora_rank=lora_rank).llm.args
        assert (args["enable_lora"], args["max_lora_rank"], args["max_loras"]) == (True, taken, 1)


def test_the_settings_follow_from_ranks_and_configuration(start: Callable[..., Engine]) -> None:
    args = start(tensor_parallel_size=2).llm.args
    config = config_of()
    assert (args["tensor_parallel_size"], args["max_num_seqs"]) == (2, 2 * config.decode_batch_size)
    assert args["distributed_executor_backend"] == "uni"
    assert "max_model_len" not in args, "vLLM's own"
    assert args["kv_cache_memory_bytes"] == config.vllm.cpu_kv_cache_gib * 2**30
    assert not args["enable_sleep_mode"], "vLLM for CPU has none"
    args = start({"max_model_len": 99}, ranks=Ranks(world_size=2)).llm.args
    assert (args["max_model_len"], args["distributed_executor_backend"]) == (99, "external_launcher")


class Shared:
    """One of four ranks. `others`: how many requests each of them has; None: nothing may be gathered."""

    def __init__(self, rank: int, others: list[int] | None) -> None:
        self.rank, self._others = rank, others

    def all_gather_object(self, value: Any) -> list[Any]:
        assert self._others is not None, "a collective that other ranks do not come to"
        asked = [
            value._replace(samples=[sample(rank)] * number, seeds=[rank] * number, looks=[False] * number)
            for rank, number in enumerate(self._others)
        ]
        asked[self.rank] = value
        return asked


@pytest.mark.parametrize(
    ("rank", "size", "others", "first", "number"),
    [
        (0, 1, None, 0, 2),
        (3, 1, None, 0, 2),
        (0, 2, [2, 3, 1, 1], 0, 5),
        (3, 2, [2, 3, 1, 2], 1, 3),
        (2, 4, [2, 3, 2, 1], 5, 8),
    ],
)
def test_ranks_that_share_an_engine_get_their_own_answers(
    start: Callable[..., Engine], rank: int, size: int, others: list[int] | None, first: int, number: int
) -> None:
    """`first`: place of the rank's first answer among the `number` that its engine makes."""
    engine = synced(start(tensor_parallel_size=size))
    backend = backend_of(engine, ranks=Shared(rank, others))
    (found,) = backend.generate_window([step_of(sample(7), sample(8))], global_step=0)
    assert [one.sample.sample_id for one in found] == ["s7", "s8"]
    assert [one.response_token_ids for one in found] == [(first,), (first + 1,)]
    (asked,) = engine.llm.asked
    assert len(asked) == number
    assert [one.seed for one in found] == [one.seed for one in asked[first : first + 2]]


def test_a_rank_without_samples_rolls_out_nothing_unless_it_shares_its_engine(
    offload: Recorded, start: Callable[..., Engine]
) -> None:
    """The others of a shared engine wait for it."""
    for size, seen in ((1, []), (2, [("generate", True)])):
        engine = synced(start(tensor_parallel_size=size))
        offload.seen.clear()
        backend = backend_of(engine, ranks=Shared(0, [0, 3]))
        assert backend.generate_window([step_of()], global_step=0) == [[]]
        assert offload.seen == seen


@pytest.mark.parametrize("learned_with", [False, True])
def test_what_is_asked_of_the_engine(start: Callable[..., Engine], learned_with: bool) -> None:
    """A window is drawn unless greedy answers are asked for; log-probabilities come where learning or scores need
    them. R48: only what is learned looks at pixels, a share of the samples with images."""
    calls: list[RolloutCallLog] = []
    engine = synced(start())
    settings = {"logprobs": True, "pixel_share": 1.0} if learned_with else {}
    backend = backend_of(engine, temperature=0.7, on_call=calls.append, **settings)
    step = step_of(sample(0), replace(sample(1), images=()))
    asked = []
    for changes in ({}, {"greedy": True}, {"temperature": 1.0}):
        backend.generate_window([step], global_step=0, **changes)
        params = engine.llm.asked[-1][0]
        asked.append((params.temperature, params.logprobs is not None, engine.looks))
    nothing = [False, False]
    assert asked == [(0.7, learned_with, [learned_with, False]), (0.0, True, nothing), (1.0, True, nothing)]
    assert all(0 <= seconds < 60 for call in calls for seconds in call.parts.values())
    assert calls[0].parts.keys() == {"prompts", "engine"}


@pytest.mark.parametrize(("max_tokens", "longest"), [(8, 504), (None, 511), (1, 511)])
def test_a_prompt_and_its_answer_must_fit_the_context(
    start: Callable[..., Engine], max_tokens: int | None, longest: int
) -> None:
    engine, how = start(), RequestConfig(max_tokens=max_tokens)

    def prompt(number: int) -> Any:
        return SimpleNamespace(token_ids=[1] * number, images=[], for_engine=dict)

    with engine.awake():
        assert len(engine.generate([prompt(1), prompt(longest)], how, [0, 1])) == 2
        with pytest.raises(PromptTooLongError, match=f"{longest + 1} prompt tokens"):
            engine.generate([prompt(1), prompt(longest + 1)], how, [0, 1])


# ---- what vLLM changes in its process ------------------------------------------------------------------------------


def test_training_draws_the_same_numbers_whatever_the_engine_draws(start: Callable[..., Engine]) -> None:
    def drawn() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    def seed() -> None:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    engine = synced(start())
    seed()
    wanted = drawn()
    seed()
    roll_out(engine)
    assert drawn() == wanted


def test_training_compiles_into_the_folder_that_it_had_before_the_engine(
    offload: Recorded, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM 0.26 points torch's compiler at a folder of its own, in the whole process, and Triton only in the run that
    compiles the model: its kernels are found by a run that finds its model compiled. vLLM's registry looks at the
    model's class in this process meanwhile."""
    from vllm.model_executor.models import registry

    (tmp_path / "model/ab").mkdir(parents=True)
    (tmp_path / "own/cd").mkdir(parents=True)
    (tmp_path / "model/ab/sampler.cubin").write_bytes(b"kernel")
    before, looked_in = registry._run_in_subprocess, []

    def compiles(**args: Any) -> Llm:
        looked_in.append(registry._run_in_subprocess(os.getpid))
        for name in COMPILER_VARIABLES:
            os.environ[name] = str(tmp_path / "model")
        return Llm(offload, args)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(vllm, "LLM", compiles)
    start()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ
    assert (tmp_path / "own/ab/sampler.cubin").read_bytes() == b"kernel"
    assert (tmp_path / "own/cd").is_dir()
    assert (looked_in, registry._run_in_subprocess) == ([os.getpid()], before)
