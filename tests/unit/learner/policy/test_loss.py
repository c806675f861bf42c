"""Tests of what may be supervised, and of the weighted sum."""

from __future__ import annotations

import pytest
import torch

from learner.policy import loss
from learner.policy.loss import check_finite, token_logprobs, weighted_loss
from shared.errors import LossError

CPU = torch.device("cpu")


def test_chunks_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(23, 8, requires_grad=True)
    targets, weights = torch.randint(0, 50, (23,)), torch.rand(23)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        hidden.grad = None
        total = weighted_loss(hidden, head, torch.arange(23), targets, weights)
        total.backward()
        assert hidden.grad is not None
        return total.detach(), hidden.grad.clone()

    whole = run()
    monkeypatch.setattr(loss, "LOGITS_CHUNK", 5)
    torch.testing.assert_close(run(), whole)
    expected = head(hidden.detach()).double().log_softmax(-1)[torch.arange(23), targets]
    torch.testing.assert_close(token_logprobs(hidden, head, targets).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises(value: float) -> None:
    with pytest.raises(LossError, match="s7"):
        check_finite(value, ["s7"])
    check_finite(3.0, ["s7"])


def test_nothing_supervised_is_a_zero_for_every_weight() -> None:
    """D5: all ranks reduce the same gradients, those of the head too."""
    head, hidden = torch.nn.Linear(8, 50), torch.randn(3, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    weighted_loss(hidden, head, none, none, torch.zeros(0)).backward()
    for tensor in (hidden, head.weight, head.bias):
        assert tensor.grad is not None
        assert not tensor.grad.any()
