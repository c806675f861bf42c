"""The weights that the sync sends are those that a checkpoint on disk would hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from learner.config.sections.model import LoraConfig
from learner.policy.load import Policy
from learner.policy.weights import merged_weight, merges_plainly
from shared.errors import ConfigError
from tests.tiers import slow
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, sample, segment


def saved(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(path)  # type: ignore[operator]
    return load_file(path / "model.safetensors")


def with_trained_adapter(path: Path, kind: str, **options: Any) -> Policy:
    policy = policy_of(path, lora=LoraConfig(type=kind, r=4, alpha=8), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in policy.trainable:
            p += 0.05 * torch.randn(p.shape) if "magnitude" not in name else 0.1 * torch.rand(p.shape)
    return policy


@pytest.mark.parametrize("which", ["tiny_vlm", "tiny_text"])
def test_names_and_values_are_those_of_save_pretrained(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """R09: full sync sends the checkpoint's tensors, tied ones once."""
    policy = policy_of(request.getfixturevalue(which))
    expected, found = saved(policy.model, tmp_path), dict(policy.named_weights())
    assert found.keys() == expected.keys()
    assert ("lm_head.weight" in found) == (which == "tiny_text")  # the other's head is tied
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_merged_as_peft_merges_them(tiny_vlm: Path, tmp_path: Path, kind: str) -> None:
    """R09: merged weights, LoRA and DoRA; the trained weights stay bit-identical."""
    policy = with_trained_adapter(tiny_vlm, kind)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    found = {name: tensor.clone() for name, tensor in policy.named_weights()}
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name

    base = saved(policy_of(tiny_vlm).model, tmp_path / "base")
    assert isinstance(policy.adapter, peft.PeftModel)
    expected = saved(policy.adapter.merge_and_unload(), tmp_path / "merged")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda m, name=name: f"{name}: {m}")
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert "model.language_model.layers.0.mlp.up_proj.weight" in changed
    assert "model.language_model.embed_tokens.weight" not in changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1, 8, 12, 16])  # scaled by 0.25, 2, 3 and 4
def test_a_merge_is_to_the_bit_as_peft_adds_and_rounds(alpha: int, base: torch.dtype, dtype: torch.dtype) -> None:
    """R09: a scaling that is no power of two is rounded before the sum, as peft does."""
    torch.manual_seed(alpha)
    model = torch.nn.Sequential(torch.nn.Linear(67, 129).to(base))
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["0"]), model)
    layer = adapted[0]
    assert isinstance(layer, LoraLayer)
    for half in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(half["default"].float().weight)  # made in float32, the same as in a policy
    (a, b), weight = (half["default"].weight for half in (layer.lora_A, layer.lora_B)), layer.get_base_layer().weight
    expected = ((b @ a) * (alpha / 4) + weight).to(dtype)
    found = merged_weight(layer, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert merges_plainly(layer)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_weights_listed_again_are_those_of_now(tiny_vlm: Path, kind: str) -> None:
    """Steps change the adapter in its place, offloading moves it; autocast does not touch the merge."""
    policy = with_trained_adapter(tiny_vlm, kind)
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    layer = policy.model.get_submodule(name.removesuffix(".weight"))
    seen = [dict(policy.named_weights())[name]]
    for i in range(3):
        with torch.no_grad():
            for _, parameter in policy.trainable:
                parameter.add_(0.1)
                if i:
                    parameter.data = parameter.data.clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=i == 2):
            seen.append(dict(policy.named_weights())[name])
        assert torch.equal(seen[-1], merged_weight(layer))
        assert not seen[-1].requires_grad
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))


@pytest.mark.parametrize("kind", [slow("lora"), "dora"])
def test_listing_weights_does_not_disturb_training(tiny_vlm: Path, kind: str) -> None:
    listed, untouched = with_trained_adapter(tiny_vlm, kind), with_trained_adapter(tiny_vlm, kind)
    list(listed.named_weights(torch.bfloat16))
    one = row(segment(listed.encoder.encode(sample([image(64, 64)])), 12))
    for _ in range(2):
        losses = [policy.backward(one).loss_sum for policy in (listed, untouched)]
        assert losses[0] == losses[1]
    for name, grad in gradients(listed).items():
        assert torch.equal(grad, gradients(untouched)[name]), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "dora"])
def test_specs_describe_the_weights(tiny_vlm: Path, kind: str | None, dtype: torch.dtype | None) -> None:
    policy = with_trained_adapter(tiny_vlm, kind) if kind else policy_of(tiny_vlm)
    found = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in policy.named_weights(dtype)]
    assert found == [(s.name, s.dtype, s.shape) for s in policy.weight_specs(dtype)]
    assert {dtype for _, dtype, _ in found} == {"bfloat16" if dtype else "float32"}


def test_only_the_adapter_is_trained(tiny_vlm: Path) -> None:
    policy = with_trained_adapter(tiny_vlm, "dora")
    assert policy.trainable
    assert all(".lora_" in name for name, _ in policy.trainable)


def test_freeze_holds_back_what_its_prefixes_name(tiny_vlm: Path) -> None:
    policy = policy_of(tiny_vlm, freeze=["model.visual."])
    assert not any(name.startswith("model.visual.") for name, _ in policy.trainable)
    assert any(name.startswith("model.language_model.") for name, _ in policy.trainable)


@pytest.mark.parametrize("prefixes", [["model.vision."], ["model.", "lm_head."]])
def test_a_freeze_that_names_nothing_or_everything_is_refused(tiny_text: Path, prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="freeze"):
        policy_of(tiny_text, freeze=prefixes)


def test_unknown_target_modules_and_models_are_refused(tiny_text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target_modules"):
        policy_of(tiny_text, lora=LoraConfig(target_modules=["no_such_layer"]))
    with pytest.raises(ConfigError, match=r"model\.path"):
        policy_of(tmp_path / "nowhere")
