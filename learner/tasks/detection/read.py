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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import CoordSlots, DetectionObject, DropReason, PredictedObject
from learner.tasks.detection.bins import arity_is_right, encloses_something
from learner.tasks.detection.coordinates import NO_SLOTS, digit_coordinates, token_coordinates
from learner.tasks.detection.grammar import BALANCE, FIELD, GEOMETRY_KINDS, JSON_SPACE, OBJECT_NAME, Grammar
from learner.tasks.pieces import TokenText

_CACHED_STRINGS = 1 << 12
_CLOSER = {b"{": b"}", b"[": b"]"}


class Entry(NamedTuple):
    """One syntactically closed object. `end` is the offset after its "}"."""

    end: int
    number: int  # N of `object_N`; 0 where it has none
    predicted: PredictedObject | None  # None: dropped


class _Field(NamedTuple):
    """One field's value as it stands in the answer."""

    string: bytes | None  # with its quotes; None where the value is none
    at: int  # the string's first byte
    list_bytes: tuple[int, int]  # a flat list's content; negative where the value is none


@dataclass(slots=True)
class Reading:
    """What was read of one answer."""

    opened: bool = False
    closed: bool = False  # the container's own closer was met
    clean: bool = False  # ... and only whitespace follows
    entries: list[Entry] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)  # of the entries so far
    drops: Counter[DropReason] = field(default_factory=Counter)
    slots: CoordSlots = NO_SLOTS


def read_answer(text: TokenText, bin_of_token: NDArray[np.int64], grammar: Grammar) -> Reading:
    """Read `text`. `bin_of_token` has each token id's bin, if it is a coordinate (not looked at for digits).

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
    objects = _ObjectReader(text, bin_of_token, grammar)
    reading.slots = objects.coordinates.slots
    follows = b","
    while follows == b",":
        usual = grammar.usual_pattern.match(data, pos)
        if usual:
            number, string, geometry, follows = usual.group("number", "desc", "kind", "follows")
            outcome = objects.made_of(string, usual.start("desc"), geometry, *usual.span("list"))
            _add(reading, usual.start("end"), int(number or 0), outcome, grammar)
            pos = usual.end()
            continue
        found = _read_unusual(objects, pos)
        if found is None:
            if data[pos:].strip(JSON_SPACE):
                reading.drops["truncated"] += 1
            return reading
        _add(reading, *found, grammar)
        separator = grammar.next_pattern.match(data, found[0])
        assert separator is not None  # it matches the empty text too
        follows, pos = separator[1], separator.end()
    if follows:
        _close(reading, data, pos)
    elif pos < len(data):
        reading.drops["truncated"] += 1
    return reading


def _close(reading: Reading, data: bytes, pos: int) -> None:
    reading.closed = True
    reading.clean = not data[pos:].strip(JSON_SPACE)


def _add(reading: Reading, end: int, number: int, outcome: PredictedObject | DropReason, grammar: Grammar) -> None:
    """Take in one entry, whose key may be wrong though its object is right."""
    if grammar.indexed:
        if not number or number in reading.numbers:
            outcome = "key_invalid"
        reading.numbers.add(number)
    if isinstance(outcome, PredictedObject):
        reading.entries.append(Entry(end, number, outcome))
    else:
        reading.entries.append(Entry(end, number, None))
        reading.drops[outcome] += 1


def _read_unusual(objects: _ObjectReader, pos: int) -> tuple[int, int, PredictedObject | DropReason] | None:
    """An entry field by field: its end, its number (0: no right one), and what became of it. None: it never closes."""
    opening = objects.grammar.entry_pattern.match(objects.data, pos)
    if opening is None:
        return None
    end, outcome = objects.fields(opening.end())
    name = OBJECT_NAME.fullmatch(opening[1]) if objects.grammar.indexed else None
    return None if end is None else (end, int(name[1]) if name else 0, outcome)


class _ObjectReader:
    """Reads objects of one answer."""

    def __init__(self, text: TokenText, bin_of_token: NDArray[np.int64], grammar: Grammar) -> None:
        self.data = text.data
        self.grammar = grammar
        self.coordinates = digit_coordinates(text) if grammar.digits else token_coordinates(text, bin_of_token)
        self._desc_name = grammar.desc_name.encode()

    def fields(self, pos: int) -> tuple[int | None, PredictedObject | DropReason]:
        """From the byte after an object's "{": the offset after its "}" (None where it never closes), and the object
        or why it is dropped."""
        data, start = self.data, pos - 1
        fields: dict[bytes, _Field] = {}
        repeated = False
        while match := FIELD.match(data, pos):
            name, string, _, stop = match.groups()
            repeated = repeated or name in fields
            fields[name] = _Field(string, match.start(2), match.span(3))
            pos = match.end()
            if stop == b"}":
                return pos, "key_invalid" if repeated else self._judge(fields, complete=True)
        end = closing_brace(data, start)
        return end, "key_invalid" if repeated else self._judge(fields, complete=False)

    def _judge(self, fields: Mapping[bytes, _Field], *, complete: bool) -> PredictedObject | DropReason:
        desc = fields.get(self._desc_name)
        if desc is None or desc.string is None or _decode(desc.string) is None:
            return "missing_desc"
        geometries = [name for name in fields if name in GEOMETRY_KINDS]
        if len(fields) > 1 + len(geometries) or len(geometries) > 1:
            return "unknown_geom"
        if not geometries or fields[geometries[0]].list_bytes[0] < 0:
            return "missing_geom"
        if not complete:
            return "unknown_geom"
        start, end = fields[geometries[0]].list_bytes
        if self.grammar.list_pattern.fullmatch(self.data, start, end) is None:
            return "non_coord_token" if self.data[start:end].strip(JSON_SPACE) else "wrong_arity"
        return self.made_of(desc.string, desc.at, geometries[0], start, end)

    def made_of(self, string: bytes, at: int, geometry: bytes, start: int, end: int) -> PredictedObject | DropReason:
        """The object with description `string`, which stands at byte `at`, and the list of coordinates that bytes
        start..end look like."""
        desc, kind = _decode(string), GEOMETRY_KINDS[geometry]
        if desc is None:
            return "missing_desc"
        slots = self.coordinates.between(start, end)
        bins = tuple(self.coordinates.bins[slots.start : slots.stop])
        if len(bins) != self.data.count(b",", start, end) + 1:
            return "non_coord_token"  # other tokens spell out a coordinate token's text
        if not arity_is_right(kind, bins):
            return "wrong_arity"
        if not encloses_something(kind, bins):
            return "bbox_invalid"
        return PredictedObject(DetectionObject(desc, kind, bins), slots, (at + 1, at + len(string) - 1))


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
