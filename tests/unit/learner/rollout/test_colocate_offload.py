"""Tests of R20: whatever a colocated engine does (start, take weights, roll out), training state is away, and back
afterwards.

Also how the engine is set up, what its errors become, and who gets which answer of an engine that ranks share.

The product's engine, backend and sync; a fake stands in for vLLM's `LLM` and for the offload, and each time that vLLM
would take memory it asks where the training state is. Real ones: tests/gpu/test_colocate_cuda.py.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm

from learner.config.sections.decoding import DecodingConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.parallel import Ranks
from learner.records import RolloutCallLog
from learner.rollout import colocated_engine
from learner.rollout.backend import MicroStep
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.requests import Decodings
from learner.sync.canary import Canary
from learner.sync.colocated import EngineDelivery
from learner.sync.sync import Sync
from shared.errors import PromptTooLongError, RolloutError, SyncError
from shared.generation import Generation, Scores
from shared.wire import RequestConfig
from tests.syncs import scorer_of
from tests.tiers import slow
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
        self.error: Exception = RuntimeError("CUDA error")

    def get_tokenizer(self) -> None: ...

    def wake_up(self) -> None:
        if self.is_sleeping:  # vLLM does nothing if it is awake
            self.worker.has_memory, self.is_sleeping = True, False

    def sleep(self, level: int) -> None:
        self.worker.sleep(level=level)
        self.is_sleeping = True

    def generate(self, prompts: list[Any], params: list[Any], *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self._offload.saw("generate")
        assert not use_tqdm
        self.adapter = lora_request
        for draw in (random.random, np.random.random, lambda: torch.rand(1)):
            draw()  # vLLM may, and training must not notice
        assert self.worker.has_memory
        if self.fails:
            raise self.error
        return [SimpleNamespace(prompt_token_ids=[1]) for _ in prompts]


class Worker:
    """vLLM's `gpu_worker.Worker`, as far as it sleeps. `fails_with`: its own assertion, after the memory is free."""

    has_memory, fails_with = True, ""

    def sleep(self, level: int = 1) -> None:
        self.has_memory = False
        assert not self.fails_with, self.fails_with


class Engine(ColocatedEngine):
    """An engine without vLLM's loader and scores: they take memory when they are called."""

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
    monkeypatch.setattr(colocated_engine, "model_folder", lambda *_: "")
    monkeypatch.setattr(colocated_engine, "stop_token_ids", lambda *_: ())
    monkeypatch.setattr(colocated_engine, "sampling_params", lambda *_: None)
    monkeypatch.setattr(colocated_engine, "read_generation", lambda *_: generation)
    return Recorded()


def engine_with(offload: Recorded, **changes: Any) -> Engine:
    config = RolloutMatchingConfig.model_validate({"decoding": {"max_new_tokens": 8}})
    settings = {"ranks": Ranks(), "tensor_parallel_size": 1} | changes
    return Engine(config, model="m", dtype=torch.float32, offload=offload, **settings)  # type: ignore[arg-type]


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
    """Return an engine as on CUDA, after a first sync and a step of training."""
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
    for device.free in (10, 8):  # 8 are just enough
        with engine.awake():
            pass
        assert not llm.is_sleeping
    device.free = 7
    with engine.awake():
        pass
    assert llm.is_sleeping


@pytest.mark.parametrize(("size", "resets"), [(1, []), (2, ["prefixes", "images"])])
def test_ranks_of_one_engine_forget_the_same_prefixes(
    size: int, resets: list[str], offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank of the engine may sleep where this one has room, and vLLM forgets its prefixes then. Ranks that know
    other prefixes would schedule other tokens, and wait for each other."""
    engine, llm = asleep_engine(offload)
    engine.tensor_parallel_size = size
    found: list[str] = []
    llm.llm_engine.reset_prefix_cache = lambda: found.append("prefixes") or True
    llm.llm_engine.reset_encoder_cache = lambda: found.append("images")
    device = Device(monkeypatch, llm)
    device.free, device.held = 10, 40
    with engine.awake(after_update=True):
        pass
    assert not llm.is_sleeping
    with engine.awake():
        assert found == resets


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


def test_training_is_left_where_it_is_only_by_an_engine_that_is_awake(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner then scores while the engine does (R09)."""
    engine, llm = asleep_engine(offload)
    device = Device(monkeypatch, llm)
    device.free, device.held = 10, 40
    assert not engine.leaves_training
    with engine.awake(after_update=True):
        pass
    assert engine.leaves_training
    offload.moves = True
    assert not engine.leaves_training


@pytest.mark.parametrize(
    ("settings", "sleeps"),
    [
        ({}, True),
        ({"keeps_awake": False}, True),
        ({"keeps_awake": True}, False),
        ({"learning_bytes": 20}, False),  # one and a half times as much, and 8 more, are free
        ({"learning_bytes": 21}, True),
    ],
)
def test_an_engine_on_cuda_sleeps_from_its_start_unless_there_is_room(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sleeps: bool
) -> None:
    monkeypatch.setattr(colocated_engine, "_keeping_random_state", lambda _: nullcontext())  # has no CUDA here
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (38, 100))
    engine = engine_with(offload, ranks=Ranks(device=torch.device("cuda")), **settings)
    assert engine._llm.is_sleeping == sleeps
    with engine.awake():
        assert not engine._llm.is_sleeping
    assert engine._llm.is_sleeping == sleeps


