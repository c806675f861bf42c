"""Y_train: what the model wrote, continued by what it missed, with labels and loss weights ("Loss on Y_train").

In: an `Assignment` (or a sample alone, for plain teacher forcing). Out: a `Target`, and with a prompt a `Segment`.

    token_ids   [ rollout prefix | tail: missed objects, closer | EOS ]
    labels      [ matched coordinates towards ground truth, else -100 | the tail's own tokens | EOS ]

Invariants: the prefix is the rollout's own token ids; every missed object is in the tail, in canonical order;
`labels[i] == -100` exactly where `loss_weights[i] == 0`; nothing outside the assistant span is supervised. Pure.
Called by the trainer's target stage.

Tail. Weight 1, and `desc_weight` on every token that holds any byte of a description, fused ones included.

Matched coordinates. One rule for both spellings: the number's own tokens count as far as the ground-truth number has
the same ones; at the first token where it leaves them, the ground-truth token is the label; what follows in the
number is masked. A coordinate token is a number of one token, so there the ground truth simply is the label. Digits
may be fused with their surroundings (`[1`, `0, 2`, `7]}`): the ground-truth number is tokenized in the predicted
one's place, between the same characters, up to the end of the token after the number. So the token where the two part
may hold structure too, and may be the one after the number, where the ground truth is longer (`12,` against `123,`),
even if that one already belongs to the tail. Where two numbers claim one token, the first has it. A pair of different
kinds of geometry, or of polygons with different numbers of points, has no corresponding slots and is not supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from learner.records import Assignment, CoordSlot, EncodedPrompt, Sample, Segment, Target
from learner.tasks.pieces import TokenPieces, TokenText, pieces_of
from learner.tasks.task import SerializedTail, Task, Tokenizer
from shared.errors import LossError

IGNORED = -100
_NUM_BINS = 1000


def build_target(
    assignment: Assignment,
    task: Task,
    tokenizer: Tokenizer,
    eos_token_id: int | None = None,
    desc_weight: float = 1.0,
) -> Target:
    """Y_train of a matched rollout, ended by `eos_token_id` (None: the tokenizer's).

    Raises LossError where a coordinate's tokens are not in the prefix.
    """
    parsed = assignment.parsed
    truth = parsed.rollout.sample.objects
    tail = task.serialize([truth[i] for i in assignment.missed], after=parsed)
    prefix = parsed.rollout.response_token_ids[: parsed.prefix_length]
    target = _with_tail(prefix, tail, pieces_of(tokenizer), eos_token_id, desc_weight)
    token_ids = (*prefix, int(target.token_ids[len(prefix)]))
    labels = _coordinate_labels(assignment, token_ids, task, pieces_of(tokenizer))
    positions = list(labels)
    target.labels[positions] = list(labels.values())
    target.loss_weights[positions] = 1.0
    return target


def ground_truth_target(
    sample: Sample, task: Task, tokenizer: Tokenizer, eos_token_id: int | None = None, desc_weight: float = 1.0
) -> Target:
    """The whole answer, teacher-forced: every object of `sample` in canonical order (stage 1, Channel-A)."""
    tail = task.serialize(sample.objects, after=None)
    return _with_tail((), tail, pieces_of(tokenizer), eos_token_id, desc_weight)


def build_segment(
    prompt: EncodedPrompt,
    target: Target,
    *,
    sample_id: str,
    ver: int | None = None,
    stats: Mapping[str, float] | None = None,
) -> Segment:
    """Prompt + Y_train. Raises LossError where the target's parts do not fit or there is no prompt to predict from."""
    num_prompt, num_target = len(prompt.token_ids), len(target.token_ids)
    if not num_prompt or not (num_target == len(target.labels) == len(target.loss_weights)):
        raise LossError(
            f"sample {sample_id}: prompt and target do not make a segment",
            found=f"{num_prompt} prompt tokens, {num_target} target tokens, {len(target.labels)} labels, "
            f"{len(target.loss_weights)} weights",
            wanted="at least one prompt token, and a label and a weight for each target token",
            remedy="encode the prompt with the chat template, and build the target with learner.target",
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


def check_supervision(segment: Segment) -> None:
    """Raise LossError unless every supervised index lies in the assistant span, with label and weight agreeing."""
    supervised = np.flatnonzero((segment.labels != IGNORED) | (segment.loss_weights != 0))
    outside = supervised[supervised < segment.prompt_length]
    weights = segment.loss_weights[supervised]
    unlike = supervised[(segment.labels[supervised] < 0) | ~np.isfinite(weights) | (weights <= 0)]
    wrong = np.concatenate([outside, unlike])
    if wrong.size:
        raise LossError(
            f"sample {segment.sample_id}: supervision outside the assistant span, or label and weight disagree",
            found=f"positions {wrong[:8].tolist()} of a segment of {len(segment)} tokens",
            wanted=f"supervised positions from {segment.prompt_length} on, each with a label and a weight above 0",
            remedy="the target builder or whoever changed its labels is at fault",
        )


def _with_tail(
    prefix: tuple[int, ...], tail: SerializedTail, pieces: TokenPieces, eos_token_id: int | None, desc_weight: float
) -> Target:
    """Prefix, tail and EOS, with the prefix ignored and the tail supervised."""
    tail_ids = pieces.tokenizer.encode(tail.text, add_special_tokens=False)
    text = pieces.text(tail_ids)
    if text.data != tail.text.encode():
        raise LossError(
            "the tokenizer does not keep the target's text",
            found=repr(text.data.decode(errors="replace"))[:300],
            wanted=repr(tail.text)[:300],
            remedy="use descriptions that survive tokenization; Task.validate finds them",
        )
    eos = pieces.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    token_ids = np.array([*prefix, *tail_ids, eos], dtype=np.int64)
    weights = np.ones(len(token_ids), dtype=np.float32)
    weights[: len(prefix)] = 0.0
    for first, last in _byte_spans(tail):
        begin = len(prefix) + text.token_at(first)
        weights[begin : len(prefix) + text.tokens_until(last)] = desc_weight
    labels = np.where(weights > 0, token_ids, IGNORED)
    return Target(token_ids=token_ids, labels=labels, loss_weights=weights, prefix_length=len(prefix))


def _byte_spans(tail: SerializedTail) -> list[tuple[int, int]]:
    """The description spans as offsets into the text's UTF-8 bytes."""
    spans = [(first, last) for first, last in tail.desc_spans if first < last]
    if tail.text.isascii():
        return spans
    offsets = np.cumsum([0, *(len(char.encode()) for char in tail.text)])
    return [(int(offsets[first]), int(offsets[last])) for first, last in spans]


# ---- matched coordinates -------------------------------------------------------------------------------------------


def _coordinate_labels(
    assignment: Assignment, token_ids: Sequence[int], task: Task, pieces: TokenPieces
) -> dict[int, int]:
    """Position in Y_train -> label, of every supervised coordinate token.

    `token_ids` are the prefix and the tail's first token, which follows a number that the prefix ends with.
    """
    parsed = assignment.parsed
    truth = parsed.rollout.sample.objects
    single = _single_tokens(task.coordinate_text, pieces.tokenizer)
    numbers = _NumberLabels(token_ids, task.coordinate_text, pieces)
    labels: dict[int, int] = {}
    for index, truth_index, _ in assignment.pairs:
        predicted, wanted = parsed.objects[index], truth[truth_index]
        if predicted.object.kind != wanted.kind or len(predicted.slots) != len(wanted.bins):
            continue
        for slot, value in zip(predicted.slots, wanted.bins, strict=True):
            start, end = slot.start, slot.end
            if not 0 <= start < end < len(token_ids):
                raise _slot_error(slot, len(token_ids) - 1)
            if single and end == start + 1 and token_ids[start] == single[slot.bin]:
                labels[start] = single[value]  # a token of its own: no other number can claim it
            else:
                labels |= numbers.labels(slot, value)
    return labels


def _slot_error(slot: CoordSlot, prefix_length: int) -> LossError:
    return LossError(
        "a matched coordinate is not in the prefix",
        found=f"tokens {slot.start}..{slot.end} of a prefix of {prefix_length}",
        wanted="tokens inside the prefix",
        remedy="the task's parser is at fault",
    )


class _NumberLabels:
    """Labels of one answer's numbers, asked for in the order in which they stand there."""

    def __init__(self, token_ids: Sequence[int], coordinate_text: Callable[[int], str], pieces: TokenPieces) -> None:
        self._ids = token_ids
        self._coordinate_text = coordinate_text
        self._pieces = pieces
        self._text: TokenText | None = None
        self._taken = 0  # tokens in front of this one belong to earlier numbers

    def labels(self, slot: CoordSlot, value: int) -> dict[int, int]:
        """What the tokens of `slot` should have been for the number to be `value`."""
        wanted = self._ids[slot.start : slot.end] if slot.bin == value else self._until_parting(slot, value)
        labels = {at: label for at, label in enumerate(wanted, start=slot.start) if at >= self._taken}
        self._taken = max(self._taken, slot.end, slot.start + len(wanted))
        return labels

    def _until_parting(self, slot: CoordSlot, value: int) -> Sequence[int]:
        """The tokens of `value` in the slot's place, up to the first that differs from the answer's own."""
        self._text = text = self._text or self._pieces.text(self._ids)
        begin = text.start(slot.start)
        number = begin + slot.lead
        behind = number + len(self._coordinate_text(slot.bin))
        left = text.data[begin:number].decode(errors="ignore")
        right = text.data[behind : text.ends[slot.end]].decode(errors="ignore")
        wanted = self._pieces.encode(left + self._coordinate_text(value) + right)
        own = self._ids[slot.start : slot.end + 1]
        for i, (token, own_token) in enumerate(zip(wanted, own, strict=False)):
            if token != own_token:
                return wanted[: i + 1]
        raise LossError(
            "a ground-truth number can't be told from the predicted one by its tokens",
            found=f"{wanted} for {value}, {list(own)} for {slot.bin}",
            wanted="tokens that part in the number or right after it",
            remedy="use a tokenizer that keeps the characters of numbers",
        )


@lru_cache(maxsize=8)
def _single_tokens(coordinate_text: Callable[[int], str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Bin -> token id where each of the 1,000 coordinates is one token of its own; empty otherwise."""
    encoded = [pieces_of(tokenizer).encode(coordinate_text(value)) for value in range(_NUM_BINS)]
    return tuple(ids[0] for ids in encoded) if all(len(ids) == 1 for ids in encoded) else ()
