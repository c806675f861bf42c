"""Parses a rollout strictly. In: its tokens. Out: its objects, and its prefix: the tokens that are kept, before an
appended tail.

Invariants: the prefix is `response_token_ids[:prefix_length]`, never edited. `tail_opening` is the text with which the
tail must begin. The prefix and `tail_opening` together end right after a closed object. Every reported object lies
before the tail, and all tokens of its coordinates are in the prefix.

1. `read_answer` reads the text into entries, one `Entry` per syntactically closed object. An object is *closed* if its
   brackets balance outside strings. The text after a closed object can be read, even if the object is wrong. Nothing is
   repaired: a wrong object is dropped with one reason, and reading continues after it. Within an object, fields are
   read until the first unreadable one. Reading stops where no next object can be read, because the answer ends or has a
   syntax error between objects (a missing comma, an entry that is not an object, unbalanced brackets). The rest of the
   text counts as one object, dropped as `truncated`.
2. `token_coordinates` or `digit_coordinates` finds all coordinates of the answer at once, in order. Some of these only
   look like coordinates (digits in a description, a coordinate token between two objects). `classify` uses only the
   numbers of lists that `read_answer` has read.
3. `classify` decides for every entry whether it is an object, or why it is dropped. An answer has dozens of entries,
   mostly correct boxes, so the corners of all entries are looked up at once. If several reasons apply, the first of
   this list is reported:
    key_invalid       its key is not `object_N` (N >= 1, no leading zeros, at most 18 digits), or N came before;
                      or one of its fields came twice
    missing_desc      no description, or one that is empty, blank, not a string, or not valid text
    unknown_geom      a field that is neither description nor geometry, two geometries, or an unreadable field
    missing_geom      no geometry that is a flat list
    non_coord_token   something in the list is not a coordinate as the task spells it (`<|coord_k|>` must be that
                      very token; digits must be 0..999 without leading zeros)
    wrong_arity       not 4 numbers for a box; fewer than 6 or an odd number for a polygon
    bbox_invalid      x2 <= x1 or y2 <= y1, for a box or for a polygon's bounding box
    image_invalid     the sample has several images, and the object's `image` is not the number of one of them. With
                      at most one image, a field `image` is unknown_geom

4. The prefix ends after the last closed object. Dropped objects are included, because they stay in the text. One token
   may hold both the end of an object and text after it (`}, "`, `]}}`, `"}]`). If the last token is shared in this way,
   the prefix ends before it, and `tail_opening` repeats the token's bytes up to the end of the object. The token's
   bytes are repeated only if they are structure: brackets, whitespace, a description's closing quote. If the token's
   bytes hold a coordinate or text of the description, the prefix ends after the previous object, and later objects are
   not part of the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.records import CoordSlots, DetectionObject, DropReason, ParsedRollout, PredictedObject, Rollout
from learner.tasks.detection.bins import arity_is_right, encloses_something
from learner.tasks.detection.grammar import (
    BALANCE,
    FIELD,
    GEOMETRY_KINDS,
    IMAGE,
    IMAGE_NUMBER,
    JSON_SPACE,
    OBJECT_NAME,
    Grammar,
    decode,
)
from learner.tasks.tokens import TokenPieces, TokenText

_NONE = np.empty(0, dtype=np.int64)


class Coordinates(NamedTuple):
    """The C coordinates of an answer. `slots` has the tokens and bins of these coordinates. Coordinate i is in bytes
    `begins[i]..ends[i]`."""

    slots: CoordSlots
    begins: NDArray[np.int64]  # [C]
    ends: NDArray[np.int64]  # [C]


NO_COORDINATES = Coordinates(CoordSlots(start=_NONE, end=_NONE, bin=_NONE, lead=_NONE), _NONE, _NONE)


def token_coordinates(text: TokenText, bin_of_token: NDArray[np.int64]) -> Coordinates:
    """Return the coordinate tokens. `bin_of_token[id]` is negative for other tokens. The last entry of `bin_of_token`
    stands for all larger ids."""
    bins = bin_of_token.take(text.ids, mode="clip")
    at = np.flatnonzero(bins >= 0)
    slots = CoordSlots(start=at, end=at + 1, bin=bins[at], lead=np.zeros_like(at))
    return Coordinates(slots, text.starts()[at], text.ends[at])


def digit_coordinates(text: TokenText) -> Coordinates:
    """Return the runs of digits that do not continue a word. The text begins with a container's opening bracket, never
    with a digit. The bin of a run of more than three digits is undefined."""
    # The added blank ends a number at the end of the text.
    chars = np.frombuffer(text.data + b" ", dtype=np.uint8)
    digits = chars - ord("0")  # other characters wrap around to 10 or more
    is_digit = digits < 10
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]) + 1
    begins, ends = edges[0::2], edges[1::2]
    apart = chars[begins - 1] != ord("_")  # digits after "_", as in `object_12` and `bbox_2d`, are no coordinates
    begins, ends = begins[apart], ends[apart]
    first = text.ends.searchsorted(begins, "right")
    behind = text.ends.searchsorted(ends, "left") + 1
    ones, tens, hundreds = ((digits * is_digit)[ends - place].astype(np.int64) for place in (1, 2, 3))
    # A number of two digits has no hundreds: the digit before it belongs to another number.
    bins = ones + 10 * tens + 100 * hundreds * (ends - begins > 2)
    slots = CoordSlots(start=first, end=behind, bin=bins, lead=begins - text.starts()[first])
    return Coordinates(slots, begins, ends)


_CLOSER = {b"{": b"}", b"[": b"]"}


# An entry is a syntactically closed object, as a tuple: (offset after its "}", N of `object_N` or 0, fault or None,
# description as written, span of the description, name of the geometry, begin and end of the coordinate list, number of
# its image or 0). If there is a fault, the items after it have no meaning. A plain tuple is fast, and an answer has
# dozens of entries.
Entry = tuple[int, int, DropReason | None, bytes, tuple[int, int], bytes, int, int, int]


@dataclass(slots=True)
class Reading:
    """The result of reading one answer."""

    opened: bool = False
    closed: bool = False  # True: the container's closing bracket was read
    clean: bool = False  # True: only whitespace follows the closing bracket
    truncated: bool = False  # True: the rest of the answer could not be read
    entries: list[Entry] = field(default_factory=list)


def read_answer(data: bytes, grammar: Grammar) -> Reading:
    """Read an answer's entries. Takes linear time in the length of `data`, and never raises, whatever the model
    wrote."""
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
        # A correct entry is read by one match, and all coordinates are found at once. Reading whole entries by one
        # match halves the time of parsing.
        usual = read_usual(data, pos)
        if usual:
            number, string, geometry, image, follows = usual.group("number", "desc", "kind", "image", "follows")
            end, place = usual.start("end"), usual.span("desc")
            add((end, int(number or 0), None, string, place, geometry, *usual.span("list"), int(image or 0)))
            pos = usual.end()
            continue
        entry = _read_unusual(data, pos, grammar)
        if entry is None:
            reading.truncated = bool(data[pos:].strip(JSON_SPACE))
            return reading
        add(entry)
        separator = grammar.next_pattern.match(data, entry[0])
        assert separator is not None  # always matches: the pattern accepts empty text
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
    """Return an entry, read field by field; None if its brackets never close."""
    opening = grammar.entry_pattern.match(data, pos)
    if opening is None:
        return None
    name = OBJECT_NAME.fullmatch(opening[1]) if grammar.indexed else None
    number = int(name[1]) if name else 0
    pos = opening.end()
    fields: dict[bytes, _Field] = {}
    repeated = False
    while match := FIELD.match(data, pos):
        key, string, _, other, stop = match.groups()
        repeated = repeated or key in fields
        fields[key] = _Field(string, match.span(2), *match.span(3), other)
        pos = match.end()
        if stop == b"}":
            return _entry(pos, number, fields, data, grammar, repeated=repeated, complete=True)
    end = closing_brace(data, opening.end() - 1)
    return None if end is None else _entry(end, number, fields, data, grammar, repeated=repeated, complete=False)


class _Field(NamedTuple):
    """A field's value: a string, a list (its text is the bytes `start` to `stop` of the answer), or another value."""

    string: bytes | None
    place: tuple[int, int]  # (begin, end) of the string in bytes
    start: int  # negative if the value is not a list
    stop: int
    other: bytes | None


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
    desc, image = fields.get(grammar.desc_name.encode()), fields.get(IMAGE) if grammar.numbered else None
    geometries = [name for name in fields if name in GEOMETRY_KINDS]
    fault: DropReason | None = None
    if repeated:
        fault = "key_invalid"
    elif desc is None or desc.string is None or decode(desc.string) is None:
        fault = "missing_desc"
    elif len(fields) > 1 + len(geometries) + (image is not None) or len(geometries) > 1:
        fault = "unknown_geom"
    elif not geometries or fields[geometries[0]].start < 0:
        fault = "missing_geom"
    elif not complete:
        fault = "unknown_geom"
    else:
        assert desc.string is not None
        _, _, start, stop, _ = fields[geometries[0]]
        if grammar.list_pattern.fullmatch(data, start, stop):
            named = image is not None and image.other is not None and IMAGE_NUMBER.fullmatch(image.other)
            place = desc.string, desc.place, geometries[0], start, stop
            return end, number, None, *place, int(named[0]) if named else 0
        fault = "non_coord_token" if data[start:stop].strip(JSON_SPACE) else "wrong_arity"
    return end, number, fault, b"", (0, 0), b"", 0, 0, 0


