"""One dataset record, checked and turned into a `Sample`: what the JSONL and the COCO reader have in common.

In: messages, images and objects in pixels, and the place (file and line) they stand at. Out: a `Sample` with absolute
image paths, and objects in bins and canonical order. Images are looked for, never opened.

The project's JSONL: one record per line.

    {"id": "a-17", "messages": [{"role": "user", "content": "<image>Detect every digit."}], "images": ["images/17.png"],
     "objects": [{"desc": "seven", "bbox_2d": [12, 40, 31, 77]}], "width": 128, "height": 128}

Coordinates are pixels; image paths are relative to the file's folder or `image_root`. An assistant's last turn is
dropped. Blank lines are let through, everything else that is not a record is a DataError with its line.

COCO instances: a sample per image, an object per annotation, its category's name as the description.

Boxes (x, y, width, height) are read, segmentations are not. Crowd regions (`iscrowd: 1`) are no objects. An image
without annotations is a sample without objects: it teaches the empty answer.

`load_samples`: a whole annotation file, read and checked before anything is trained (R12).

Nothing is skipped: the first record that can't be used stops the run, with file, line and reason. Only annotations are
held in memory (some 2 kB a sample); images are opened when a prompt is encoded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from learner.config.schema import DataConfig
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


def read_jsonl(file: Path, *, image_root: Path) -> Iterator[tuple[Place, Sample]]:
    """Samples in the order of lines, with their places. Raises DataError for the first line that is wrong."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = Place(file, f"line {number}")
            try:
                row = Row.model_validate_json(line.strip())
            except ValidationError as error:
                raise place.invalid(error) from error
            sample_id = str(number) if row.id is None else str(row.id)
            yield place, to_sample(row, sample_id=sample_id, image_root=image_root, place=place)


DEFAULT_PROMPT = "<image>Detect every object."


class CocoImage(RowModel):
    id: int | str
    file_name: str = Field(min_length=1)
    width: int = Field(gt=0)
    height: int = Field(gt=0)


class CocoAnnotation(RowModel):
    id: int | str
    image_id: int | str
    category_id: int | str
    bbox: list[float] = Field(min_length=4, max_length=4)
    iscrowd: int = 0


class CocoCategory(RowModel):
    id: int | str
    name: str = Field(min_length=1)


class CocoFile(RowModel):
    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


def read_coco(file: Path, *, image_root: Path, prompt: str | None) -> Iterator[tuple[Place, Sample]]:
    """Samples in the order of `images`, with their places; `prompt` is the user's turn.

    Raises DataError naming the image or the annotation.
    """
    try:
        coco = CocoFile.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise Place(file, "COCO JSON").invalid(error) from error
    by_image = _annotations_by_image(coco, file)
    names = {category.id: category.name for category in coco.categories}
    message = Message(role="user", content=prompt if prompt is not None else DEFAULT_PROMPT)
    for image in coco.images:
        place = Place(file, f"image {image.id}")
        row = Row(
            messages=[message],
            images=[image.file_name],
            objects=[_to_row(annotation, names, file) for annotation in by_image.get(image.id, ())],
            width=image.width,
            height=image.height,
        )
        yield place, to_sample(row, sample_id=str(image.id), image_root=image_root, place=place)


def _annotations_by_image(coco: CocoFile, file: Path) -> Mapping[int | str, list[CocoAnnotation]]:
    image_ids = {image.id for image in coco.images}
    grouped: dict[int | str, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if annotation.image_id not in image_ids:
            raise Place(file, f"annotation {annotation.id}").error(
                "its image is not there", found=f"image_id {annotation.image_id!r}", wanted="an id of `images`"
            )
        if not annotation.iscrowd:
            grouped[annotation.image_id].append(annotation)
    return grouped


def _to_row(annotation: CocoAnnotation, names: Mapping[int | str, str], file: Path) -> ObjectRow:
    place = Place(file, f"annotation {annotation.id}")
    if annotation.category_id not in names:
        raise place.error(
            "its category is not there", found=f"category_id {annotation.category_id!r}", wanted="an id of `categories`"
        )
    x, y, width, height = annotation.bbox
    try:
        return ObjectRow(desc=names[annotation.category_id], bbox_2d=[x, y, x + width, y + height])
    except ValidationError as error:
        raise place.error(
            "its box is empty", found=f"bbox {annotation.bbox}", wanted="width and height above 0"
        ) from error


class Validates(Protocol):
    """The part of a `Task` that is needed here."""

    def validate(self, sample: Sample) -> None: ...


def load_samples(data: DataConfig, path: str, task: Validates) -> list[Sample]:
    """Every sample of the annotation file `path`, in file order; of `data.train` at most `data.max_samples`.

    Raises DataError, with file and line, where a record is broken, an id comes twice, or the task can't use a sample.
    """
    limit = data.max_samples if path == data.train else None
    places: dict[str, Place] = {}
    samples = []
    for place, sample in islice(_read(data, Path(path)), limit):
        if sample.sample_id in places:
            raise place.error(
                "its id is taken",
                found=f"id {sample.sample_id!r}, also at {places[sample.sample_id].record}",
                wanted="an id of its own",
            )
        places[sample.sample_id] = place
        _validate(sample, task, place)
        samples.append(sample)
    if not samples:
        raise DataError(f"{path} has no samples", found="an empty file", wanted="one record or more")
    return samples


def _read(data: DataConfig, file: Path) -> Iterator[tuple[Place, Sample]]:
    if not file.is_file():
        raise DataError(
            "an annotation file is missing",
            found=f"no file {file.absolute()}",
            wanted=f"{data.format} annotations",
            remedy="correct the path under data; relative ones start at the working directory",
        )
    image_root = Path(data.image_root) if data.image_root is not None else file.parent
    if data.format == "coco":
        return read_coco(file, image_root=image_root, prompt=data.prompt)
    return read_jsonl(file, image_root=image_root)


def _validate(sample: Sample, task: Validates, place: Place) -> None:
    try:
        task.validate(sample)
    except DataError as error:
        raise place.error(error.what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error
