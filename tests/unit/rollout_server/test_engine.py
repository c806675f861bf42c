"""Tests of how the engine's process is made, and of what vLLM's errors become."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm import exceptions
from vllm.v1.engine.exceptions import EngineGenerateError

from rollout_server.config import ServerConfig
from rollout_server.decoding import Budget, Decoders, PixelShare
from rollout_server.engine import END_S, VllmEngine, WorkerReply, graph_args
from rollout_server.stalls import StallWatch
from shared.addresses import free_port
from shared.errors import MediaError, PromptTooLongError, RequestError, ServerBusyError, ServerError
from shared.generation import TRIES, Prompt
from shared.sync.calls import Operation
from shared.sync.group import _introduction
from shared.sync.meeting import HELLO_BYTES, Seat
from shared.wire import Message, RequestConfig, RolloutInferRequest, ScoreItem
from tests.unit.shared.sync.test_strangers import HOST, SECRET, connect, nothing_is_unpickled


@pytest.mark.slow
def test_all_threads_are_counted() -> None:
    """OpenMP's stay after the first operation that used them, and would be missing from a forked process."""
    work = """
import threading, torch
from rollout_server.engine import _num_threads
for openmp in (1, 3):
    torch.set_num_threads(openmp)
    torch.randn(1 << 20).exp_()
    print(_num_threads())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(_num_threads())
"""
    found = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True, timeout=120.0)
    alone, with_openmps, with_pythons = map(int, found.stdout.split())
    assert alone == 1 < with_openmps == with_pythons - 1, found.stdout


@pytest.mark.slow
def test_new_shapes_of_images_take_no_more_memory() -> None:
    """R16: oneDNN and ideep keep something for 1,024 shapes of matrices. Without the server's settings 400 of them took
    259 MiB; a machine without instructions for bfloat16 takes another way and keeps less."""
    work = """
from pathlib import Path
from rollout_server.__main__ import _prepare_environment
from rollout_server.config import ServerConfig
_prepare_environment(ServerConfig(model="m", cpu_threads=1))
import torch
weight = torch.randn(64, 64, dtype=torch.bfloat16)
def multiply(first, last):
    for num_rows in range(first, last):
        torch.nn.functional.linear(torch.randn(num_rows, 64, dtype=torch.bfloat16), weight)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
print(-multiply(1, 50) + multiply(50, 450))
"""
    mine = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    found = subprocess.run(
        [sys.executable, "-c", work], capture_output=True, text=True, check=True, timeout=120.0, env=mine
    )
    assert float(found.stdout) < 40, found.stdout


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (exceptions.VLLMValidationError("temperature must be in [0, 2]"), RequestError),
        (exceptions.VLLMValidationError("longer than the maximum model length of 512"), PromptTooLongError),
        (ValueError("no such modality"), RequestError),
        (EngineGenerateError("out of memory"), ServerError),
        (because(EngineGenerateError(), ValueError("absolute aspect ratio must be smaller than 200")), RequestError),
        (because(EngineGenerateError(), RuntimeError("CUDA error")), ServerError),
    ],
)
def test_what_vllm_refuses_is_the_request_s_fault(error: Exception, wanted: type[Exception]) -> None:
    """R16: 4xx, and never "a defect"."""

    class Engine(VllmEngine):
        dead, max_model_len = False, 512  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

    with pytest.raises(wanted) as raised, Engine()._vllm_errors():
        raise error
    assert type(raised.value) is wanted


def test_a_caller_that_goes_ends_the_decoding_of_its_images_and_gives_back_their_memory() -> None:
    """R16: on vLLM's side of the gate, with a renderer that decodes until it is told to end."""
    held: list[PixelShare] = []

    class Slow:
        decoders = Decoders(ServerConfig(model="m"))

        def render(self, request: RolloutInferRequest, share: PixelShare) -> Prompt:
            share.take(1000)
            held.append(share)
            assert share.closed.wait(10)
            raise RequestError("the client hung up")

    engine = object.__new__(VllmEngine)
    engine._renderer, engine._threads, engine._rendering = cast(Any, Slow()), ThreadPoolExecutor(1), {}

    async def run() -> None:
        request = RolloutInferRequest(messages=[Message(role="user", content="a")])
        calling = asyncio.create_task(engine.generate(request, RequestConfig(), None))
        while not held:
            await asyncio.sleep(0.01)
        assert Slow.decoders._budget.num_held == 1000
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert Slow.decoders._budget.num_held == 0

    asyncio.run(asyncio.wait_for(run(), 10))
    engine._threads.shutdown(wait=True)


