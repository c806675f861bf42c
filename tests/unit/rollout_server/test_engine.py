"""How the engine's process is made, and what vLLM's errors become."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from vllm import exceptions
from vllm.v1.engine.exceptions import EngineGenerateError

from rollout_server.config import ServerConfig
from rollout_server.decoding import Decoders, Share
from rollout_server.engine import VllmEngine
from shared.errors import PromptTooLongError, RequestError, ServerError
from shared.generation import Prompt
from shared.wire import Message, RequestConfig, RolloutInferRequest


@pytest.mark.parametrize("openmp", [1, 3])
def test_all_threads_are_counted(openmp: int) -> None:
    """OpenMP's stay after the first operation that used them, and would be missing from a forked process."""
    work = f"""
import threading, torch
from rollout_server.engine import _num_threads
torch.set_num_threads({openmp})
torch.randn(1 << 20).exp_()
before = _num_threads()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(before, _num_threads() - before)
"""
    found = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True, timeout=120.0)
    before, more = map(int, found.stdout.split())
    assert (before == 1, more) == (openmp == 1, 1), found.stdout


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (exceptions.VLLMValidationError("temperature must be in [0, 2]"), RequestError),
        (exceptions.VLLMValidationError("longer than the maximum model length of 512"), PromptTooLongError),
        (ValueError("no such modality"), RequestError),
        (EngineGenerateError("out of memory"), ServerError),
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
    held: list[Share] = []

    class Slow:
        decoders = Decoders(ServerConfig(model="m"))

        def render(self, request: RolloutInferRequest, share: Share) -> Prompt:
            share.take(1000)
            held.append(share)
            assert share.closed.wait(10)
            raise RequestError("the client hung up")

    engine = object.__new__(VllmEngine)
    engine._renderer, engine._threads = cast(Any, Slow()), ThreadPoolExecutor(1)

    async def run() -> None:
        request = RolloutInferRequest(messages=[Message(role="user", content="a")])
        calling = asyncio.create_task(engine.generate(request, RequestConfig(), None))
        while not held:
            await asyncio.sleep(0.01)
        assert Slow.decoders.num_pixels_held == 1000
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert Slow.decoders.num_pixels_held == 0

    asyncio.run(asyncio.wait_for(run(), 10))
    engine._threads.shutdown(wait=True)
