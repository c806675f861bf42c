"""A small server on given GPUs, a learner's sync to it, and what it answers: shared by the tests of syncs on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.records import Sample
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CanaryItem
from learner.sync.sync import Sync
from shared.addresses import free_port
from tests.gpu.devices import SERVER_MEMORY, SHARED
from tests.servers import RunningServer, running_server
from tests.syncs import server_sync

SMALL = {"dtype": "bfloat16", **SERVER_MEMORY}


@contextmanager
def server_on(devices: str, model: Path, folder: Path, **settings: Any) -> Iterator[RunningServer]:
    config = {"model": str(model), **SMALL, **settings}
    with running_server(config, folder, env={"CUDA_VISIBLE_DEVICES": devices}) as running:
        yield running


def load(model: Path, device: str = "cuda:0", **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=str(model), **settings), device=torch.device(device), bf16=True)


def samples(number: int = 4) -> list[Sample]:
    turns = [({"role": "user", "content": f"{i}: detect every digit"},) for i in range(number)]
    return [
        Sample(sample_id=str(i), messages=turn, images=(), objects=(), width=1, height=1)
        for i, turn in enumerate(turns)
    ]


@contextmanager
def learner(
    servers: RunningServer | Sequence[RunningServer],
    policy: Policy,
    *,
    allow_shared_gpu: bool = SHARED,
) -> Iterator[tuple[ServerBackend, Sync]]:
    servers = [servers] if isinstance(servers, RunningServer) else servers
    entries = [{"base_url": server.base_url, "group_port": free_port()} for server in servers]
    section: Mapping[str, Any] = {
        "decode_batch_size": 8,
        "decoding": {"max_new_tokens": 24},
        "vllm": {
            "mode": "server",
            "server": {"servers": entries, "timeout_s": 60.0, "allow_shared_gpu": allow_shared_gpu},
            "sync": {"bucket_bytes": 1 << 20},
        },
    }
    backend = ServerBackend(RolloutMatchingConfig.model_validate(section), run_seed=0)
    backend.connect()
    canary = [
        CanaryItem(sample=s, prompt=policy.encoder.encode(s), response_token_ids=tuple(range(20, 60)))
        for s in samples(2)
    ]
    answers = RepeatedLogprobs(policy, [(item.prompt, item.response_token_ids) for item in canary])
    sync = server_sync(backend, policy, canary, answers, device=policy.device)
    try:
        yield backend, sync
    finally:
        sync.close()
        backend.close()


@torch.no_grad()
def change(policy: Policy, seed: int) -> None:
    """Every weight becomes another one, adapters included."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        parameter += 0.3 * (parameter.std(correction=0) + 0.02) * torch.randn_like(parameter)


def answers(backend: ServerBackend) -> list[tuple[int, ...]]:
    rollouts = backend.generate(samples(), global_step=1, micro_step_idx=0, first_req_idx=0, greedy=True)
    return [rollout.response_token_ids for rollout in rollouts]