@pytest.mark.parametrize("takes_a_limit", [True, False])
def test_an_engine_has_time_to_end_before_it_is_killed(takes_a_limit: bool) -> None:
    """A killed one leaves semaphores, and complains on stderr. vLLM's own limit is 5 s; older versions take none."""
    told: list[float | None] = []
    engine = object.__new__(VllmEngine)
    renderer = SimpleNamespace(decoders=SimpleNamespace(close=lambda: None))
    engine._renderer, engine._threads = cast(Any, renderer), ThreadPoolExecutor(1)
    new, old = lambda timeout=None: told.append(timeout), lambda: told.append(None)
    engine._llm = cast(Any, SimpleNamespace(shutdown=new if takes_a_limit else old))
    engine.shutdown()
    assert told == [END_S if takes_a_limit else None]
    engine._llm.shutdown()
    assert len(told) == 1, "its destructor calls it again"


@pytest.mark.parametrize("num_back", [0, TRIES - 1, TRIES])
def test_a_request_that_the_engine_gives_back_is_asked_again_a_few_times(num_back: int) -> None:
    """vLLM ends one whose image it does not have with the reason "error" and no tokens. (On real vLLM, where a caller
    hangs up: tests/integration/test_server.py.)"""
    reasons = iter(["error"] * num_back + ["stop"] * TRIES)
    asked: list[str] = []

    async def generate(prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any]:
        asked.append(request_id)
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=next(reasons))])

    engine = object.__new__(VllmEngine)
    engine._stalls, engine._ids, engine._adapter = StallWatch(60.0), itertools.count(), None
    engine._llm = SimpleNamespace(generate=generate)
    running = engine._run(Prompt(token_ids=[1], images=[]), None)
    if num_back == TRIES:
        with pytest.raises(ServerBusyError):
            asyncio.run(running)
    else:
        assert asyncio.run(running).outputs[0].finish_reason == "stop"
    assert len(set(asked)) == len(asked) == min(num_back + 1, TRIES)


def test_no_reply_of_a_worker_is_given_up() -> None:
    """vLLM's tensor-parallel workers reply into one queue, in order. A call with a deadline would leave its late reply
    there for whoever reads next. (A worker that was stopped for longer ended the engine: 'str' has no tokens.)"""

    class Core:
        """A core with one queue of replies, as `MultiprocExecutor` has it. The first reply takes long."""

        def __init__(self) -> None:
            self.replies: asyncio.Queue[str] = asyncio.Queue()

        async def collective_rpc_async(self, method: str, deadline_s: float | None, args: Any, _: Any) -> list[str]:
            reply = WorkerReply(weights=method).model_dump_json()
            asyncio.get_running_loop().call_later(0.05 * (method == "slow"), self.replies.put_nowait, reply)
            passed = None if deadline_s is None else 0.01  # its clock is fast
            return [await asyncio.wait_for(self.replies.get(), passed)]

    engine = object.__new__(VllmEngine)
    engine._stalls = StallWatch(60.0)

    async def run() -> None:
        engine._llm = SimpleNamespace(engine_core=Core())
        for method in ("slow", "next"):
            (reply,) = await engine.on_workers(method)
            assert reply.weights == method

    asyncio.run(asyncio.wait_for(run(), 10))


