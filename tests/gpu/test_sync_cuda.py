"""A real rollout server on one GPU and the learner's sync on another, or both on one: vLLM, HTTP, NCCL (R09, R10)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.demo.model import build
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.records import Sample
from learner.rollout.servers import ServerBackend
from learner.sync.canary import CanaryItem
from learner.sync.sync import Sync
from shared.addresses import free_port
from shared.errors import CommunicatorError
from tests.gpu.devices import OTHER, SERVER_MEMORY, SHARED, needs_gpus
from tests.servers import RunningServer, running_server
from tests.syncs import server_sync

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
SMALL = {"dtype": "bfloat16", **SERVER_MEMORY}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "model"
    build(path, "demo", seed=0)
    return path


@contextmanager
def server_on(devices: str, model: Path, folder: Path, **settings: Any) -> Iterator[RunningServer]:
    config = {"model": str(model), **SMALL, **settings}
    with running_server(config, folder, env={"CUDA_VISIBLE_DEVICES": devices}) as running:
        yield running


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_on(str(OTHER), model, tmp_path_factory.mktemp("server")) as running:
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
    servers: RunningServer | Sequence[RunningServer], policy: Policy, *, allow_shared_gpu: bool = SHARED
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


LEARNERS: list[Callable[[Path], Policy]] = [
    lambda path: load(path, dtype="bfloat16"),
    lambda path: load(path, dtype="float32"),
    lambda path: load(path, dtype="float32", lora=LoraConfig(r=8, alpha=16)),
    lambda path: load(path, dtype="float32", lora=LoraConfig(type="dora", r=8, alpha=16)),
]


@pytest.mark.parametrize("make", LEARNERS, ids=["bfloat16", "float32", "lora", "dora"])
def test_syncs_change_what_is_served(server: RunningServer, model: Path, make: Callable[[Path], Policy]) -> None:
    """R09, R10: several buckets, loaded in place; every learner is a new incarnation of the one before."""
    policy = make(model)
    with learner(server, policy) as (backend, sync):
        said: list[Sequence[tuple[int, ...]]] = []
        for seed in range(3):
            change(policy, seed)
            receipt = sync.sync()
            assert receipt.num_tensors == len(policy.weight_specs())
            said.append(answers(backend))
        assert said[0] != said[1] != said[2]


def test_a_learner_on_the_server_s_gpu_is_told(server: RunningServer, model: Path) -> None:
    here = load(model, f"cuda:{OTHER}")
    refused = pytest.raises(CommunicatorError, match=r"on one GPU[\s\S]*allow_shared_gpu")
    with learner(server, here, allow_shared_gpu=False) as (_, sync), refused:
        sync.sync()
    policy = load(model)
    with learner(server, policy) as (backend, sync):
        sync.sync()
        assert answers(backend)


def test_a_shared_gpu_is_allowed_where_it_is_asked_for(server: RunningServer, model: Path) -> None:
    policy = load(model, f"cuda:{OTHER}")
    with learner(server, policy, allow_shared_gpu=True) as (backend, sync):
        said = []
        for seed in range(2):
            change(policy, seed)
            sync.sync()
            said.append(answers(backend))
        assert said[0] != said[1]


def test_an_honest_sync_heals_whatever_nan_weights_have_left(model: Path, tmp_path: Path) -> None:
    """NaN in the KV cache, as on CPU (`tests/integration/test_server.py`)."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.v_proj.weight"))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file, metadata={"format": "pt"})
    with server_on(str(OTHER), broken, tmp_path) as running, learner(running, load(model)) as (backend, sync):
        calls = {"infer_requests": [{"messages": samples(1)[0].messages}] * 30, "request_config": {"max_tokens": 100}}
        for _ in range(3):
            spoiled = httpx.post(f"{running.base_url}/infer/", json=calls, timeout=60.0, trust_env=False)
            assert spoiled.status_code == 200
        sync.sync()
        assert answers(backend) == answers(backend)


@needs_gpus(3)
@pytest.mark.parametrize("how", ["tensor_parallel_size", "data_parallel_size"])
def test_servers_of_two_gpus(model: Path, tmp_path: Path, how: str) -> None:
    """R23: every worker gets every byte and loads its own part."""
    policy = load(model)
    with server_on("1,2", model, tmp_path, **{how: 2}) as running, learner(running, policy) as (backend, sync):
        for seed in range(2):
            change(policy, seed)
            sync.sync()
            assert answers(backend)


@pytest.mark.parametrize("device", [str(OTHER), pytest.param("2", marks=needs_gpus(3))])
def test_two_servers_at_once(
    server: RunningServer, model: Path, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R09: in one group where each has a GPU of its own, in two where they share one; both serve every update."""
    policy = load(model)
    with server_on(device, model, tmp_path) as second, learner([server, second], policy) as (backend, sync):
        caplog.set_level("INFO", "learner.sync")
        said = []
        for seed in range(2):
            change(policy, seed)
            sync.sync()
            said.append(answers(backend))
        assert said[0] != said[1]
        one, two = server.base_url, second.base_url
        assert f"joined {[one, two] if device == str(OTHER) else [f'{one}, {two}']}" in caplog.text
