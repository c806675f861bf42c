"""Offloading on CUDA: the device is empty meanwhile, and training goes on as if nothing had been moved (R20)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from peft.tuners.lora import LoraLayer

from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import OffloadConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.offload import make_offload
from learner.policy.optim import Optimizer
from tests.unit.learner.policy.rows import image, row, sample, segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)
BOTH = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)


def learner(path: Path, lora: LoraConfig | None) -> tuple[Policy, Optimizer]:
    torch.manual_seed(0)
    policy = load_policy(ModelConfig(path=str(path), lora=lora), device=CUDA)
    config = TrainingConfig(output_dir="run", max_steps=4, learning_rate=1e-3)
    return policy, Optimizer(policy.trainable, config, total_steps=4)


def state(policy: Policy, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return weights, buffers, gradients and moments."""
    named = {**dict(policy.model.named_parameters()), **dict(policy.model.named_buffers())}
    gradients = {f"{name}.grad": p.grad for name, p in policy.trainable if p.grad is not None}
    return {**named, **gradients, **optimizer.state()}


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, alpha=8, dropout=0.0)])
def test_everything_comes_back_bit_for_bit(model: Path, lora: LoraConfig | None) -> None:
    """Between the micro-steps of a window too, where gradients wait; and training goes on with it."""
    policy, optimizer = learner(model, lora)
    prompt = policy.encoder.encode(sample([image(128, 128, seed=0)]))
    away = make_offload(BOTH, policy, optimizer).away
    for step in range(2):
        for micro_step in range(2):
            policy.backward(row(segment(prompt, 20, seed=2 * step + micro_step)))
            before = {name: tensor.detach().clone() for name, tensor in state(policy, optimizer).items()}
            with away():
                assert {tensor.device.type for tensor in state(policy, optimizer).values()} == {"cpu"}
            after = state(policy, optimizer)
            assert after.keys() == before.keys()
            for name, tensor in after.items():
                assert tensor.device == CUDA, name
                assert torch.equal(tensor, before[name]), name
        optimizer.update(step)
        assert any(not torch.equal(p, before[name]) for name, p in policy.trainable)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_merged_on_the_device_while_the_model_is_away(model: Path, kind: Literal["lora", "dora"]) -> None:
    """On the host a 4B model took 35 s a sync. The values are those of a merge without offloading, bit for bit."""
    policy, optimizer = learner(model, LoraConfig(r=4, alpha=8, dropout=0.0, type=kind))
    before = {name: tensor.clone() for name, tensor in policy.named_weights(torch.bfloat16)}
    with make_offload(BOTH, policy, optimizer).away():
        found = dict(policy.named_weights(torch.bfloat16))
        merged = [name for name, tensor in found.items() if tensor.device == CUDA]
    assert len(merged) == sum(isinstance(module, LoraLayer) for module in policy.model.modules())
    for name, tensor in found.items():
        assert torch.equal(tensor.to(CUDA), before[name]), name


def test_a_step_s_most_memory_is_that_since_the_last_one(model: Path) -> None:
    policy, _ = learner(model, None)
    policy.peak_gib()
    held = torch.cuda.memory_allocated(CUDA) / 2**30
    large = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    del large
    assert policy.peak_gib() == pytest.approx(held + 1, abs=0.01)
    assert policy.peak_gib() == pytest.approx(held, abs=0.01)


def test_the_device_is_empty_meanwhile(model: Path) -> None:
    policy, optimizer = learner(model, None)
    prompt = policy.encoder.encode(sample([image(128, 128, seed=0)]))
    policy.backward(row(segment(prompt, 20, seed=0)))
    optimizer.update(0)
    num_bytes = sum(p.numel() * 4 for _, p in policy.trainable)
    before = torch.cuda.memory_allocated()
    with make_offload(BOTH, policy, optimizer).away():
        assert before - torch.cuda.memory_allocated() >= 3 * num_bytes  # the weights and two moments
    tied = policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    assert tied == policy.model.config.tie_word_embeddings
    assert torch.cuda.memory_allocated() <= before
