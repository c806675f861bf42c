"""Builds Y_train: the rollout's prefix, then the missed objects, with labels and loss weights ("Loss on Y_train").

In: an `Assignment` (or a sample alone, for plain teacher forcing). Out: a `Target`.

    token_ids   [ rollout prefix | tail: missed objects, closer | EOS ]
    labels      [ ground truth for matched coordinates, else -100 | the tail's own tokens | EOS ]

Invariants: the prefix is the rollout's own token ids. Every missed object is in the tail, in canonical order.
`learner/tasks/supervision.py` has the invariants of all tasks. No side effects, no torch.

Tail. Every token has weight 1. Tokens that hold any byte of a description have weight `desc_weight`, even if they hold
other bytes too. Predictions without a label (`keep_unmatched`) are sorted in among the missed objects, with weight 0.

Matched predictions. `labels.py` gives the right token for each token of a coordinate and of a description. By default
(SPEC) coordinates have weight 1 and descriptions weight 0.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from learner.config.sections.loss import LossConfig
from learner.extensions import Tokenizer
from learner.records import Assignment, DetectionObject, Sample, Target
from learner.tasks.detection.labels import coordinate_labels, description_labels
from learner.tasks.detection.prefix import overrun_label, unmatched_behind, up_to_first_miss, up_to_last_match
from learner.tasks.supervision import IGNORED, continued, tokens_of
from learner.tasks.task import ObjectTask, SerializedTail
from learner.tasks.tokens import TokenPieces, pieces_of

SPECIFIED = LossConfig()  # default settings of the loss on Y_train


def build_target(
    assignment: Assignment,
    task: ObjectTask,
    tokenizer: Tokenizer,
    loss: LossConfig = SPECIFIED,
) -> Target:
    """Return Y_train of a matched rollout, ended by the tokenizer's EOS, with the weights of `loss`.

    Raises LossError if a coordinate's tokens are not in the prefix.
    """
    whole = assignment
    # The answer is cut earlier, because missed objects that are appended after its last object would teach a good model
    # to go back in the order, and to continue where it should end.
    if loss.prefix_end != "last_object":
        cut = up_to_last_match if loss.prefix_end == "last_match" else up_to_first_miss
        assignment = cut(assignment, task)
    # Objects without a label that were cut off are appended again, because without them the target would teach the
    # model to leave them out.
    unlabelled = unmatched_behind(whole, assignment, task) if loss.keep_unmatched else []
    parsed = assignment.parsed
    objects, untaught = _appended(_missed(assignment, loss), unlabelled, task)
    tail = task.serialize(objects, after=parsed)
    prefix = parsed.token_ids[: parsed.prefix_length]
    target = _with_tail(prefix, tail, pieces_of(tokenizer), loss.desc_weight, untaught)
    # One token more is read, because a number at the prefix's end may differ only in the next token
    read = target.token_ids[: len(prefix) + 1]
    positions, labels = coordinate_labels(assignment, read, task.coordinate_text, tokenizer)
    target.labels[positions] = labels
    target.loss_weights[positions] = 1.0
    # A token that holds a part of a coordinate keeps the coordinate's label, which it got above.
    if loss.matched_desc_weight:
        for position, label in description_labels(assignment, task.desc_text, tokenizer):
            _teach_besides(target, position, label, loss.matched_desc_weight)
    overrun = overrun_label(assignment, task, tokenizer) if loss.overrun_close_weight else None
    if overrun is not None:
        _teach_besides(target, *overrun, loss.overrun_close_weight)
    return target


def _missed(assignment: Assignment, loss: LossConfig) -> list[DetectionObject]:
    """Return the objects to append, in canonical order or in a random order that is fixed per sample."""
    sample = assignment.parsed.rollout.sample
    missed = [sample.objects[i] for i in assignment.missed]
    if loss.missed_order == "random":
        random.Random(sample.sample_id).shuffle(missed)
    return missed


def _appended(
    missed: list[DetectionObject], unlabelled: list[DetectionObject], task: ObjectTask
) -> tuple[list[DetectionObject], list[int]]:
    """Return missed and unlabelled objects in canonical order, and the indices of the unlabelled objects."""
    both = [(obj, True) for obj in missed] + [(obj, False) for obj in unlabelled]
    # Missed objects alone keep their order, which may be random.
    if unlabelled:
        both.sort(key=lambda pair: task.canonical_key(pair[0]))
    return [obj for obj, _ in both], [place for place, (_, has_label) in enumerate(both) if not has_label]


def _teach_besides(target: Target, position: int, label: int, weight: float) -> None:
    """Set a label, unless the token has one: a token that holds a part of a coordinate keeps the coordinate's label."""
    if target.labels[position] == IGNORED:
        target.labels[position], target.loss_weights[position] = label, weight


def ground_truth_target(sample: Sample, task: ObjectTask, tokenizer: Tokenizer, desc_weight: float = 1.0) -> Target:
    """Return the whole answer for plain teacher forcing: every object of `sample` in canonical order."""
    tail = task.serialize(sample.objects, after=None)
    return _with_tail(np.empty(0, dtype=np.int64), tail, pieces_of(tokenizer), desc_weight)


def _with_tail(
    prefix: NDArray[np.int64],
    tail: SerializedTail,
    pieces: TokenPieces,
    desc_weight: float,
    untaught: Collection[int] = (),
) -> Target:
    """Return prefix, tail and EOS. The prefix has no labels. Tail and EOS have labels, except the tail's objects with
    the indices `untaught`."""
    text = tokens_of(tail.text, pieces)
    target = continued(prefix, text, pieces.tokenizer.eos_token_id)
    token_ids, weights = target.token_ids, target.loss_weights
    marked = [(span, desc_weight) for span in tail.desc_spans] if desc_weight != 1.0 else []
    marked += [(tail.object_spans[place], 0.0) for place in untaught]
    in_bytes = _byte_spans(tail.text, [span for span, _ in marked])
    for (first, last), (_, weight) in zip(in_bytes, marked, strict=True):
        if first < last:
            begin = len(prefix) + text.token_at(first)
            weights[begin : len(prefix) + text.tokens_until(last)] = weight
    return replace(target, labels=np.where(weights > 0, token_ids, IGNORED))


def _byte_spans(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans of characters as spans of the text's UTF-8 bytes."""
    if text.isascii() or not spans:
        return spans
    offsets = np.cumsum([0, *(len(char.encode()) for char in text)])
    return [(int(offsets[first]), int(offsets[last])) for first, last in spans]
