"""A real rollout server on one GPU and the learner's sync on another, or both on one: vLLM, HTTP, NCCL (R09, R10)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.config.sections.model import LoraConfig
from learner.policy.load import Policy
from shared.errors import CommunicatorError
from tests.gpu.devices import OTHER, SHARED, needs_gpus
from tests.gpu.servers import answers, change, learner, load, samples, server_on
from tests.servers import RunningServer

pytestmark = [pytest.mark.gpu, needs_gpus(1)]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_on(str(OTHER), model, tmp_path_factory.mktemp("server")) as running:
        yield running


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


@pytest.mark.skipif(not SHARED, reason="NCCL keeps a process's host id; test_two_servers_at_once has this case")
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
