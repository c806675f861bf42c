"""Adapter sync against full sync: bytes and seconds of both, with one server and the same LoRA policy.

In: a model folder and scenes. Out: figures of syncs as the product makes them, every check included: first merged
weights, then the adapter alone. Between two syncs the adapter is changed, so that each brings other bytes. The first
ones of each kind warm up and do not count, nor does sending the weights below the adapter. Called by `run.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.figures import Figure, median
from bench.runs import serve
from bench.training import learner_config
from deploy.launch import supervised
from learner.config.load import load_config
from learner.config.schema import RunConfig
from learner.data.readers import load_samples
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import SyncReceipt
from learner.rollout.connect import connect_sync
from learner.rollout.servers import ServerBackend
from learner.tasks.detection.task import DetectionTask
from shared.addresses import free_ports
from shared.config.parse import write_yaml

WARM_UP_SYNCS = 2
RANK = 16
# What the server can adapt: the language model, not the vision tower.
_TARGETS = r".*language_model.*_proj"


def measure(model: Path, data: Path, folder: Path, *, num_syncs: int = 15) -> list[Figure]:
    """Figures of `num_syncs` syncs of each kind; the files of server and learner go into `folder`."""
    ports = free_ports(2)
    server = {"model": str(model), "port": ports[0], "enable_lora": True, "max_lora_rank": RANK}
    configs = {mode: _config(mode, model, data, folder, ports) for mode in ("full", "adapter")}
    policy = load_policy(configs["full"].model, device=torch.device("cpu"), bf16=True)
    with supervised() as processes:
        serve(processes, {**server, "allowed_image_roots": [str(data)]}, folder, "adapters-server")
        receipts = {mode: _syncs(config, policy, num_syncs) for mode, config in configs.items()}
    return figures(receipts["full"], receipts["adapter"])


def figures(full: Sequence[SyncReceipt], adapter: Sequence[SyncReceipt]) -> list[Figure]:
    """Of syncs that count."""
    sides = {"full sync, merged": full, f"adapter sync, rank {RANK}": adapter}
    ratio = adapter[0].num_bytes / full[0].num_bytes
    return [
        *(
            Figure(name=name, value=median(seconds), unit="s", samples=seconds)
            for name, seconds in ((name, [receipt.seconds for receipt in side]) for name, side in sides.items())
        ),
        *(Figure(name=f"{name}: bytes", value=side[0].num_bytes / 2**20, unit="MiB") for name, side in sides.items()),
        Figure(name="bytes of an adapter sync against a full one", value=ratio, unit="ratio"),
        Figure(
            name="largest canary gap of an adapter sync",
            value=max(receipt.canary_gap for receipt in adapter),
            unit="nats per token",
        ),
    ]


def _syncs(config: RunConfig, policy: Policy, num_syncs: int) -> list[SyncReceipt]:
    """The receipts of syncs after the warm-up, on a connection of their own."""
    task = DetectionTask(config.task, policy.tokenizer)
    samples = load_samples(config.data, config.data.train, task)
    backend = ServerBackend(config.rollout_matching, run_seed=config.training.seed)
    try:
        backend.connect()
        sync = connect_sync(config, Ranks(), policy, backend, task, samples)
        receipts = []
        for _ in range(WARM_UP_SYNCS + num_syncs):
            _change(policy)
            receipts.append(sync.sync())
        sync.close()
    finally:
        backend.close()
    return receipts[WARM_UP_SYNCS:]


@torch.no_grad()
def _change(policy: Policy) -> None:
    for _, parameter in policy.trainable:
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def _config(mode: str, model: Path, data: Path, folder: Path, ports: Sequence[int]) -> RunConfig:
    config: dict[str, Any] = learner_config(model, data, folder, ports[0], ports[1], steps=1, batch_size=1)
    config["model"]["lora"] = {"r": RANK, "target_modules": _TARGETS}
    vllm = config["custom"]["extra"]["rollout_matching"]["vllm"]
    vllm |= {"enable_lora": True, "sync": {"mode": mode, "fallback_to_full": False}}
    path = folder / f"adapters-{mode}.yaml"
    write_yaml(path, config, "bench")
    return load_config(str(path), world_size=1, env={})