def closing_brace(data: bytes, start: int) -> int | None:
    """Return the offset after the bracket that closes the bracket at `start`; None if there is none, or if brackets
    cross."""
    stack: list[bytes] = []
    for match in BALANCE.finditer(data, start):
        mark = match[0]
        if mark in _CLOSER:
            stack.append(_CLOSER[mark])
        elif mark == b'"':
            return None  # a string of the answer has no end
        elif mark in (b"}", b"]"):
            if stack.pop() != mark:
                return None
            if not stack:
                return match.end()
    return None


Outcome = PredictedObject | DropReason
_FOUR = np.arange(4)
# Objects are made from tuples by `tuple.__new__`, because calling the classes takes twice as long.
_detection: Callable[[tuple[object, ...]], DetectionObject] = partial(tuple.__new__, DetectionObject)
_predicted: Callable[[tuple[object, ...]], PredictedObject] = partial(tuple.__new__, PredictedObject)


def classify(
    entries: Sequence[Entry], data: bytes, coordinates: Coordinates, grammar: Grammar, num_images: int
) -> list[Outcome]:
    """Return the outcome of each entry. `data` is the answer's text in bytes, `num_images` counts the sample's
    images."""
    if not entries:
        return []
    _, numbers, faults, strings, places, geometries, begins, ends, images = zip(*entries, strict=True)
    first, behind = coordinates.begins.searchsorted(begins), coordinates.ends.searchsorted(ends, "right")
    num_listed = behind - first  # digits: the number of coordinates found between the list's brackets
    if not grammar.digits:
        num_listed = np.fromiter(map(data.count, repeat(b","), begins, ends), dtype=np.int64, count=len(entries)) + 1
    # numpy's `take` refuses an empty array.
    bins = coordinates.slots.bin if len(coordinates.slots.bin) else np.zeros(1, dtype=np.int64)
    # Lists with fewer than four numbers get meaningless corners here, and are left out of `boxes` below.
    corners = bins.take(first[:, None] + _FOUR, mode="clip")
    x1, y1, x2, y2 = corners.T
    boxes = (behind - first == 4) & (num_listed == 4) & (x1 < x2) & (y1 < y2)
    descs = [decode(string) or "" for string in strings]
    slots = list(map(range, first.tolist(), behind.tolist()))
    columns = zip(descs, repeat("bbox_2d"), map(tuple, corners.tolist()), repeat(None), repeat(None), strict=False)
    objects = map(_detection, columns)
    outcomes: list[Outcome] = list(map(_predicted, zip(objects, slots, places, strict=True)))
    # If all entries are boxes without a fault (the usual case), only boxes with wrong numbers are classified one by
    # one.
    usual = faults.count(None) == geometries.count(b"bbox_2d") == len(entries) and all(descs)
    for i in np.flatnonzero(~boxes).tolist() if usual else range(len(entries)):
        outcomes[i] = faults[i] or _classify(entries[i], int(num_listed[i]), slots[i], coordinates)
    if grammar.numbered:
        outcomes = [_in_image(outcome, image, num_images) for outcome, image in zip(outcomes, images, strict=True)]
    if grammar.indexed:
        _refuse_keys(numbers, outcomes)
    return outcomes


