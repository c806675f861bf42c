"""`Policy.flops_per_token` against what torch counts of the decoder's matrix products, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from learner.config.sections.model import LoraConfig
from learner.policy.load import Policy
from learner.records import PackedRow
from tests.tiers import slow
from tests.unit.learner.policy.rows import image, policy_of, sample, segment

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def counted(policy: Policy, row: PackedRow) -> float:
    """Count the products of the decoder's layers: not of attention, the head and the vision tower."""
    counter = FlopCounterMode(display=False)
    with counter:
        policy.backward(row)
    by_module = counter.get_flop_counts()
    names = [name for name in by_module if ".language_model.layers." in name and name.rpartition(".")[2].isdigit()]
    assert names
    return float(sum(by_module[name].get(product, 0) for name in names for product in PRODUCTS))


@pytest.mark.parametrize("checkpointing", [slow(False), True])
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, alpha=8)])
def test_is_what_torch_counts(tiny_vlm: Path, lora: LoraConfig | None, checkpointing: bool) -> None:
    policy = policy_of(tiny_vlm, lora=lora, gradient_checkpointing=checkpointing)
    prompt = policy.encoder.encode(sample([image(64, 64)]))
    row = PackedRow(segments=(segment(prompt, 40),), capacity=4096)
    assert policy.flops_per_token * row.num_tokens == pytest.approx(counted(policy, row), rel=0.05)
