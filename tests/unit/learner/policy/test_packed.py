"""A packed row computes what its segments compute alone, by transformers' own forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from learner.policy.load import Policy
from learner.policy.loss import weighted_loss
from learner.policy.packed import hidden_states, pack_inputs
from learner.records import Segment
from tests.unit.learner.policy.rows import CPU, gradients, image, policy_of, row, sample, segment

SIZES = [(64, 64), (128, 128), (96, 160), (256, 64)]
shapes = st.lists(st.tuples(st.lists(st.sampled_from(SIZES), max_size=3), st.integers(1, 60)), min_size=1, max_size=5)
some_examples = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def vlm(tiny_vlm: Path) -> Policy:
    return policy_of(tiny_vlm)


@pytest.fixture(scope="module")
def reference(tiny_vlm: Path) -> PreTrainedModel:
    """Return transformers as it comes: eager attention, one segment at a time."""
    return AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32, attn_implementation="eager")


def make(policy: Policy, drawn: Sequence[tuple[list[tuple[int, int]], int]]) -> list[Segment]:
    return [
        segment(policy.encoder.encode(sample([image(*s, seed=10 * i + j) for j, s in enumerate(sizes)])), length, i)
        for i, (sizes, length) in enumerate(drawn)
    ]


def reference_logits(model: PreTrainedModel, one: Segment) -> torch.Tensor:
    ids = torch.from_numpy(one.input_ids)[None]
    inputs = {"input_ids": ids}
    if one.vision is not None:
        inputs |= {
            "pixel_values": one.vision.pixel_values,
            "image_grid_thw": one.vision.image_grid_thw,
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    return model(**inputs).logits[0]


def packed_logits(policy: Policy, segments: Sequence[Segment]) -> torch.Tensor:
    hidden = hidden_states(policy.model, pack_inputs(row(*segments), policy.model, CPU))
    return policy.model.get_output_embeddings()(hidden)


@given(drawn=shapes)
@some_examples
def test_logits_of_a_packed_row_equal_the_segments_own(
    vlm: Policy, reference: PreTrainedModel, drawn: list[tuple[list[tuple[int, int]], int]]
) -> None:
    """Qwen3-VL: any lengths, any number and size of images, with and without images."""
    segments = make(vlm, drawn)
    with torch.no_grad():
        expected = torch.cat([reference_logits(reference, s) for s in segments])
        torch.testing.assert_close(packed_logits(vlm, segments), expected, atol=1e-4, rtol=0)


def test_logits_of_a_packed_row_of_another_family(tiny_qwen2_5_vl: Path) -> None:
    """Qwen2.5-VL: a vision tower with windows, its own rotary positions, biases."""
    policy = policy_of(tiny_qwen2_5_vl)
    alone = AutoModelForImageTextToText.from_pretrained(tiny_qwen2_5_vl, attn_implementation="eager")
    segments = make(policy, [([(128, 128)], 20), ([], 10), ([(64, 64), (96, 160)], 7), ([(256, 64)], 5)])
    with torch.no_grad():
        expected = torch.cat([reference_logits(alone, s) for s in segments])
        torch.testing.assert_close(packed_logits(policy, segments), expected, atol=1e-4, rtol=0)


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6))
@some_examples
def test_logits_of_a_packed_text_row_equal_the_segments_own(tiny_text: Path, lengths: list[int]) -> None:
    policy = policy_of(tiny_text)
    alone = AutoModelForCausalLM.from_pretrained(tiny_text, attn_implementation="eager")
    prompt = policy.encoder.encode(sample())
    segments = [segment(prompt, length, i) for i, length in enumerate(lengths)]
    with torch.no_grad():
        expected = torch.cat([reference_logits(alone, s) for s in segments])
        torch.testing.assert_close(packed_logits(policy, segments), expected, atol=1e-4, rtol=0)


def reference_loss(model: PreTrainedModel, one: Segment) -> torch.Tensor:
    """Compute the loss token by token, from full logits."""
    logprobs = reference_logits(model, one).log_softmax(-1)
    terms = [
        -float(one.loss_weights[i]) * logprobs[i - 1, one.labels[i]] for i in range(len(one)) if one.labels[i] != -100
    ]
    return torch.stack(terms).sum()


def test_gradients_of_a_packed_row_equal_the_segments_own(vlm: Policy, reference: PreTrainedModel) -> None:
    segments = make(vlm, [([(128, 128)], 40), ([], 25), ([(64, 64), (96, 160)], 3)])
    reference.zero_grad()
    total = torch.stack([reference_loss(reference, s) for s in segments]).sum()
    total.backward()
    vlm.model.zero_grad()
    result = vlm.backward(row(*segments))

    assert result.loss_sum == pytest.approx(total.item(), rel=1e-5)
    assert result.weight_sum == pytest.approx(sum(s.loss_weights.sum() for s in segments), rel=1e-6)
    assert result.num_supervised == sum((s.labels != -100).sum() for s in segments)
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = gradients(vlm)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=2e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_gradient_checkpointing_changes_nothing(tiny_vlm: Path, vlm: Policy) -> None:
    segments = make(vlm, [([(64, 64)], 20), ([], 10)])
    vlm.model.zero_grad()
    vlm.backward(row(*segments))
    other = policy_of(tiny_vlm, gradient_checkpointing=True)
    other.backward(row(*segments))
    for name, grad in gradients(other).items():
        torch.testing.assert_close(grad, gradients(vlm)[name])


def test_an_empty_row_gives_zero_gradient(vlm: Policy) -> None:
    """D5: a zero-weight pass runs forward and backward and adds nothing."""
    vlm.model.zero_grad()
    result = vlm.backward(row())
    assert (result.loss_sum, result.weight_sum, result.num_supervised) == (0.0, 0.0, 0)
    found = gradients(vlm)
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in found
    assert all(not grad.any() for grad in found.values())


@pytest.mark.parametrize("family", ["tiny_vlm", "tiny_qwen2_5_vl"])
@pytest.mark.parametrize("num_segments", [0, 2])
def test_a_blank_image_reaches_every_weight_and_adds_nothing(
    family: str, num_segments: int, request: pytest.FixtureRequest
) -> None:
    """A sharded model learns on it, so that every rank's pass uses every layer."""
    policy = policy_of(request.getfixturevalue(family))
    policy.backward(row(*make(policy, [([(64, 64)], 5)])))
    used = gradients(policy).keys()
    policy.model.zero_grad()
    one = row(*make(policy, [([], 20), ([], 9)][:num_segments]))
    policy.backward(one)
    expected = gradients(policy)
    policy.model.zero_grad()
    inputs = pack_inputs(one, policy.model, CPU, always_image=True)
    hidden = hidden_states(policy.model, inputs)
    head = policy.model.get_output_embeddings()
    weighted_loss(hidden, head, inputs.predict_at, inputs.targets, inputs.weights).backward()
    found = gradients(policy)
    assert found.keys() == used
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected.get(name, torch.zeros_like(grad)), atol=1e-5, rtol=1e-3)


