"""Tokens per second through `/infer/` over HTTP, against the same prompts given directly to the same engine.

In: a size of model. Out: figures. One `VllmEngine` in this process serves both sides, on the first GPU if there is one.
The app runs under uvicorn on the same event loop as the direct calls, so only HTTP, JSON, routing and the gate differ.
Sides take turns, and the order changes every round. Caches are reset before each turn, and the first round warms up.

- "demo": image requests of 64 tokens at temperature 1, each with a seed, so that both sides decode the same tokens.
- Text models: 256 requests of 256 tokens at temperature 1, also with a seed per request, as a learner sends them; the
  rate for each `decode_batch_size` of the learner's own client; and, with `trl` installed and a second GPU, TRL's
  client and server on that GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import uvicorn

from bench import models
from bench.figures import Figure, sampled
from bench.runs import TrlServer, say
from deploy.launch import supervised
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.records import Sample
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.server_backend import ServerBackend
from rollout_server.__main__ import _prepare_environment
from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.engine import VllmEngine
from rollout_server.service import RolloutService
from shared.addresses import free_port
from shared.aio import LoopThread
from shared.seeds import offset_seed
from shared.wire import InferCall, RequestConfig, RolloutInferRequest, RolloutOutput

WANTED_OF_ENGINE, WANTED_OF_ENGINE_IMAGES = 0.97, 0.9
WANTED_AGAINST_TRL = 1.2
NUM_REQUESTS = MAX_TOKENS = 256
NUM_IMAGES = IMAGE_MAX_TOKENS = 64
BATCH_SIZES = (4, 16, 64, 256)
KV_CACHE_BYTES = 24 << 30
_TIMEOUT_S = 120.0

Side = Callable[[int], Awaitable[int]]  # round -> number of tokens


def measure(
    folder: Path, *, size: models.Size | Literal["demo"], num_requests: int | None = None, rounds: int | None = None
) -> list[Figure]:
    """Return medians over `rounds`, each of which sends all requests once per side."""
    if size == "demo":
        return _images(folder, num_requests or NUM_IMAGES, rounds or 8)
    return _text(size, folder, num_requests or NUM_REQUESTS, rounds or 5)


@contextmanager
def _engine(config: ServerConfig) -> Iterator[VllmEngine]:
    _prepare_environment(config)
    engine = VllmEngine(config)
    try:
        yield engine
    finally:
        engine.shutdown()


async def _take_turns(sides: Mapping[str, Side], engine: VllmEngine, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each side, once per round."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(1 + rounds):
        for name in list(sides) if i % 2 else reversed(list(sides)):
            await engine.reset_caches()
            await engine._llm.reset_mm_cache()  # each side processes all images
            begin = time.perf_counter()
            num_tokens = await sides[name](i)
            rates[name].append(num_tokens / (time.perf_counter() - begin))
    return {name: found[1:] for name, found in rates.items()}


def _ratio(name: str, ours: Sequence[float], others: Sequence[float], wanted: float | None) -> Figure:
    return sampled(name, [a / b for a, b in zip(ours, others, strict=True)], "ratio", at_least=wanted)


def _call(requests: Sequence[RolloutInferRequest], i: int, max_tokens: int, *, seed: int | None) -> InferCall:
    """Return the requests of round `i`, with new ids, because the server keeps recent answers."""
    new = [request.model_copy(update={"uuid": f"{seed}-{i}-{n}"}) for n, request in enumerate(requests)]
    return InferCall(
        infer_requests=new, request_config=RequestConfig(max_tokens=max_tokens, temperature=1.0, seed=seed)
    )


async def direct(engine: VllmEngine, call: InferCall) -> int:
    """Number of tokens from the engine, with the server's seeds."""
    config, seed = call.request_config, call.request_config.seed
    seeds = [None if seed is None else offset_seed(seed, i) for i in range(len(call.infer_requests))]
    answers = await asyncio.gather(
        *(engine.generate(request, config, own) for request, own in zip(call.infer_requests, seeds, strict=True))
    )
    return sum(len(generation.response_token_ids) for generations in answers for generation in generations)


