"""Tokens per second through `/infer/` over HTTP, against the same prompts given straight to the same engine.

In: a model folder and images. Out: three figures: both rates, and their ratio within a round. One `VllmEngine` serves
both sides, in this process: the app runs under uvicorn on a thread's event loop, the direct calls on that same loop,
so only HTTP, JSON, routing and the gate differ. Rounds alternate the side that goes first; each request is 64 tokens
at temperature 1 with a seed, so that both sides decode the same tokens. Called by `run.py`.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import uvicorn

from bench.figures import Figure, median
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.servers import LoopThread
from rollout_server.__main__ import _prepare_environment
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import VllmEngine
from rollout_server.service import RolloutService
from shared.addresses import free_ports
from shared.seeds import offset_seed
from shared.wire import InferCall, RequestConfig, RolloutInferRequest

WANTED_RATIO = 0.9
MAX_TOKENS = 64
NUM_REQUESTS = 64
_TIMEOUT_S = 120.0


def measure(model: Path, images: list[Path], *, num_requests: int = NUM_REQUESTS, rounds: int = 8) -> list[Figure]:
    """Medians over rounds, each of which sends all requests once per side."""
    config = _server_config(model, images)
    _prepare_environment(config)
    engine = VllmEngine(config)
    try:
        return asyncio.run(_compare(engine, config, _requests(images, num_requests), rounds))
    finally:
        engine.shutdown()


async def _compare(
    engine: VllmEngine, config: ServerConfig, requests: list[RolloutInferRequest], rounds: int
) -> list[Figure]:
    rates: dict[str, list[float]] = {"http": [], "direct": []}
    with Client(config) as client, Served(engine, config):
        for i in range(1 + rounds):
            call = InferCall(
                infer_requests=[request.model_copy(update={"uuid": f"{i}-{n}"}) for n, request in enumerate(requests)],
                request_config=RequestConfig(max_tokens=MAX_TOKENS, temperature=1.0, seed=1000 * i),
            )
            for side in ("http", "direct") if i % 2 else ("direct", "http"):
                await engine.reset_caches()
                begin = time.perf_counter()
                num_tokens = await (direct(engine, call) if side == "direct" else client.infer(call))
                rates[side].append(num_tokens / (time.perf_counter() - begin))
    over_http, straight = rates["http"][1:], rates["direct"][1:]  # the first round warms up
    ratios = [a / b for a, b in zip(over_http, straight, strict=True)]
    return [
        Figure(name="tokens/s straight to the engine", value=median(straight), unit="tokens/s", samples=straight),
        Figure(name="tokens/s through /infer/", value=median(over_http), unit="tokens/s", samples=over_http),
        Figure(
            name=f"/infer/ against the engine, {len(requests)} image requests",
            value=median(ratios),
            unit="ratio",
            wanted=WANTED_RATIO,
            samples=ratios,
        ),
    ]


async def direct(engine: VllmEngine, call: InferCall) -> int:
    """Tokens that the engine made of the call, seeded as the server would."""
    config, seed = call.request_config, call.request_config.seed
    seeds = [None if seed is None else offset_seed(seed, i) for i in range(len(call.infer_requests))]
    generations = await asyncio.gather(
        *(engine.generate(request, config, own) for request, own in zip(call.infer_requests, seeds, strict=True))
    )
    return sum(len(generation.response_token_ids) for generation in generations)


class Served:
    """The app under uvicorn on the running event loop; use as a context."""

    def __init__(self, engine: VllmEngine, config: ServerConfig) -> None:
        app = create_app(RolloutService(engine, config), None)
        settings = uvicorn.Config(app, host=config.host, port=config.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(settings)

    def __enter__(self) -> None:
        self._task = asyncio.create_task(self._server.serve())

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True


class Client:
    """A learner's client, on an event loop of its own: a client's work is not the server's. Use as a context.

    One for all calls, as a learner has it: loading TLS's certificates, which every new one does, takes 10 to 30 ms.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._loop = LoopThread("bench-client")
        self._client = ServerClient(config.base_url, timeouts=Timeouts.of(_TIMEOUT_S, _TIMEOUT_S))

    async def infer(self, call: InferCall) -> int:
        """Tokens that came back for the call."""
        outputs = await asyncio.wrap_future(self._loop.submit(self._client.infer(call)))
        return sum(len(output.response_token_ids) for output in outputs)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run(self._client.aclose())
        self._loop.close(_TIMEOUT_S)


def _server_config(model: Path, images: list[Path]) -> ServerConfig:
    (port,) = free_ports(1)
    return ServerConfig(model=str(model), port=port, allowed_image_roots=[images[0].parent.resolve()])


def _requests(images: list[Path], number: int) -> list[RolloutInferRequest]:
    return [
        RolloutInferRequest(
            messages=[{"role": "user", "content": "<image>Detect every digit."}],
            images=[str(images[i % len(images)].resolve())],
        )
        for i in range(number)
    ]
