"""AdamW, schedule and clipping, against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config.sections.training import TrainingConfig
from learner.policy.optim import Optimizer, learning_rate
from shared.errors import CheckpointError, LossError


def config(**options: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"output_dir": "out", "lr_scheduler_type": "constant", **options})


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    rest=st.integers(1, 200),
    data=st.data(),
)
def test_the_rate_rises_to_its_peak_and_then_never_again(
    schedule: str, warmup: int, rest: int, data: st.DataObject
) -> None:
    def rate(step: int) -> float:
        return learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=warmup + rest)  # type: ignore[arg-type]

    assert rate(warmup) == 2.0
    step = data.draw(st.integers(0, warmup + rest - 1))
    assert 0 < rate(step) <= 2.0
    before, after = (rate(step), rate(step + 1))
    assert before < after if step < warmup else before >= after
    assert rate(warmup + rest) == pytest.approx(2.0 if schedule == "constant" else 0.0)


@pytest.mark.parametrize(("schedule", "wanted"), [("constant", 1.0), ("linear", 0.75), ("cosine", 0.5 + 0.5**1.5)])
def test_a_quarter_of_the_way(schedule: str, wanted: float) -> None:
    found = learning_rate(35, peak=1.0, schedule=schedule, warmup_steps=10, total_steps=110)  # type: ignore[arg-type]
    assert found == pytest.approx(wanted)


def test_update_is_adamw_with_decay_on_matrices_only() -> None:
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))
    settings = config(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = Optimizer([("m", matrix), ("v", vector)], settings, total_steps=10)
    expected = {p: p.detach().double().clone() for p in (matrix, vector)}
    moments = {p: [torch.zeros_like(v), torch.zeros_like(v)] for p, v in expected.items()}
    for step in range(3):
        grads = {p: torch.randn(p.shape) for p in expected}
        for p, value in expected.items():
            p.grad = grads[p].clone()
            first, second = moments[p]
            first.mul_(0.9).add_(0.1 * grads[p])
            second.mul_(0.95).add_(0.05 * grads[p] ** 2)
            value *= 1 - 0.1 * (0.5 if p is matrix else 0.0)
            value -= 0.1 * (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        rate, norm = optimizer.update(step)
        assert rate == 0.1
        assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads.values())), rel=1e-5)
        assert matrix.grad is None
    for p, value in expected.items():
        torch.testing.assert_close(p.detach().double(), value, atol=1e-5, rtol=1e-5)


def test_clipping_scales_the_whole_gradient() -> None:
    """Two first updates by AdamW differ by clipping only through epsilon, so compare the moments."""
    one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([("a", one), ("b", other)], config(max_grad_norm=1.0), total_steps=1)
    one.grad, other.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    _, norm = optimizer.update(0)
    assert norm == pytest.approx(5.0)
    moments = optimizer.state()
    torch.testing.assert_close(moments["a.exp_avg"], 0.1 * torch.tensor([0.6, 0.0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(moments["b.exp_avg"], 0.1 * torch.tensor([0.8]), rtol=1e-4, atol=0)


def test_a_gradient_that_is_not_finite_touches_no_weight() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer([("p", p)], config(), total_steps=1)
    p.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(LossError, match="step 7"):
        optimizer.update(7)
    assert torch.equal(p.detach(), torch.ones(2))


def test_state_of_other_parameters_is_refused() -> None:
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer([("p", p)], config(), total_steps=1)
    p.grad = torch.ones(2)
    optimizer.update(0)
    with pytest.raises(CheckpointError, match=r"model\.freeze"):
        Optimizer([("p", p), ("q", q)], config(), total_steps=1).load_state(optimizer.state())