class HeldCore:
    """vLLM's client of one engine: notes what is sent, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def add_request_async(self, request: str) -> None:
        self.log.append(request)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.log.append("hold")

    async def resume_scheduler_async(self) -> None:
        self.log.append("go on")


def _item(*, images: list[str] | None = None) -> ScoreItem:
    request = RolloutInferRequest(messages=[Message(role="user", content="a")], images=images or [])
    return ScoreItem(request=request, response_token_ids=[1, 2])


def _holding(core: HeldCore, num_sent: int, *, items: list[ScoreItem], error: bool = False) -> list[str]:
    """Return what the engine has been sent when the caller has sent `num_sent` requests, and then in all."""
    engine = object.__new__(VllmEngine)
    engine._stalls, engine._llm, engine._caches_prefixes = StallWatch(60.0), SimpleNamespace(engine_core=core), True

    async def run() -> list[str]:
        before: list[str] = []
        with pytest.raises(RequestError) if error else contextlib.nullcontext():
            async with engine.together(items):
                for i in range(num_sent):
                    await engine._llm.engine_core.add_request_async(f"{i}")
                    await asyncio.sleep(0)
                    before = list(core.log)
                if error:
                    raise RequestError("refused")
                await asyncio.sleep(0.05)
                before = list(core.log)
        return before

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_requests_that_share_a_step_are_all_sent_before_it() -> None:
    """R10: two items of two tokens, each token read through the cache too. The canary has one step then."""
    for other in (_item(), _item(images=["a.png"])):
        core = HeldCore()
        wanted = ["hold", *map(str, range(6)), "go on"]
        assert _holding(core, 6, items=[_item(), other]) == wanted
        assert core.log == wanted


def test_the_engine_goes_on_if_a_request_is_refused() -> None:
    core = HeldCore()
    assert _holding(core, 2, items=[_item(), _item()], error=True) == ["hold", "0", "1"]
    assert core.log == ["hold", "0", "1", "go on"]


def test_the_engine_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.engine._MOST_HELD_S", 0.01)
    assert _holding(HeldCore(), 1, items=[_item()]) == ["hold", "0", "go on"]


def test_nothing_is_held_for_replicas() -> None:
    """They agree on a pause in steps of their own."""
    replicas = HeldCore()
    replicas.core_engines = [b"0", b"1"]  # type: ignore[attr-defined]
    assert _holding(replicas, 3, items=[_item()]) == replicas.log == ["0", "1", "2"]


def test_an_update_forgets_embeddings_and_keeps_processed_images() -> None:
    """R10. Pixels do not depend on weights, and to process an image again takes milliseconds of every pause."""
    found = []

    class Llm:
        async def reset_prefix_cache(self) -> bool:
            found.append("prefixes")
            return True

        async def reset_encoder_cache(self) -> None:
            found.append("embeddings")

        async def reset_mm_cache(self) -> None:
            found.append("processed images")

    engine = object.__new__(VllmEngine)
    engine._stalls, engine._llm = StallWatch(60.0), Llm()
    asyncio.run(asyncio.wait_for(engine.reset_caches(), 10))
    assert sorted(found) == ["embeddings", "prefixes"]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8, 100, 128, 255])
def test_steps_of_short_prompts_have_graphs(max_num_seqs: int) -> None:
    """vLLM's own sizes stay, as vLLM says them in `_set_cudagraph_sizes`."""
    sizes = graph_args(ServerConfig(model="m", max_num_seqs=max_num_seqs))["cudagraph_capture_sizes"]
    assert isinstance(sizes, list)
    most = 2 * max_num_seqs
    own = {n for n in {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), max_num_seqs} if n <= most}
    assert own == {n for n in sizes if n <= most}
    assert sizes == sorted(set(sizes))
    assert all(any(n <= size < n + 64 for size in sizes) for n in range(1, 513))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 256},
        {"enforce_eager": True},
        {"engine_args": {"compilation_config": {"mode": 0}}},
        {"engine_args": {"max_cudagraph_capture_size": 64}},
        {"engine_args": {"cudagraph_capture_sizes": [8]}},
    ],
)
def test_the_user_s_graphs_and_vllm_s_own_stay(settings: dict[str, Any]) -> None:
    assert graph_args(ServerConfig(model="m", **settings)) == {}


# ---- prompts that requests share -------------------------------------------------------------------------------------


class SlowRenderer:
    """Renders when it is let go on. Notes the requests that it renders, and the shares of their images' pixels."""

    def __init__(self) -> None:
        self.decoders = self
        self.go_on, self.begun = threading.Event(), threading.Event()
        self.rendered: list[str] = []
        self.shares: list[PixelShare] = []
        self._numbers = itertools.count()

    def share(self) -> PixelShare:
        self.shares.append(PixelShare(Budget(1, 1.0)))
        return self.shares[-1]

    def render(self, request: RolloutInferRequest, share: PixelShare) -> Prompt:
        self.rendered.append(request.images[0])
        number = next(self._numbers)
        self.begun.set()
        assert self.go_on.wait(10.0)
        if request.images == ["broken"]:
            raise MediaError("no image")
        return Prompt(token_ids=[number], images=[])


def _asks(image: str, *, text: str = "a", seed: int = 0) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[Message(role="user", content=text)], images=[image], seed=seed)


