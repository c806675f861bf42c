"""`jsonl`, the project's own format: one record per line.

Coordinates are pixels. Image paths are relative to the file's folder or `image_root`. The assistant's answer at the end
of `messages` is dropped. Without `id` the line number is the id. An object with `"ignore": true` (or `iscrowd`,
`difficult`) is an ignore region. `width` and `height` are the size of the image. If width and height are missing, the
size is read from the image file. If a row has several images, each object says which image it is in (`"image": 2`,
counted from 1). For several images, `width` and `height` hold for every image, or `sizes` lists the size of each one.

    {"id": "a-17", "messages": [{"role": "user", "content": "<image>Detect every digit."}], "images": ["images/17.png"],
     "objects": [{"desc": "seven", "bbox_2d": [12, 40, 31, 77]}], "width": 128, "height": 128}
    {"id": "b-2", "messages": [{"role": "user", "content": "<image><image>Detect every digit."}],
     "images": ["1.png", "2.png"], "sizes": [[128, 128], [96, 64]],
     "objects": [{"desc": "two", "image": 2, "bbox_2d": [12, 40, 31, 60]}]}

Rows of other programs are read too: ms-swift's, and conversations (`learner.data.formats.chat`), also as one JSON list.
The first row decides which kind of rows a file has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from learner.data.formats.chat import RowKind, own_row, row_kind
from learner.data.formats.source import RowModel, Source
from learner.data.formats.strict import Flag, Identity, Number, Size
from learner.data.raw import BadRecords
from learner.records import GeometryKind, Place, RawObject, RawRecord
from shared.errors import DataError
from shared.generation import Turn
from shared.reading import json_in, json_of, lines_in
from shared.wire import Message


class ObjectRow(RowModel):
    """An object in pixels. `bbox_2d` is x1, y1, x2, y2, `poly` is x1, y1, x2, y2, ...; an object has exactly one of
    both."""

    desc: str = ""
    bbox_2d: list[Number] | None = Field(default=None, min_length=4, max_length=4)
    poly: list[Number] | None = Field(default=None, min_length=6)
    image: Size | None = None
    ignore: Flag = False
    iscrowd: Flag = False
    difficult: Flag = False

    @property
    def ignored(self) -> bool:
        return self.ignore or self.iscrowd or self.difficult

    @model_validator(mode="after")
    def _is_one_object(self) -> ObjectRow:
        if not self.desc and not self.ignored:
            raise ValueError("a desc")
        if (self.bbox_2d is None) == (self.poly is None):
            raise ValueError("exactly one of bbox_2d and poly")
        if self.poly is not None and len(self.poly) % 2:
            raise ValueError("poly: wanted an even number of coordinates")
        return self


class Row(RowModel):
    """A line of the project's JSONL."""

    id: Identity | None = None
    messages: list[Message] = Field(min_length=1)
    images: list[str] = []
    objects: list[ObjectRow]
    width: Size | None = None
    height: Size | None = None
    sizes: list[tuple[Size, Size]] = []

    def faults(self) -> Iterator[tuple[str, str, str]]:
        """Yield (what is wrong, found, wanted) for the row's sizes."""
        number = len(self.images)
        if number > 1 and self.sizes and len(self.sizes) != number:
            found = f"{len(self.sizes)} sizes, {number} images"
            yield "sizes is wrong", found, "width and height of each image, in the order of the images"
        missing = [name for name in ("width", "height") if getattr(self, name) is None]
        for name in missing if number == 0 or len(missing) == 1 else ():
            given = ", ".join(sorted(key for key in self.model_fields_set if getattr(self, key) is not None))
            yield f"{name} is missing", f"only {given}", f"a value for {name}"


