"""The loss of a policy gradient, per token (`grpo`, R37).

A token of a rollout has three log-probabilities: `rollout`, which the engine computed when it sampled the token;
`first`, which the learner computed before its first update on the rollout; `now`, with the present weights and a
gradient. `A` is the token's advantage.

    importance  w = min(exp(first - rollout), cap)      corrects the engine's older weights and other kernels
    ratio       r = exp(now - first)                    1 in the first update
    surrogate   w x min(r A, clip(r, 1 - low, 1 + high) A)
    loss        weight x (-surrogate + kl_weight x k3)  with k3 = exp(ref - now) - (ref - now) - 1

In the first update the gradient is exactly -weight x w x A x grad(now). Tokens that are not part of a rollout
(`is_policy` false) have the usual cross-entropy. k3 (Schulman 2020) estimates the KL divergence from the reference
model, whose log-probability is `ref`. The estimate is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.records import Segment

SUMS = ("tokens", "entropy", "importance", "truncated", "ratio", "clipped", "gap", "drawn_elsewhere", "kl")
PREFIX = "grpo/"
_PER_TOKEN = ("entropy", "importance", "truncated", "ratio", "clipped", "kl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of a token's loss. `cap`: max importance (truncated importance sampling). `low` and `high`: if a token's
    probability has fallen by the fraction `low` or risen by the fraction `high` since the first update, it gets no more
    gradient in that direction (DAPO)."""

    cap: float = 2.0
    low: float = 0.2
    high: float = 0.28


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyInputs:
    """Inputs of the loss. Each field [N] has one value for each supervised token of a row; NaN where it is not
    known."""

    is_policy: torch.Tensor  # bool: the token is part of a rollout, so its loss is the policy gradient
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor  # nats
    first_logprobs: torch.Tensor  # nats


def gather_policy(segments: Sequence[Segment], supervised: Sequence[np.ndarray]) -> PolicyInputs | None:
    """Return the inputs for all supervised tokens of the segments, on the CPU; None if no segment has a policy
    gradient. `supervised`: for each segment the indices of its supervised tokens."""
    if all(segment.policy is None for segment in segments):
        return None
    parts: list[list[np.ndarray]] = [[], [], [], []]
    for segment, at in zip(segments, supervised, strict=True):
        policy = segment.policy
        parts[0].append(np.full(len(at), policy is not None))
        for part, name in zip(parts[1:], ("advantages", "rollout_logprobs", "first_logprobs"), strict=True):
            part.append(np.full(len(at), np.nan, np.float32) if policy is None else getattr(policy, name)[at])
    is_policy, advantages, rollout, first = (torch.from_numpy(np.concatenate(part)) for part in parts)
    return PolicyInputs(is_policy=is_policy, advantages=advantages, rollout_logprobs=rollout, first_logprobs=first)


def write_first_logprobs(segments: Sequence[Segment], supervised: Sequence[np.ndarray], logprobs: torch.Tensor) -> None:
    """Store this pass's `logprobs` [N] as `first_logprobs` in the segments that have none yet, because this is their
    first pass. `supervised` is as in `gather_policy`."""
    values, start = logprobs.detach().float().cpu().numpy(), 0
    # `strict` is off, because `supervised` may have one more entry: a blank image's.
    for segment, at in zip(segments, supervised, strict=False):
        # Only the first pass is stored, because later passes use weights that this rollout has changed.
        if segment.policy is not None and np.isnan(segment.policy.first_logprobs[at]).any():
            segment.policy.first_logprobs[at] = values[start : start + len(at)]
        start += len(at)


def policy_loss(
    now: torch.Tensor,  # [N] log-probabilities with the present weights, in nats, with gradient
    weights: torch.Tensor,  # [N]
    policy: PolicyInputs,
    *,
    entropy: torch.Tensor,  # [N] nats
    reference: torch.Tensor | None = None,  # [N] nats
    kl_weight: float = 0.0,
    bounds: Bounds = Bounds(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss (scalar), and, without gradient, the sums listed in SUMS [len(SUMS)], taken over the
    tokens where `is_policy` is true."""
    held, ours = now.detach(), policy.is_policy
    # Tokens without `first_logprobs` are in their first pass: their ratio is 1, and has a gradient.
    first = torch.where(policy.first_logprobs.isnan(), held, policy.first_logprobs)
    drawn_elsewhere = ours & ~policy.rollout_logprobs.isnan()
    # Where the rollouts' log-probabilities are not known, the importance is 1.
    gap = torch.where(drawn_elsewhere, first - policy.rollout_logprobs, 0.0)
    importance = gap.exp()
    # Unknown advantages are NaN, which would reach the gradient even where `where` does not choose it.
    advantages = torch.where(ours, policy.advantages, 0.0)
    ratio = (now - first).exp()
    clipped = ratio.clamp(1 - bounds.low, 1 + bounds.high)
    surrogate = importance.clamp(max=bounds.cap) * torch.minimum(ratio * advantages, clipped * advantages)
    loss = torch.where(ours, -surrogate, -now)
    kl = torch.zeros_like(held)
    if reference is not None:
        kl = (reference - now).exp() - (reference - now) - 1
        loss = loss + kl_weight * torch.where(ours, kl, 0.0)
    with torch.no_grad():
        lost = (ratio * advantages > clipped * advantages) & ours
        sums = (
            torch.ones_like(held),
            entropy,
            importance,
            importance > bounds.cap,
            ratio,
            lost,
            gap.abs(),
            drawn_elsewhere,
            kl,
        )
        counted = torch.stack([torch.where(ours, part.float(), 0.0).sum() for part in sums])
    return (loss * weights).sum(), counted


def policy_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Return a step's means per token or per group, computed from the sums `counts`, under the same names; {} without
    groups."""
    tokens, groups = counts.get(f"{PREFIX}tokens", 0.0), counts.get(f"{PREFIX}groups", 0.0)
    if not groups:
        return {}
    elsewhere = counts.get(f"{PREFIX}drawn_elsewhere", 0.0)
    found = {f"{PREFIX}{name}": counts.get(f"{PREFIX}{name}", 0.0) / max(1.0, tokens) for name in _PER_TOKEN}
    found |= {f"{PREFIX}{name}": counts.get(f"{PREFIX}{name}", 0.0) / groups for name in ("no_signal", "reward_std")}
    found[f"{PREFIX}gap"] = counts.get(f"{PREFIX}gap", 0.0) / max(1.0, elsewhere)
    return found