def test_an_image_token_in_the_answer_is_text(vlm: Policy) -> None:
    """A policy may write the image token; it takes no image's features, and other segments stay as they are."""
    one, two = make(vlm, [([(64, 64)], 12), ([(64, 64)], 9)])
    ids = one.input_ids.copy()
    ids[one.prompt_length + 3] = vlm.model.config.image_token_id
    odd = Segment(
        sample_id="odd",
        input_ids=ids,
        labels=one.labels,
        loss_weights=one.loss_weights,
        prompt_length=one.prompt_length,
        vision=one.vision,
    )
    at = len(one) - 12 + 3
    with torch.no_grad():
        plain, found = packed_logits(vlm, [one, two]), packed_logits(vlm, [odd, two])
        embedding = vlm.model.get_input_embeddings()
        saved = embedding.weight[one.input_ids[at]].clone()
        embedding.weight[one.input_ids[at]] = embedding.weight[ids[at]]  # the plain row, with that embedding there
        assert (one.input_ids == one.input_ids[at]).sum() == 1
        same = hidden_states(vlm.model, pack_inputs(row(one, two), vlm.model, CPU))
        embedding.weight[one.input_ids[at]] = saved
        expected = vlm.model.get_output_embeddings()(same)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.equal(found[at : len(one)], plain[at : len(one)])
    assert torch.equal(found[len(one) :], plain[len(one) :])


def test_bf16_is_autocast_near_float32(tiny_vlm: Path, vlm: Policy) -> None:
    segments = make(vlm, [([(128, 128)], 40), ([], 25)])
    exact, rough = vlm.backward(row(*segments)), policy_of(tiny_vlm, bf16=True).backward(row(*segments))
    assert rough.loss_sum == pytest.approx(exact.loss_sum, rel=5e-3)
    assert rough.loss_sum != exact.loss_sum


def test_logprobs_are_a_log_softmax_over_the_vocabulary(vlm: Policy, reference: PreTrainedModel) -> None:
    prompt = vlm.encoder.encode(sample([image(64, 64)]))
    answer = [5, 900, 17, 33]
    one = segment(prompt, 4)
    one.input_ids[-4:] = answer
    with torch.no_grad():
        logprobs = reference_logits(reference, one).double().log_softmax(-1)
    expected = [logprobs[len(prompt.token_ids) + j - 1, token].item() for j, token in enumerate(answer)]
    np.testing.assert_allclose(vlm.logprobs([(prompt, answer)])[0], expected, atol=1e-5)
