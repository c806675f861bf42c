"""The check after a sync: the served model and the learner must give fixed answers the same probabilities.

In: samples with an answer each, the learner's log-probabilities of these answers, and a generator's scores. Out: the
gap, or a CanaryError. The worst failure of this system is a sync that reports success while the served model is wrong.
The loaders check that all bytes of all weights arrived; this check covers the whole served model. No side effects.
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
from shared.canary import CanaryGap, Logprobs, compare, shape_error
from shared.errors import NotFiniteError, RolloutError
from shared.wire import ExpectScoresCall, ScoreItem, ScoreReply

# Max mean gap in nats per token: EXACT_TOLERANCE if both sides compute in float32, else TOLERANCE. A model of 5M
# parameters without an adapter had mean gaps of 0.0000 in float32 and at most 0.061 in bfloat16.
EXACT_TOLERANCE, TOLERANCE = 0.01, 0.1
# Computes the learner's scores of the canary's answers, with the weights as they are sent. The arguments are the dtype
# of these weights (None: their own dtype), and whether an adapter is merged into them.
Scorer = Callable[[torch.dtype | None, bool], CanaryScores]

CANARY_SAMPLES = 2  # number of prompts whose answers learner and server score after a sync.
# Max pixels of an image's side, and max tokens of an answer. With these limits the prompts and the requests that read
# the cache fit into one CUDA graph of an engine (512 tokens). Short answers show faults as well as long ones: with
# planted faults, the mean gaps over the first 32, 64 and 128 tokens of an answer differ by a factor of 0.77 to 1.35.
CANARY_SIDE, CANARY_TOKENS = 256, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryItem:
    """A sample, its prompt as the learner encodes it, and an answer to score (at least one token)."""

    sample: Sample
    prompt: EncodedPrompt
    response_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """The check of a sync by fixed answers. `items`: the answers. `scorer` scores the answers under the learner's
    weights, in the form in which they are sent now (D14). `tolerance`: the largest mean gap, in nats per token; None:
    it depends on the types in which both sides compute. `dtype`: the learner's type."""

    items: Sequence[CanaryItem]
    scorer: Scorer
    tolerance: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.items, "a sync without a canary is not checked"

    def tolerance_with(self, served: torch.dtype | None) -> float:
        """Return the tolerance for generators that compute in type `served` (None: not known)."""
        if self.tolerance is not None:
            return self.tolerance
        return EXACT_TOLERANCE if self.dtype == served == torch.float32 else TOLERANCE

    def expected(self, incarnation: str, ver: int, learner: Logprobs, served: torch.dtype | None) -> ExpectScoresCall:
        """Return the call that sends a server the expected scores for update `ver`. `served`: the type in which the
        server computes; None: not known. Raises NotFiniteError if the learner's scores are not finite."""
        # If the learner sent scores that are not finite, the server's comparison would fail, and the served model would
        # seem to be wrong.
        if not np.isfinite(np.concatenate(learner)).all():
            raise NotFiniteError(
                "the learner's own log-probabilities of the canary are not finite",
                found="nan or infinite values",
                wanted="finite weights",
                remedy="look at the loss and the learning rate, and resume from an earlier checkpoint",
            )
        logprobs = [list(one) for one in learner]
        tolerance = self.tolerance_with(served)
        return ExpectScoresCall(incarnation=incarnation, ver=ver, logprobs=logprobs, tolerance=tolerance)

    def compare(self, learner: Logprobs, reply: ScoreReply, who: str, served: torch.dtype | None = None) -> CanaryGap:
        """Return the gap between the log-probabilities of the learner and of a generator. `who` names the generator
        that gave `reply` and computes in `served`.

        Raises CanaryError if the gap is above the tolerance or not a number, PromptMismatchError if the prompts differ,
        RolloutError if the reply has another shape.
        """
        wrong = shape_error([item.response_token_ids for item in self.items], reply)
        if wrong or len(reply.prompt_token_ids) != len(self.items):
            raise RolloutError(
                f"{who}: malformed answer at /score/: logprobs",
                found=f"{wrong or 'all log-probabilities'}, and {len(reply.prompt_token_ids)} prompts",
                wanted=f"one per token of {len(self.items)} answers, and a prompt each",
                remedy="run the same version of this project on both sides",
            )
        for item, served_ids in zip(self.items, reply.prompt_token_ids, strict=True):
            # Prompts are compared before scores, because different prompts alone make the scores differ.
            check_prompt_prefix(item.prompt.token_ids, served_ids, item.sample.sample_id)
        return compare(
            learner,
            reply,
            tolerance=self.tolerance_with(served),
            what=f"{who}: after the sync to ver {reply.ver} the served model is not the learner's",
            name_of=lambda i: f"sample {self.items[i].sample.sample_id!r}",
        )


def worst_gap(gaps: Sequence[CanaryGap]) -> CanaryGap:
    """Return the gap of the generator with the largest gap."""
    return CanaryGap(mean=max(gap.mean for gap in gaps), max=max(gap.max for gap in gaps))


def score_items(items: Sequence[CanaryItem], *, pixels: bool = False) -> list[ScoreItem]:
    """Return the canary's items as the calls to a server take them. `pixels`: also ask for the vision tower's input of
    their images."""
    return [
        ScoreItem(request=infer_request(item.sample, pixels=pixels), response_token_ids=list(item.response_token_ids))
        for item in items
    ]
