"""Says of every entry of an answer what it is: an object, or why it is dropped.

In: the entries, and the answer's coordinates. Out: one outcome per entry, in order. An entry may be dropped for several
reasons; the first of these that holds is told:

    key_invalid       its key is not `object_N` (N >= 1, no leading zeros, at most 18 digits), or N came before;
                      or one of its fields came twice
    missing_desc      no description, or one that is empty, blank, not a string, or not valid text
    unknown_geom      a field that is neither description nor geometry, two geometries, or a rest that is unreadable
    missing_geom      no geometry that is a flat list
    non_coord_token   something in the list is not a coordinate as the task spells it (`<|coord_k|>` must be that
                      very token; digits must be 0..999 without leading zeros)
    wrong_arity       not 4 numbers for a box; fewer than 6 or an odd number for a polygon
    bbox_invalid      x2 <= x1 or y2 <= y1, degenerate ones included; for a polygon, of its bounding box

Called by `parse_rollout`. The corners of all entries are looked up at once, for there are dozens, mostly right boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from learner.records import DetectionObject, DropReason, PredictedObject
from learner.tasks.detection.bins import arity_is_right, encloses_something
from learner.tasks.detection.coordinates import Coordinates
from learner.tasks.detection.grammar import GEOMETRY_KINDS, Grammar, decode
from learner.tasks.detection.read import Entry

Outcome = PredictedObject | DropReason
_FOUR = np.arange(4)
# Made of tuples, for dozens at a time: calling the classes takes twice as long.
_detection: Callable[[tuple[Any, ...]], DetectionObject] = partial(tuple.__new__, DetectionObject)
_predicted: Callable[[tuple[Any, ...]], PredictedObject] = partial(tuple.__new__, PredictedObject)


def judge(entries: Sequence[Entry], data: bytes, coordinates: Coordinates, grammar: Grammar) -> list[Outcome]:
    """The outcome of each entry; `data` are the answer's bytes."""
    if not entries:
        return []
    _, numbers, faults, strings, places, geometries, begins, ends = zip(*entries, strict=True)
    first, behind = coordinates.begins.searchsorted(begins), coordinates.ends.searchsorted(ends, "right")
    num_listed = behind - first  # digits are a number of the list wherever they stand in it
    if not grammar.digits:
        num_listed = np.fromiter(map(data.count, repeat(b","), begins, ends), dtype=np.int64, count=len(entries)) + 1
    bins = coordinates.slots.bin if len(coordinates.slots.bin) else np.zeros(1, dtype=np.int64)
    corners = bins.take(first[:, None] + _FOUR, mode="clip")
    x1, y1, x2, y2 = corners.T
    boxes = (behind - first == 4) & (num_listed == 4) & (x1 < x2) & (y1 < y2)
    descs = [decode(string) or "" for string in strings]
    slots = list(map(range, first.tolist(), behind.tolist()))
    objects = map(_detection, zip(descs, repeat("bbox_2d"), map(tuple, corners.tolist()), strict=False))
    outcomes: list[Outcome] = list(map(_predicted, zip(objects, slots, places, strict=True)))
    usual = faults.count(None) == geometries.count(b"bbox_2d") == len(entries) and all(descs)
    for i in np.flatnonzero(~boxes).tolist() if usual else range(len(entries)):
        outcomes[i] = faults[i] or _judge(entries[i], int(num_listed[i]), slots[i], coordinates)
    if grammar.indexed:
        _refuse_keys(numbers, outcomes)
    return outcomes


def _judge(entry: Entry, num_listed: int, slots: range, coordinates: Coordinates) -> Outcome:
    """Of one entry without a fault."""
    _, _, _, string, place, geometry, _, _ = entry
    desc, kind = decode(string), GEOMETRY_KINDS[geometry]
    if desc is None:
        return "missing_desc"
    if len(slots) != num_listed:
        return "non_coord_token"  # other tokens spell out a coordinate token's text
    bins = tuple(coordinates.slots.bin[slots.start : slots.stop].tolist())
    if not arity_is_right(kind, bins):
        return "wrong_arity"
    if not encloses_something(kind, bins):
        return "bbox_invalid"
    return PredictedObject(DetectionObject(desc, kind, bins), slots, place)


def _refuse_keys(numbers: Sequence[int], outcomes: list[Outcome]) -> None:
    """Numbers that are none, or that came before, overrule whatever was said."""
    if 0 not in numbers and len(set(numbers)) == len(numbers):
        return
    met: set[int] = {0}
    for i, number in enumerate(numbers):
        if number in met:
            outcomes[i] = "key_invalid"
        met.add(number)
