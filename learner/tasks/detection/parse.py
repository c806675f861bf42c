"""Token-aligned, strict parsing: a rollout's tokens in, its objects and the prefix that can be continued out.

Invariants: the prefix is `response_token_ids[:prefix_length]`, never edited; the prefix and `tail_opening` together
end right after a closed object; every object that is reported lies wholly in front of that point, with all its
coordinates' tokens in the prefix. Called by `DetectionTask.parse`.

Where the prefix ends. After the last closed object (dropped ones count: they stay in the text) whose end falls
between two tokens. A token may fuse an object's end with what follows (`}, "`, `]}}`, `"}]`): then the prefix ends
before that token, and `tail_opening` gives back what the cut took, as long as that is structure: brackets,
whitespace, a description's closing quote. Where that token holds text of the description or a coordinate too, the end
moves to the object before, and the objects behind it are no part of the result.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from learner.records import ParsedRollout, Rollout
from learner.tasks.detection.coordinates import NO_COORDINATES, Coordinates, digit_coordinates, token_coordinates
from learner.tasks.detection.grammar import Grammar
from learner.tasks.detection.judge import judge
from learner.tasks.detection.read import Entry, read_answer
from learner.tasks.pieces import TokenPieces, TokenText

# A quote here can only be a closing one, and none but the first character: what comes after it is outside strings.
_STRUCTURE = re.compile(rb'"?[\]} \t\n\r]*+')


def parse_rollout(
    rollout: Rollout, pieces: TokenPieces, bin_of_token: NDArray[np.int64], grammar: Grammar
) -> ParsedRollout:
    """Parse one rollout. Never raises on what a model wrote.

    `usable` says that the container was opened. Where it holds no closed object, the prefix is empty and the
    tail opens the container anew.
    """
    text = pieces.text(rollout.response_token_ids)
    reading = read_answer(text.data, grammar)
    coordinates = _coordinates(text, bin_of_token, grammar) if reading.opened else NO_COORDINATES
    outcomes = judge(reading.entries, text.data, coordinates, grammar)
    drops = Counter([outcome for outcome in outcomes if isinstance(outcome, str)] + ["truncated"] * reading.truncated)
    kept, prefix_length, tail_opening = _cut(text, reading.entries, grammar)
    entries = reading.entries[:kept]
    return ParsedRollout(
        rollout=rollout,
        token_ids=text.ids,
        objects=tuple([outcome for outcome in outcomes[:kept] if not isinstance(outcome, str)]),
        slots=coordinates.slots,
        drops=dict(drops),
        prefix_length=prefix_length,
        tail_opening=tail_opening,
        needs_separator=bool(entries),
        next_index=1 + max((entry[1] for entry in entries), default=0),
        truncated=not reading.closed,
        usable=reading.opened,
        closed=reading.clean,
    )


def _coordinates(text: TokenText, bin_of_token: NDArray[np.int64], grammar: Grammar) -> Coordinates:
    return digit_coordinates(text) if grammar.digits else token_coordinates(text, bin_of_token)


def _cut(text: TokenText, entries: list[Entry], grammar: Grammar) -> tuple[int, int, str]:
    """How many entries are kept, how many tokens, and the text that the tail begins with."""
    for kept in range(len(entries), 0, -1):
        end = entries[kept - 1][0]
        length = text.tokens_until(end)
        if text.ends[length - 1] == end:
            return kept, length, ""
        taken = text.data[text.start(length - 1) : end]
        if _STRUCTURE.fullmatch(taken):
            return kept, length - 1, taken.decode()
    return 0, 0, grammar.opener
