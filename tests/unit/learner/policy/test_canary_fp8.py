"""The canary of an engine in FP8 (R09): scored with the weights that such an engine makes of what is sent.

The engine is a second model here, whose linear layers were quantised and multiplied out again, and which quantises the
inputs of these layers as vLLM does. `tests/integration/test_fp8.py` has vLLM itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy
from learner.policy.weights import checksum
from learner.records import EncodedPrompt
from learner.sync.canary import FP8_TOLERANCE
from shared.canary import compare
from shared.errors import CanaryError
from shared.quantization import is_quantised
from shared.sync.fp8 import round_trip
from shared.wire import ScoreReply
from tests.unit.learner.policy.rows import image, policy_of, sample
from tests.unit.learner.policy.test_weights import with_trained_adapter

Answers = list[tuple[EncodedPrompt, list[int]]]


def answers(policy: Policy) -> Answers:
    tokens = np.random.default_rng(0).integers(0, 1200, 40).tolist()
    return [(policy.encoder.encode(sample([image(64, 64)])), tokens), (policy.encoder.encode(sample()), tokens[:20])]


def base_name(name: str) -> str:
    return name.removesuffix(".base_layer")


def layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the layers that the engine quantises, by name."""
    found = {base_name(name): layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    return {name: layer for name, layer in found.items() if is_quantised(name)}


@torch.no_grad()
def engine(path: Path, sent: dict[str, torch.Tensor], *, inputs: bool) -> Policy:
    """Return a model that holds what was sent as an FP8 engine holds it. `inputs`: its layers' inputs are quantised
    too."""
    served = policy_of(path)
    wanted = dict(served.model.named_parameters())
    for name, tensor in sent.items():
        wanted[name].copy_(round_trip(tensor) if is_quantised(name.removesuffix(".weight")) else tensor)
    for layer in layers(served.model).values():
        if inputs:
            layer.register_forward_pre_hook(lambda _, given: (round_trip(given[0]),))
    return served


def sent_by(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights(torch.bfloat16)}


def scores(policy: Policy, quantization: Any = "fp8", *, merged: bool = True) -> list[list[float]]:
    return CanaryScorer(policy, answers(policy), quantization=quantization)(torch.bfloat16, merged).logprobs


def gap(learner: list[list[float]], served: Policy) -> float:
    """Compare as the canary does; return the mean gap. Raises CanaryError."""
    reply = ScoreReply(ver=1, logprobs=served.logprobs(answers(served)), prompt_token_ids=[[], []])
    return compare(learner, reply, tolerance=FP8_TOLERANCE, what="", name_of=str).mean


@pytest.mark.parametrize("kind", [None, "lora", "dora"])
def test_scores_are_those_of_a_model_that_holds_the_weights_in_fp8(tiny_vlm: Path, kind: str | None) -> None:
    """They are equal to the bit, with an adapter merged before. Those of the weights that were sent differ."""
    policy = with_trained_adapter(tiny_vlm, kind) if kind else policy_of(tiny_vlm)
    found = scores(policy)
    assert found == engine(tiny_vlm, sent_by(policy), inputs=False).logprobs(answers(policy))
    assert found != scores(policy, "none")


def test_below_an_adapter_the_weights_are_quantised_and_the_adapter_is_not(tiny_vlm: Path) -> None:
    """R08: what an engine computes that is sent the adapter alone."""
    policy, by_hand = with_trained_adapter(tiny_vlm, "lora"), with_trained_adapter(tiny_vlm, "lora")
    for model in (policy.model, by_hand.model):
        model.bfloat16()  # nothing else is rounded
    found = scores(policy, merged=False)
    assert found == scores(policy, merged=False)
    with torch.no_grad():
        for layer in layers(by_hand.model).values():
            layer.weight.copy_(round_trip(layer.weight))
    assert found == by_hand.logprobs(answers(by_hand))
    assert found != policy.logprobs(answers(policy))


def test_the_policy_stays_as_it_was_and_the_checksums_are_of_what_was_sent(tiny_vlm: Path) -> None:
    """The seal and the bit-for-bit comparison are of weights before they are quantised."""
    policy = policy_of(tiny_vlm, dtype="bfloat16", bf16=True)
    before = {name: tensor.clone() for name, tensor in policy.model.named_parameters()}
    found = CanaryScorer(policy, answers(policy), quantization="fp8")(torch.bfloat16, merged=True)
    assert found.logprobs != policy.logprobs(answers(policy))
    assert found.merge_gap > 0  # the change by quantising is reported
    for name, tensor in policy.model.named_parameters():
        assert torch.equal(tensor, before[name]), name
    sent = dict(policy.named_weights(torch.bfloat16))
    assert found.checksums.keys() >= sent.keys()
    assert all(int(found.checksums[name]) == int(checksum(tensor)) for name, tensor in sent.items())


def test_a_right_engine_passes(tiny_vlm: Path) -> None:
    """Its inputs are quantised, which the learner does not repeat."""
    policy = policy_of(tiny_vlm)
    assert gap(scores(policy), engine(tiny_vlm, sent_by(policy), inputs=True)) < 0.5 * FP8_TOLERANCE


@torch.no_grad()
def trained(path: Path) -> Policy:
    """All of its layers are far from those that the engine had before."""
    policy = policy_of(path)
    torch.manual_seed(1)
    for layer in layers(policy.model).values():
        layer.weight.add_(2 * layer.weight.std() * torch.randn_like(layer.weight))
    return policy


def one_is_stale(sent: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sent if name.endswith("layers.1.mlp.down_proj.weight"))
    sent[name] = old[name]


def two_are_swapped(sent: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    first, second = (
        next(name for name in sent if name.endswith(f"layers.{i}.self_attn.q_proj.weight")) for i in (0, 1)
    )
    sent[first], sent[second] = sent[second], sent[first]


@pytest.mark.parametrize("spoil", [one_is_stale, two_are_swapped])
def test_a_wrong_layer_is_found(tiny_vlm: Path, spoil: Any) -> None:
    """The same engine with the right layers passes."""
    policy, old = trained(tiny_vlm), sent_by(policy_of(tiny_vlm))
    learner, sent = scores(policy), sent_by(policy)
    gap(learner, engine(tiny_vlm, sent, inputs=True))
    spoil(sent, old)
    with pytest.raises(CanaryError, match="mean gap") as caught:
        gap(learner, engine(tiny_vlm, sent, inputs=True))
    assert "vllm.quantization" in caught.value.remedy  # both sides have it on purpose
    assert "without quantization" not in caught.value.remedy