def _classify(entry: Entry, num_listed: int, slots: range, coordinates: Coordinates) -> Outcome:
    """Return the object of an entry whose fields have no fault, or the reason why the entry is dropped."""
    _, _, _, string, place, geometry, *_ = entry
    desc, kind = decode(string), GEOMETRY_KINDS[geometry]
    if desc is None:
        return "missing_desc"
    if len(slots) != num_listed:
        return "non_coord_token"  # some coordinate is spelled by ordinary tokens
    bins = tuple(coordinates.slots.bin[slots.start : slots.stop].tolist())
    if not arity_is_right(kind, bins):
        return "wrong_arity"
    if not encloses_something(kind, bins):
        return "bbox_invalid"
    return PredictedObject(DetectionObject(desc, kind, bins), slots, place)


def _in_image(outcome: Outcome, image: int, num_images: int) -> Outcome:
    if isinstance(outcome, str):
        return outcome
    if not 1 <= image <= num_images:
        return "image_invalid"
    return outcome._replace(object=outcome.object._replace(image=image))


def _refuse_keys(numbers: Sequence[int], outcomes: list[Outcome]) -> None:
    """Set key_invalid for entries without a number, or with the number of an earlier entry."""
    if 0 not in numbers and len(set(numbers)) == len(numbers):
        return
    met: set[int] = {0}
    for i, number in enumerate(numbers):
        if number in met:
            outcomes[i] = "key_invalid"
        met.add(number)


