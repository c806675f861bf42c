"""The check after a sync: the served model must give a fixed answer the probabilities that the learner gives it.

In: canary items with the learner's own log-probabilities, and a server's scores. Out: the gap, or a
CanaryError. A sync that returned 200 with wrong tokens behind it is the worst failure this system can have; bytes and
coverage are checked by the server, this is the check of the whole. Pure. Called by `fleet.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from learner.data.prompt import check_prompt_prefix
from learner.policy.canary_scores import CanaryScores
from learner.records import EncodedPrompt, Sample
from learner.rollout.requests import infer_request
from shared.errors import CanaryError, RolloutError
from shared.wire import ScoreItem, ScoreReply


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryItem:
    """A sample, its prompt as the learner encodes it, and an answer to score (at least one token)."""

    sample: Sample
    prompt: EncodedPrompt
    response_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryGap:
    """|learner log-probability - served log-probability| over all tokens of all items, nats."""

    mean: float
    max: float


class Scorer(Protocol):
    """The learner's half of the canary; `learner.policy.canary_scores.CanaryScorer` is one."""

    def __call__(self, dtype: torch.dtype | None, *, merged: bool) -> CanaryScores: ...


def score_items(items: Sequence[CanaryItem]) -> list[ScoreItem]:
    return [
        ScoreItem(request=infer_request(item.sample), response_token_ids=list(item.response_token_ids))
        for item in items
    ]


def compare(
    items: Sequence[CanaryItem],
    learner_logprobs: Sequence[Sequence[float]],
    reply: ScoreReply,
    *,
    tolerance: float,
    base_url: str,
) -> CanaryGap:
    """The gap between both sides. Raises CanaryError above `tolerance` (mean, nats per token) or where it is not a
    number, PromptMismatchError where the prompts differ, RolloutError where the reply has another shape."""
    wanted = [len(item.response_token_ids) for item in items]
    found = [len(logprobs) for logprobs in reply.logprobs]
    if found != wanted or len(reply.prompt_token_ids) != len(items):
        raise RolloutError(
            f"{base_url}: malformed answer at /score/: logprobs",
            found=f"lengths {found} and {len(reply.prompt_token_ids)} prompts",
            wanted=f"lengths {wanted}",
            remedy="run the same version of this project on both sides",
        )
    for item, served_ids in zip(items, reply.prompt_token_ids, strict=True):
        check_prompt_prefix(item.prompt.token_ids, served_ids, item.sample.sample_id)
    gaps = np.abs(np.concatenate(learner_logprobs) - np.concatenate(reply.logprobs))
    gap = CanaryGap(mean=float(gaps.mean()), max=float(gaps.max()))
    if not gap.mean <= tolerance:  # also where it is nan
        raise _canary_error(items, learner_logprobs, reply, gaps, tolerance, base_url)
    return gap


def _canary_error(
    items: Sequence[CanaryItem],
    learner_logprobs: Sequence[Sequence[float]],
    reply: ScoreReply,
    gaps: np.ndarray,
    tolerance: float,
    base_url: str,
) -> CanaryError:
    worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
    owner = [(item.sample.sample_id, j) for item in items for j in range(len(item.response_token_ids))]
    sample_id, position = owner[worst]
    here, there = np.concatenate(learner_logprobs)[worst], np.concatenate(reply.logprobs)[worst]
    return CanaryError(
        f"{base_url}: after the sync to ver {reply.ver} the served model is not the learner's",
        found=f"mean gap {gaps.mean():.4f} nats per token over {len(gaps)} tokens; worst at token {position} of sample "
        f"{sample_id!r}: learner {here:.4f}, server {there:.4f}",
        wanted=f"at most {tolerance:g} (custom.extra.rollout_matching.vllm.sync.canary_tolerance)",
        remedy="check that both sides run the same model configuration and a precision that fits the tolerance; do not "
        "train on this server's rollouts",
    )
