"""The loss of a policy gradient and its gradient, against slow references (R37).

`policy_loss` is compared with a loop over tokens under autograd, and a packed row's gradient with transformers' own
forward on one segment at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText, PreTrainedModel

from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import LoraConfig
from learner.policy.load import Policy
from learner.policy.parallel import Ranks
from learner.policy.policy_gradient import PREFIX, SUMS, Bounds, PolicyInputs, policy_loss, policy_metrics
from learner.records import PackedRow, PolicyTokens, Segment
from learner.steps.buffered import copy_row
from tests.examples import examples
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, sample, segment

NAN = math.nan
BOUNDS, KL_WEIGHT = Bounds(), 0.1
CONFIG = GrpoConfig(kl_weight=KL_WEIGHT)


# ---- per token -----------------------------------------------------------------------------------------------------


def token_loss(now: torch.Tensor, weight: float, token: Sequence[float], reference: float | None) -> torch.Tensor:
    """Compute one token's loss by the module's formulas. `token`: advantage, rollout, first; NaN advantage: taught."""
    advantage, rollout, first = token
    if math.isnan(advantage):
        return -weight * now
    start = float(now.detach()) if math.isnan(first) else first
    importance = 1.0 if math.isnan(rollout) else min(math.exp(start - rollout), BOUNDS.cap)
    ratio = (now - start).exp()
    if advantage > 0 and float(ratio.detach()) > 1 + BOUNDS.high:
        surrogate = now * 0 + (1 + BOUNDS.high) * advantage
    elif advantage < 0 and float(ratio.detach()) < 1 - BOUNDS.low:
        surrogate = now * 0 + (1 - BOUNDS.low) * advantage
    else:
        surrogate = ratio * advantage
    loss = -importance * surrogate
    if reference is not None:
        loss = loss + KL_WEIGHT * ((reference - now).exp() - (reference - now) - 1)
    return weight * loss


def inputs_of(tokens: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> PolicyInputs:
    advantages, rollout, first = (torch.tensor(part, dtype=dtype) for part in zip(*tokens, strict=True))
    return PolicyInputs(
        is_policy=~advantages.isnan(), advantages=advantages, rollout_logprobs=rollout, first_logprobs=first
    )


def loss_of(
    now: Sequence[float], weights: Sequence[float], tokens: Sequence[Any], reference: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, its gradient with respect to `now`, the counts."""
    leaf = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss, sums = policy_loss(
        leaf,
        torch.tensor(weights, dtype=torch.float64),
        inputs_of(tokens),
        entropy=torch.full((len(now),), 0.5, dtype=torch.float64),
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        kl_weight=KL_WEIGHT,
        bounds=BOUNDS,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, dict(zip(SUMS, sums.tolist(), strict=True))


LOGPROBS = st.integers(-60, -1).map(lambda v: v / 20)
TOKENS = st.tuples(  # (now, weight, advantage, rollout, first, reference)
    LOGPROBS,
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([NAN, -1.5, -0.3, 0.0, 0.4, 2.0]),
    st.one_of(st.just(NAN), LOGPROBS),
    st.one_of(st.just(NAN), LOGPROBS),
    LOGPROBS,
)


@given(drawn=st.lists(TOKENS, min_size=1, max_size=6), has_reference=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_value_and_gradient_equal_a_loop_over_tokens(drawn: list[tuple[float, ...]], has_reference: bool) -> None:
    """Clipped and truncated tokens, taught ones between them, and log-probabilities that nobody knows."""
    now, weights, advantages, rollout, first, reference = zip(*drawn, strict=True)
    leaf = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    terms = [
        token_loss(leaf[i], weights[i], (advantages[i], rollout[i], first[i]), reference[i] if has_reference else None)
        for i in range(len(drawn))
    ]
    wanted = torch.stack(terms).sum()
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf, allow_unused=True)
    found, gradient, _ = loss_of(
        now, weights, list(zip(advantages, rollout, first, strict=True)), reference if has_reference else None
    )
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-9, atol=1e-12)


