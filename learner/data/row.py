"""One dataset record, checked and turned into a `Sample`: what the JSONL and the COCO reader have in common.

In: messages, images and objects in pixels, and the place (file and line) they stand at. Out: a `Sample` with absolute
image paths, and objects in bins and canonical order. Images are looked for, never opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from learner.records import DetectionObject, Sample
from learner.tasks.detection.bins import canonical_order, to_bins
from shared.errors import DataError, RequestError
from shared.prompt import render_messages
from shared.wire import Message

INLINE_PREFIXES = ("http://", "https://", "data:")
MIN_BASE64_LENGTH = 1024  # no path is that long; a shorter string is a path
EDGE_TOLERANCE = 1.0  # pixels by which rounding may push a coordinate out of the image


class RowModel(BaseModel):
    """Fields that are not ours are let through: datasets carry provenance, scores, licences."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class ObjectRow(RowModel):
    """Pixels: `bbox_2d` is x1, y1, x2, y2; `poly` is x1, y1, x2, y2, ...; exactly one of them."""

    desc: str = Field(min_length=1)
    bbox_2d: list[float] | None = Field(default=None, min_length=4, max_length=4)
    poly: list[float] | None = Field(default=None, min_length=6)

    @model_validator(mode="after")
    def _one_geometry(self) -> ObjectRow:
        if (self.bbox_2d is None) == (self.poly is None):
            raise ValueError("wanted exactly one of bbox_2d and poly")
        if self.poly is not None and len(self.poly) % 2:
            raise ValueError("poly: wanted an even number of coordinates")
        if self.bbox_2d is not None and not (self.bbox_2d[0] < self.bbox_2d[2] and self.bbox_2d[1] < self.bbox_2d[3]):
            raise ValueError(f"bbox_2d: wanted x1 < x2 and y1 < y2, found {self.bbox_2d}")
        return self


class Row(RowModel):
    """A line of the project's JSONL. Without `id` the line number stands in."""

    id: str | int | None = None
    messages: list[Message] = Field(min_length=1)
    images: list[str] = []
    objects: list[ObjectRow]
    width: int = Field(gt=0)
    height: int = Field(gt=0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands, for messages: file, and "line 7" or "image 12"."""

    file: Path
    record: str

    def error(self, what: str, *, found: str, wanted: str, remedy: str = "correct the row") -> DataError:
        return DataError(f"{self.file}, {self.record}: {what}", found=found, wanted=wanted, remedy=remedy)

    def invalid(self, error: ValidationError) -> DataError:
        """The first mistake that pydantic found."""
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "json_invalid":
            found = f"{first['msg']}: {first['input'].decode(errors='replace'):.200}"
            return self.error("not JSON", found=found, wanted="one JSON object on the line")
        if first["type"] == "missing":
            found = f"only {', '.join(map(str, first['input'])) or 'nothing'}"
            return self.error(f"{field} is missing", found=found, wanted=f"a value for {field}")
        return self.error(
            f"{field or 'row'} is wrong",
            found=f"{first['input']!r:.200}",
            wanted=first["msg"].removeprefix("Value error, "),
        )


def to_sample(row: Row, *, sample_id: str, image_root: Path, place: Place) -> Sample:
    """Raises DataError, naming the place, where the record can't be used."""
    messages = _prompt_turns(row.messages, place)
    try:
        render_messages(messages, len(row.images))
    except RequestError as error:
        raise place.error(error.what, found=error.found, wanted=error.wanted) from error
    return Sample(
        sample_id=sample_id,
        messages=tuple(messages),
        images=tuple(_resolve(image, image_root, place) for image in row.images),
        objects=canonical_order(_to_object(number, obj, row, place) for number, obj in enumerate(row.objects, start=1)),
        width=row.width,
        height=row.height,
    )


def _prompt_turns(messages: Sequence[Message], place: Place) -> list[dict[str, Any]]:
    """The turns without the assistant's last one: what a rollout is asked to answer."""
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


def _resolve(image: str, image_root: Path, place: Place) -> str:
    """URLs, data URLs and base64 as they are; a path made absolute and looked for."""
    if image.startswith(INLINE_PREFIXES) or len(image) >= MIN_BASE64_LENGTH:
        return image
    path = (image_root / image).absolute()
    if not path.is_file():
        raise place.error(
            "an image is missing",
            found=f"no file {path}",
            wanted=f"{image!r} under {image_root}",
            remedy="correct the row, or set data.image_root to the images' folder",
        )
    return str(path)


def _to_object(number: int, obj: ObjectRow, row: Row, place: Place) -> DetectionObject:
    coords = obj.bbox_2d if obj.bbox_2d is not None else obj.poly
    assert coords is not None
    sizes = (row.width, row.height)
    if any(not -EDGE_TOLERANCE <= value <= sizes[i % 2] + EDGE_TOLERANCE for i, value in enumerate(coords)):
        raise place.error(
            f"object {number} ({obj.desc!r}) lies outside the image",
            found=f"{coords}"[:200],
            wanted=f"pixels within {row.width} x {row.height}",
        )
    return DetectionObject(
        desc=obj.desc,
        kind="bbox_2d" if obj.bbox_2d is not None else "poly",
        bins=to_bins(coords, row.width, row.height),
    )
