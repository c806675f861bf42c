"""Tests of what may be supervised, and of the weighted sum."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.config.sections.model import ModelConfig
from learner.policy import loss
from learner.policy.load import load_policy
from learner.policy.loss import SmoothCoordinates, check_finite, token_logprobs, weighted_loss
from learner.records import PackedRow, Segment
from learner.tasks.detection.task import coordinate_token_ids
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


# ---- neighbouring coordinates --------------------------------------------------------------------------------------

COORDINATES = [7, 3, 40, 12, 11, 30, 31, 2, 49, 20]  # tokens of ten bins, in no order


def slowly_smoothed(logits: torch.Tensor, targets: list[int], sigma: float) -> list[float]:
    """Compute the weighted log-probabilities one target after the other, one bin after the other."""
    found = []
    for row, target in zip(logits.double().tolist(), targets, strict=True):
        total = math.log(math.fsum(math.exp(value) for value in row))
        if target not in COORDINATES:
            found.append(row[target] - total)
            continue
        right = COORDINATES.index(target)
        shares = [math.exp(-((bin_ - right) ** 2) / (2 * sigma**2)) for bin_ in range(len(COORDINATES))]
        found.append(
            sum(share / sum(shares) * (row[token] - total) for share, token in zip(shares, COORDINATES, strict=True))
        )
    return found


@pytest.mark.parametrize("sigma", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("chunk", [1024, 5])
def test_a_coordinate_teaches_its_neighbours(sigma: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient are the slow reference's; other tokens, and larger ids than any coordinate's, stay exact."""
    torch.manual_seed(0)
    monkeypatch.setattr(loss, "LOGITS_CHUNK", chunk)
    head, hidden = torch.nn.Linear(8, 60), torch.randn(23, 8, requires_grad=True)
    targets, weights = torch.randint(0, 60, (23,)), torch.rand(23)
    targets[:9], targets[9] = torch.tensor(COORDINATES[:9]), 59
    smoothing = SmoothCoordinates(COORDINATES, sigma)
    total = weighted_loss(hidden, head, torch.arange(23), targets, weights, smoothing=smoothing)
    expected = slowly_smoothed(head(hidden.detach()), targets.tolist(), sigma)
    assert total.item() == pytest.approx(-sum(w * x for w, x in zip(weights.tolist(), expected, strict=True)), rel=1e-5)
    total.backward()
    logits = head(hidden.detach()).double().requires_grad_()
    shares = torch.zeros(23, 60, dtype=torch.float64)  # the gradient of a logit: its probability minus its share
    for i, target in enumerate(targets.tolist()):
        shares[i, target] = 1.0
        if target in COORDINATES:
            bins = torch.arange(10, dtype=torch.float64)
            shares[i, COORDINATES] = torch.softmax(-((bins - COORDINATES.index(target)) ** 2) / (2 * sigma**2), 0)
    slopes = (logits.softmax(-1) - shares) * weights[:, None].double()
    torch.testing.assert_close(hidden.grad, (slopes @ head.weight.double()).float(), atol=1e-5, rtol=1e-4)


def test_a_narrow_gaussian_is_the_bin_alone() -> None:
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(8, 60), torch.randn(10, 8), torch.tensor(COORDINATES)
    plain, smooth = (
        weighted_loss(hidden, head, torch.arange(10), targets, torch.ones(10), smoothing=one)
        for one in (None, SmoothCoordinates(COORDINATES, 0.05))
    )
    torch.testing.assert_close(plain, smooth)


def test_a_policy_learns_smooth_coordinates(tiny_text: Path) -> None:
    """The tokens are the tokenizer's own, and transformers' model computes the logits."""
    policy = load_policy(ModelConfig(path=str(tiny_text)), device=CPU, coordinate_smoothing=2.0)
    plain = load_policy(ModelConfig(path=str(tiny_text)), device=CPU)
    ids = coordinate_token_ids(policy.tokenizer)
    answer = np.array([5, ids[500], ids[0], ids[999]])
    one = Segment(
        sample_id="s",
        input_ids=answer,
        labels=np.array([-100, *answer[1:]]),
        loss_weights=np.array([0, 1, 1, 1], np.float32),
        prompt_length=1,
    )
    found = [each.backward(PackedRow(segments=(one,), capacity=64)).loss_sum for each in (policy, plain)]
    assert found[0] != found[1]
    whole = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float32)(torch.tensor(answer)[None])
    logprobs = whole.logits[0, :3].double().log_softmax(-1)[:, ids]
    distances = torch.arange(1000, dtype=torch.float64) - torch.tensor([[500.0], [0.0], [999.0]])
    expected = -(torch.softmax(-(distances**2) / 8, dim=1) * logprobs).sum()
    assert found[0] == pytest.approx(expected.item(), rel=1e-5)
