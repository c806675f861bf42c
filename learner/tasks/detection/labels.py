"""Finds labels for matched coordinates and descriptions among the rollout's own tokens ("Loss on Y_train").

In: an `Assignment`, and the tokens of its prefix with the token after it. Out: positions of supervised tokens, and
their labels. No side effects.

The rule is the same for both spellings of coordinates (one coordinate token, or digits). The predicted number and the
true number are compared token by token. Up to the first difference each token is its own label. At the first difference
the label is the true number's token. The predicted number's tokens after the first difference are masked. A coordinate
token is a number of one token, so its label is the true token. One token may hold digits and also brackets, commas or
spaces (`spelling.py`). If the true number is longer (`123,` instead of `12,`), the first difference may be at the token
after the predicted number. The token after the predicted number may already belong to the tail. If a token holds parts
of two numbers, it gets the first number's label. A matched pair is not supervised if its kinds of geometry differ, or
if its polygons have different numbers of points. All numbers of an answer are labelled in one call, because there are
hundreds.

Descriptions (`loss.matched_desc_weight`). Matching uses IoU alone, so a prediction with the right box may have the
wrong name. The prefix's text has weight 0 in the loss on Y_train, so wrong names are corrected only with
`loss.matched_desc_weight`. The rule for numbers also holds for names: tokens are their own labels up to the first
difference, where the label is the true token. Later tokens of the name are masked. A token that holds any byte of the
description belongs to it. If the true description is longer, the first difference may be at the token after the
description. The tokenizer may split the description's text into other tokens than the rollout's. In this case the whole
description is masked (not learned).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from learner.extensions import Tokenizer
from learner.records import Assignment, PredictedObject
from learner.tasks.detection.spelling import NO_TOKEN, WINDOW, Ints, Numbers, spelling_of
from learner.tasks.tokens import TokenPieces, TokenText, pieces_of, ranges
from shared.errors import LossError


def description_labels(
    assignment: Assignment, desc_text: Callable[[str], str], tokenizer: Tokenizer
) -> Iterator[tuple[int, int]]:
    """Yield (position in the prefix, label) of every supervised token of a matched description."""
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    pieces = pieces_of(tokenizer)
    text = pieces.text(parsed.token_ids[: parsed.prefix_length].tolist())
    for index, truth_index, _ in assignment.pairs:
        predicted, wanted = parsed.objects[index], truth[truth_index].desc
        begin, end = _inside_quotes(predicted)
        if end >= len(text.data):
            continue  # the description's last token also holds text that the tail repeats
        if predicted.object.desc == wanted:
            tokens = range(text.token_at(begin), text.tokens_until(end))
            yield from zip(tokens, text.ids[tokens].tolist(), strict=True)
        else:
            yield from _up_to_parting(text, predicted, desc_text(wanted), pieces)


def _up_to_parting(
    text: TokenText, predicted: PredictedObject, wanted: str, pieces: TokenPieces
) -> Iterator[tuple[int, int]]:
    """Yield (position, label) of the tokens of a wrong name, up to the first token that differs. The labels are the
    tokens of `wanted` that cover the same character positions. Yield nothing if the answer's own tokens differ from the
    tokenizer's tokens."""
    begin, end = _inside_quotes(predicted)
    first, last = text.token_at(begin), text.tokens_until(end)  # `last` is the token after the description
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
    """Return the tokens of the bytes; None if they are not UTF-8, because a character is cut at either end."""
    try:
        return list(pieces.encode(data.decode()))
    except UnicodeDecodeError:
        return None


def coordinate_labels(
    assignment: Assignment, token_ids: Ints, coordinate_text: Callable[[int], str], tokenizer: Tokenizer
) -> tuple[Ints, Ints]:
    """Return the supervised positions in `token_ids` (the prefix and the token after it), and the label of each.

    Raises LossError if a coordinate's tokens are not in the prefix, or if two numbers have the same tokens.
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
    """Return the positions of the tokens to learn in N predicted numbers, and their labels. `tokens` [N, W]: the first
    W tokens of the true number, written in place of the predicted number."""
    right = numbers.bin == numbers.wanted
    parting = numbers.start + _first_difference(numbers, tokens, token_ids, right)
    behind = np.where(right, numbers.end, parting + 1)
    # A token that holds parts of two numbers belongs to the first one.
    first = np.maximum(numbers.start, _taken_before(np.maximum(numbers.end, behind)))

    labels = token_ids.copy()
    leaves = np.flatnonzero(~right & (parting >= first))
    labels[parting[leaves]] = tokens[leaves, (parting - numbers.start)[leaves]]
    positions = ranges(first, np.maximum(behind - first, 0))
    return positions, labels[positions]


def _corresponding(assignment: Assignment) -> Numbers:
    """Return the coordinates of matched predictions, each with its true bin."""
    parsed, truth = assignment.parsed, assignment.parsed.rollout.sample.objects
    first: list[int] = []
    lengths: list[int] = []
    wanted: list[int] = []
    for index, truth_index, _ in assignment.pairs:
        said, slots, _ = parsed.objects[index]
        true = truth[truth_index]
        if said.kind == true.kind and len(slots) == len(true.bins):
            first.append(slots.start)
            lengths.append(len(slots))
            wanted += true.bins
    at = ranges(np.array(first, dtype=np.int64), np.array(lengths, dtype=np.int64))
    start, end, written, lead = [column[at] for column in parsed.slots]
    return Numbers(start, end, written, lead, np.array(wanted, dtype=np.int64))


def _require_inside(numbers: Numbers, prefix_length: int) -> None:
    inside = (numbers.start >= 0) & (numbers.start < numbers.end) & (numbers.end <= prefix_length)
    if not inside.all():
        i = int(inside.argmin())
        raise LossError(
            "a matched coordinate is not in the prefix",
            found=f"tokens {numbers.start[i]}..{numbers.end[i]} of a prefix of {prefix_length}",
            wanted="tokens inside the prefix",
            remedy="this is a bug in the task's parser: please report the sample",
        )


def _first_difference(numbers: Numbers, tokens: Ints, token_ids: Ints, right: NDArray[np.bool_]) -> Ints:
    """Return for each predicted number [N] how many of its first tokens are also the first tokens of its true number.
    The value is undefined where `right` (the numbers are equal) is True."""
    at = numbers.start[:, None] + np.arange(WINDOW)
    own = token_ids.take(at, mode="clip")
    differs = (own != tokens) & (tokens != NO_TOKEN) & (at <= numbers.end[:, None])
    alike = ~(differs.any(axis=1) | right)
    if alike.any():
        i = int(alike.argmax())
        raise LossError(
            "a ground-truth number and the predicted one have the same tokens",
            found=f"{tokens[i].tolist()} for {numbers.wanted[i]}, {own[i].tolist()} for {numbers.bin[i]}",
            wanted="tokens that differ in the number or right after it",
            remedy="use a tokenizer that keeps the characters of numbers",
        )
    return differs.argmax(axis=1)


def _taken_before(behind: Ints) -> Ints:
    """Return, for each of N coordinates, the position after the tokens that earlier coordinates use: the running
    maximum of `behind`, shifted by one; 0 for the first. `behind` [N]: for each coordinate, the position after the last
    token that it labels or masks."""
    return np.concatenate([[0], np.maximum.accumulate(behind)[:-1]])
