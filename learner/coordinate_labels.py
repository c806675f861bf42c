"""Labels of matched coordinates, in the rollout's own context ("Loss on Y_train").

In: an `Assignment`, and the tokens of its prefix with the one that follows. Out: which of these are supervised, and
what each should have been. Pure. Called by `learner.target`.

One rule for both spellings: the number's own tokens count as far as the ground-truth number has the same ones; at the
first token where it leaves them, the ground-truth token is the label; what follows in the number is masked. A
coordinate token is a number of one token, so there the ground truth simply is the label. Digits may be fused with
their surroundings (`[1`, `0, 2`, `7]}`): the ground-truth number is tokenized in the predicted one's place, between
the same characters, up to the end of the token after the number. So the token where the two part may hold structure
too, and may be the one after the number, where the ground truth is longer (`12,` against `123,`), even if that one
already belongs to the tail. Where two numbers claim one token, the first has it. A pair of different kinds of
geometry, or of polygons with different numbers of points, has no corresponding slots and is not supervised.

An answer's N numbers are labelled together: there are hundreds in each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import Assignment, CoordSlot
from learner.tasks.pieces import TokenPieces, pieces_of
from learner.tasks.task import Tokenizer
from shared.errors import LossError

_NUM_BINS = 1000
_MAX_PLACES = 1 << 10
_WINDOW = 4  # tokens: a number has at most three characters, so by the token after it two numbers have parted
_NO_TOKEN, _NOT_MET = -1, -2

Ints = NDArray[np.int64]


class _Numbers(NamedTuple):
    """Matched coordinates in the order in which they stand, each field [N]: `CoordSlot`'s, and the truth."""

    start: Ints
    end: Ints
    bin: Ints
    lead: Ints
    wanted: Ints  # the ground truth's bin


class _Place(NamedTuple):
    """What stands around a number: `lead` bytes of the token `before`, and `tail` bytes of the token `last`, which the
    number shares with them (_NO_TOKEN where there are none), and the token `after` that."""

    before: int
    lead: int
    last: int
    tail: int
    after: int


def coordinate_labels(
    assignment: Assignment, token_ids: Ints, coordinate_text: Callable[[int], str], tokenizer: Tokenizer
) -> tuple[Ints, Ints]:
    """Positions in `token_ids`, which are the prefix and the token that follows it, and the label of each.

    Raises LossError where a coordinate's tokens are not in the prefix, or two numbers can't be told apart.
    """
    slots, wanted_bins = _corresponding(assignment)
    if not slots:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    fields = np.fromiter(chain.from_iterable(slots), dtype=np.int64, count=4 * len(slots)).reshape(-1, 4)
    start, end, own, lead = fields.T
    numbers = _Numbers(start, end, own, lead, np.array(wanted_bins))
    _require_inside(numbers, slots, len(token_ids) - 1)
    spelling = _spelling_of(coordinate_text, tokenizer)
    if spelling.are_single(numbers, token_ids):
        return numbers.start, spelling.single_tokens[numbers.wanted]
    return _labels_of(numbers, spelling.tokens_in_place(numbers, token_ids), token_ids)


def _labels_of(numbers: _Numbers, tokens: Ints, token_ids: Ints) -> tuple[Ints, Ints]:
    """Positions and labels; `tokens` [N, W] are what the true numbers begin with."""
    right = numbers.bin == numbers.wanted
    parting = numbers.start + _first_difference(numbers, tokens, token_ids, right)
    behind = np.where(right, numbers.end, parting + 1)
    first = np.maximum(numbers.start, _taken_before(np.maximum(numbers.end, behind)))

    labels = token_ids.copy()
    leaves = np.flatnonzero(~right & (parting >= first))
    labels[parting[leaves]] = tokens[leaves, (parting - numbers.start)[leaves]]
    positions = _covered(first, behind, len(token_ids))
    return positions, labels[positions]


def _corresponding(assignment: Assignment) -> tuple[list[CoordSlot], list[int]]:
    """Slots of matched predictions, and the bin that the truth has for each."""
    truth = assignment.parsed.rollout.sample.objects
    slots: list[CoordSlot] = []
    wanted: list[int] = []
    for index, truth_index, _ in assignment.pairs:
        predicted, true = assignment.parsed.objects[index], truth[truth_index]
        if predicted.object.kind == true.kind and len(predicted.slots) == len(true.bins):
            slots += predicted.slots
            wanted += true.bins
    return slots, wanted


