"""The packed forward on CUDA: one varlen kernel per layer, the same numbers as a segment alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.demo.model import build
from learner.config.schema import ModelConfig
from learner.policy import attention
from learner.policy.attention import SegmentLayout, segment_attention
from learner.policy.load import Policy, load_policy
from learner.records import Segment
from tests.unit.learner.policy.rows import gradients, image, row, sample, segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTHS = [7, 130, 1, 64, 300]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "demo"
    build(path, "demo", seed=0)
    return path


def policy_on(path: Path, device: str, *, bf16: bool) -> Policy:
    return load_policy(ModelConfig(path=str(path)), device=torch.device(device), bf16=bf16)


def segments_of(policy: Policy) -> list[Segment]:
    pictures = [[(128, 128)], [], [(64, 96), (256, 128)], [(128, 128)]]
    prompts = [policy.encoder.encode(sample([image(*size, seed=i) for size in p])) for i, p in enumerate(pictures)]
    return [segment(prompt, 20 + 30 * i, seed=i) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attention_is_sdpa_per_segment(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(LENGTHS), 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    layout = SegmentLayout.of(LENGTHS, q.device)
    vision = {"cu_seq_lens_q": layout.cu_seqlens, "max_length_q": max(LENGTHS), "is_causal": False}
    found, _ = segment_attention(torch.nn.Identity(), q, k, v, None, **({"segments": layout} if causal else vision))  # type: ignore[arg-type]
    wanted = torch.randn_like(found)
    found_grads = torch.autograd.grad(found, (q, k, v), wanted)
    expected = attention._batched(q.float(), k.float(), v.float(), layout, 64**-0.5, causal)
    expected_grads = torch.autograd.grad(expected, (q, k, v), wanted.float())
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=0)
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=6e-2, rtol=2e-2)


def test_cuda_and_cpu_agree_in_float32(path: Path) -> None:
    cpu, cuda = policy_on(path, "cpu", bf16=False), policy_on(path, "cuda", bf16=False)
    rows = row(*segments_of(cpu))
    assert cuda.backward(rows).loss_sum == pytest.approx(cpu.backward(rows).loss_sum, rel=1e-4)
    expected, found = gradients(cpu), gradients(cuda)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name].cpu() - grad).norm() <= 5e-3 * grad.norm() + 1e-4, name


def test_a_packed_bf16_row_is_near_float32(path: Path) -> None:
    """Through the varlen kernel, vision tower included; an empty row adds nothing."""
    exact, packed = policy_on(path, "cuda", bf16=False), policy_on(path, "cuda", bf16=True)
    segments = segments_of(exact)
    total = sum(exact.backward(row(one)).loss_sum for one in segments)
    assert packed.backward(row(*segments)).loss_sum == pytest.approx(total, rel=5e-3)
    assert packed.backward(row()).loss_sum == 0.0
    expected, found = gradients(exact), gradients(packed)
    flat = [torch.cat([grads[name].flatten() for name in expected]) for grads in (expected, found)]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.995
