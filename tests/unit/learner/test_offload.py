"""Offloading around colocated rollouts: what is refused, and that everything comes back (R20). CUDA: tests/gpu/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from learner.config.schema import ModelConfig, OffloadConfig, TrainingConfig
from learner.offload import HOST, Offload, make_offload
from learner.optim import Optimizer
from learner.policy.load import Policy, load_policy
from shared.errors import ConfigError

CUDA = torch.device("cuda", 0)
BOTH = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)


class Part:
    """Remembers where it was sent; `full` is a device without room for it."""

    def __init__(self, full: torch.device | None = None) -> None:
        self.sent: list[torch.device] = []
        self._full = full

    def to(self, device: torch.device) -> None:
        self.sent.append(device)
        if device == self._full:
            raise MemoryError(f"{device} is full")


@pytest.fixture
def policy(tiny_text: Path) -> Policy:
    return load_policy(ModelConfig(path=str(tiny_text)), device=HOST)


def optimizer_of(policy: Policy) -> Optimizer:
    return Optimizer(policy.trainable, TrainingConfig(output_dir="run", max_steps=1), total_steps=1)


def test_away_inside_and_back_afterwards() -> None:
    parts = (Part(), Part())
    with Offload(*parts, device=CUDA).away():
        assert [part.sent for part in parts] == [[HOST], [HOST]]
    assert [part.sent for part in parts] == [[HOST, CUDA], [HOST, CUDA]]


def test_back_where_the_engine_fails() -> None:
    """Or else the error that stopped the run could not be followed by a checkpoint."""
    part = Part()
    with pytest.raises(RuntimeError, match="engine"), Offload(part, device=CUDA).away():
        raise RuntimeError("the engine failed")
    assert part.sent == [HOST, CUDA]


def test_back_where_the_host_has_no_room() -> None:
    parts = (Part(), Part(full=HOST))
    with pytest.raises(MemoryError), Offload(*parts, device=CUDA).away():
        pytest.fail("nothing may run that counts on the memory")
    assert [part.sent[-1] for part in parts] == [CUDA, CUDA]


def test_nothing_moves_on_cpu(policy: Policy) -> None:
    optimizer = optimizer_of(policy)
    for _, parameter in policy.trainable:
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0)
    tensors = [*policy.model.parameters(), *optimizer.state().values()]
    before = [tensor.data_ptr() for tensor in tensors]
    with make_offload(BOTH, policy, optimizer).away():
        assert [tensor.data_ptr() for tensor in tensors] == before


def test_the_optimizer_moves_its_state(policy: Policy) -> None:
    """To a device that holds no values, for CPU has no other to come back from."""
    optimizer = optimizer_of(policy)
    for _, parameter in policy.trainable:
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0)
    optimizer.to(torch.device("meta"))
    assert {tensor.device.type for tensor in optimizer.state().values()} == {"meta"}
    assert len(optimizer.state()) == 3 * len(policy.trainable)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_state_is_refused_with_a_way_out(policy: Policy) -> None:
    fully_shard(policy.model)
    with pytest.raises(ConfigError, match=r"offload\.enabled") as caught:
        make_offload(BOTH, policy, optimizer_of(policy))
    assert "sharded" in caught.value.found
    assert "rollout_backend: hf" in caught.value.remedy
    make_offload(OffloadConfig(), policy, optimizer_of(policy))  # nothing asked for, nothing refused


def test_a_model_that_is_elsewhere_is_refused(policy: Policy) -> None:
    """Spread over devices, or not loaded: `to` would not bring it back to where it was."""
    policy.model.get_input_embeddings().to("meta")
    with pytest.raises(ConfigError, match="can't be moved") as caught:
        make_offload(BOTH, policy, optimizer_of(policy))
    assert "on meta" in caught.value.found
