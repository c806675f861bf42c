"""Spells the thousand coordinates in a tokenizer's tokens, alone and in place of another number.

In: numbers of an answer, and the answer's tokens. Out: the tokens that the true numbers would have in these positions.
One call handles all numbers of an answer, because there are hundreds.

Digits may be fused with their surroundings (`[1`, `0, 2`, `7]}`). If digits are fused, the ground-truth number is
tokenized in place of the predicted number, between the same characters, up to the end of the token after the number. If
the tokenizer never fuses digits with other characters (`tokens.py`), a number has the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.extensions import Tokenizer
from learner.tasks.tokens import TokenPieces, pieces_of

NO_TOKEN = -1
# Number of compared tokens. A number has at most three characters, so two numbers differ at the latest in the token
# after the number.
WINDOW = 4
_NUM_BINS = 1000
_MAX_PLACES = 1 << 10
_NOT_MET = -2

Ints = NDArray[np.int64]


class Numbers(NamedTuple):
    """N matched coordinates in order of appearance. Each field has the shape [N]. `start`, `end`, `bin` and `lead` are
    as in `CoordSlots`."""

    start: Ints
    end: Ints
    bin: Ints
    lead: Ints
    wanted: Ints  # the ground-truth bin


class _Context(NamedTuple):
    """How a number's text is tokenized at its ends. If the number's first token begins before the number, `before` is
    that token, and `lead` is how many of the token's bytes come before the number. If the number's last token ends
    after the number, `last` is that token, and `tail` is how many of the token's bytes come after the number. NO_TOKEN:
    no token crosses that end. `after` is the next token."""

    before: int
    lead: int
    last: int
    tail: int
    after: int


class Spelling:
    """How one tokenizer splits coordinates into tokens. Made by `spelling_of`."""

    def __init__(self, coordinate_text: Callable[[int], str], pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._texts = tuple(coordinate_text(value) for value in range(_NUM_BINS))
        self._lengths = np.array([len(text) for text in self._texts])
        encoded = [pieces.encode(text) for text in self._texts]
        # [bin] the coordinate's token; empty if some coordinate has several tokens.
        self.single_tokens = np.array([ids[0] for ids in encoded] if all(len(ids) == 1 for ids in encoded) else [])
        # [bin, W] the coordinate's tokens; empty if they depend on the neighbours.
        alone = [
            (*ids, *[NO_TOKEN] * WINDOW)[:WINDOW] for ids in map(pieces.boundaries.numbers.get, self._texts) if ids
        ]
        self._alone = np.array(alone if len(alone) == _NUM_BINS else [], dtype=np.int64)
        self._num_tokens = (self._alone != NO_TOKEN).sum(axis=-1)
        self._table = Lock()
        self._places: dict[_Context, int] = {}
        # [place, bin, W] the first tokens of each number in each context (`_Context`), filled on demand. An answer
        # needs hundreds of these tokens.
        self._tokens = np.full((1, _NUM_BINS, WINDOW), _NOT_MET, dtype=np.int32)

    def are_single(self, numbers: Numbers, token_ids: Ints) -> bool:
        """Return True if each number is one token. In this case a number's neighbours do not change its tokens."""
        return len(self.single_tokens) > 0 and bool((token_ids[numbers.start] == self.single_tokens[numbers.bin]).all())

    def tokens_in_place(self, numbers: Numbers, token_ids: Ints) -> Ints:
        """Return the first tokens [N, W] of each true number in place of the predicted number; NO_TOKEN after the
        last."""
        if not len(self._alone):
            return self._fused_tokens(numbers, token_ids)
        tokens = self._alone[numbers.wanted]
        # If the true number is longer, perhaps only the token after the predicted number differs. So the token after
        # the predicted number is compared too.
        tokens[np.arange(len(tokens)), self._num_tokens[numbers.wanted]] = token_ids[numbers.end]
        return tokens

    def _fused_tokens(self, numbers: Numbers, token_ids: Ints) -> Ints:
        start, end, own, lead, wanted = numbers
        lengths = self._pieces.lengths(token_ids)
        ends = lengths.cumsum()
        tail = ends[end - 1] - (ends - lengths)[start] - lead - self._lengths[own]  # number of bytes after the number
        before = np.where(lead > 0, token_ids[start], NO_TOKEN)
        last = np.where(tail > 0, token_ids[end - 1], NO_TOKEN)
        columns = [column.tolist() for column in (before, lead, last, tail, token_ids[end])]
        with self._table:  # the lock of the token table, which several threads use
            return self._in_places(list(map(_Context._make, zip(*columns, strict=True))), wanted)

    def _in_places(self, contexts: Sequence[_Context], wanted: Ints) -> Ints:
        # The text of an untrained model would make the table grow without end.
        if len(self._places) > _MAX_PLACES:
            self._places.clear()
            self._tokens[:] = _NOT_MET
        places = np.fromiter(map(self._index_of, contexts), dtype=np.int64, count=len(contexts))
        tokens = self._tokens[places, wanted]
        unmet = np.flatnonzero(tokens[:, 0] == _NOT_MET)
        for i in unmet.tolist():
            self._tokens[places[i], wanted[i]] = self._encode(contexts[i], int(wanted[i]))
        return np.asarray(self._tokens[places, wanted] if len(unmet) else tokens, dtype=np.int64)

    def _index_of(self, place: _Context) -> int:
        """Return the row of the context `place` in the table of tokens; a new context gets a new row."""
        index = self._places.setdefault(place, len(self._places))
        if index == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, _NOT_MET)])
        return index

    def _encode(self, place: _Context, value: int) -> tuple[int, ...]:
        """Return the first tokens that `value` has in this context. If the context cuts a character of the surrounding
        text in two, this character is left out."""
        left = self._pieces[place.before][: place.lead] if place.lead else b""
        right = (self._pieces[place.last][-place.tail :] if place.tail else b"") + self._pieces[place.after]
        text = left.decode(errors="ignore") + self._texts[value] + right.decode(errors="ignore")
        return (*self._pieces.encode(text), *[NO_TOKEN] * WINDOW)[:WINDOW]


@lru_cache(maxsize=8)
def spelling_of(coordinate_text: Callable[[int], str], tokenizer: Tokenizer) -> Spelling:
    """Return how the tokenizer spells the coordinates that `coordinate_text` writes. Equal arguments give the same
    object, so that its tables are shared."""
    return Spelling(coordinate_text, pieces_of(tokenizer))
