"""R47: a group's prompt once in a row. Losses and gradients are those of the segments alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import LoraConfig
from learner.policy.attention import SegmentLayout, segment_attention
from learner.policy.load import Policy
from learner.policy.packed import pack_inputs
from learner.records import PackedRow, PolicyTokens, Segment
from learner.steps.buffered import copy_row
from tests.tiers import slow
from tests.unit.learner.policy.rows import CPU, gradients, image, policy_of, sample, segment

SIZES = [(64, 64), (128, 128), (96, 160)]
drawn_groups = st.lists(  # each group: the sizes of its images, and the length of each answer
    st.tuples(st.lists(st.sampled_from(SIZES), max_size=2), st.lists(st.integers(1, 30), min_size=1, max_size=4)),
    min_size=1,
    max_size=3,
)
some_examples = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def group(policy: Policy, sizes: Sequence[tuple[int, int]], lengths: Sequence[int], name: str) -> list[Segment]:
    """Answers to one sample, the tokens of every second one reinforced."""
    number = sum(map(ord, name))
    prompt = policy.encoder.encode(sample([image(*size, seed=number + j) for j, size in enumerate(sizes)]))
    answers = [replace(segment(prompt, length, number + i), sample_id=name) for i, length in enumerate(lengths)]
    return [reinforced(one, i) if i % 2 else one for i, one in enumerate(answers)]


def reinforced(one: Segment, seed: int) -> Segment:
    rng = np.random.default_rng(seed)
    known = np.full(len(one), np.nan, np.float32)
    advantages = rng.normal(size=len(one)).astype(np.float32)
    return replace(one, policy=PolicyTokens(advantages=advantages, rollout_logprobs=known, first_logprobs=known.copy()))


def backward(policy: Policy, segments: Sequence[Segment], *, shared: bool) -> tuple[float, dict[str, torch.Tensor]]:
    policy.model.zero_grad()
    fresh = [
        one if one.policy is None else replace(one, policy=replace(one.policy, first_logprobs=nothing_known(one)))
        for one in segments
    ]
    result = policy.backward(PackedRow(segments=tuple(fresh), capacity=4096, share_prompts=shared))
    return result.loss_sum, gradients(policy)


def nothing_known(one: Segment) -> np.ndarray:
    return np.full(len(one), np.nan, np.float32)


def check_equal(policy: Policy, segments: Sequence[Segment], tolerance: float = 1e-6) -> None:
    expected_loss, expected = backward(policy, segments, shared=False)
    found_loss, found = backward(policy, segments, shared=True)
    scale = sum(float(np.abs(one.loss_weights).sum()) for one in segments) * 10  # nats: losses of both signs cancel
    assert abs(found_loss - expected_loss) <= tolerance * scale
    assert found.keys() == expected.keys()
    total = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= tolerance * (grad.norm() + 0.1 * total), name


@pytest.fixture(scope="module")
def vlm(tiny_vlm: Path) -> Policy:
    return policy_of(tiny_vlm, grpo=GrpoConfig())


@given(drawn=drawn_groups)
@some_examples
def test_loss_and_gradients_are_those_of_whole_segments(
    vlm: Policy, drawn: list[tuple[list[tuple[int, int]], list[int]]]
) -> None:
    segments = [one for i, (sizes, lengths) in enumerate(drawn) for one in group(vlm, sizes, lengths, f"sample {i}")]
    check_equal(vlm, segments)


@pytest.mark.parametrize("checkpointing", [slow(False), True])
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, alpha=8)])
def test_the_same_with_adapters_and_checkpointing(tiny_vlm: Path, lora: LoraConfig | None, checkpointing: bool) -> None:
    policy = policy_of(tiny_vlm, lora=lora, grpo=GrpoConfig(), gradient_checkpointing=checkpointing)
    with torch.no_grad():
        for name, parameter in policy.trainable:
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    check_equal(policy, group(policy, [(128, 128)], [20, 1, 7], "a") + group(policy, [], [5, 9], "b"))


def test_a_row_that_is_learned_again(tiny_vlm: Path) -> None:
    """Later updates of a rollout buffer learn copies of a row, and compare with the first pass's probabilities."""
    found: list[tuple[float, dict[str, torch.Tensor], PackedRow]] = []
    for shared in (False, True):
        policy = policy_of(tiny_vlm, grpo=GrpoConfig())
        segments = group(policy, [(64, 64)], [20, 9, 7], "a") + group(policy, [], [5, 9], "b")
        kept = PackedRow(segments=tuple(segments), capacity=4096, share_prompts=shared)
        policy.backward(copy_row(kept))
        with torch.no_grad():
            torch.manual_seed(7)
            for _, parameter in policy.trainable:
                parameter += 0.02 * torch.randn_like(parameter)
        policy.model.zero_grad()
        result = policy.backward(copy_row(kept))
        found.append((result.loss_sum, gradients(policy), kept))
    (loss, grads, alone), (shared_loss, shared_grads, together) = found
    assert copy_row(together).num_tokens == together.num_tokens < alone.num_tokens
    for one, other in zip(alone.segments, together.segments, strict=True):
        if one.policy is not None and other.policy is not None:
            supervised = one.labels != -100
            first = other.policy.first_logprobs[supervised]
            np.testing.assert_allclose(first, one.policy.first_logprobs[supervised], atol=1e-4)
            assert np.isfinite(first).all()
    assert shared_loss == pytest.approx(loss, rel=1e-5)
    total = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for name, grad in grads.items():
        assert (shared_grads[name] - grad).norm() <= 1e-5 * (grad.norm() + 0.1 * total), name


