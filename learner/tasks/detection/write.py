"""Writes objects as an answer or as the continuation of one, and checks whether ground truth can be written and read
back.

The text is canonical: ", " and ": ", descriptions as JSON strings with non-ASCII characters unescaped. The start of an
answer (the prefix) and the written continuation (the tail) together are a closed container. The container is parsed as
the prefix's objects, followed by the written objects. `validate_sample` is called once per sample, before training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from learner.records import DetectionObject, ParsedRollout, Sample
from learner.tasks.detection.bins import arity_is_right, canonical_key, has_area
from learner.tasks.detection.grammar import NUM_BINS, Grammar
from learner.tasks.task import SerializedTail, text_fault
from shared.errors import DataError

if TYPE_CHECKING:
    from learner.tasks.tokens import TokenPieces

_CACHED_DESCS = 1 << 12


def serialize_objects(
    objects: Sequence[DetectionObject], after: ParsedRollout | None, grammar: Grammar
) -> SerializedTail:
    """Write `objects`, in the given order, as text that continues `after` (None: a whole answer) and closes the
    container."""
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
    """Return one object's text in three parts: before its description, the description without quotes, and after it."""
    desc = escaped(obj.desc)
    numbers = ", ".join(map(grammar.coordinate_text, obj.bins))
    image = "" if obj.image is None else f'"image": {obj.image}, '
    if grammar.indexed:
        return f'"object_{number}": {{"desc": "', desc, f'", {image}"{obj.kind}": [{numbers}]}}'
    return f'{{{image}"{obj.kind}": [{numbers}], "label": "', desc, '"}'


@lru_cache(maxsize=_CACHED_DESCS)
def escaped(desc: str) -> str:
    """Return the description as the inside of a JSON string, without its quotes."""
    return json.dumps(desc, ensure_ascii=False)[1:-1]


def validate_sample(sample: Sample, pieces: TokenPieces | None) -> None:
    """Raises DataError, which names sample and object, if an object cannot be a target, or if an object of a sample
    with several images does not say which image it is in.

    `pieces` None: it is not checked that descriptions are read back unchanged after tokenization.
    """
    _validate_images(sample)
    for number, obj in enumerate(sample.objects, start=1):
        fault = object_fault(obj, pieces)
        if fault is not None:
            found, wanted, remedy = fault
            raise DataError(
                f"sample {sample.sample_id}: ground-truth object {number} cannot be used",
                found=found,
                wanted=wanted,
                remedy=remedy,
            )
    keys = [canonical_key(obj) for obj in sample.objects]
    if keys != sorted(keys):
        raise DataError(
            f"sample {sample.sample_id}: ground truth is not in canonical order",
            found=f"{'(image, y1, x1)' if sample.sizes else '(y1, x1)'} = {keys}"[:200],
            wanted="top to bottom, then left to right" + (", image after image" if sample.sizes else ""),
            remedy="order the objects with learner.tasks.detection.bins.canonical_order",
        )


def _validate_images(sample: Sample) -> None:
    """Raises DataError if an object or region does not name its image, or if some image's size is not known."""
    number = len(sample.images)
    if number > 1 and len(sample.sizes) != number:
        raise DataError(
            f"sample {sample.sample_id}: the sizes of its images are not known",
            found=f"{number} images, {len(sample.sizes)} sizes",
            wanted="width and height of each image, because a box is a share of its own image",
            remedy="give the sizes (`sizes` in JSONL and in Sample), or make the images local files",
        )
    known = range(1, number + 1) if number > 1 else (None,)
    for obj in (*sample.objects, *sample.ignored):
        if isinstance(obj, DetectionObject) and obj.image not in known:
            raise DataError(
                f"sample {sample.sample_id}: {obj.desc!r} is in no image of it",
                found="no image" if obj.image is None else f"image {obj.image}",
                wanted=f"1 to {number}" if number > 1 else "no number, because the sample has no more than one image",
                remedy="correct the `image` of the object",
            )


def object_fault(obj: DetectionObject, pieces: TokenPieces | None) -> tuple[str, str, str] | None:
    """Return (found, wanted, what to do) if an object cannot be a target, else None."""
    return _geometry_fault(obj) or text_fault(obj.desc, pieces)


def _geometry_fault(obj: DetectionObject) -> tuple[str, str, str] | None:
    found, remedy = f"{obj.kind} {list(obj.bins)}"[:200], "fix or remove this object"
    if not all(0 <= value < NUM_BINS for value in obj.bins):
        return found, f"bins in 0..{NUM_BINS - 1}", remedy
    if not arity_is_right(obj.kind, obj.bins):
        return found, "4 numbers for a box, an even number of at least 6 for a polygon", remedy
    if not has_area(obj.kind, obj.bins):
        return found, "x1 < x2 and y1 < y2 in bins, and an area above 0", remedy
    return None
