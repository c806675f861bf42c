"""Labels of matched coordinates, in the rollout's own context ("Loss on Y_train").

In: an `Assignment`, and the tokens of its prefix with the one that follows. Out: which of these are supervised, and
what each should have been. Pure. Called by `learner.target.target`.

One rule for both spellings: the number's own tokens count as far as the ground-truth number has the same ones; at the
first token where it leaves them, the ground-truth token is the label; what follows in the number is masked. A
coordinate token is a number of one token, so there the ground truth simply is the label. Digits may be fused with
their surroundings (`coordinate_spelling.py`): the token where the two part may hold structure too, and may be the one
after the number, where the ground truth is longer (`12,` against `123,`), even if that one already belongs to the
tail. Where two numbers claim one token, the first has it. A pair of different kinds of geometry, or of polygons with
different numbers of points, has no corresponding slots and is not supervised.

An answer's N numbers are labelled together: there are hundreds in each.

Labels of matched descriptions, in the rollout's own context (`loss.matched_desc_weight`).

Matching goes by IoU alone, so a prediction in the right place may have the wrong name, and the loss on Y_train has no
word on it: prefix text has weight 0. Where names are what a model gets wrong, that leaves its errors as they are.

In: an `Assignment`. Out: which tokens of its prefix are supervised, and what each should have been. Pure.
The rule is that of numbers (`coordinate_labels.py`): own tokens count as far as the true description
has the same ones; at the first token where it leaves them, its token is the label; what follows is masked. A token
that holds any byte of the description is one of its tokens; where the true one is longer, the parting token may be the
one behind it. A description is masked whole where the rollout cut its text in other tokens than the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, PredictedObject
from learner.target.spelling import NO_TOKEN, WINDOW, Ints, Numbers, spelling_of
from learner.tasks.task import Tokenizer
from learner.tasks.tokens import TokenPieces, TokenText, pieces_of, ranges
from shared.errors import LossError


def description_labels(
    assignment: Assignment, desc_text: Callable[[str], str], tokenizer: Tokenizer
) -> Iterator[tuple[int, int]]:
    """(position in the prefix, label) of every supervised token of a matched description."""
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    pieces = pieces_of(tokenizer)
    text = pieces.text(parsed.token_ids[: parsed.prefix_length].tolist())
    for index, truth_index, _ in assignment.pairs:
        predicted, wanted = parsed.objects[index], truth[truth_index].desc
        begin, end = _inside_quotes(predicted)
        if end >= len(text.data):
            continue  # fused with the prefix's end, which the tail gives back
        if predicted.object.desc == wanted:
            tokens = range(text.token_at(begin), text.tokens_until(end))
            yield from zip(tokens, text.ids[tokens].tolist(), strict=True)
        else:
            yield from _up_to_parting(text, predicted, desc_text(wanted), pieces)


def _up_to_parting(
    text: TokenText, predicted: PredictedObject, wanted: str, pieces: TokenPieces
) -> Iterator[tuple[int, int]]:
    """The labels where `wanted` is not what was said: its tokens in the same place, between the same bytes."""
    begin, end = _inside_quotes(predicted)
    first, last = text.token_at(begin), text.tokens_until(end)  # with the token behind the description
    last = min(last, len(text.ids) - 1)
    before, behind = text.data[text.start(first) : begin], text.data[end : text.ends[last]]
    own = text.ids[first : last + 1].tolist()
    if _encoded(before + text.data[begin:end] + behind, pieces) != own:
        return
    labels = _encoded(before + wanted.encode() + behind, pieces) or []
    for position, (token, label) in enumerate(zip(own, labels, strict=False), start=first):
        yield position, label
        if token != label:
            return


def _inside_quotes(predicted: PredictedObject) -> tuple[int, int]:
    begin, end = predicted.desc_bytes
    return begin + 1, end - 1


def _encoded(data: bytes, pieces: TokenPieces) -> list[int] | None:
    """None where the bytes are no text: a character is torn at either end."""
    try:
        return list(pieces.encode(data.decode()))
    except UnicodeDecodeError:
        return None


def coordinate_labels(
    assignment: Assignment, token_ids: Ints, coordinate_text: Callable[[int], str], tokenizer: Tokenizer
) -> tuple[Ints, Ints]:
    """Positions in `token_ids`, which are the prefix and the token that follows it, and the label of each.

    Raises LossError where a coordinate's tokens are not in the prefix, or two numbers can't be told apart.
    """
    numbers = _corresponding(assignment)
    if not len(numbers.start):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    _require_inside(numbers, len(token_ids) - 1)
    spelling = spelling_of(coordinate_text, tokenizer)
    if spelling.are_single(numbers, token_ids):
        return numbers.start, spelling.single_tokens[numbers.wanted]
    return _labels_of(numbers, spelling.tokens_in_place(numbers, token_ids), token_ids)


def _labels_of(numbers: Numbers, tokens: Ints, token_ids: Ints) -> tuple[Ints, Ints]:
    """Positions and labels; `tokens` [N, W] are what the true numbers begin with."""
    right = numbers.bin == numbers.wanted
    parting = numbers.start + _first_difference(numbers, tokens, token_ids, right)
    behind = np.where(right, numbers.end, parting + 1)
    first = np.maximum(numbers.start, _taken_before(np.maximum(numbers.end, behind)))

    labels = token_ids.copy()
    leaves = np.flatnonzero(~right & (parting >= first))
    labels[parting[leaves]] = tokens[leaves, (parting - numbers.start)[leaves]]
    positions = ranges(first, np.maximum(behind - first, 0))
    return positions, labels[positions]


def _corresponding(assignment: Assignment) -> Numbers:
    """The coordinates of matched predictions, and the bin that the truth has for each."""
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    first: list[int] = []
    lengths: list[int] = []
    wanted: list[int] = []
    for index, truth_index, _ in assignment.pairs:
        (_, kind, _), slots, _ = parsed.objects[index]
        _, true_kind, true_bins = truth[truth_index]
        if kind == true_kind and len(slots) == len(true_bins):
            first.append(slots.start)
            lengths.append(len(slots))
            wanted += true_bins
    at = ranges(np.array(first, dtype=np.int64), np.array(lengths, dtype=np.int64))
    start, end, said, lead = [column[at] for column in parsed.slots]
    return Numbers(start, end, said, lead, np.array(wanted, dtype=np.int64))


def _require_inside(numbers: Numbers, prefix_length: int) -> None:
    inside = (numbers.start >= 0) & (numbers.start < numbers.end) & (numbers.end <= prefix_length)
    if not inside.all():
        i = int(inside.argmin())
        raise LossError(
            "a matched coordinate is not in the prefix",
            found=f"tokens {numbers.start[i]}..{numbers.end[i]} of a prefix of {prefix_length}",
            wanted="tokens inside the prefix",
            remedy="the task's parser is at fault",
        )


def _first_difference(numbers: Numbers, tokens: Ints, token_ids: Ints, right: NDArray[np.bool_]) -> Ints:
    """[N] how many tokens each number shares with the truth's. Means nothing for those that are `right`."""
    at = numbers.start[:, None] + np.arange(WINDOW)
    own = token_ids.take(at, mode="clip")
    differs = (own != tokens) & (tokens != NO_TOKEN) & (at <= numbers.end[:, None])
    alike = ~(differs.any(axis=1) | right)
    if alike.any():
        i = int(alike.argmax())
        raise LossError(
            "a ground-truth number can't be told from the predicted one by its tokens",
            found=f"{tokens[i].tolist()} for {numbers.wanted[i]}, {own[i].tolist()} for {numbers.bin[i]}",
            wanted="tokens that part in the number or right after it",
            remedy="use a tokenizer that keeps the characters of numbers",
        )
    return differs.argmax(axis=1)


def _taken_before(behind: Ints) -> Ints:
    """[N] for each number, the first token that no earlier one has; `behind` is where each one's tokens end."""
    return np.concatenate([[0], np.maximum.accumulate(behind)[:-1]])
