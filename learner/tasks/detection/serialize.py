"""Writes objects as an answer, fresh or continuing a prefix, and says where the descriptions are.

The text is canonical: ", " and ": ", descriptions as JSON strings with non-ASCII characters as they are. Parsing
prefix + tail gives the prefix's objects, then the written ones, in a closed container. Called by
`DetectionTask.serialize`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from learner.records import DetectionObject, ParsedRollout
from learner.tasks.detection.grammar import Grammar
from learner.tasks.task import SerializedTail

_CACHED_DESCS = 1 << 12


def serialize_objects(
    objects: Sequence[DetectionObject], after: ParsedRollout | None, grammar: Grammar
) -> SerializedTail:
    """`objects`, in the order given, as text that continues `after` (None: a whole answer) and closes the container."""
    parts = [grammar.opener if after is None else after.tail_opening]
    length = len(parts[0])
    desc_spans: list[tuple[int, int]] = []
    object_spans: list[tuple[int, int]] = []
    separator = ", " if after is not None and after.needs_separator else ""
    for number, obj in enumerate(objects, start=1 if after is None else after.next_index):
        before, desc, behind = _write(obj, number, grammar)
        start = length + len(separator) + len(before)
        end = start + len(desc) + len(behind)
        desc_spans.append((start, start + len(desc)))
        object_spans.append((length, end))
        parts += (separator, before, desc, behind)
        length, separator = end, ", "
    parts.append(grammar.closer)
    return SerializedTail(text="".join(parts), desc_spans=tuple(desc_spans), object_spans=tuple(object_spans))


def _write(obj: DetectionObject, number: int, grammar: Grammar) -> tuple[str, str, str]:
    """One object's text: what is before its description, the description between its quotes, and what is behind."""
    desc = escaped(obj.desc)
    numbers = ", ".join(map(grammar.coordinate_text, obj.bins))
    if grammar.indexed:
        return f'"object_{number}": {{"desc": "', desc, f'", "{obj.kind}": [{numbers}]}}'
    return f'{{"{obj.kind}": [{numbers}], "label": "', desc, '"}'


@lru_cache(maxsize=_CACHED_DESCS)
def escaped(desc: str) -> str:
    """The description inside a JSON string's quotes."""
    return json.dumps(desc, ensure_ascii=False)[1:-1]
