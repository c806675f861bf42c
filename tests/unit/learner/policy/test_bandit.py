"""Rollouts drawn by older weights, on a problem whose answer is known: a bandit with a softmax policy (R37).

Each arm is a token, a rollout is one pull. The exact gradient of the expected reward is a formula, so the estimate of
`policy_loss` can be judged: with importance weights it is unbiased, without them it is not.
"""

from __future__ import annotations

import math

import torch

from learner.policy.policy_gradient import Bounds, PolicyInputs, policy_loss

REWARDS = torch.tensor([0.1, 0.5, 0.3, 1.0], dtype=torch.float64)
OLD = torch.tensor([1.0, 0.5, 0.0, -1.0], dtype=torch.float64)  # logits that rarely pull the best arm
NOW = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)
UNCAPPED = Bounds(cap=1e6)


def loss_of(
    logits: torch.Tensor, drawn_by: torch.Tensor, arms: torch.Tensor, bounds: Bounds, *, is_corrected: bool
) -> torch.Tensor:
    """Return the loss per pull. Rewards themselves are the advantages: no baseline that could hide a bias."""
    logprobs, old = logits.log_softmax(-1)[arms], drawn_by.log_softmax(-1)[arms]
    unknown = torch.full_like(old, math.nan)
    policy = PolicyInputs(
        is_policy=torch.ones(len(arms), dtype=torch.bool),
        advantages=REWARDS[arms],
        rollout_logprobs=old if is_corrected else unknown,
        first_logprobs=unknown,
    )
    weights = torch.full_like(old, 1 / len(arms))
    return policy_loss(logprobs, weights, policy, entropy=torch.zeros_like(old), bounds=bounds)[0]


def estimate(arms: torch.Tensor, bounds: Bounds = UNCAPPED, *, is_corrected: bool) -> torch.Tensor:
    logits = NOW.clone().requires_grad_()
    loss_of(logits, OLD, arms, bounds, is_corrected=is_corrected).backward()
    assert logits.grad is not None
    return -logits.grad


def exact() -> torch.Tensor:
    """Return the exact gradient of the expected reward by the present policy: p (r - E r)."""
    p = NOW.softmax(-1)
    return p * (REWARDS - (p * REWARDS).sum())


def pulls(logits: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(logits.softmax(-1), number, replacement=True, generator=generator)


def test_importance_weights_make_the_gradient_of_old_rollouts_unbiased() -> None:
    """The mean is within four standard errors of 400,000 pulls; without them the error is many times that."""
    arms = pulls(OLD, 400_000, torch.Generator().manual_seed(0))
    parts = torch.stack([estimate(part, is_corrected=True) for part in arms.split(4000)])
    error = (parts.mean(0) - exact()).abs()
    standard_error = parts.std(0) / len(parts) ** 0.5
    assert (error <= 4 * standard_error).all()
    assert standard_error.max() < 0.002
    biased = (estimate(arms, is_corrected=False) - exact()).abs().max()
    assert biased > 0.05


def test_a_truncated_weight_bounds_a_pull_and_costs_little() -> None:
    """The rare arm weighs 2 instead of more than 4: a step's size is bounded, and its direction still gains."""
    arms = pulls(OLD, 100_000, torch.Generator().manual_seed(1))
    capped = estimate(arms, Bounds(cap=2.0), is_corrected=True)
    whole = estimate(arms, is_corrected=True)
    assert not torch.allclose(capped, whole, atol=0.02)
    assert capped @ exact() > 0
    (rare,) = estimate(torch.tensor([3]), Bounds(cap=2.0), is_corrected=True)[3:]
    torch.testing.assert_close(rare, 2.0 * (1 - NOW.softmax(-1)[3]))


def learn(*, lag: int, is_corrected: bool, steps: int = 300, seed: int = 0) -> float:
    """Return the best arm's probability after updates whose rollouts were drawn by the weights of `lag` updates ago."""
    generator = torch.Generator().manual_seed(seed)
    logits = OLD.clone().requires_grad_()
    history = [OLD.clone()]
    for _ in range(steps):
        drawn_by = history[max(0, len(history) - 1 - lag)]
        arms = pulls(drawn_by, 64, generator)
        (grad,) = torch.autograd.grad(
            loss_of(logits, drawn_by, arms, Bounds(cap=8.0), is_corrected=is_corrected), logits
        )
        with torch.no_grad():
            logits -= 0.5 * grad
        history.append(logits.detach().clone())
    return float(logits.detach().softmax(-1)[3])


def test_old_rollouts_still_lead_to_the_best_arm() -> None:
    """Eight updates of lag."""
    assert learn(lag=8, is_corrected=True) > 0.9


def test_without_correction_a_common_arm_wins_over_a_better_one() -> None:
    """Rollouts that are always of the first weights: what they pull most is reinforced most."""
    assert learn(lag=10**6, is_corrected=True) > 0.8
    assert learn(lag=10**6, is_corrected=False) < 0.3
