"""The check after a sync: the served model must give fixed answers the probabilities that the learner gives them.

In: samples with an answer each, the learner's log-probabilities of these answers, and a generator's scores. Out: the
gap, or a CanaryError. A sync that returned 200 with wrong tokens behind it is the worst failure this system can have.
Whoever loads the weights checks bytes and coverage; this is the check of the whole. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.data.prompt import check_prompt_prefix
from learner.policy.canary_scores import CanaryScores
from learner.records import EncodedPrompt, Sample
from learner.rollout.requests import infer_request
from shared.errors import CanaryError, NotFiniteError, RolloutError
from shared.wire import ExpectScoresCall, ScoreItem, ScoreReply

Logprobs = Sequence[Sequence[float]]  # natural, one sequence per answer
# The answers' scores under the weights as they travel: in this dtype (None: as trained), merged or not.
Scorer = Callable[[torch.dtype | None, bool], CanaryScores]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """`scorer` scores the answers under the learner's weights as they are sent now (D14). `tolerance`: the largest mean
    gap, nats per token."""

    items: Sequence[CanaryItem]
    scorer: Scorer
    tolerance: float

    def __post_init__(self) -> None:
        assert self.items, "a sync without a canary is not checked"

    def expected(self, incarnation: str, ver: int, learner: Logprobs) -> ExpectScoresCall:
        """What a server must find for update `ver`. Raises NotFiniteError if the learner's scores are not."""
        if not np.isfinite(np.concatenate(learner)).all():
            raise NotFiniteError(
                "the learner's own log-probabilities of the canary are not finite",
                found="nan or infinite values",
                wanted="finite weights",
                remedy="look at the loss and the learning rate, and resume from an earlier checkpoint",
            )
        logprobs = [list(one) for one in learner]
        return ExpectScoresCall(incarnation=incarnation, ver=ver, logprobs=logprobs, tolerance=self.tolerance)

    def compare(self, learner: Logprobs, reply: ScoreReply, who: str) -> CanaryGap:
        """The gap between both sides; `who` is the generator that gave `reply`.

        Raises CanaryError if the gap is above the tolerance or not a number, PromptMismatchError if the prompts differ,
        RolloutError if the reply has another shape.
        """
        wanted = [len(item.response_token_ids) for item in self.items]
        found = [len(logprobs) for logprobs in reply.logprobs]
        if found != wanted or len(reply.prompt_token_ids) != len(self.items):
            raise RolloutError(
                f"{who}: malformed answer at /score/: logprobs",
                found=f"lengths {found} and {len(reply.prompt_token_ids)} prompts",
                wanted=f"lengths {wanted}",
                remedy="run the same version of this project on both sides",
            )
        for item, served_ids in zip(self.items, reply.prompt_token_ids, strict=True):
            check_prompt_prefix(item.prompt.token_ids, served_ids, item.sample.sample_id)
        gaps = np.abs(np.concatenate(learner) - np.concatenate(reply.logprobs))
        gap = CanaryGap(mean=float(gaps.mean()), max=float(gaps.max()))
        if not gap.mean <= self.tolerance:  # also if it is nan
            raise self._error(learner, reply, gaps, who)
        return gap

    def _error(self, learner: Logprobs, reply: ScoreReply, gaps: np.ndarray, who: str) -> CanaryError:
        worst = int(np.argmax(np.nan_to_num(gaps, nan=np.inf)))
        owner = [(item.sample.sample_id, j) for item in self.items for j in range(len(item.response_token_ids))]
        sample_id, position = owner[worst]
        here, there = np.concatenate(learner)[worst], np.concatenate(reply.logprobs)[worst]
        return CanaryError(
            f"{who}: after the sync to ver {reply.ver} the served model is not the learner's",
            found=f"mean gap {gaps.mean():.4f} nats per token over {len(gaps)} tokens; worst at token {position} of "
            f"sample {sample_id!r}: learner {here:.4f}, server {there:.4f}",
            wanted=f"at most {self.tolerance:g} (custom.extra.rollout_matching.vllm.sync.canary_tolerance)",
            remedy=CanaryError.LIKELY_CAUSES,
        )


def worst_gap(gaps: Sequence[CanaryGap]) -> CanaryGap:
    """Of several generators."""
    return CanaryGap(mean=max(gap.mean for gap in gaps), max=max(gap.max for gap in gaps))


def score_items(items: Sequence[CanaryItem]) -> list[ScoreItem]:
    """The items for the wire."""
    return [
        ScoreItem(request=infer_request(item.sample), response_token_ids=list(item.response_token_ids))
        for item in items
    ]
