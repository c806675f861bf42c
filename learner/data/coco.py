"""COCO instances: a sample per image, an object per annotation, its category's name as the description.

Boxes (x, y, width, height) are read, segmentations are not. Crowd regions (`iscrowd: 1`) are no objects. An image
without annotations is a sample without objects: it teaches the empty answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from learner.data.row import ObjectRow, Place, Row, RowModel, to_sample
from learner.records import Sample
from shared.wire import Message

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