def test_the_first_update_is_the_plain_policy_gradient() -> None:
    """Ratio and importance are exactly 1: the gradient is -weight x A, and taught tokens keep theirs."""
    advantages, weights = [1.5, -0.7, 0.0, NAN], [1.0, 2.0, 1.0, 0.5]
    _, gradient, counts = loss_of([-1.3, -0.1, -2.0, -0.4], weights, [(a, NAN, NAN) for a in advantages])
    assert gradient.tolist() == [-1.5, 1.4, 0.0, -0.5]
    assert (counts["tokens"], counts["ratio"], counts["importance"]) == (3.0, 3.0, 3.0)
    assert counts["clipped"] == counts["truncated"] == counts["gap"] == counts["drawn_elsewhere"] == 0.0


@pytest.mark.parametrize(
    ("moved", "advantage", "is_clipped"),
    [(0.5, 1.0, True), (0.5, -1.0, False), (-0.5, -1.0, True), (-0.5, 1.0, False), (0.1, 1.0, False)],
)
def test_a_token_that_has_moved_far_enough_gains_no_more(moved: float, advantage: float, is_clipped: bool) -> None:
    _, gradient, counts = loss_of([-1.0], [1.0], [(advantage, NAN, -1.0 - moved)])
    assert counts["clipped"] == is_clipped
    assert (gradient.item() == 0.0) == is_clipped


def test_importance_is_truncated_and_both_are_counted() -> None:
    drawn = [(1.0, -2.0, NAN), (1.0, -1.1, NAN), (1.0, NAN, NAN)]
    _, gradient, counts = loss_of([-1.0] * 3, [1.0] * 3, drawn)
    assert gradient.tolist() == pytest.approx([-BOUNDS.cap, -math.exp(0.1), -1.0])
    assert (counts["truncated"], counts["drawn_elsewhere"]) == (1.0, 2.0)
    assert counts["gap"] == pytest.approx(1.1)
    assert counts["importance"] == pytest.approx(math.exp(1.0) + math.exp(0.1) + 1.0)


@given(now=LOGPROBS, reference=LOGPROBS)
@settings(deadline=None)
def test_k3_is_never_negative_and_pulls_towards_the_reference(now: float, reference: float) -> None:
    loss, gradient, counts = loss_of([now], [1.0], [(0.0, NAN, NAN)], [reference])
    assert counts["kl"] >= -1e-12
    assert loss.item() == pytest.approx(KL_WEIGHT * counts["kl"], rel=1e-6, abs=1e-9)
    assert gradient.item() == pytest.approx(KL_WEIGHT * (1 - math.exp(reference - now)), abs=1e-9)


def test_metrics_are_means_over_tokens_groups_and_tokens_drawn_elsewhere() -> None:
    sums = dict.fromkeys(SUMS, 6.0) | {"tokens": 12.0, "drawn_elsewhere": 3.0, "groups": 4.0, "no_signal": 1.0}
    found = policy_metrics({PREFIX + name: value for name, value in sums.items()})
    assert (found["grpo/entropy"], found["grpo/gap"], found["grpo/no_signal"]) == (0.5, 2.0, 0.25)
    assert policy_metrics({"matched": 3.0}) == {}


# ---- a packed row --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tiny_vlm: Path) -> Policy:
    return policy_of(tiny_vlm, grpo=CONFIG)


@pytest.fixture(scope="module")
def plain(tiny_vlm: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32, attn_implementation="eager")


def reinforced(one: Segment, seed: int, *, gap: float | None = None) -> Segment:
    """Return the segment with random advantages; `gap`: rollouts were drawn by log-probabilities that are this much
    lower at most."""
    rng = np.random.default_rng(seed)
    advantages = rng.normal(size=len(one)).astype(np.float32)
    empty = np.full(len(one), np.nan, np.float32)
    drawn = empty.copy() if gap is None else rng.uniform(-8, -6, len(one)).astype(np.float32)
    return replace(one, policy=PolicyTokens(advantages=advantages, rollout_logprobs=drawn, first_logprobs=empty.copy()))


