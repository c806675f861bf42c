"""The packed forward on CUDA: one varlen kernel per layer, the same numbers as a segment alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.config.sections.model import ModelConfig
from learner.policy.attention import SegmentLayout, segment_attention
from learner.policy.load import Policy, load_policy
from learner.records import Segment
from tests.unit.learner.policy.rows import gradients, image, row, sample, segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTHS = [7, 130, 1, 64, 300]


def policy_on(path: Path, device: str, *, bf16: bool) -> Policy:
    return load_policy(ModelConfig(path=str(path)), device=torch.device(device), bf16=bf16)


def segments_of(policy: Policy) -> list[Segment]:
    pictures = [[(128, 128)], [], [(64, 96), (256, 128)], [(128, 128)]]
    prompts = [policy.encoder.encode(sample([image(*size, seed=i) for size in p])) for i, p in enumerate(pictures)]
    return [segment(prompt, 20 + 30 * i, seed=i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("how", ["causal", "vision", "shared"])
def test_varlen_attention_is_sdpa_per_segment(how: str) -> None:
    """Shared: the fourth and the fifth piece attend to the second one too (R47)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(LENGTHS), 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    layout = SegmentLayout.of(LENGTHS, q.device)
    if how == "shared":
        prompt = range(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
        layout = SegmentLayout.shared(LENGTHS, [range(0)] * 3 + [prompt] * 2, q.device)
    vision = {"cu_seq_lens_q": layout.cu_seqlens, "max_length_q": max(LENGTHS), "is_causal": False}
    where = vision if how == "vision" else {"segments": layout}
    found, _ = segment_attention(torch.nn.Identity(), q, k, v, None, **where)  # type: ignore[arg-type]
    wanted = torch.randn_like(found)
    found_grads = torch.autograd.grad(found, (q, k, v), wanted)
    exact = [x.float().detach().requires_grad_() for x in (q, k, v)]
    expected, _ = segment_attention(torch.nn.Identity(), *exact, None, **where)  # type: ignore[arg-type]
    expected_grads = torch.autograd.grad(expected, exact, wanted.float())
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=0)
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=6e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo hides it, once shown
@pytest.mark.parametrize("compiled", [False, True])
def test_a_shared_prompt_changes_nothing_but_rounding(model: Path, compiled: bool) -> None:
    """R47, in bf16, through the varlen kernel: as near to float32 as a row of whole segments is."""
    exact = policy_on(model, "cuda", bf16=False)
    settings = ModelConfig(path=str(model), compile=compiled, gradient_checkpointing=True)
    rounded = load_policy(settings, device=torch.device("cuda"), bf16=True)
    prompt = exact.encoder.encode(sample([image(128, 128, seed=0)]))
    answers = [replace(segment(prompt, 30 + 50 * i, seed=i), sample_id="s") for i in range(4)]
    whole = row(*answers)
    flat, losses = [], []
    for policy, one in ((exact, whole), (rounded, whole), (rounded, replace(whole, share_prompts=True))):
        policy.model.zero_grad()
        losses.append(policy.backward(one).loss_sum)
        flat.append(torch.cat([grad.flatten() for grad in gradients(policy).values()]))
    assert losses[2] == pytest.approx(losses[1], rel=5e-3)
    apart = [float((one - flat[0]).norm() / flat[0].norm()) for one in flat[1:]]
    assert apart[1] < 1.2 * apart[0]


def test_cuda_and_cpu_agree_in_float32(model: Path) -> None:
    cpu, cuda = policy_on(model, "cpu", bf16=False), policy_on(model, "cuda", bf16=False)
    rows = row(*segments_of(cpu))
    assert cuda.backward(rows).loss_sum == pytest.approx(cpu.backward(rows).loss_sum, rel=1e-4)
    expected, found = gradients(cpu), gradients(cuda)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name].cpu() - grad).norm() <= 5e-3 * grad.norm() + 1e-4, name


def test_a_packed_bf16_row_is_near_float32(model: Path) -> None:
    """The row goes through the varlen kernel, vision tower included. An empty row adds nothing."""
    exact, packed = policy_on(model, "cuda", bf16=False), policy_on(model, "cuda", bf16=True)
    segments = segments_of(exact)
    total = sum(exact.backward(row(one)).loss_sum for one in segments)
    assert packed.backward(row(*segments)).loss_sum == pytest.approx(total, rel=5e-3)
    assert packed.backward(row()).loss_sum == 0.0
    expected, found = gradients(exact), gradients(packed)
    flat = [torch.cat([grads[name].flatten() for name in expected]) for grads in (expected, found)]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.995
