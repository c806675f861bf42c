"""Compares, after a weight sync, log-probabilities of fixed answers (the canary) from the learner and from the served
model (R09, D14). Pure functions, used on both sides.

vLLM scores a whole answer without its prefix cache, but rollouts read that cache. So some tokens of each answer are
scored a second time, each by a separate request that reads the cache. Only requests that read the cache can find cached
keys and values of old weights. So the gaps of these scores have a mean of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import CanaryError
from shared.wire import ScoreReply

Logprobs = Sequence[Sequence[float]]  # natural log-probabilities of the tokens, one sequence per answer
TokenPlace = tuple[int, int]  # (index of an answer, index of its token)
MAX_CACHED = 4  # max tokens of an answer scored through the cache: each token needs its own request
TOLERANCE_KEY = "custom.extra.rollout_matching.vllm.sync.canary_tolerance"


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryGap:
    """|learner log-probability - served log-probability|, nats. `mean` is taken over all tokens of all answers, `max`
    also over the scores through the prefix cache."""

    mean: float
    max: float


def cached_positions(num_tokens: int) -> list[int]:
    """Return the positions of an answer's tokens that are also scored through the prefix cache, evenly spread."""
    number = min(num_tokens, MAX_CACHED)
    return [(2 * i + 1) * num_tokens // (2 * number) for i in range(number)]


def shape_error(learner: Logprobs, reply: ScoreReply) -> str:
    """Return, in words, where `reply` has too many or too few log-probabilities; "" if it has the right number
    everywhere."""
    wanted, found = [len(one) for one in learner], [len(one) for one in reply.logprobs]
    if found != wanted:
        return f"{found} log-probabilities for answers of {wanted} tokens"
    wanted, found = [len(cached_positions(n)) for n in wanted], [len(one) for one in reply.cached_logprobs]
    return f"{found} log-probabilities through the prefix cache, not {wanted}" if found not in ([], wanted) else ""


def compare(
    learner: Logprobs, reply: ScoreReply, *, tolerance: float, what: str, name_of: Callable[[int], str]
) -> CanaryGap:
    """Return the gap between the learner's log-probabilities and a reply in which `shape_error` finds nothing. For
    messages, `what` names the two sides, and `name_of` names an answer by its index.

    Raises CanaryError if the mean gap over all tokens, or over the tokens scored through the prefix cache, is above the
    tolerance or NaN.
    """
    places = [(i, j) for i, answer in enumerate(learner) for j in range(len(answer))]
    served = {(i, j): reply.logprobs[i][j] for i, j in places}
    cached = {
        (i, j): logprob
        for i, logprobs in enumerate(reply.cached_logprobs)
        for j, logprob in zip(cached_positions(len(learner[i])), logprobs, strict=True)
    }
    gaps = _checked(learner, served, "", tolerance=tolerance, what=what, name_of=name_of)
    through = " through the prefix cache"
    # Scores through the cache have a mean of their own, because these few tokens hardly change the mean of all tokens.
    cached_gaps = _checked(learner, cached, through, tolerance=tolerance, what=what, name_of=name_of)
    return CanaryGap(mean=math.fsum(gaps) / len(gaps), max=max(gaps + cached_gaps))


def _checked(
    learner: Logprobs,
    served: Mapping[TokenPlace, float],
    how: str,
    *,
    tolerance: float,
    what: str,
    name_of: Callable[[int], str],
) -> list[float]:
    """Return the gap of each token. Raises CanaryError."""
    gaps = {(i, j): abs(logprob - learner[i][j]) for (i, j), logprob in served.items()}
    mean = math.fsum(gaps.values()) / max(1, len(gaps))
    # `not <=` instead of `>`: the condition must also hold if the mean is NaN.
    if not mean <= tolerance:
        i, j = max(gaps, key=lambda place: math.inf if math.isnan(gaps[place]) else gaps[place])
        raise CanaryError(
            what,
            found=f"mean gap {mean:.4f} nats per token over {len(gaps)} tokens{how}; worst at token {j} of "
            f"{name_of(i)}: learner {learner[i][j]:.4f}, server {served[i, j]:.4f}",
            wanted=f"at most {tolerance:g} ({TOLERANCE_KEY})",
            remedy=CanaryError.STALE_CACHE if how else CanaryError.LIKELY_CAUSES,
        )
    return list(gaps.values())