def mixed(policy: Policy, *, gap: float | None = None) -> list[Segment]:
    """Return segments with two images, with none, with one; the second is taught."""
    sizes = [[(64, 64), (96, 160)], [], [(64, 64)], []]
    made = [
        segment(policy.encoder.encode(sample([image(*s, seed=i) for s in shape])), 9 + 6 * i, i)
        for i, shape in enumerate(sizes)
    ]
    return [one if i == 1 else reinforced(one, i, gap=gap) for i, one in enumerate(made)]


def plain_logprobs(model: PreTrainedModel, one: Segment) -> tuple[torch.Tensor, np.ndarray]:
    """Return the log-probabilities of the supervised tokens, and where they are."""
    ids, inputs = torch.from_numpy(one.input_ids)[None], {}
    if one.vision is not None:
        inputs = {
            "pixel_values": one.vision.pixel_values,
            "image_grid_thw": one.vision.image_grid_thw,
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    logprobs = model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
    at = np.flatnonzero(one.labels != -100)
    return logprobs[torch.from_numpy(at) - 1, torch.from_numpy(one.labels[at])], at


def plain_loss(
    model: PreTrainedModel, segments: Sequence[Segment], first: Sequence[np.ndarray] | None = None
) -> torch.Tensor:
    """Compute the loss one segment after the other, token by token. `first`: log-probabilities before the first
    update."""
    total = torch.zeros(())
    for number, one in enumerate(segments):
        logprobs, at = plain_logprobs(model, one)
        for i, place in enumerate(at):
            token = (NAN, NAN, NAN)
            if one.policy is not None:
                before = NAN if first is None else float(first[number][place])
                token = (float(one.policy.advantages[place]), float(one.policy.rollout_logprobs[place]), before)
            total = total + token_loss(logprobs[i], float(one.loss_weights[place]), token, None)
    return total


def assert_same_gradients(policy: Policy, model: PreTrainedModel, loss: torch.Tensor) -> None:
    model.zero_grad()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = gradients(policy)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=2e-4, rtol=1e-3, msg=f"{name}: {{}}".format)


NO_KL = CONFIG.model_copy(update={"kl_weight": 0.0})


@pytest.mark.parametrize("gap", [None, 2.0])
def test_the_gradient_of_a_packed_row_equals_that_of_its_segments_alone(
    tiny_vlm: Path, plain: PreTrainedModel, gap: float | None
) -> None:
    """On policy (`gap` None) it is -weight x A x grad log p; else each token has its truncated importance."""
    policy = policy_of(tiny_vlm, grpo=NO_KL)
    segments = mixed(policy, gap=gap)
    expected = plain_loss(plain, segments)
    result = policy.backward(row(*segments))
    assert result.loss_sum == pytest.approx(expected.item(), rel=1e-4)
    assert_same_gradients(policy, plain, expected)
    tokens = sum(int((s.labels != -100).sum()) for s in segments if s.policy is not None)
    assert result.counts["grpo/tokens"] == tokens
    assert result.counts["grpo/ratio"] == tokens
    if gap is None:
        assert result.counts["grpo/importance"] == tokens
        policy.model.zero_grad()
        by_weight = [torch.tensor(0.0)]
        for one in segments:
            logprobs, at = plain_logprobs(plain, one)
            advantages = np.ones(len(at), np.float32) if one.policy is None else one.policy.advantages[at]
            by_weight.append(-(torch.from_numpy(one.loss_weights[at] * advantages) * logprobs).sum())
        policy.backward(row(*segments))
        assert_same_gradients(policy, plain, torch.stack(by_weight).sum())
    else:
        assert 0 < result.counts["grpo/truncated"] <= tokens
        assert result.counts["grpo/gap"] > 0


