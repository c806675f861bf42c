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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from learner.records import Assignment, CoordSlot, EncodedPrompt, Sample, Segment, Target
from learner.supervision import IGNORED, check_supervision
from learner.tasks.pieces import TokenPieces, TokenText, pieces_of
from learner.tasks.task import SerializedTail, Task, Tokenizer
from shared.errors import LossError

_NUM_BINS = 1000
_CACHED_PLACES = 1 << 16


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


def _with_tail(
    prefix: tuple[int, ...], tail: SerializedTail, pieces: TokenPieces, eos_token_id: int | None, desc_weight: float
) -> Target:
    """Prefix, tail and EOS, with the prefix ignored and the tail supervised."""
    tail_ids = pieces.encode_long(tail.text)
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
    spelling = _spelling_of(task.coordinate_text, pieces.tokenizer)
    single = spelling.single_tokens
    numbers = _NumberLabels(token_ids, spelling)
    labels: dict[int, int] = {}
    for index, truth_index, _ in assignment.pairs:
        predicted, wanted = parsed.objects[index], truth[truth_index]
        if predicted.object.kind != wanted.kind or len(predicted.slots) != len(wanted.bins):
            continue
        for slot, value in zip(predicted.slots, wanted.bins, strict=True):
            start, end, own, _ = slot
            if not 0 <= start < end < len(token_ids):
                raise _slot_error(slot, len(token_ids) - 1)
            if single and end == start + 1 and token_ids[start] == single[own]:
                labels[start] = single[value]  # a token of its own: no other number can claim it
            else:
                labels.update(numbers.labels(slot, value))
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

    def __init__(self, token_ids: Sequence[int], spelling: _Spelling) -> None:
        self._ids = token_ids
        self._spelling = spelling
        self._text: TokenText | None = None
        self._taken = 0  # tokens in front of this one belong to earlier numbers

    def labels(self, slot: CoordSlot, value: int) -> Iterable[tuple[int, int]]:
        """(position, label): what the tokens of `slot` should have been for the number to be `value`."""
        wanted = self._ids[slot.start : slot.end] if slot.bin == value else self._until_parting(slot, value)
        first = max(self._taken, slot.start)
        labels = zip(range(first, slot.start + len(wanted)), wanted[first - slot.start :], strict=True)
        self._taken = max(self._taken, slot.end, slot.start + len(wanted))
        return labels

    def _until_parting(self, slot: CoordSlot, value: int) -> Sequence[int]:
        """The tokens of `value` in the slot's place, up to the first that differs from the answer's own."""
        self._text = text = self._text or self._spelling.pieces.text(self._ids)
        start, end, predicted, lead = slot
        begin = text.start(start)
        number = begin + lead
        behind = number + len(self._spelling.texts[predicted])
        wanted = self._spelling.between(text.data[begin:number], value, text.data[behind : text.ends[end]])
        for i, (token, own_token) in enumerate(zip(wanted, self._ids[start : end + 1], strict=False)):
            if token != own_token:
                return wanted[: i + 1]
        raise LossError(
            "a ground-truth number can't be told from the predicted one by its tokens",
            found=f"{wanted} for {value}, {list(self._ids[start : end + 1])} for {predicted}",
            wanted="tokens that part in the number or right after it",
            remedy="use a tokenizer that keeps the characters of numbers",
        )


class _Spelling:
    """How one tokenizer spells the thousand coordinates. Made by `_spelling_of`."""

    def __init__(self, coordinate_text: Callable[[int], str], pieces: TokenPieces) -> None:
        self.pieces = pieces
        self.texts = tuple(coordinate_text(value) for value in range(_NUM_BINS))
        encoded = [pieces.encode(text) for text in self.texts]
        # Bin -> token id where each coordinate is one token of its own; empty otherwise.
        self.single_tokens = tuple(ids[0] for ids in encoded) if all(len(ids) == 1 for ids in encoded) else ()
        self.between = lru_cache(maxsize=_CACHED_PLACES)(self._between)

    def _between(self, left: bytes, value: int, right: bytes) -> tuple[int, ...]:
        """The tokens of `value` between these bytes; a character that is torn by their ends is left out."""
        return self.pieces.encode(left.decode(errors="ignore") + self.texts[value] + right.decode(errors="ignore"))


@lru_cache(maxsize=8)
def _spelling_of(coordinate_text: Callable[[int], str], tokenizer: Tokenizer) -> _Spelling:
    return _Spelling(coordinate_text, pieces_of(tokenizer))