def test_an_engine_whose_training_state_moves_away_sleeps_from_its_start(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colocated_engine, "_keeping_random_state", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 100))
    offload.moves = True
    assert engine_with(offload, ranks=Ranks(device=torch.device("cuda")), learning_bytes=1)._llm.is_sleeping


# ---- settings, errors, shares --------------------------------------------------------------------------------------


def test_an_engine_takes_adapters_if_it_is_to_serve_any(offload: Recorded) -> None:
    """R08: with the rank that the run has, or the next that vLLM takes."""
    assert "enable_lora" not in engine_with(offload)._engine_args("m")
    ranks = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512))  # vLLM takes no others
    for lora_rank, taken in (*ranks, *((taken, taken) for _, taken in ranks), (513, 512)):
        args = engine_with(offload, lora_rank=lora_rank)._engine_args("m")
        assert (args["enable_lora"], args["max_lora_rank"], args["max_loras"]) == (True, taken, 1)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (RuntimeError("CUDA error"), "the colocated engine failed"),
        (ValueError("no such token"), "refuses a request"),
    ],
)
def test_an_engines_error_says_what_to_do(offload: Recorded, error: Exception, words: str) -> None:
    engine = engine_with(offload)
    synced(engine)
    engine._llm.fails, engine._llm.error = True, error
    with pytest.raises(RolloutError, match=words) as raised:
        backend_of(engine).generate([sample(0)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert str(error)[:20] in str(raised.value)
    assert ("decode_batch_size" in raised.value.remedy) == (words == "out of memory")


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
    rank: int,
    size: int,
    others: list[int] | None,
    first: int,
    number: int,
    offload: Recorded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`first`: place of the rank's first answer among the `number` that its engine makes."""
    engine = engine_with(offload, tensor_parallel_size=size)
    synced(engine)
    backend = backend_of(engine)
    monkeypatch.setattr(backend, "_ranks", Shared(rank, others))
    made: list[list[int]] = []

    def generate(prompts: Any, how: Any, seeds: list[int], **_: Any) -> list[Generation]:
        made.append(seeds)
        return [
            Generation(prompt_token_ids=[1], response_token_ids=[i], text="", finish_reason="stop")
            for i in range(len(seeds))
        ]

    monkeypatch.setattr(engine, "generate", generate)
    found = backend.generate([sample(7), sample(8)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert [one.sample.sample_id for one in found] == ["s7", "s8"]
    assert [one.response_token_ids for one in found] == [(first,), (first + 1,)]
    assert len(made[0]) == number
    assert [one.seed for one in found] == made[0][first : first + 2]


def test_a_window_is_drawn_unless_greedy_answers_are_asked_for(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = engine_with(offload), list[float | None]()
    calls: list[RolloutCallLog] = []
    synced(engine)
    monkeypatch.setattr(colocated_engine, "sampling_params", lambda how, seed: asked.append(how.temperature))
    backend = backend_of(engine)
    backend._decoding = Decodings(
        DecodingConfig(decode_mode="sample", temperature=0.7, max_new_tokens=8), logprobs=False
    )
    backend._on_call = calls.append
    step = MicroStep(samples=(sample(0),), micro_step_idx=0, first_req_idx=0)
    backend.generate_window([step], global_step=0)
    backend.generate_window([step], global_step=0, greedy=True)
    assert asked == [0.7, 0.0]
    assert all(0 <= seconds < 60 for call in calls for seconds in call.parts.values())
    assert calls[0].parts.keys() == {"prompts", "engine"}


@pytest.mark.parametrize("learned_with", [False, True])
def test_log_probabilities_are_asked_for_where_learning_or_scores_need_them(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch, learned_with: bool
) -> None:
    engine, asked = engine_with(offload), list[bool]()
    synced(engine)
    monkeypatch.setattr(colocated_engine, "sampling_params", lambda how, seed: asked.append(how.logprobs))
    wanted = {"logprobs": True} if learned_with else {}
    backend = ColocateBackend(engine._config, engine, Encoder(), run_seed=0, ranks=Ranks(), **wanted)  # type: ignore[arg-type]
    step = MicroStep(samples=(sample(0),), micro_step_idx=0, first_req_idx=0)
    backend.generate_window([step], global_step=0)
    backend.generate_window([step], global_step=0, greedy=True)
    backend.generate_window([step], global_step=0, temperature=0.7)
    assert asked == [learned_with, True, True]


def test_the_settings_follow_from_ranks_and_configuration(offload: Recorded) -> None:
    engine = engine_with(offload, tensor_parallel_size=2)
    batch_size = engine._config.decode_batch_size
    args = engine._engine_args("m")
    assert (args["tensor_parallel_size"], args["max_num_seqs"]) == (2, 2 * batch_size)
    assert args["distributed_executor_backend"] == "uni"
    assert "max_model_len" not in args, "vLLM's own"
    assert args["kv_cache_memory_bytes"] == engine._config.vllm.cpu_kv_cache_gib * 2**30
    assert not args["enable_sleep_mode"], "vLLM for CPU has none"
    assert not engine._llm.is_sleeping
    engine._config = RolloutMatchingConfig.model_validate({"vllm": {"max_model_len": 99}})
    engine._ranks = Ranks(world_size=2)
    args = engine._engine_args("m")
    assert (args["max_model_len"], args["distributed_executor_backend"]) == (99, "external_launcher")


def test_training_compiles_into_the_folder_that_it_had_before_the_engine(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 points torch's compiler at a folder of its own, in the whole process."""
    start = Engine._start

    def start_compiling(engine: Engine, folder: str) -> Any:
        for name in colocated_engine.COMPILER_VARIABLES:
            os.environ[name] = "7"
        return start(engine, folder)

    monkeypatch.setattr(Engine, "_start", start_compiling)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    engine_with(offload)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert not {"TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"} & set(os.environ)


def test_kernels_that_vllm_compiles_are_found_by_a_run_that_finds_its_model_compiled(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM 0.26 points Triton at a folder of its model only in the run that compiles the model."""
    start = Engine._start
    (tmp_path / "model/ab").mkdir(parents=True)
    (tmp_path / "own/cd").mkdir(parents=True)
    (tmp_path / "model/ab/sampler.cubin").write_bytes(b"kernel")

    def start_compiling(engine: Engine, folder: str) -> Any:
        os.environ["TRITON_CACHE_DIR"] = str(tmp_path / "model")
        return start(engine, folder)

    monkeypatch.setattr(Engine, "_start", start_compiling)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    engine_with(offload)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own")
    assert (tmp_path / "own/ab/sampler.cubin").read_bytes() == b"kernel"
    assert (tmp_path / "own/cd").is_dir()


def test_vllm_looks_at_the_model_s_class_in_this_process_while_the_engine_starts(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own registry: `_run_in_subprocess` is what it calls to look at a class that it does not know."""
    from vllm.model_executor.models import registry

    looked_in: list[int] = []

    def start(**args: object) -> Any:
        looked_in.append(registry._run_in_subprocess(os.getpid))
        return Llm(offload)

    before = registry._run_in_subprocess
    monkeypatch.setattr(vllm, "LLM", start)
    ColocatedEngine._start(engine_with(offload), "m")
    assert looked_in == [os.getpid()]
    assert registry._run_in_subprocess is before


def test_training_draws_the_same_numbers_whatever_the_engine_draws(offload: Recorded) -> None:
    def drawn() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    def seed() -> None:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    engine = engine_with(offload)
    synced(engine)
    seed()
    wanted = drawn()
    seed()
    backend_of(engine).generate([sample(0)], global_step=0, micro_step_idx=0, first_req_idx=0)
    assert drawn() == wanted


@pytest.mark.parametrize(("max_tokens", "longest"), [(8, 504), (None, 511), (1, 511)])
def test_a_prompt_and_its_answer_must_fit_the_context(offload: Recorded, max_tokens: int | None, longest: int) -> None:
    engine = engine_with(offload)
    how = RequestConfig(max_tokens=max_tokens)

    def prompt(number: int) -> Any:
        return SimpleNamespace(token_ids=[1] * number, images=[], for_engine=dict)

    with engine.awake():
        assert len(engine.generate([prompt(1), prompt(longest)], how, [0, 1])) == 2
        with pytest.raises(PromptTooLongError, match=f"{longest + 1} prompt tokens"):
            engine.generate([prompt(1), prompt(longest + 1)], how, [0, 1])


def test_only_what_is_learned_looks_at_pixels(offload: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """R48: a share of the samples; neither greedy answers nor those at another temperature."""
    engine = engine_with(offload)
    synced(engine)
    backend, asked = backend_of(engine), list[list[bool]]()
    generation = Generation(prompt_token_ids=[1], response_token_ids=[2], text="", finish_reason="stop")

    def generate(prompts: Any, how: Any, seeds: Any, *, looks: list[bool]) -> list[Generation]:
        asked.append(looks)
        return [generation for _ in prompts]

    monkeypatch.setattr(engine, "generate", generate)
    samples = (sample(0), replace(sample(1), images=()))
    step = MicroStep(samples=samples, micro_step_idx=0, first_req_idx=0)
    backend.generate_window([step], global_step=0)
    backend._pixel_share = 1.0
    backend.generate_window([step], global_step=0)
    backend.generate_window([step], global_step=0, greedy=True)
    backend.generate_window([step], global_step=0, temperature=1.0)
    assert asked == [[False, False], [True, False], [False, False], [False, False]]


def test_a_rank_without_samples_rolls_out_nothing_unless_it_shares_its_engine(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of a shared engine wait for it."""
    empty = MicroStep(samples=(), micro_step_idx=0, first_req_idx=0)
    alone = engine_with(offload)
    synced(alone)
    seen = len(offload.seen)
    assert backend_of(alone).generate_window([empty], global_step=0) == [[]]
    assert offload.seen[seen:] == [], "training state stays where it is"
    shared = engine_with(offload, tensor_parallel_size=2)
    synced(shared)
    seen = len(offload.seen)
    backend = backend_of(shared)
    monkeypatch.setattr(backend, "_ranks", Shared(0, [0, 3]))
    assert backend.generate_window([empty], global_step=0) == [[]]
    assert offload.seen[seen:] == [("generate", True)]


# ---- loading, and the end --------------------------------------------------------------------------------------------


class Load:
    """A `WeightLoad`, as far as the engine knows it."""

    def __init__(self, told: list[str], error: Exception | None = None) -> None:
        self._told, self._error = told, error

    def open(self) -> None:
        self._told.append("open")

    def add(self, piece: list[tuple[str, torch.Tensor]]) -> None:
        self._told.append("+".join(name for name, _ in piece))
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self._told.append("finish")

    def close(self) -> None:
        self._told.append("close")


class Loading(Engine):
    """An engine with the product's way of loading."""

    load = ColocatedEngine.load


@pytest.fixture
def loading(offload: Recorded, monkeypatch: pytest.MonkeyPatch) -> Loading:
    """Return an engine with adapters, and vLLM's caches. `told`: what happened, in order."""
    monkeypatch.setattr(colocated_engine, "_PIECE_BYTES", 8)
    config = RolloutMatchingConfig.model_validate({})
    engine = Loading(
        config,
        model="m",
        dtype=torch.float32,
        ranks=Ranks(),
        tensor_parallel_size=1,
        offload=offload,  # type: ignore[arg-type]
        lora_rank=8,
    )
    engine.told = told = list[str]()  # type: ignore[attr-defined]
    llm_engine = engine._llm.llm_engine
    llm_engine.has_blocks = False
    llm_engine.reset_prefix_cache = lambda: told.append("no prefixes") or not llm_engine.has_blocks
    llm_engine.reset_encoder_cache = lambda: told.append("no images")
    runner = SimpleNamespace(model=torch.nn.Identity(), lora_manager="manager")
    engine._llm.worker.model_runner = runner
    engine.error = None  # type: ignore[attr-defined]
    for name in ("WeightLoad", "BaseWeightLoad", "AdapterLoad"):

        def made(*args: Any, name: str = name) -> Load:
            told.append(name)
            assert (args[-1] == "manager") == (name != "WeightLoad"), "adapters are the manager's"
            return Load(told, engine.error)  # type: ignore[attr-defined]

        monkeypatch.setattr(colocated_engine, name, made)
    monkeypatch.setattr(colocated_engine, "adapter_request", lambda name: name)
    return engine


WEIGHTS = [(name, torch.zeros(1)) for name in "abc"]
LOADED = ["open", "a+b", "c", "finish", "close", "no prefixes", "no images"]


def test_an_adapter_answers_until_all_weights_are_loaded(loading: Any) -> None:
    loading.ver = 3
    loading.load_adapter(WEIGHTS)
    assert loading.told == ["AdapterLoad", *LOADED]
    assert loading.ver is None, "nobody has checked it yet"
    assert loading._num_loads == 1
    loading._run([], [])
    first = loading._llm.adapter
    loading.load_adapter(WEIGHTS)
    loading._run([], [])
    assert first
    assert loading._llm.adapter not in (None, first), "vLLM's cached prefixes belong to a name"
    loading.told.clear()
    loading.ver = 4
    loading.load(WEIGHTS)
    assert loading.told == ["BaseWeightLoad", *LOADED]
    loading._run([], [])
    assert (loading._llm.adapter, loading.ver, loading._num_loads) == (None, None, 3)


def test_an_engine_without_adapters_loads_the_model_itself(loading: Any) -> None:
    loading.max_lora_rank = 0
    loading.load(WEIGHTS)
    assert loading.told == ["WeightLoad", *LOADED]


@pytest.mark.parametrize("error", [SyncError("not this one"), ValueError("no such parameter")])
def test_a_load_that_fails_leaves_every_layer_whole(loading: Any, error: Exception) -> None:
    loading.ver, loading.error = 3, error
    with pytest.raises(SyncError, match=str(error)) as raised:
        loading.load(WEIGHTS)
    assert (raised.value is error) == isinstance(error, SyncError)
    assert loading.told == ["BaseWeightLoad", "open", "a+b", "close"]
    assert loading.ver is None


def test_old_prefixes_that_stay_are_an_error(loading: Any) -> None:
    """They hold what other weights computed."""
    loading._llm.llm_engine.has_blocks = True
    with pytest.raises(SyncError, match="prefix cache cannot be reset"):
        loading.load(WEIGHTS)


@pytest.mark.parametrize("asleep", [slow(False), True])
def test_a_closed_engine_has_let_go_of_everything(
    offload: Recorded, monkeypatch: pytest.MonkeyPatch, asleep: bool
) -> None:
    told = list[str]()
    names = ("destroy_distributed_environment", "destroy_model_parallel")
    groups = {name: lambda name=name: told.append(name) for name in names}
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(**groups))
    engine = engine_with(offload)
    threads, memory = engine._threads, weakref.ref(engine._llm.worker)
    engine._llm.itself = engine._llm  # vLLM's objects hold each other
    engine._llm.llm_engine.engine_core = SimpleNamespace(
        shutdown=lambda: told.append(f"shutdown {engine._llm.is_sleeping}")
    )
    if asleep:
        engine._sleeps = True
        engine._sleep()
    engine.close()
    assert told == ["shutdown False", *sorted(names, reverse=True)], "vLLM frees no memory that is not mapped"
    assert not hasattr(engine, "_llm")
    assert memory() is None, "training gets it now, and not when Python next looks"
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(print)
    told.clear()
    of_a_job = engine_with(offload)
    of_a_job._ranks = Ranks(world_size=2)
    of_a_job._llm.llm_engine.engine_core = SimpleNamespace(shutdown=lambda: told.append("shutdown"))
    of_a_job.close()
    assert told == ["shutdown"], "the job's group is not the engine's"


@pytest.mark.parametrize("caches", [False, True])
def test_each_response_gets_its_own_scores(offload: Recorded, monkeypatch: pytest.MonkeyPatch, caches: bool) -> None:
    """All prompts are scored first, in order, then what each of them reads through the prefix cache."""
    engine = engine_with(offload)
    engine._caches_prefixes = caches
    run: list[list[Any]] = []
    monkeypatch.setattr(colocated_engine, "scoring", lambda prompt, ids: (prompt, ("whole", *ids)))
    monkeypatch.setattr(
        colocated_engine, "cached_scoring", lambda prompt, ids: [(prompt, ("part", i)) for i in range(len(ids))]
    )
    monkeypatch.setattr(engine, "_run", lambda prompts, params: run.append(params) or params)
    monkeypatch.setattr(
        colocated_engine,
        "read_scores",
        lambda output, number: Scores(prompt_token_ids=[number], logprobs=[float(x) for x in output[1:]]),
    )
    monkeypatch.setattr(colocated_engine, "read_cached_score", lambda output: output[1])
    prompts: list[Any] = [SimpleNamespace(token_ids=[1], images=[]) for _ in range(3)]
    found = ColocatedEngine.score(engine, prompts, [(1, 2), (), (3,)])
    assert [(score.prompt_token_ids, score.logprobs) for score in found] == [([2], [1.0, 2.0]), ([0], []), ([1], [3.0])]
    assert [score.cached_logprobs for score in found] == ([[0, 1], [], [0]] if caches else [[], [], []])
    whole = [("whole", 1, 2), ("whole",), ("whole", 3)]
    assert run == [[*whole, *([("part", 0), ("part", 1), ("part", 0)] if caches else [])]]
