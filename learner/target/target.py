"""Y_train: what the model wrote, continued by what it missed, with labels and loss weights ("Loss on Y_train").

In: an `Assignment` (or a sample alone, for plain teacher forcing). Out: a `Target`, and with a prompt a `Segment`.

    token_ids   [ rollout prefix | tail: missed objects, closer | EOS ]
    labels      [ matched coordinates towards ground truth, else -100 | the tail's own tokens | EOS ]

Invariants: the prefix is the rollout's own token ids. Every missed object is in the tail, in canonical order.
`labels[i] == -100` exactly where `loss_weights[i] == 0`. Every supervised token is in the assistant span, after a token
that predicts it. `check_supervision` checks this when a segment is built, and again before it is learned
(`policy/packed.py`). Pure, no torch.

Tail. Weight 1, except for descriptions: `desc_weight` on every token that holds any byte of one, fused tokens included.
Predictions without a label (`keep_unmatched`, `best_of.use: union`) stand among the missed objects in canonical order,
with weight 0.

Matched predictions. `labels.py` gives the right token for each token of a coordinate and of a description. By default
(SPEC) coordinates have weight 1 and descriptions none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learner.config.schema import LossConfig
from learner.records import Assignment, DetectionObject, EncodedPrompt, Rollout, Sample, Segment, Target
from learner.target.labels import coordinate_labels, description_labels
from learner.target.prefix import apart, overrun_label, unmatched_behind, up_to_first_miss, up_to_last_match
from learner.tasks.task import ObjectTask, SerializedTail, Tokenizer
from learner.tasks.tokens import TokenPieces, TokenText, pieces_of
from shared.errors import LossError

IGNORED = -100  # the label of a token that is not learned


def check_supervision(segment: Segment) -> NDArray[np.int64]:
    """Indices of the segment's supervised tokens (label set, weight positive).

    Raises LossError if one is outside the assistant span, or if labels and weights contradict each other.
    """
    labels, weights = segment.labels, segment.loss_weights
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


SPECIFIED = LossConfig()  # the default loss on Y_train


def build_target(
    assignment: Assignment,
    task: ObjectTask,
    tokenizer: Tokenizer,
    eos_token_id: int | None = None,
    loss: LossConfig = SPECIFIED,
    besides: Sequence[DetectionObject] = (),
) -> Target:
    """Y_train of a matched rollout, ended by `eos_token_id` (None: the tokenizer's), with the weights of `loss`.

    `besides`: objects without a label that are appended too, without loss, unless the prefix has them (`union`).
    Raises LossError if a coordinate's tokens are not in the prefix.
    """
    whole = assignment
    if loss.prefix_end != "last_object":
        cut = up_to_last_match if loss.prefix_end == "last_match" else up_to_first_miss
        assignment = cut(assignment, task)
    unlabelled = unmatched_behind(whole, assignment, task) if loss.keep_unmatched else []
    parsed = assignment.parsed
    if besides:
        there = [*(predicted.object for predicted in parsed.objects), *unlabelled]
        unlabelled += apart(besides, there, parsed, task)
    objects, masked = _appended(_missed(assignment, loss), unlabelled, task)
    tail = task.serialize(objects, after=parsed)
    prefix = parsed.token_ids[: parsed.prefix_length]
    target = _with_tail(prefix, tail, pieces_of(tokenizer), eos_token_id, loss.desc_weight, masked)
    read = target.token_ids[: len(prefix) + 1]  # the number at the prefix's end may differ in the next token
    if loss.matched_coordinate_weight:
        positions, labels = coordinate_labels(assignment, read, task.coordinate_text, tokenizer)
        target.labels[positions] = labels
        target.loss_weights[positions] = loss.matched_coordinate_weight
    if loss.matched_desc_weight:
        for position, label in description_labels(assignment, task.desc_text, tokenizer):
            _teach_besides(target, position, label, loss.matched_desc_weight)
    overrun = overrun_label(assignment, task, tokenizer) if loss.overrun_close_weight else None
    if overrun is not None:
        _teach_besides(target, *overrun, loss.overrun_close_weight)
    return target


def _missed(assignment: Assignment, loss: LossConfig) -> list[DetectionObject]:
    """The objects to append, in canonical order or in a random order that is fixed per sample."""
    sample = assignment.parsed.rollout.sample
    missed = [sample.objects[i] for i in assignment.missed]
    if loss.missed_order == "random":
        random.Random(sample.sample_id).shuffle(missed)
    return missed


def _appended(
    missed: list[DetectionObject], unlabelled: list[DetectionObject], task: ObjectTask
) -> tuple[list[DetectionObject], list[int]]:
    """Both in canonical order, and the indices of those without loss."""
    if not unlabelled:
        return missed, []
    both = [(obj, True) for obj in missed] + [(obj, False) for obj in unlabelled]
    both.sort(key=lambda pair: task.canonical_key(pair[0]))
    return [obj for obj, _ in both], [place for place, (_, is_learned) in enumerate(both) if not is_learned]


def _teach_besides(target: Target, position: int, label: int, weight: float) -> None:
    """Add a label, unless the token has one already: a token that is part of a coordinate keeps the coordinate's
    label."""
    if target.labels[position] == IGNORED:
        target.labels[position], target.loss_weights[position] = label, weight


def ground_truth_target(
    sample: Sample, task: ObjectTask, tokenizer: Tokenizer, eos_token_id: int | None = None, desc_weight: float = 1.0
) -> Target:
    """The whole answer, teacher-forced: every object of `sample` in canonical order (stage 1, Channel-A)."""
    tail = task.serialize(sample.objects, after=None)
    return _with_tail(np.empty(0, dtype=np.int64), tail, pieces_of(tokenizer), eos_token_id, desc_weight)


def own_target(rollout: Rollout, weight: float = 1.0) -> Target:
    """The rollout's own tokens, the stop token included, each its own label."""
    stop = [] if rollout.stop_token_id is None else [rollout.stop_token_id]
    token_ids = np.array([*rollout.response_token_ids, *stop], dtype=np.int64)
    return Target(
        token_ids=token_ids,
        labels=token_ids.copy(),
        loss_weights=np.full(len(token_ids), weight, dtype=np.float32),
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
    """Prompt + Y_train. Raises LossError if the target's parts do not fit, or if the prompt is empty."""
    num_prompt, num_target = len(prompt.token_ids), len(target.token_ids)
    if not num_prompt or not (num_target == len(target.labels) == len(target.loss_weights)):
        raise LossError(
            f"sample {sample_id}: prompt and target do not make a segment",
            found=f"{num_prompt} prompt tokens, {num_target} target tokens, {len(target.labels)} labels, "
            f"{len(target.loss_weights)} weights",
            wanted="at least one prompt token, and a label and a weight for each target token",
            remedy="encode the prompt with the chat template, and build the target with learner.target.target",
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


def _with_tail(
    prefix: NDArray[np.int64],
    tail: SerializedTail,
    pieces: TokenPieces,
    eos_token_id: int | None,
    desc_weight: float,
    masked: Sequence[int] = (),
) -> Target:
    """Prefix, tail and EOS. The prefix and the objects `masked` of the tail are ignored, the rest is supervised."""
    text = tokens_of(tail.text, pieces)
    eos = pieces.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    target = continued(prefix, text, eos)
    token_ids, weights = target.token_ids, target.loss_weights
    marked = [(span, desc_weight) for span in tail.desc_spans if desc_weight != 1.0]
    marked += [(tail.object_spans[place], 0.0) for place in masked]
    in_bytes = _byte_spans(tail.text, [span for span, _ in marked])
    for (first, last), (_, weight) in zip(in_bytes, marked, strict=True):
        if first < last:
            begin = len(prefix) + text.token_at(first)
            weights[begin : len(prefix) + text.tokens_until(last)] = weight
    return replace(target, labels=np.where(weights > 0, token_ids, IGNORED))


def tokens_of(text: str, pieces: TokenPieces) -> TokenText:
    """The tokens of a tail's text. Raises LossError if the tokenizer changes it."""
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
    """The prefix [P], ignored, then the tail and EOS with weight 1."""
    token_ids = np.concatenate([prefix, tail.ids, [eos_token_id]])
    weights = np.ones(len(token_ids), dtype=np.float32)
    weights[: len(prefix)] = 0.0
    labels = np.where(weights > 0, token_ids, IGNORED)
    return Target(token_ids=token_ids, labels=labels, loss_weights=weights, prefix_length=len(prefix))


def _byte_spans(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of characters as offsets into the text's UTF-8 bytes."""
    if text.isascii() or not spans:
        return spans
    offsets = np.cumsum([0, *(len(char.encode()) for char in text)])
    return [(int(offsets[first]), int(offsets[last])) for first, last in spans]