def read_jsonl(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    if source.data.prompt is not None:
        remedy = "remove data.prompt, or correct data.format"
        found = f"data.prompt {source.data.prompt!r:.100}, and JSONL rows"
        raise DataError("JSONL rows carry their own messages", found=found, wanted="no data.prompt", remedy=remedy)

    def records() -> Iterator[RawRecord]:
        kind: RowKind | None = None
        try:
            for number, text in _rows(source.file):
                place = Place(source.file, f"line {number}")
                kind = kind or _kind(text)
                yield from _records(kind or "own", text, number, place, source)
        except (OSError, ValueError) as error:
            place = Place(source.file, "lines")
            raise place.error("the file cannot be read", found=str(error), wanted="one record a line") from error

    return source.image_root(source.file.parent), records()


def _rows(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, row) for each line, or for each item if the file is a JSON list. Raises OSError, ValueError."""
    lines = lines_in(file)
    first = next(lines, None)
    if first is not None and first[1][:1] == b"[":
        content = json_in(file)
        for number, row in enumerate(content if isinstance(content, list) else [], start=1):
            yield number, json.dumps(row).encode()
    elif first is not None:
        yield first
        yield from lines


def _kind(text: bytes) -> RowKind | None:
    try:
        row = json_of(text)
    except ValueError:  # the mistake is reported when the row is read
        return None
    return row_kind(row) if isinstance(row, dict) else None


def is_own(file: Path) -> bool:
    """Return True if the first row is the project's own. A file that is one JSON list never is. Raises DataError if the
    file cannot be read."""
    try:
        first = next(lines_in(file), (1, b"{}"))[1]
        return first[:1] != b"[" and _kind(first) != "chat"
    except OSError as error:
        raise Place(file, "lines").error(
            "the file cannot be read", found=str(error), wanted="one record a line"
        ) from error


def _records(kind: RowKind, text: bytes, number: int, place: Place, source: Source) -> Iterator[RawRecord]:
    if kind == "own":
        yield from of_row(partial(Row.model_validate_json, text), str(number), place, source.bad)
        return
    try:
        row = json_of(text)
        if not isinstance(row, dict):
            raise ValueError(f"{text[:80].decode(errors='replace')} instead of an object with keys")
        made, unit = own_row(row)
    except ValueError as error:
        wanted = "a conversation with boxes in its last answer, or objects with ref and bbox"
        source.bad.meet("malformed", place.error("a row without boxes", found=str(error)[:200], wanted=wanted))
        return
    for record in of_row(partial(Row.model_validate, made), str(number), place, source.bad):
        yield replace(record, unit=unit)


def of_row(parse: Callable[[], Row], default_id: str, place: Place, bad: BadRecords) -> Iterator[RawRecord]:
    """Yield the row's record. A row with mistakes yields nothing, and its mistakes go to `bad`."""
    try:
        row = parse()
        faults = [place.error(what, found=found, wanted=wanted) for what, found, wanted in row.faults()]
        messages = _prompt_turns(row.messages, place)
    except ValidationError as error:
        bad.malformed(place, error)
    except DataError as error:
        bad.meet("malformed", error)
    else:
        for fault in faults:
            bad.meet("malformed", fault)
        if faults:
            return
        yield RawRecord(
            place=place,
            sample_id=default_id if row.id is None else row.id,
            messages=messages,
            images=tuple(row.images),
            objects=[_of_object_row(number, obj, place) for number, obj in enumerate(row.objects, start=1)],
            width=row.width,
            height=row.height,
            sizes=tuple(row.sizes),
        )


def _of_object_row(number: int, obj: ObjectRow, place: Place) -> RawObject:
    kind: GeometryKind = "bbox_2d" if obj.bbox_2d is not None else "poly"
    coords = obj.bbox_2d if obj.bbox_2d is not None else obj.poly
    assert coords is not None
    return RawObject(
        desc=obj.desc,
        kind=kind,
        coords=tuple(coords),
        written=f"{kind} {[round(v, 3) for v in coords]}"[:200],
        name=f"object {number} ({obj.desc!r})",
        place=place,
        ignored=obj.ignored,
        image=obj.image,
    )


def _prompt_turns(messages: Sequence[Message], place: Place) -> list[Turn]:
    """Return the turns without the assistant's answer at the end. A rollout answers these turns. Raises DataError."""
    turns = messages[:-1] if messages[-1].role == "assistant" else messages
    if not turns or turns[-1].role != "user":
        roles = [message.role for message in messages]
        raise place.error(
            "messages ask nothing", found=f"roles {roles}", wanted="a user's turn, then at most one answer"
        )
    for message in turns:
        if not isinstance(message.content, str) and any(part.image is not None for part in message.content):
            raise place.error(
                "messages hold an image", found="a content part with an image", wanted="images in the row's `images`"
            )
    return [message.model_dump(exclude_none=True) for message in turns]
