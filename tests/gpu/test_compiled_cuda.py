"""Compiled learning on CUDA: the numbers of eager code, one program for rows of all lengths, few logits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from learner.config.sections.model import ModelConfig
from learner.policy.canary_scores import RepeatedLogprobs
from learner.policy.load import Policy, load_policy
from learner.policy.loss import weighted_loss
from learner.records import PackedRow
from tests.unit.learner.policy.rows import gradients, image, row, sample, segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's own, while it traces
]
CUDA = torch.device("cuda")
SCENES: list[list[tuple[int, int]]] = [[(128, 128)], [], [(64, 96), (256, 128)]]
ROWS = [(20, 50, 80), (400, 3), (7, 7, 7, 90, 250), (1200,), (64, 64, 64)]  # tokens of answers
VOCABULARY, HIDDEN, POSITIONS = 151_936, 512, 16_384


@pytest.fixture(autouse=True)
def _no_programs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def policy_on_cuda(path: Path, *, compile: bool, gradient_checkpointing: bool = False) -> Policy:
    config = ModelConfig(
        path=str(path), dtype="bfloat16", compile=compile, gradient_checkpointing=gradient_checkpointing
    )
    return load_policy(config, device=CUDA, bf16=True)


def row_of(policy: Policy, answers: Sequence[int]) -> PackedRow:
    scenes = [SCENES[i % len(SCENES)] for i in range(len(answers))]
    prompts = [policy.encoder.encode(sample([image(*size, seed=i) for size in s])) for i, s in enumerate(scenes)]
    return row(*(segment(prompt, n, seed=n) for prompt, n in zip(prompts, answers, strict=True)))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_compiled_is_eager_within_bfloat16(model: Path, gradient_checkpointing: bool) -> None:
    eager = policy_on_cuda(model, compile=False)
    policy = policy_on_cuda(model, compile=True, gradient_checkpointing=gradient_checkpointing)
    for answers in ROWS[:3]:
        learned = row_of(eager, answers)
        assert policy.backward(learned).loss_sum == pytest.approx(eager.backward(learned).loss_sum, rel=5e-3)
    expected, found = gradients(eager), gradients(policy)
    assert found.keys() == expected.keys()
    flat = [torch.cat([grads[name].float().flatten() for name in expected]) for grads in (expected, found)]
    assert torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0) > 0.99
    assert flat[1].norm().item() == pytest.approx(flat[0].norm().item(), rel=2e-2)


def test_rows_of_all_lengths_share_a_program(model: Path) -> None:
    """Every layer and row, the empty row and rows without images included."""
    policy = policy_on_cuda(model, compile=True)
    for answers in ROWS[:2]:
        policy.backward(row_of(policy, answers))
    before = counters["stats"]["unique_graphs"]
    assert 0 < before <= 6
    for answers in [*ROWS[2:], ()]:
        policy.backward(row_of(policy, answers))
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def test_the_canary_of_a_compiled_policy(model: Path) -> None:
    """Scoring is eager, so its CUDA graph is captured with nothing to compile, and the same as without a graph."""
    policy = policy_on_cuda(model, compile=True)
    policy.backward(row_of(policy, ROWS[0]))
    answers = [(policy.encoder.encode(sample()), list(range(20, 40)))]
    repeated = RepeatedLogprobs(policy, answers)
    assert repeated()[0] == pytest.approx(policy.logprobs(answers)[0], abs=1e-3)


@pytest.mark.parametrize(("compiled", "limit_gib"), [(False, 4.0), (True, 2.0)])
def test_the_loss_needs_little_memory(compiled: bool, limit_gib: float) -> None:
    """All logits would be 9.3 GiB in float32, their gradient as much again. Chunks of 1,024 tokens: 0.6 GiB for each
    copy in float32, half of it in bfloat16; four of them at a time and the head's gradients must do, compiled two."""
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=CUDA, dtype=torch.bfloat16)
    hidden = torch.randn(POSITIONS, HIDDEN, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,), device=CUDA)
    at, weights = torch.arange(POSITIONS, device=CUDA), torch.ones(POSITIONS, device=CUDA)

    def learn() -> float:
        loss = weighted_loss(hidden, head, at, targets, weights, compiled=compiled)
        loss.backward()
        return loss.item()

    learn()  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = learn()
    assert (torch.cuda.max_memory_allocated() - before) / 2**30 < limit_gib
    with torch.no_grad():
        parts = zip(hidden.split(1024), targets.split(1024), strict=True)
        exact = sum(torch.nn.functional.cross_entropy(head(h).float(), t, reduction="sum").item() for h, t in parts)
    assert found == pytest.approx(exact, rel=1e-3)