def test_a_later_update_is_measured_from_the_first_pass(tiny_vlm: Path) -> None:
    """R18: the kept row is copied for each step. The first pass writes its log-probabilities, later ones read them."""
    policy = policy_of(tiny_vlm, grpo=NO_KL)
    kept = row(*mixed(policy, gap=1.0))
    policy.backward(copy_row(kept))
    first = [None if s.policy is None else s.policy.first_logprobs.copy() for s in kept.segments]
    again = policy.backward(copy_row(kept))
    assert again.counts["grpo/ratio"] == again.counts["grpo/tokens"]  # the weights have not moved
    torch.manual_seed(5)
    with torch.no_grad():
        for _, p in policy.trainable:
            p.add_(torch.randn_like(p) * 0.02)
    policy.model.zero_grad()
    second = policy.backward(copy_row(kept))
    for one, before in zip(kept.segments, first, strict=True):
        if one.policy is not None:
            np.testing.assert_array_equal(one.policy.first_logprobs, before)
            known = ~np.isnan(one.policy.first_logprobs)
            assert (known == (one.labels != -100)).all()
    moved = AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32, attn_implementation="eager")
    named = dict(moved.named_parameters())
    with torch.no_grad():
        for name, p in policy.trainable:
            named[name].copy_(p)
    expected = plain_loss(moved, kept.segments, [np.zeros(0) if f is None else f for f in first])
    assert second.counts["grpo/clipped"] > 0
    assert second.loss_sum == pytest.approx(expected.item(), rel=1e-3)
    assert_same_gradients(policy, moved, expected)


def test_the_reference_is_the_model_without_its_adapter(tiny_text: Path) -> None:
    """A fresh adapter changes nothing, so the divergence is 0; a trained one diverges, and is pulled back."""
    policy = policy_of(tiny_text, lora=LoraConfig(r=2), grpo=CONFIG)
    one = reinforced(segment(policy.encoder.encode(sample()), 12), 0)
    still = replace(one, policy=replace(one.policy, advantages=np.zeros(len(one), np.float32)))  # type: ignore[type-var]
    assert divergence(policy, still) == 0.0
    with torch.no_grad():
        for _, p in policy.trainable:
            p.add_(0.05 * torch.ones_like(p))
    before = divergence(policy, still)
    assert before > 0
    with torch.no_grad():
        for _, p in policy.trainable:
            assert p.grad is not None
            p.sub_(0.1 * p.grad)
    assert divergence(policy, still) < before


def test_the_reference_leaves_frozen_adapters_frozen(tiny_text: Path) -> None:
    """peft's `disable_adapter` makes every adapter trainable when it ends. Ranks then reduced unequal buckets."""
    policy = policy_of(tiny_text, lora=LoraConfig(r=2), grpo=CONFIG, freeze=["model.layers.0."])
    names = [name for name, _ in policy.trainable]
    assert names
    assert not any("layers.0." in name for name in names)
    policy.backward(row(reinforced(segment(policy.encoder.encode(sample()), 12), 0)))
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == names
    assert set(gradients(policy)) == set(names)
    policy.reduce_gradients(Ranks(), weight_sum=1.0)


def test_parameters_that_became_trainable_are_noticed(tiny_text: Path) -> None:
    policy = policy_of(tiny_text, lora=LoraConfig(r=2))
    next(p for p in policy.model.parameters() if not p.requires_grad).requires_grad_(True)
    with pytest.raises(AssertionError, match="trained"):
        policy.reduce_gradients(Ranks(), weight_sum=1.0)


def divergence(policy: Policy, one: Segment) -> float:
    policy.model.zero_grad()
    return policy.backward(PackedRow(segments=(one,), capacity=512)).counts["grpo/kl"]


def test_a_row_without_reinforced_segments_has_no_counts(policy: Policy) -> None:
    prompt = policy.encoder.encode(sample())
    assert policy.backward(row(segment(prompt, 5))).counts == {}
    assert policy.backward(row()).counts == {}
