"""What may be supervised, and the weighted sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.policy import loss
from learner.policy.loss import check_finite, check_supervision, token_logprobs, weighted_loss
from learner.records import Segment
from shared.errors import LossError


def segment_with(labels: list[int], weights: list[float], prompt_length: int = 2) -> Segment:
    return Segment(
        sample_id="s",
        input_ids=np.arange(len(labels)),
        labels=np.array(labels),
        loss_weights=np.array(weights, np.float32),
        prompt_length=prompt_length,
    )


def test_supervised_indices_are_those_with_label_and_weight() -> None:
    found = check_supervision(segment_with([-100, -100, 4, -100, 6, 7], [0, 0, 1, 0, 0, 0.5]))
    assert found.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        ([-100, 3, -100, -100], [0, 1, 0, 0]),  # a label in the prompt
        ([-100, -100, 3, -100], [0, 0.5, 1, 0]),  # a weight in the prompt
        ([-100, -100, 3, -100], [0, 0, 1, 1]),  # a weight without a label
        ([-100, -100, 3, 4], [0, 0, 1, -1]),  # a negative weight
        ([-100, -100, 3, 4], [0, 0, 1, float("nan")]),
    ],
)
def test_supervision_outside_the_assistant_span_raises(labels: list[int], weights: list[float]) -> None:
    """Every supervised index must lie in the assistant span; the trainer raises if one does not."""
    with pytest.raises(LossError, match="sample 's'"):
        check_supervision(segment_with(labels, weights))


def test_the_first_token_of_a_segment_can_not_be_supervised() -> None:
    """Nothing in its segment predicts it, even with an empty prompt."""
    with pytest.raises(LossError):
        check_supervision(segment_with([3, 4], [1, 1], prompt_length=0))


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
