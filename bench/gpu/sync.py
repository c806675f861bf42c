"""Seconds of a checked full sync between GPUs: from the learner's `sync()` to verified and serving.

In: a size of model and a number of servers; the learner is this process, on the first GPU, each server a process of its
own on one of the next. Out: figures: seconds, gigabytes per second and what they are of the raw broadcast; with one
server also TRL's client and server, in the same run on the same GPUs. Every weight changes before every sync, so that a
server that kept old ones fails its canary. Run by `run.py`, in a process of its own: `python -m bench.gpu.sync --help`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import Figure, median
from bench.gpu.devices import visible
from bench.gpu.models import Size, build
from bench.gpu.results import write
from bench.gpu.trl import TrlServer, is_installed
from bench.gpu.wire import raw_rates
from deploy.launch import Processes, start_server, supervised, wait_ready
from learner.config.schema import ModelConfig, RolloutMatchingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.policy.repeated import RepeatedLogprobs
from learner.records import Sample, SyncReceipt
from learner.rollout.servers import ServerBackend
from learner.sync.canary import Canary, CanaryItem
from learner.sync.servers import ServerDelivery
from learner.sync.sync import Sync
from shared.addresses import free_ports
from shared.config.parse import write_yaml

WANTED_S = 0.050
WANTED_AGAINST_TRL = 1.8
WANTED_OF_ONE_SERVER = 1.5
WARM_UP, ROUNDS = 3, 12
BUCKET_BYTES = 512 << 20
KV_CACHE_BYTES = 16 << 30
_READY_TIMEOUT_S = 400.0


def main(
    out: Annotated[Path, typer.Option(help="File for the figures.")],
    folder: Annotated[Path, typer.Option(help="For the model, configurations and logs; large and fast.")],
    size: Annotated[str, typer.Option(help="0.6B or 4B.")] = "4B",
    servers: Annotated[int, typer.Option(help="Syncs to one server, and to all of these at once.")] = 1,
) -> None:
    """Measure and write."""
    write(out, measure(size, servers, folder))  # type: ignore[arg-type]


def measure(size: Size, num_servers: int, folder: Path) -> list[Figure]:
    """Figures of syncs to one server, and to `num_servers` at once where that is more than one."""
    device = torch.device("cuda:0")
    model = folder / f"model-{size}"
    num_parameters = build(model, size, device=device)
    name = f"{num_parameters / 1e9:.2f}B"
    with supervised() as processes:
        starting = [_start(processes, model, i, folder) for i in range(num_servers)]
        # The comparison's server shares the first server's GPU: neither has work while the other is measured.
        trl = _start_trl(processes, model, folder) if num_servers == 1 and is_installed() else None
        policy = load_policy(ModelConfig(path=str(model), dtype="bfloat16"), device=device, bf16=True)
        rates = raw_rates(2 * num_parameters, BUCKET_BYTES)
        urls = [url for url, wait_until_ready in starting if wait_until_ready() is None]
        figures = _figures(name, _sync(policy, urls[:1]), rates)
        if num_servers > 1:
            figures.append(_several(figures[0], _sync(policy, urls), num_servers))
        if trl is not None:
            figures += _against_trl(figures[0], _time_trl(trl, policy))
    return figures


def _start(processes: Processes, model: Path, index: int, folder: Path) -> tuple[str, Callable[[], None]]:
    (port,) = free_ports(1)
    config = folder / f"server-{index}.yaml"
    settings = {
        "model": str(model),
        "port": port,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.4,
        "engine_args": {"kv_cache_memory_bytes": KV_CACHE_BYTES},
    }
    write_yaml(config, settings, "bench")
    server, url = start_server(processes, str(config), log=folder / f"server-{index}.log", devices=visible(1 + index))

    def wait_until_ready() -> None:
        wait_ready(server, url, _READY_TIMEOUT_S)

    return url, wait_until_ready


def _start_trl(processes: Processes, model: Path, folder: Path) -> TrlServer:
    return TrlServer(
        processes, model, device=1, max_num_seqs=128, kv_cache_bytes=KV_CACHE_BYTES, log=folder / "trl.log"
    )


def _sync(policy: Policy, urls: Sequence[str]) -> list[SyncReceipt]:
    ports = free_ports(len(urls))
    section = {
        "vllm": {
            "mode": "server",
            "server": {
                "servers": [{"base_url": url, "group_port": port} for url, port in zip(urls, ports, strict=True)],
                "timeout_s": 120.0,
            },
            "sync": {"bucket_bytes": BUCKET_BYTES},
        }
    }
    backend = ServerBackend(RolloutMatchingConfig.model_validate(section), run_seed=0)
    backend.connect()
    vllm = backend.config.vllm
    items = [_canary(policy, i) for i in range(vllm.sync.canary_samples)]
    answers = RepeatedLogprobs(policy, [(item.prompt, item.response_token_ids) for item in items])
    canary = Canary(items=items, learner_logprobs=answers, tolerance=vllm.sync.canary_tolerance)
    sync = Sync(ServerDelivery(backend, vllm, canary=canary, ranks=Ranks(), device=policy.device), policy)
    receipts = []
    try:
        for _ in range(WARM_UP + ROUNDS):
            _change(policy)
            receipts.append(sync.sync())
        return receipts[WARM_UP:]
    finally:
        sync.close()
        backend.close()


def _canary(policy: Policy, index: int) -> CanaryItem:
    messages = ({"role": "user", "content": f"{index}: name every digit, and where it is."},)
    sample = Sample(sample_id=str(index), messages=messages, images=(), objects=(), width=1, height=1)
    return CanaryItem(sample=sample, prompt=policy.encoder.encode(sample), response_token_ids=tuple(range(20, 84)))


@torch.no_grad()
def _change(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    torch.cuda.synchronize()


def _figures(name: str, receipts: Sequence[SyncReceipt], rates: Sequence[float]) -> list[Figure]:
    seconds = [receipt.seconds for receipt in receipts]
    rate = receipts[0].num_bytes / median(seconds) / 1e9
    return [
        Figure(
            name=f"sync, {name} to one server, all checks included",
            value=median(seconds),
            unit="s",
            wanted=WANTED_S,
            at_least=False,
            samples=seconds,
        ),
        Figure(name="the same as a rate", value=rate, unit="GB/s"),
        Figure(name="raw broadcast of as many bytes", value=median(rates), unit="GB/s", samples=rates),
        Figure(name="what the whole sync keeps of the raw broadcast", value=rate / median(rates), unit="share"),
        Figure(
            name="canary gap, worst",
            value=max(receipt.canary_gap for receipt in receipts),
            unit="nats per token",
            samples=[receipt.canary_gap for receipt in receipts],
        ),
    ]


def _several(one: Figure, receipts: Sequence[SyncReceipt], num_servers: int) -> Figure:
    ratios = [receipt.seconds / one.value for receipt in receipts]
    return Figure(
        name=f"sync to {num_servers} servers at once, against one",
        value=statistics.median(ratios),
        unit="times",
        wanted=WANTED_OF_ONE_SERVER,
        at_least=False,
        samples=ratios,
    )


def _time_trl(server: TrlServer, policy: Policy) -> list[float]:
    client: Any = server.client(_READY_TIMEOUT_S)
    client.init_communicator(device=policy.device)
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        _change(policy)
        begin = time.perf_counter()
        client.update_model_params(policy.model)
        client.reset_prefix_cache()
        seconds.append(time.perf_counter() - begin)
    client.close_communicator()
    server.stop()
    return seconds[WARM_UP:]


def _against_trl(ours: Figure, seconds: Sequence[float]) -> list[Figure]:
    return [
        Figure(name="TRL's update of the model, nothing checked", value=median(seconds), unit="s", samples=seconds),
        Figure(
            name="TRL's seconds over ours",
            value=median(seconds) / ours.value,
            unit="times",
            wanted=WANTED_AGAINST_TRL,
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