def _with_slow_renderer() -> tuple[VllmEngine, SlowRenderer]:
    engine, renderer = object.__new__(VllmEngine), SlowRenderer()
    engine._renderer, engine._rendering = cast(Any, renderer), {}
    engine._threads = ThreadPoolExecutor(4)
    return engine, renderer


async def _token_ids(engine: VllmEngine, request: RolloutInferRequest) -> list[int]:
    async with engine._rendered(request) as prompt:
        await asyncio.sleep(0.01)
        return prompt.token_ids


def test_requests_for_one_prompt_render_it_once() -> None:
    """A group's answers: its images are decoded once, and stay as long as one of its requests runs."""
    engine, renderer = _with_slow_renderer()

    async def run() -> None:
        group = [asyncio.create_task(_token_ids(engine, _asks("one", seed=i))) for i in range(8)]
        others = [asyncio.create_task(_token_ids(engine, one)) for one in (_asks("two"), _asks("one", text="b"))]
        await asyncio.sleep(0.05)
        renderer.go_on.set()
        answers = await asyncio.gather(*group)
        assert answers == [answers[0]] * 8
        assert len({answers[0][0], *(ids[0] for ids in await asyncio.gather(*others))}) == 3
        assert sorted(renderer.rendered) == ["one", "one", "two"]
        assert all(share.closed.is_set() for share in renderer.shares)
        assert not engine._rendering

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_later_request_reads_its_images_again() -> None:
    """A file or a URL may have changed, also while an earlier request for it still runs."""
    engine, renderer = _with_slow_renderer()
    renderer.go_on.set()

    async def run() -> None:
        async with engine._rendered(_asks("one")) as first:
            assert await _token_ids(engine, _asks("one")) != first.token_ids
            assert [share.closed.is_set() for share in renderer.shares] == [False, True]
        assert renderer.shares[0].closed.is_set()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_decoding_ends_with_the_last_request_that_waits_for_it() -> None:
    """R16: one caller that goes takes nothing from the others."""
    engine, renderer = _with_slow_renderer()

    async def run() -> None:
        first, second = (asyncio.create_task(_token_ids(engine, _asks("one", seed=i))) for i in range(2))
        await asyncio.to_thread(renderer.begun.wait, 10.0)
        first.cancel()
        await asyncio.wait([first])
        assert not renderer.shares[0].closed.is_set()
        second.cancel()
        await asyncio.wait([second])
        assert renderer.shares[0].closed.is_set()
        assert not engine._rendering
        renderer.go_on.set()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_an_image_that_cannot_be_read_fails_all_its_requests_once() -> None:
    engine, renderer = _with_slow_renderer()
    renderer.go_on.set()

    async def run() -> None:
        for i in (1, 2):
            both = asyncio.gather(*(_token_ids(engine, _asks("broken")) for _ in range(2)), return_exceptions=True)
            assert [type(error) for error in await both] == [MediaError, MediaError]
            assert len(renderer.rendered) == i
            assert not engine._rendering

    asyncio.run(asyncio.wait_for(run(), 10))


# ---- weight groups between GPUs, where vLLM's binding meets ----------------------------------------------------------


class NcclId(ctypes.Structure):
    """NCCL's id as in vLLM's binding."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_nccl_s_id_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """R42: vLLM's group took it out of an open store as a pickle. Here it travels at the meeting, as so many bytes,
    while a stranger sends pickles. (With GPUs: `tests/gpu/test_nccl.py`.)"""
    gpus = iter(("gpu-a", "gpu-b"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=next(gpus)))
    port, given_up = free_port(), threading.Event()
    sent = NcclId.from_buffer_copy(pickle.dumps(os.getcwd).ljust(128, b"\0"))

    def introduce(rank: int, unique_id: NcclId) -> Operation[NcclId]:
        member = Seat(
            host=HOST, port=port, rank=rank, world_size=2, timeout_s=20.0, device=torch.device("cpu"), secret=SECRET
        )
        introduction = _introduction(member, given_up, allow_shared_gpu=False)
        assert type(introduction).__mro__[1].__module__.startswith("vllm."), "it is not vLLM's group"
        return Operation(lambda: introduction.broadcast_obj(unique_id, src=0), 20.0, "introducing")

    with nothing_is_unpickled():
        worker = introduce(0, sent)
        with connect(port) as stranger:
            stranger.sendall(pickle.dumps(os.getcwd).ljust(HELLO_BYTES, b"\0"))
            learner = introduce(1, NcclId())
            assert [bytes(one.result()) for one in (worker, learner)] == [bytes(sent)] * 2