def _require_inside(numbers: _Numbers, slots: list[CoordSlot], prefix_length: int) -> None:
    inside = (numbers.start >= 0) & (numbers.start < numbers.end) & (numbers.end <= prefix_length)
    if not inside.all():
        slot = slots[int(inside.argmin())]
        raise LossError(
            "a matched coordinate is not in the prefix",
            found=f"tokens {slot.start}..{slot.end} of a prefix of {prefix_length}",
            wanted="tokens inside the prefix",
            remedy="the task's parser is at fault",
        )


def _first_difference(numbers: _Numbers, tokens: Ints, token_ids: Ints, right: NDArray[np.bool_]) -> Ints:
    """[N] how many tokens each number shares with the truth's. Means nothing for those that are `right`."""
    at = numbers.start[:, None] + np.arange(_WINDOW)
    own = token_ids.take(at, mode="clip")
    differs = (own != tokens) & (tokens != _NO_TOKEN) & (at <= numbers.end[:, None])
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


def _covered(first: Ints, behind: Ints, length: int) -> Ints:
    """The positions in 0..length that are in any of the ranges first..behind, which do not overlap."""
    some = first < behind
    steps = np.zeros(length + 1, dtype=np.int8)
    steps[first[some]] += 1
    steps[behind[some]] -= 1
    return np.flatnonzero(steps.cumsum(dtype=np.int8))


class _Spelling:
    """How one tokenizer spells the thousand coordinates. Made by `_spelling_of`."""

    def __init__(self, coordinate_text: Callable[[int], str], pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._texts = tuple(coordinate_text(value) for value in range(_NUM_BINS))
        self._lengths = np.array([len(text) for text in self._texts])
        encoded = [pieces.encode(text) for text in self._texts]
        # Bin -> the token that it is; empty where some coordinates are several tokens.
        self.single_tokens = np.array([ids[0] for ids in encoded] if all(len(ids) == 1 for ids in encoded) else [])
        self._places: dict[_Place, int] = {}
        # [place, bin, W] the first tokens of each number there, as they are met. Dense: an answer asks for hundreds.
        self._tokens = np.full((1, _NUM_BINS, _WINDOW), _NOT_MET, dtype=np.int32)

    def are_single(self, numbers: _Numbers, token_ids: Ints) -> bool:
        """Whether each number is a token of its own: then it does not matter what is beside it."""
        return len(self.single_tokens) > 0 and bool((token_ids[numbers.start] == self.single_tokens[numbers.bin]).all())

    def tokens_in_place(self, numbers: _Numbers, token_ids: Ints) -> Ints:
        """[N, W] the first tokens of each true number in the predicted one's place; _NO_TOKEN behind its last."""
        start, end, own, lead, wanted = numbers
        lengths = self._pieces.lengths(token_ids)
        ends = lengths.cumsum()
        tail = ends[end - 1] - (ends - lengths)[start] - lead - self._lengths[own]  # bytes of the last token behind it
        before = np.where(lead > 0, token_ids[start], _NO_TOKEN)
        last = np.where(tail > 0, token_ids[end - 1], _NO_TOKEN)
        columns = [column.tolist() for column in (before, lead, last, tail, token_ids[end])]
        contexts = list(map(_Place._make, zip(*columns, strict=True)))
        if len(self._places) > _MAX_PLACES:  # an untrained model writes anything
            self._places.clear()
            self._tokens[:] = _NOT_MET
        places = np.fromiter(map(self._index_of, contexts), dtype=np.int64, count=len(contexts))
        tokens = self._tokens[places, wanted]
        unmet = np.flatnonzero(tokens[:, 0] == _NOT_MET)
        for i in unmet.tolist():
            self._tokens[places[i], wanted[i]] = self._encode(contexts[i], int(wanted[i]))
        return np.asarray(self._tokens[places, wanted] if len(unmet) else tokens, dtype=np.int64)

    def _index_of(self, place: _Place) -> int:
        """Where the table has `place`; a new one is given its own."""
        index = self._places.setdefault(place, len(self._places))
        if index == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, _NOT_MET)])
        return index

    def _encode(self, place: _Place, value: int) -> tuple[int, ...]:
        """The first tokens of `value` in its place; a character that is torn by the place's ends is left out."""
        left = self._pieces[place.before][: place.lead] if place.lead else b""
        right = (self._pieces[place.last][-place.tail :] if place.tail else b"") + self._pieces[place.after]
        text = left.decode(errors="ignore") + self._texts[value] + right.decode(errors="ignore")
        return (*self._pieces.encode(text), *[_NO_TOKEN] * _WINDOW)[:_WINDOW]


@lru_cache(maxsize=8)
def _spelling_of(coordinate_text: Callable[[int], str], tokenizer: Tokenizer) -> _Spelling:
    return _Spelling(coordinate_text, pieces_of(tokenizer))