# Brackets and whitespace after an object's end. An optional quote comes first: it can only close a description.
_STRUCTURE = re.compile(rb'"?[\]} \t\n\r]*+')


def parse_rollout(
    rollout: Rollout, pieces: TokenPieces, bin_of_token: NDArray[np.int64], grammar: Grammar
) -> ParsedRollout:
    """Parse one rollout. Never raises, whatever the model wrote.

    `usable` is True if the container was opened. If the answer has no closed object, its kept part (the prefix) is
    empty, and the text that continues it (the tail) opens the container again.
    """
    text = pieces.text(rollout.response_token_ids)
    reading = read_answer(text.data, grammar)
    coordinates = NO_COORDINATES
    if reading.opened:
        coordinates = digit_coordinates(text) if grammar.digits else token_coordinates(text, bin_of_token)
    outcomes = classify(reading.entries, text.data, coordinates, grammar, len(rollout.sample.images))
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
        # Dropped entries count too, because their keys stay in the text.
        next_index=1 + max((entry[1] for entry in entries), default=0),
        truncated=not reading.closed,
        usable=reading.opened,
        closed=reading.clean,
        dropped=_dropped(text, reading, outcomes) if drops else (),
    )


def _dropped(text: TokenText, reading: Reading, outcomes: Sequence[Outcome]) -> tuple[tuple[DropReason, int, int], ...]:
    """Return why each entry was dropped, and the range of tokens that hold any part of it."""
    found: list[tuple[DropReason, int, int]] = []
    begin = 0
    for (end, *_), outcome in zip(reading.entries, outcomes, strict=True):
        if isinstance(outcome, str):
            found.append((outcome, text.token_at(begin), text.tokens_until(end)))
        begin = end
    if reading.truncated:
        found.append(("truncated", text.token_at(begin), len(text.ids)))
    return tuple(found)


def _cut(text: TokenText, entries: list[Entry], grammar: Grammar) -> tuple[int, int, str]:
    """Return the number of kept entries, the number of kept tokens, and the text with which the appended tail must
    begin. The text is the last bytes of the last kept entry if its last token is cut off, the container's opening text
    if no entry is kept, and "" otherwise."""
    for kept in range(len(entries), 0, -1):
        end = entries[kept - 1][0]
        length = text.tokens_until(end)
        if text.ends[length - 1] == end:
            return kept, length, ""
        taken = text.data[text.start(length - 1) : end]
        if _STRUCTURE.fullmatch(taken):
            return kept, length - 1, taken.decode()
    return 0, 0, grammar.opener
