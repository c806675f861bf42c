"""Reads an answer's text into entries, strictly, one after the other.

In: the answer's bytes with each token's place in them. Out: an `Entry` per syntactically closed object, in order, and
what became of the container. No repair: an object that is closed but wrong is dropped with one reason and reading
goes on after it; where no next object can be found, reading stops.

An object is *closed* when its brackets balance outside strings, so nothing inside it can make the rest unreadable.
Its fields are read until the first unreadable one, and the first of these that holds is the reason:

    key_invalid       its key is not `object_N` (N >= 1, no leading zeros, at most 18 digits), or N came before;
                      or one of its fields came twice
    missing_desc      no description, or one that is empty, blank, not a string, or not valid text
    unknown_geom      a field that is neither description nor geometry, two geometries, or a rest that is unreadable
    missing_geom      no geometry that is a flat list
    non_coord_token   something in the list is not a coordinate as the task spells it (`<|coord_k|>` must be that
                      very token; digits must be 0..999 without leading zeros)
    wrong_arity       not 4 numbers for a box; fewer than 6 or an odd number for a polygon
    bbox_invalid      x2 <= x1 or y2 <= y1, degenerate ones included; for a polygon, of its bounding box

`truncated` counts what was cut off by the answer's end, or by a syntax error between objects that makes the rest
unreadable (a missing comma, an entry that is no object, unbalanced brackets): once.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from learner.records import CoordSlot, DetectionObject, DropReason, PredictedObject
from learner.tasks.detection.bins import arity_is_right, encloses_something
from learner.tasks.detection.grammar import BALANCE, FIELD, GEOMETRY_KINDS, JSON_SPACE, OBJECT_NAME, Grammar
from learner.tasks.pieces import TokenText

_CACHED_STRINGS = 1 << 12
_CLOSER = {b"{": b"}", b"[": b"]"}


class Entry(NamedTuple):
    """One syntactically closed object. `end` is the offset after its "}"."""

    end: int
    number: int  # N of `object_N`; 0 where it has none
    predicted: PredictedObject | None  # None: dropped


@dataclass(slots=True)
class Reading:
    """What was read of one answer."""

    opened: bool = False
    closed: bool = False  # the container's own closer was met
    clean: bool = False  # ... and only whitespace follows
    entries: list[Entry] = field(default_factory=list)
    drops: Counter[DropReason] = field(default_factory=Counter)


def read_answer(
    text: TokenText, token_ids: Sequence[int], bin_of_token: Mapping[int, int], grammar: Grammar
) -> Reading:
    """Read `text`, which is that of `token_ids`. `bin_of_token` maps coordinate token ids to bins (empty for digits).

    Linear in the length of the text; never raises on an answer, whatever it holds.
    """
    reading = Reading()
    data = text.data
    opening = grammar.open_pattern.match(data)
    if opening is None:
        return reading
    reading.opened = True
    pos = opening.end()
    if opening[1]:
        _close(reading, data, pos)
        return reading
    objects = _ObjectReader(text, token_ids, bin_of_token, grammar)
    while _read_entry(reading, objects, pos):
        separator = grammar.next_pattern.match(data, reading.entries[-1].end)
        assert separator is not None  # it matches the empty text too
        pos = separator.end()
        if separator[1] == b",":
            continue
        if separator[1]:
            _close(reading, data, pos)
        elif pos < len(data):
            reading.drops["truncated"] += 1
        break
    return reading


def _close(reading: Reading, data: bytes, pos: int) -> None:
    reading.closed = True
    reading.clean = not data[pos:].strip(JSON_SPACE)


def _read_entry(reading: Reading, objects: _ObjectReader, pos: int) -> bool:
    """Read one entry at `pos`; False where there is none that closes."""
    usual = objects.grammar.usual_pattern.match(objects.text.data, pos)
    if usual:
        end, number, outcome = usual.end(), int(usual["number"] or 0), objects.usual(usual)
    else:
        found = _read_unusual(objects, pos)
        if found is None:
            if objects.text.data[pos:].strip(JSON_SPACE):
                reading.drops["truncated"] += 1
            return False
        end, number, outcome = found
    if objects.grammar.indexed:
        if not number or number in objects.numbers:
            outcome = "key_invalid"
        objects.numbers.add(number)
    if isinstance(outcome, PredictedObject):
        reading.entries.append(Entry(end, number, outcome))
    else:
        reading.entries.append(Entry(end, number, None))
        reading.drops[outcome] += 1
    return True


def _read_unusual(objects: _ObjectReader, pos: int) -> tuple[int, int, PredictedObject | DropReason] | None:
    """An entry field by field: its end, its number (0: no right one), and what became of it. None: it never closes."""
    opening = objects.grammar.entry_pattern.match(objects.text.data, pos)
    if opening is None:
        return None
    end, outcome = objects.fields(opening.end())
    name = OBJECT_NAME.fullmatch(opening[1]) if objects.grammar.indexed else None
    return None if end is None else (end, int(name[1]) if name else 0, outcome)


class _ObjectReader:
    """Reads objects of one answer."""

    def __init__(
        self, text: TokenText, token_ids: Sequence[int], bin_of_token: Mapping[int, int], grammar: Grammar
    ) -> None:
        self.text = text
        self.grammar = grammar
        self.numbers: set[int] = set()
        self._desc_name = grammar.desc_name.encode()
        bins = enumerate(map(bin_of_token.get, token_ids)) if bin_of_token else ()
        # All coordinate tokens of the answer, wherever they stand, and where each ends.
        self._coords = [CoordSlot(at, at + 1, value) for at, value in bins if value is not None]
        self._coord_ends = [text.ends[slot.start] for slot in self._coords]

    def usual(self, match: re.Match[bytes]) -> PredictedObject | DropReason:
        """The object of a whole entry in our own spelling."""
        desc, kind = match.group("desc", "kind")
        return self._object(desc, kind, self._slots(*match.span("list")))

    def fields(self, pos: int) -> tuple[int | None, PredictedObject | DropReason]:
        """From the byte after an object's "{": the offset after its "}" (None where it never closes), and the object
        or why it is dropped."""
        data, start = self.text.data, pos - 1
        fields: dict[bytes, tuple[bytes | None, tuple[int, int]]] = {}
        repeated = False
        while match := FIELD.match(data, pos):
            name, string, _, stop = match.groups()
            repeated = repeated or name in fields
            fields[name] = string, match.span(3)
            pos = match.end()
            if stop == b"}":
                return pos, "key_invalid" if repeated else self._judge(fields, complete=True)
        end = closing_brace(data, start)
        return end, "key_invalid" if repeated else self._judge(fields, complete=False)

    def _judge(
        self, fields: Mapping[bytes, tuple[bytes | None, tuple[int, int]]], *, complete: bool
    ) -> PredictedObject | DropReason:
        string = fields[self._desc_name][0] if self._desc_name in fields else None
        if string is None or _decode(string) is None:
            return "missing_desc"
        geometries = [name for name in fields if name in GEOMETRY_KINDS]
        if len(fields) > 1 + len(geometries) or len(geometries) > 1:
            return "unknown_geom"
        if not geometries or fields[geometries[0]][1][0] < 0:
            return "missing_geom"
        if not complete:
            return "unknown_geom"
        start, end = fields[geometries[0]][1]
        if self.grammar.list_pattern.fullmatch(self.text.data, start, end) is None:
            return "non_coord_token" if self.text.data[start:end].strip(JSON_SPACE) else "wrong_arity"
        return self._object(string, geometries[0], self._slots(start, end))

    def _object(
        self, string: bytes, geometry: bytes, slots: tuple[CoordSlot, ...] | None
    ) -> PredictedObject | DropReason:
        desc, kind = _decode(string), GEOMETRY_KINDS[geometry]
        if desc is None:
            return "missing_desc"
        if slots is None:
            return "non_coord_token"
        bins = tuple([slot.bin for slot in slots])
        if not arity_is_right(kind, bins):
            return "wrong_arity"
        if not encloses_something(kind, bins):
            return "bbox_invalid"
        return PredictedObject(object=DetectionObject(desc=desc, kind=kind, bins=bins), slots=slots)

    def _slots(self, start: int, end: int) -> tuple[CoordSlot, ...] | None:
        """The coordinates in bytes start..end, which look like a list of them; None where tokens say otherwise."""
        data, grammar = self.text.data, self.grammar
        if grammar.digits:
            return tuple([self._digits(match) for match in grammar.number_pattern.finditer(data, start, end)])
        first = bisect_right(self._coord_ends, start)
        slots = self._coords[first : bisect_right(self._coord_ends, end, first)]
        # Fewer tokens than numbers: a coordinate token's text was spelled out by other tokens.
        return tuple(slots) if len(slots) == data.count(b",", start, end) + 1 else None

    def _digits(self, match: re.Match[bytes]) -> CoordSlot:
        ends = self.text.ends
        begin, end = match.span()
        token = bisect_right(ends, begin)
        last = bisect_left(ends, end, token)
        return CoordSlot(token, last + 1, int(match[0]), begin - (ends[token - 1] if token else 0))


def closing_brace(data: bytes, start: int) -> int | None:
    """The offset after the bracket that closes the one at `start`; None where none does, or brackets are crossed."""
    stack: list[bytes] = []
    for match in BALANCE.finditer(data, start):
        mark = match[0]
        if mark in _CLOSER:
            stack.append(_CLOSER[mark])
        elif mark == b'"':
            return None  # a string that never ends
        elif mark in (b"}", b"]"):
            if stack.pop() != mark:
                return None
            if not stack:
                return match.end()
    return None


@lru_cache(maxsize=_CACHED_STRINGS)
def _decode(string: bytes) -> str | None:
    """A JSON string's text; None where it is blank or no valid text."""
    try:
        text = string[1:-1].decode()
    except UnicodeDecodeError:
        return None
    if "\\" in text:
        text = json.loads(f'"{text}"')
        if any("\ud800" <= char <= "\udfff" for char in text):
            return None  # half of a surrogate pair
    return text if text.strip() else None