class ServedApp:
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
    """A learner's client, on its own event loop, so that its work does not slow the server's. Use as a context.

    One client for all calls, as in a learner: a new one loads TLS certificates, which takes 10 to 30 ms.
    """

    def __init__(self, base_url: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._loop = LoopThread("bench-client")
        self._client = ServerClient(base_url, timeouts=Timeouts.of(timeout_s, timeout_s))

    async def infer(self, call: InferCall) -> int:
        """Number of tokens in the answers."""
        return sum(len(output.response_token_ids) for output in await self.outputs(call))

    async def outputs(self, call: InferCall) -> list[RolloutOutput]:
        """The answers, in the order in which they ended."""
        found: list[RolloutOutput] = []
        answering = self._client.infer(call, lambda _, output: found.append(output))
        await asyncio.wrap_future(self._loop.submit(answering))
        return found

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run(self._client.aclose())
        self._loop.close(_TIMEOUT_S)


# ---- the canary's reads through the prefix cache ---------------------------------------------------------------------


# ---- images, the demo's model --------------------------------------------------------------------------------------


def _images(folder: Path, num_requests: int, rounds: int) -> list[Figure]:
    model, data = models.demo_model(folder), models.demo_scenes(folder).resolve()
    images = sorted((data / "images" / "train").glob("*.png"))[:NUM_IMAGES]
    config = ServerConfig(model=str(model), port=free_port(), allowed_image_roots=[images[0].parent])
    messages = [{"role": "user", "content": "<image>Detect every digit."}]
    chosen = [images[n % len(images)] for n in range(num_requests)]
    requests = [RolloutInferRequest(messages=messages, images=[str(image)]) for image in chosen]

    async def rates_of(engine: VllmEngine) -> dict[str, list[float]]:
        with Client(config.base_url) as client, ServedApp(engine, config):
            sides: dict[str, Side] = {
                "http": lambda i: client.infer(_call(requests, i, IMAGE_MAX_TOKENS, seed=1000 * i)),
                "direct": lambda i: direct(engine, _call(requests, i, IMAGE_MAX_TOKENS, seed=1000 * i)),
            }
            return await _take_turns(sides, engine, rounds)

    with _engine(config) as engine:
        rates = asyncio.run(rates_of(engine))
    name = f"/infer/ against the engine, {num_requests} image requests"
    return [
        sampled("tokens/s straight to the engine", rates["direct"], "tokens/s"),
        sampled("tokens/s through /infer/", rates["http"], "tokens/s"),
        _ratio(name, rates["http"], rates["direct"], WANTED_OF_ENGINE_IMAGES),
    ]


# ---- text, models of real size -------------------------------------------------------------------------------------


def _text(size: models.Size, folder: Path, num_requests: int, rounds: int) -> list[Figure]:
    model, on_gpu = models.text_model(folder, size), torch.cuda.is_available()
    config = ServerConfig(
        model=str(model),
        port=free_port(),
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.5,
        engine_args={"kv_cache_memory_bytes": KV_CACHE_BYTES} if on_gpu else {},
    )
    requests = [RolloutInferRequest(messages=[{"role": "user", "content": _prompt(n)}]) for n in range(num_requests)]
    with supervised() as processes:
        trl = None
        if TrlServer.is_installed() and torch.cuda.device_count() > 1:
            log = folder / "trl-infer.log"
            trl = TrlServer(processes, model, device=1, max_num_seqs=256, kv_cache_bytes=KV_CACHE_BYTES, log=log)
        else:
            say("TRL's server is left out: it needs `trl` and a second GPU")
        with _engine(config) as engine:
            rates, by_batch_size = asyncio.run(_text_rates(engine, config, trl, requests, rounds))
    points = by_batch_size.items()
    return [
        *text_figures(size, num_requests, rates),
        *(Figure(name=f"{size}, decode_batch_size {n}", value=rate, unit="tokens/s") for n, rate in points),
    ]


async def _text_rates(
    engine: VllmEngine,
    config: ServerConfig,
    trl: TrlServer | None,
    requests: Sequence[RolloutInferRequest],
    rounds: int,
) -> tuple[dict[str, list[float]], dict[int, float]]:
    """Rates by side, and by `decode_batch_size`."""
    with Client(config.base_url) as client, ServedApp(engine, config):
        sides: dict[str, Side] = {
            "straight to the engine": lambda i: direct(engine, _call(requests, i, MAX_TOKENS, seed=None)),
            "through /infer/": lambda i: client.infer(_call(requests, i, MAX_TOKENS, seed=None)),
            "through /infer/, a seed per request": lambda i: client.infer(_call(requests, i, MAX_TOKENS, seed=i)),
        }
        if trl is not None:
            sides |= await asyncio.to_thread(_trl_sides, trl, engine, requests)
        rates = await _take_turns(sides, engine, rounds)
        if trl is not None:
            await asyncio.to_thread(trl.stop)
        return rates, await asyncio.to_thread(_rates_by_batch_size, config, len(requests))


def _prompt(index: int) -> str:
    return f"{index}: name every digit of the picture, and where it is, in the order in which one reads."


def _trl_sides(server: TrlServer, engine: VllmEngine, requests: Sequence[RolloutInferRequest]) -> dict[str, Side]:
    """Return TRL's client as its trainers call it (the sampled tokens' log-probabilities come along), and without
    those."""
    client = server.client()
    share = engine._renderer.decoders.share()
    prompts = [engine._renderer.render(request, share).token_ids for request in requests]

    def generate(logprobs: int | None) -> int:
        client.reset_prefix_cache()
        answer = client.generate(prompts, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=logprobs)
        return sum(map(len, answer["completion_ids"]))

    return {
        "through TRL's server": lambda i: asyncio.to_thread(generate, 0),
        "through TRL's server, no log-probabilities": lambda i: asyncio.to_thread(generate, None),
    }


def text_figures(size: models.Size, num_requests: int, rates: Mapping[str, Sequence[float]]) -> list[Figure]:
    what = f"{size}, {num_requests} requests of {MAX_TOKENS} tokens"
    wanted = {
        "straight to the engine": WANTED_OF_ENGINE,
        "through TRL's server": WANTED_AGAINST_TRL,
        "through TRL's server, no log-probabilities": None,
    }
    ours = rates["through /infer/"]
    return [
        *(sampled(f"{what}, {name}", found, "tokens/s") for name, found in rates.items()),
        *(
            _ratio(f"{size}, /infer/ against {other}", ours, rates[other], bound)
            for other, bound in wanted.items()
            if other in rates
        ),
    ]


def _rates_by_batch_size(config: ServerConfig, most: int) -> dict[int, float]:
    """Tokens per second of a learner's own client by `decode_batch_size`, seeds included."""
    rates: dict[int, float] = {}
    for batch_size in (n for n in BATCH_SIZES if n <= most):
        section = {
            "decode_batch_size": batch_size,
            "decoding": {"temperature": 1.0, "max_new_tokens": 128},
            "vllm": {"mode": "server", "server": {"servers": [{"base_url": config.base_url, "group_port": 1024}]}},
        }
        backend = ServerBackend(RolloutMatchingConfig.model_validate(section), run_seed=batch_size)
        backend.connect()
        messages = [
            ({"role": "user", "content": _prompt(n)},) for n in range(4 * batch_size if batch_size < 64 else 256)
        ]
        samples = [
            Sample(sample_id=str(n), messages=m, images=(), objects=(), width=1, height=1)
            for n, m in enumerate(messages)
        ]
        begin = time.perf_counter()
        rollouts = backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)
        rates[batch_size] = sum(len(rollout.response_token_ids) for rollout in rollouts) / (time.perf_counter() - begin)
        backend.close()
    return rates
