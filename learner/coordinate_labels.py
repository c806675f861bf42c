"""Labels of matched coordinates, in the rollout's own context ("Loss on Y_train").

In: an `Assignment`, and the tokens of its prefix with the one that follows. Out: which of these are supervised, and
what each should have been. Pure. Called by `learner.target`.

One rule for both spellings: the number's own tokens count as far as the ground-truth number has the same ones; at the
first token where it leaves them, the ground-truth token is the label; what follows in the number is masked. A
coordinate token is a number of one token, so there the ground truth simply is the label. Digits may be fused with
their surroundings (`coordinate_spelling.py`): the token where the two part may hold structure too, and may be the one
after the number, where the ground truth is longer (`12,` against `123,`), even if that one already belongs to the
tail. Where two numbers claim one token, the first has it. A pair of different kinds of geometry, or of polygons with
different numbers of points, has no corresponding slots and is not supervised.

An answer's N numbers are labelled together: there are hundreds in each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from learner.coordinate_spelling import NO_TOKEN, WINDOW, Ints, Numbers, spelling_of
from learner.records import Assignment
from learner.tasks.ranges import ranges
from learner.tasks.task import Tokenizer
from shared.errors import LossError


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
