"""Tokens per second of text rollouts on a GPU: through `/infer/`, straight to the engine, through TRL's server.

In: a size of model. Out: figures: `/infer/` against the engine (256 requests of 256 tokens at temperature 1, with CUDA
graphs), against TRL's client and server, with seeds per request as a learner sends them, and the rate for each
`decode_batch_size`. The engine is on the first GPU and TRL's server on the second; sides take turns, and caches are
reset before each. Run by `run.py`, in a process of its own: `python -m bench.gpu.infer --help`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import Figure, median
from bench.gpu.models import Size, build
from bench.gpu.results import write
from bench.gpu.trl import TrlServer, is_installed
from bench.serving import Client, Served, direct
from deploy.launch import supervised
from learner.config.schema import RolloutMatchingConfig
from learner.records import Sample
from learner.rollout.servers import ServerBackend
from rollout_server.__main__ import _prepare_environment
from rollout_server.config import ServerConfig
from rollout_server.engine import VllmEngine
from shared.addresses import free_ports
from shared.wire import InferCall, RequestConfig, RolloutInferRequest

WANTED_OF_ENGINE = 0.97
WANTED_AGAINST_TRL = 1.2
NUM_REQUESTS = MAX_TOKENS = 256
BATCH_SIZES = (4, 16, 64, 256)
ROUNDS = 5
KV_CACHE_BYTES = 24 << 30
_READY_TIMEOUT_S = 400.0

Side = Callable[[int], Awaitable[int]]  # round -> tokens made


def main(
    out: Annotated[Path, typer.Option(help="File for the figures.")],
    folder: Annotated[Path, typer.Option(help="For the model and logs; large and fast.")],
    size: Annotated[str, typer.Option(help="0.6B or 4B.")] = "4B",
) -> None:
    """Measure and write."""
    write(out, measure(size, folder))  # type: ignore[arg-type]


def measure(size: Size, folder: Path, *, num_requests: int = NUM_REQUESTS, rounds: int = ROUNDS) -> list[Figure]:
    model = folder / f"model-{size}"
    if not model.is_dir():
        build(model, size, device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        torch.cuda.empty_cache()
    (port,) = free_ports(1)
    engine_args = {"kv_cache_memory_bytes": KV_CACHE_BYTES} if torch.cuda.is_available() else {}
    config = ServerConfig(
        model=str(model),
        port=port,
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.5,
        engine_args=engine_args,
    )
    _prepare_environment(config)
    with supervised() as processes:
        trl = _start_trl(processes, model, folder) if is_installed() else None
        engine = VllmEngine(config)
        try:
            return asyncio.run(_measure(size, engine, config, trl, num_requests, rounds))
        finally:
            engine.shutdown()


def _start_trl(processes: Any, model: Path, folder: Path) -> TrlServer:
    return TrlServer(
        processes, model, device=1, max_num_seqs=256, kv_cache_bytes=KV_CACHE_BYTES, log=folder / "trl-infer.log"
    )


async def _measure(
    size: Size, engine: VllmEngine, config: ServerConfig, trl: TrlServer | None, num_requests: int, rounds: int
) -> list[Figure]:
    def call(i: int, seed: int | None) -> InferCall:
        requests = [
            RolloutInferRequest(messages=[{"role": "user", "content": _text(n)}], uuid=f"{seed}-{i}-{n}")
            for n in range(num_requests)
        ]
        return InferCall(
            infer_requests=requests,
            request_config=RequestConfig(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed),
        )

    with Client(config) as client, Served(engine, config):
        sides: dict[str, Side] = {
            "straight to the engine": lambda i: direct(engine, call(i, None)),
            "through /infer/": lambda i: client.infer(call(i, None)),
            "through /infer/, a seed per request": lambda i: client.infer(call(i, i)),
        }
        if trl is not None:
            sides |= await asyncio.to_thread(_trl_sides, trl, engine, num_requests)
        rates = await _take_turns(sides, engine, rounds)
        if trl is not None:
            await asyncio.to_thread(trl.stop)
        curve = await asyncio.to_thread(_curve, config, num_requests)
    return [*_figures(size, num_requests, rates), *(_point(size, n, rate) for n, rate in curve.items())]


def _text(index: int) -> str:
    return f"{index}: name every digit of the picture, and where it is, in the order in which one reads."


def _trl_sides(server: TrlServer, engine: VllmEngine, num_requests: int) -> dict[str, Side]:
    """TRL's client as its trainers call it (the sampled tokens' log-probabilities come along), and without those."""
    client = server.client(_READY_TIMEOUT_S)
    requests = [RolloutInferRequest(messages=[{"role": "user", "content": _text(n)}]) for n in range(num_requests)]
    prompts = [engine._renderer.render(request).token_ids for request in requests]

    def generate(logprobs: int | None) -> int:
        client.reset_prefix_cache()
        answer = client.generate(prompts, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=logprobs)
        return sum(map(len, answer["completion_ids"]))

    return {
        "through TRL's server": lambda i: asyncio.to_thread(generate, 0),
        "through TRL's server, no log-probabilities": lambda i: asyncio.to_thread(generate, None),
    }


async def _take_turns(sides: Mapping[str, Side], engine: VllmEngine, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each side, once per round after the first, which warms up; the order turns around."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(1 + rounds):
        for name in list(sides) if i % 2 else reversed(list(sides)):
            await engine.reset_caches()
            begin = time.perf_counter()
            num_tokens = await sides[name](i)
            rates[name].append(num_tokens / (time.perf_counter() - begin))
    return {name: found[1:] for name, found in rates.items()}


def _figures(size: Size, num_requests: int, rates: Mapping[str, Sequence[float]]) -> list[Figure]:
    what = f"{size}, {num_requests} requests of {MAX_TOKENS} tokens"
    figures = [
        Figure(name=f"{what}, {name}", value=median(found), unit="tokens/s", samples=found)
        for name, found in rates.items()
    ]
    ours = rates["through /infer/"]

    def against(other: str, wanted: float | None) -> Figure:
        ratios = [a / b for a, b in zip(ours, rates[other], strict=True)]
        name = f"{size}, /infer/ against {other}"
        return Figure(name=name, value=median(ratios), unit="ratio", wanted=wanted, samples=ratios)

    figures.append(against("straight to the engine", WANTED_OF_ENGINE))
    if "through TRL's server" in rates:
        figures.append(against("through TRL's server", WANTED_AGAINST_TRL))
        figures.append(against("through TRL's server, no log-probabilities", None))
    return figures


def _curve(config: ServerConfig, most: int) -> dict[int, float]:
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
        messages = [({"role": "user", "content": _text(n)},) for n in range(4 * batch_size if batch_size < 64 else 256)]
        samples = [
            Sample(sample_id=str(n), messages=m, images=(), objects=(), width=1, height=1)
            for n, m in enumerate(messages)
        ]
        begin = time.perf_counter()
        rollouts = backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)
        rates[batch_size] = sum(len(rollout.response_token_ids) for rollout in rollouts) / (time.perf_counter() - begin)
        backend.close()
    return rates


def _point(size: Size, batch_size: int, rate: float) -> Figure:
    return Figure(name=f"{size}, decode_batch_size {batch_size}", value=rate, unit="tokens/s")


if __name__ == "__main__":
    typer.run(main)
