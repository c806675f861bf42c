"""Offloading around colocated rollouts: what is refused, and that everything comes back (R20). CUDA: tests/gpu/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from learner.config.sections.model import ModelConfig
from learner.config.sections.rollout_matching import OffloadConfig
from learner.config.sections.training import TrainingConfig
from learner.policy import offload
from learner.policy.load import Policy, load_policy
from learner.policy.offload import HOST, Offload, make_offload
from learner.policy.optim import Optimizer
from shared.errors import ConfigError

BOTH = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)


@pytest.fixture
def policy(tiny_text: Path) -> Policy:
    return load_policy(ModelConfig(path=str(tiny_text)), device=HOST)


def optimizer_of(policy: Policy) -> Optimizer:
    return Optimizer(policy.trainable, TrainingConfig(output_dir="run", max_steps=1), total_steps=1)


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return tensors of several types, shapes and strides, and a view without content of its own; two of them are
    larger than a block."""
    monkeypatch.setattr(offload, "_BLOCK_BYTES", 1024)
    large = [torch.arange(1000, dtype=torch.float32) + i for i in range(2)]
    return [
        torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        torch.nn.Parameter(torch.randn(4, 6).T),
        *large,
        torch.tensor(7, dtype=torch.int64),
        torch.ones(3).expand(2, 3),
        torch.empty(0),
    ]


def test_what_was_away_is_as_it_was(tensors: list[torch.Tensor]) -> None:
    """The CPU stands for a device here: moving is the same for both."""
    before = [(tensor.detach().clone(), tensor.dtype, tensor.shape) for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    with Offload(lambda: tensors, HOST).away():
        inside = [tensor.data_ptr() for tensor in tensors]
        for tensor, (content, *_) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, content)
    assert not {*inside} & {*addresses} - {0}
    assert not {*inside} & {tensor.data_ptr() for tensor in tensors} - {0}
    for tensor, (content, dtype, shape) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, content)
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert tensors[1].stride() == (1, 6)


def test_the_host_memory_is_used_again(tensors: list[torch.Tensor]) -> None:
    """It is used again too if others are moved the next time, as gradients come and go."""
    moved = Offload(lambda: tensors, HOST)
    places: list[list[int]] = []
    for _ in range(2):
        with moved.away():
            places.append([tensor.data_ptr() for tensor in tensors])
    assert places[0] == places[1]
    last = tensors.pop()
    tensors[2] += 1
    with moved.away():
        assert [tensor.data_ptr() for tensor in tensors] == places[0][:-1]
        tensors[2] += 1
    assert float(tensors[2][5]) == 7
    assert last.numel() == 0


def test_back_where_the_engine_fails(tensors: list[torch.Tensor]) -> None:
    """Otherwise no checkpoint could follow the error that stopped the run."""
    inside: list[int] = []

    def fail() -> None:
        inside.extend(tensor.data_ptr() for tensor in tensors)
        raise RuntimeError("the engine failed")

    with pytest.raises(RuntimeError, match="engine"), Offload(lambda: tensors, HOST).away():
        fail()
    assert not {*inside} & {tensor.data_ptr() for tensor in tensors} - {0}


def test_nothing_moves_where_the_host_has_no_room(tensors: list[torch.Tensor]) -> None:
    huge = torch.empty(1, dtype=torch.uint8).expand(2**60)
    addresses = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(ConfigError, match="too little") as caught, Offload(lambda: [*tensors, huge], HOST).away():
        pytest.fail("nothing may run that counts on the memory")
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert "GiB" in caught.value.found


def test_nothing_moves_on_cpu(policy: Policy) -> None:
    optimizer = optimizer_of(policy)
    for _, parameter in policy.trainable:
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0)
    tensors = [*policy.model.parameters(), *optimizer.state().values()]
    before = [tensor.data_ptr() for tensor in tensors]
    with make_offload(BOTH, policy, optimizer).away():
        assert [tensor.data_ptr() for tensor in tensors] == before


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
    with pytest.raises(ConfigError, match="cannot be moved") as caught:
        make_offload(BOTH, policy, optimizer_of(policy))
    assert "on meta" in caught.value.found