def test_other_families(tiny_qwen2_5_vl: Path, tiny_text: Path) -> None:
    """Another vision tower with its own positions, and a model without one."""
    for path, sizes in ((tiny_qwen2_5_vl, [(64, 64), (96, 160)]), (tiny_text, [])):
        policy = policy_of(path, grpo=GrpoConfig())
        check_equal(policy, group(policy, sizes, [12, 30, 4], "a") + group(policy, [], [6], "b"))


def test_a_prompt_is_computed_once(vlm: Policy) -> None:
    """Tokens, patches, and the numbers that packing counts."""
    segments = group(vlm, [(128, 128)], [20, 10, 5], "a") + group(vlm, [(64, 64)], [3], "b")
    row = PackedRow(segments=tuple(segments), capacity=4096, share_prompts=True)
    inputs = pack_inputs(row, vlm.model, CPU)
    alone = [pack_inputs(PackedRow(segments=(one,), capacity=4096), vlm.model, CPU) for one in segments]
    assert row.num_tokens == inputs.input_ids.shape[1] == segments[0].prompt_length + 35 + len(segments[3])
    assert inputs.pixel_values is not None
    assert len(inputs.pixel_values) == sum(
        len(one.pixel_values) for one in (alone[0], alone[3]) if one.pixel_values is not None
    )
    assert inputs.layout.cu_keys[-1] == sum(map(len, segments)) + segments[0].prompt_length
    assert torch.equal(inputs.targets, torch.cat([one.targets for one in alone]))


def test_an_image_token_that_was_written_is_text(vlm: Policy) -> None:
    segments = group(vlm, [(64, 64)], [6, 9], "a")
    for one in segments:
        one.input_ids[one.prompt_length + 2] = vlm.model.config.image_token_id
    check_equal(vlm, segments)


def test_other_samples_and_other_prompts_are_not_shared(vlm: Policy) -> None:
    first, second = group(vlm, [(64, 64)], [4, 4], "a")
    other = replace(second, sample_id="b")
    longer = replace(second, prompt_length=second.prompt_length - 1)
    assert len({one.prompt_key for one in (first, second)}) == 1
    assert len({one.prompt_key for one in (first, other, longer)}) == 3


def test_answers_without_tokens_are_no_pieces(vlm: Policy) -> None:
    segments = group(vlm, [], [4, 5], "a")
    end = segments[0].prompt_length
    empty = replace(
        segments[0],
        input_ids=segments[0].input_ids[:end],
        labels=segments[0].labels[:end],
        loss_weights=segments[0].loss_weights[:end],
        policy=None,
    )
    check_equal(vlm, [segments[0], empty, segments[1]])


@given(
    drawn=st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=20, deadline=None)
def test_attention_sees_the_prompt_and_itself(drawn: list[tuple[int, list[int]]], dtype: torch.dtype) -> None:
    """The reference is one softmax per query over the tokens that it may see."""
    torch.manual_seed(0)
    lengths, prefixes, sees, at = [], [], [], 0
    for prompt, answers in drawn:
        start = at
        for length, prefix in [(prompt, range(0)), *((n, range(start, start + prompt)) for n in answers)]:
            lengths.append(length)
            prefixes.append(prefix)
            sees += [[*prefix, *range(at, at + i + 1)] for i in range(length)]
            at += length
    q, k, v = (torch.randn(1, heads, at, 8, dtype=dtype) for heads in (4, 2, 2))
    layout = SegmentLayout.shared(lengths, prefixes, CPU)
    found, _ = segment_attention(torch.nn.Identity(), q, k, v, None, segments=layout)
    for token, seen in enumerate(sees):
        for head in range(4):
            scores = q[0, head, token].double() @ k[0, head // 2, seen].double().T * 8**-0.5
            expected = scores.softmax(-1) @ v[0, head // 2, seen].double()
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(found[0, token, head].double(), expected, atol=tolerance, rtol=0)
