"""The canary is scored with the weights that travel (D14): merged, and rounded to the type that travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy
from learner.policy.weights import as_sent, checksum, replaced_modules
from learner.records import EncodedPrompt
from shared.sync.buckets import SEAL_BYTES, pack, spec_of
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, sample, segment
from tests.unit.learner.policy.test_weights import with_trained_adapter

pytestmark = pytest.mark.slow

Answers = list[tuple[EncodedPrompt, list[int]]]


def answers(policy: Policy) -> Answers:
    tokens = np.random.default_rng(0).integers(0, 1200, 20).tolist()
    return [(policy.encoder.encode(sample([image(64, 64)])), tokens), (policy.encoder.encode(sample()), tokens[:7])]


def reference(policy: Policy, path: Path, dtype: torch.dtype | None, tmp_path: Path) -> list[list[float]]:
    """Return what a model says that was loaded from the tensors that were sent, and nothing else."""
    sent = policy_of(path)
    state = {name: tensor.to(torch.float32).clone() for name, tensor in policy.named_weights(dtype)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sent.model.config.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa")
    sent.model.load_state_dict(loaded.state_dict())
    return sent.logprobs(answers(sent))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "lora", "dora"])
def test_scores_are_those_of_a_model_loaded_from_what_was_sent(
    tiny_vlm: Path, tmp_path: Path, kind: str | None, dtype: torch.dtype | None
) -> None:
    """The scores are equal to the bit: the same values, in the same computation."""
    policy = with_trained_adapter(tiny_vlm, kind) if kind else policy_of(tiny_vlm)
    expected = reference(policy, tiny_vlm, dtype, tmp_path)
    assert CanaryScorer(policy, answers(policy))(dtype, merged=True).logprobs == expected


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_scoring_leaves_the_policy_as_it_was(tiny_vlm: Path, kind: str) -> None:
    policy, untouched = with_trained_adapter(tiny_vlm, kind), with_trained_adapter(tiny_vlm, kind)
    with as_sent(policy.model, torch.bfloat16, merged=True), pytest.raises(RuntimeError):
        policy.model(input_ids=torch.zeros((1, 4, 7), dtype=torch.long))  # a forward pass that ends in an error
    CanaryScorer(policy, answers(policy))(torch.bfloat16, merged=True)
    one = row(segment(policy.encoder.encode(sample([image(64, 64)])), 12))
    assert policy.backward(one).loss_sum == untouched.backward(one).loss_sum
    for (name, here), (_, there) in zip(policy.trainable, untouched.trainable, strict=True):
        assert torch.equal(here, there), name
    for name, gradient in gradients(policy).items():
        assert torch.equal(gradient, gradients(untouched)[name]), name


def test_the_merge_gap_is_what_rounding_the_sum_changes(tiny_vlm: Path) -> None:
    """Nothing in float32, something in bfloat16, and nothing where nothing is merged or rounded."""
    policy = with_trained_adapter(tiny_vlm, "lora")
    scorer = CanaryScorer(policy, answers(policy))
    exact, rounded = scorer(torch.float32, merged=True), scorer(torch.bfloat16, merged=True)
    assert exact.merge_gap < 1e-4 < rounded.merge_gap
    trained = np.concatenate(policy.logprobs(answers(policy)))
    gap = np.abs(np.concatenate(rounded.logprobs) - trained).mean()
    assert rounded.merge_gap == pytest.approx(gap, rel=1e-6)

    plain = CanaryScorer(policy_of(tiny_vlm), answers(policy))
    assert plain(torch.float32, merged=True).merge_gap == 0.0
    assert scorer(torch.float32, merged=False).merge_gap == 0.0


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"bf16": True, "dtype": "bfloat16"}])
@pytest.mark.parametrize("kind", [None, "lora"])
def test_checksums_of_scored_weights_are_those_of_sent_ones(
    tiny_vlm: Path, kind: str | None, options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Every tensor that is sent has one, computed on another way, and a change of one value changes it. Autocast does
    not reach into merging."""
    policy = with_trained_adapter(tiny_vlm, kind, **options) if kind else policy_of(tiny_vlm, **options)
    found = CanaryScorer(policy, answers(policy))(dtype, merged=True).checksums
    sent = dict(policy.named_weights(dtype))
    assert found.keys() >= sent.keys()  # a tied head is sent once
    assert all(int(found[name]) == int(checksum(tensor)) for name, tensor in sent.items())
    name = next(name for name, tensor in sent.items() if tensor.dim() == 2)
    changed = sent[name].clone()
    changed[1, 1] *= 1.02
    assert int(checksum(changed)) != int(found[name])


def test_scores_without_checksums_are_the_same(tiny_vlm: Path) -> None:
    """A colocated engine takes the tensors themselves, so nobody reads checksums."""
    policy = with_trained_adapter(tiny_vlm, "lora")
    expected = CanaryScorer(policy, answers(policy))(torch.bfloat16, merged=True)
    found = CanaryScorer(policy, answers(policy), checksums=False)(torch.bfloat16, merged=True)
    assert (found.logprobs, found.merge_gap) == (expected.logprobs, expected.merge_gap)
    assert expected.checksums
    assert not found.checksums


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_parts_of_a_merged_layer_are_not_replaced(tiny_vlm: Path, kind: str) -> None:
    """A pass does not call them, and to replace each takes time."""
    policy = with_trained_adapter(tiny_vlm, kind)
    names = [name for name, _ in replaced_modules(policy.model, torch.bfloat16, merged=True)]
    assert names
    assert not [name for name in names if "lora_" in name or name.endswith("base_layer")]


def test_a_buckets_checksum_is_the_sum_of_its_tensors() -> None:
    """This holds for any size and layout: zeros fill the gaps between tensors."""
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7, 2).t(), "c": torch.randn(()), "d": torch.ones(1)}
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    bucket = pack(specs, tensors, "cpu")[:-SEAL_BYTES]
    assert int(checksum(bucket)) == int(torch.stack([checksum(tensor) for tensor in tensors.values()]).sum())
