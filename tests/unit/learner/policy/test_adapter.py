"""The adapter by itself: with the weights below it, it is the merged model (R08, R09)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tiny_models import FAMILIES
from learner.config.sections.model import LoraConfig
from learner.policy.load import Policy
from learner.policy.lora import AdapterWeights
from tests.unit.learner.policy.rows import policy_of


def trained(path: Path, *, freeze: list[str] | None = None, **lora: Any) -> Policy:
    policy = policy_of(path, freeze=freeze or [], lora=LoraConfig.model_validate({"r": 4, "alpha": 12} | lora))
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter += 0.05 * torch.randn(parameter.shape)
    return policy


def adapter_of(policy: Policy) -> AdapterWeights:
    adapter = policy.adapter_weights()
    assert adapter is not None
    return adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_base_plus_adapter_is_the_merged_model(family: str, tmp_path: Path) -> None:
    """Names are the checkpoint's, also where the model's own differ; the scaling is in `lora_B`."""
    FAMILIES[family](tmp_path)
    policy = trained(tmp_path)
    adapter = adapter_of(policy)
    assert (adapter.obstacle, adapter.rank) == ("", 4)
    merged, base = dict(policy.named_weights()), dict(adapter.base.named_weights())
    tensors = dict(adapter.named_weights())
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    assert len(tensors) == 2 * len(modules) > 0
    for name, weight in merged.items():
        module = name.removesuffix(".weight")
        if module not in modules:
            assert torch.equal(weight, base[name]), name
            continue
        delta = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        assert delta.abs().max() > 0
        torch.testing.assert_close(base[name] + delta, weight)
    assert modules <= {name.removesuffix(".weight") for name in merged}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_specs_describe_the_tensors(tiny_vlm: Path, dtype: torch.dtype | None) -> None:
    adapter = adapter_of(trained(tiny_vlm))
    for source in (adapter, adapter.base):
        found = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in source.named_weights(dtype)]
        assert found == [(spec.name, spec.dtype, spec.shape) for spec in source.weight_specs(dtype)]


def test_listing_disturbs_nothing(tiny_vlm: Path) -> None:
    policy = trained(tiny_vlm)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    adapter = adapter_of(policy)
    list(adapter.named_weights(torch.bfloat16))
    list(adapter.base.named_weights(torch.bfloat16))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


def test_what_is_frozen_and_without_effect_is_left_out(tiny_vlm: Path) -> None:
    policy = trained(tiny_vlm, freeze=["model.visual."])
    assert not any("visual" in spec.name for spec in adapter_of(policy).weight_specs())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "visual" in name and "lora_B" in name:
                parameter += 1.0
    assert any("visual" in spec.name for spec in adapter_of(policy).weight_specs())


def test_obstacles_are_named(tiny_text: Path) -> None:
    assert "DoRA" in adapter_of(trained(tiny_text, type="dora")).obstacle
    assert (
        "embed_tokens is not adapted as a linear"
        in adapter_of(trained(tiny_text, target_modules=".*embed_tokens")).obstacle
    )
    policy = trained(tiny_text)
    policy.model.get_submodule("model.norm").weight.requires_grad_(True)  # type: ignore[union-attr]
    assert adapter_of(policy).obstacle == "model.norm.weight is trained and is no part of the adapter"


def test_no_adapter(tiny_text: Path) -> None:
    assert policy_of(tiny_text).adapter_weights() is None
