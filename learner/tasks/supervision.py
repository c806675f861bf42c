"""Checks a sample's labels and weights, and joins prompt and target into a segment, for all tasks.

In: a `Target`, or a text's tokens. Out: a checked `Segment`. Invariants: `labels[i] == -100` exactly if
`loss_weights[i] == 0`. Every supervised token is in the assistant span, and a token before it predicts it.
`check_supervision` checks these invariants when a segment is built, and before it is learned (`policy/packed.py`). No
side effects.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from learner.records import EncodedPrompt, Rollout, Segment, Target
from learner.tasks.tokens import TokenPieces, TokenText
from shared.errors import LossError

IGNORED = -100  # the label of a token that is not learned


def check_supervision(segment: Segment) -> NDArray[np.int64]:
    """Return the indices of the segment's supervised tokens (label set, weight positive).

    Raises LossError if a supervised token is outside the assistant span, or if labels and weights contradict each
    other.
    """
    labels, weights = segment.labels, segment.loss_weights
    # The first token is never supervised, because no token before it predicts it.
    first = max(segment.prompt_length, 1)
    if (labels[:first] != IGNORED).any() or (weights[:first] != 0).any():
        bad = int(np.flatnonzero((labels[:first] != IGNORED) | (weights[:first] != 0))[0])
        raise _error("a supervised index is outside the assistant span", segment, bad, f"an index >= {first}")
    wrong = ~np.isfinite(weights) | (weights < 0) | ((labels == IGNORED) & (weights != 0))
    wrong |= (labels < 0) & (labels != IGNORED)
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise _error(
            "a label or its weight is not usable",
            segment,
            bad,
            "a token id or -100 (ignored, weight 0), a finite weight >= 0",
        )
    return np.flatnonzero((labels != IGNORED) & (weights > 0))


def _error(what: str, segment: Segment, index: int, wanted: str) -> LossError:
    return LossError(
        what,
        found=f"label {segment.labels[index]}, weight {segment.loss_weights[index]} at index {index} of sample "
        f"{segment.sample_id!r}, whose prompt has {segment.prompt_length} of {len(segment)} tokens",
        wanted=wanted,
        remedy="this is a bug in the target builder: please report the sample",
    )


def own_target(rollout: Rollout) -> Target:
    """Return the rollout's own tokens with the stop token. Each token is its own label and has weight 1."""
    stop = [] if rollout.stop_token_id is None else [rollout.stop_token_id]
    token_ids = np.array([*rollout.response_token_ids, *stop], dtype=np.int64)
    return Target(
        token_ids=token_ids,
        labels=token_ids.copy(),
        loss_weights=np.ones(len(token_ids), dtype=np.float32),
        prefix_length=len(rollout.response_token_ids),
    )


def build_segment(
    prompt: EncodedPrompt,
    target: Target,
    *,
    sample_id: str,
    ver: int | None = None,
    stats: Mapping[str, float] | None = None,
) -> Segment:
    """Return prompt and target (Y_train) as one segment. Raises LossError if the target's arrays differ in length, or
    if the prompt is empty."""
    num_prompt, num_target = len(prompt.token_ids), len(target.token_ids)
    if not num_prompt or not (num_target == len(target.labels) == len(target.loss_weights)):
        raise LossError(
            f"sample {sample_id}: prompt and target do not make a segment",
            found=f"{num_prompt} prompt tokens, {num_target} target tokens, {len(target.labels)} labels, "
            f"{len(target.loss_weights)} weights",
            wanted="at least one prompt token, and a label and a weight for each target token",
            remedy="encode the prompt with the chat template, and build the target with learner.tasks.detection.target",
        )
    segment = Segment(
        sample_id=sample_id,
        input_ids=np.concatenate([np.asarray(prompt.token_ids, dtype=np.int64), target.token_ids]),
        labels=np.concatenate([np.full(num_prompt, IGNORED, dtype=np.int64), target.labels]),
        loss_weights=np.concatenate([np.zeros(num_prompt, dtype=np.float32), target.loss_weights]),
        prompt_length=num_prompt,
        vision=prompt.vision,
        ver=ver,
        stats=stats or {},
    )
    check_supervision(segment)
    return segment


def tokens_of(text: str, pieces: TokenPieces) -> TokenText:
    """Return the tokens of the text that is appended to an answer's kept prefix. Raises LossError if decoding the
    tokens does not give the text back."""
    found = pieces.text(pieces.encode_long(text))
    if found.data != text.encode():
        raise LossError(
            "the tokenizer changes the target's text",
            found=repr(found.data.decode(errors="replace"))[:300],
            wanted=repr(text)[:300],
            remedy="use texts that survive tokenization; Task.validate finds the others",
        )
    return found


def continued(prefix: NDArray[np.int64], tail: TokenText, eos_token_id: int) -> Target:
    """Return the prefix [P] without labels, then the tail and EOS with weight 1."""
    token_ids = np.concatenate([prefix, tail.ids, [eos_token_id]])
    weights = np.ones(len(token_ids), dtype=np.float32)
    weights[: len(prefix)] = 0.0
    labels = np.where(weights > 0, token_ids, IGNORED)
    return Target(token_ids=token_ids, labels=labels, loss_weights=weights, prefix_length=len(prefix))
