"""Reads an answer's text into entries, strictly, one after the other.

In: the answer's bytes. Out: an `Entry` per syntactically closed object, in order, and what became of the container. No
repair: an object that is closed but wrong is dropped with one reason and reading goes on after it; where no next object
can be found, reading stops.

An object is *closed* when its brackets balance outside strings, so nothing inside it can make the rest unreadable. Its
fields are read until the first unreadable one. What can be said of them without looking at numbers is said here, the
rest by `judge.py`, which lists the reasons.

`truncated` counts what was cut off by the answer's end, or by a syntax error between objects that makes the rest
unreadable (a missing comma, an entry that is no object, unbalanced brackets): once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.records import DropReason
from learner.tasks.detection.grammar import BALANCE, FIELD, GEOMETRY_KINDS, JSON_SPACE, OBJECT_NAME, Grammar, decode

_CLOSER = {b"{": b"}", b"[": b"]"}


# One syntactically closed object: the offset after its "}"; N of `object_N`, 0 where it has none; its fault; and where
# it has none, its description as written and where that stands, its geometry's name, and where the content of its list
# begins and ends. A plain tuple, for there are dozens in an answer.
Entry = tuple[int, int, DropReason | None, bytes, tuple[int, int], bytes, int, int]


@dataclass(slots=True)
class Reading:
    """What was read of one answer."""

    opened: bool = False
    closed: bool = False  # the container's own closer was met
    clean: bool = False  # ... and only whitespace follows
    truncated: bool = False  # something was cut off
    entries: list[Entry] = field(default_factory=list)


def read_answer(data: bytes, grammar: Grammar) -> Reading:
    """Linear in the length of `data`; never raises on an answer, whatever it holds."""
    reading = Reading()
    opening = grammar.open_pattern.match(data)
    if opening is None:
        return reading
    reading.opened = True
    pos = opening.end()
    if opening[1]:
        _close(reading, data, pos)
        return reading
    read_usual, add = grammar.usual_pattern.match, reading.entries.append
    follows = b","
    while follows == b",":
        usual = read_usual(data, pos)
        if usual:
            number, string, geometry, follows = usual.group("number", "desc", "kind", "follows")
            end, place = usual.start("end"), usual.span("desc")
            add((end, int(number or 0), None, string, place, geometry, *usual.span("list")))
            pos = usual.end()
            continue
        entry = _read_unusual(data, pos, grammar)
        if entry is None:
            reading.truncated = bool(data[pos:].strip(JSON_SPACE))
            return reading
        add(entry)
        separator = grammar.next_pattern.match(data, entry[0])
        assert separator is not None  # it matches the empty text too
        follows, pos = separator[1], separator.end()
    if follows:
        _close(reading, data, pos)
    else:
        reading.truncated = pos < len(data)
    return reading


def _close(reading: Reading, data: bytes, pos: int) -> None:
    reading.closed = True
    reading.clean = not data[pos:].strip(JSON_SPACE)


def _read_unusual(data: bytes, pos: int, grammar: Grammar) -> Entry | None:
    """An entry field by field. None: it never closes."""
    opening = grammar.entry_pattern.match(data, pos)
    if opening is None:
        return None
    name = OBJECT_NAME.fullmatch(opening[1]) if grammar.indexed else None
    number = int(name[1]) if name else 0
    pos = opening.end()
    fields: dict[bytes, _Field] = {}
    repeated = False
    while match := FIELD.match(data, pos):
        key, string, _, stop = match.groups()
        repeated = repeated or key in fields
        fields[key] = _Field(string, match.span(2), *match.span(3))
        pos = match.end()
        if stop == b"}":
            return _entry(pos, number, fields, data, grammar, repeated=repeated, complete=True)
    end = closing_brace(data, opening.end() - 1)
    return None if end is None else _entry(end, number, fields, data, grammar, repeated=repeated, complete=False)


class _Field(NamedTuple):
    """A field's value: a string, or the list in bytes `start..stop`, or something else."""

    string: bytes | None
    place: tuple[int, int]  # of the string
    start: int  # negative: no list
    stop: int


def _entry(
    end: int,
    number: int,
    fields: Mapping[bytes, _Field],
    data: bytes,
    grammar: Grammar,
    *,
    repeated: bool,
    complete: bool,
) -> Entry:
    desc = fields.get(grammar.desc_name.encode())
    geometries = [name for name in fields if name in GEOMETRY_KINDS]
    fault: DropReason | None = None
    if repeated:
        fault = "key_invalid"
    elif desc is None or desc.string is None or decode(desc.string) is None:
        fault = "missing_desc"
    elif len(fields) > 1 + len(geometries) or len(geometries) > 1:
        fault = "unknown_geom"
    elif not geometries or fields[geometries[0]].start < 0:
        fault = "missing_geom"
    elif not complete:
        fault = "unknown_geom"
    else:
        assert desc.string is not None
        _, _, start, stop = fields[geometries[0]]
        if grammar.list_pattern.fullmatch(data, start, stop):
            return end, number, None, desc.string, desc.place, geometries[0], start, stop
        fault = "non_coord_token" if data[start:stop].strip(JSON_SPACE) else "wrong_arity"
    return end, number, fault, b"", (0, 0), b"", 0, 0


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
