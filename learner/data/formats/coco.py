"""`coco`: one sample per image, one object per annotation. The name of the category is the description.

With `task.geometry: poly`, polygons and run lengths are the objects' outlines. With other geometries, outlines are read
only if an annotation has no box, and the box around the outline is used. Run lengths (RLE) become their mask's outline.
Run lengths as text are as in COCO's reference (`rleFrString` in pycocotools): each character has five bits, and a run
is stored as its difference from the run two before. `iscrowd` and `ignore` make ignore regions. If `width` and `height`
are missing, the image's own size is read. If CVAT's `attributes.rotation` turns a rectangle, the enclosing box is used.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from learner.data.formats.source import RowModel, Source, enclosing, turned
from learner.data.formats.strict import (
    ClassName,
    Flag,
    Identity,
    KnownSize,
    Number,
    number,
    numbers,
    plain_name,
    whole,
)
from learner.records import GeometryKind, Place, RawObject, RawRecord, Size
from learner.tasks.detection.bins import ring_of
from shared.reading import as_here, is_file, json_bytes_in, json_in, json_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from shapely.geometry.base import BaseGeometry


class CocoImage(RowModel):
    id: Identity
    file_name: str = Field(min_length=1)
    width: KnownSize = None
    height: KnownSize = None

    @property
    def size(self) -> Size | None:
        """Return width and height; None if the file does not give them."""
        return (self.width, self.height) if self.width and self.height else None


def _rotation(value: object) -> float:
    """Return the degrees by which CVAT's attributes turn a box clockwise; 0 if there is no rotation."""
    try:
        return number(value.get("rotation")) if isinstance(value, Mapping) else 0.0
    except ValueError:
        return 0.0


# Large files have millions of annotations, and pydantic models would take three times the memory.
_slim = dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))


@_slim
class CocoAnnotation:
    id: Identity
    image_id: Identity
    category_id: Identity
    bbox: list[Number] = Field(min_length=4, max_length=4)
    iscrowd: Flag = False
    ignore: Flag = False
    rotation: Annotated[float, BeforeValidator(_rotation)] = Field(default=0.0, alias="attributes")


@_slim
class OutlinedAnnotation(CocoAnnotation):
    """An annotation with its outline."""

    segmentation: object = None


class CocoCategory(RowModel):
    id: Identity
    name: ClassName


class CocoFile(RowModel):
    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]
    item: ClassVar[type[CocoAnnotation]] = CocoAnnotation


class OutlinedFile(CocoFile):
    annotations: list[OutlinedAnnotation]  # type: ignore[assignment]
    item: ClassVar[type[CocoAnnotation]] = OutlinedAnnotation


Item = TypeVar("Item")


def read_coco(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    """Return the image folder and the records in the order of `images`."""

    def records() -> Iterator[RawRecord]:
        coco, broken = _read_file(source)
        by_image = _annotations_by_image(coco, broken, source)
        names = _names_by_id(coco.categories, source)
        folder = _near_folder([image.file_name for image in coco.images[:1]], source)
        for image in coco.images:
            found = by_image.get(image.id, ())
            if "categories" in broken:  # a mistake of unreadable categories was reported already
                found = [annotation for annotation in found if annotation.category_id in names]
            place = Place(source.file, f"image {image.id}")
            _check_size(image, place, source)
            size = image.size or _size_of_run_lengths(found)
            objects = [_of_annotation(a, names, size, source) for a in found]
            yield RawRecord(
                place=place,
                sample_id=image.id,
                messages=source.messages,
                images=(str(folder / as_here(image.file_name, folder)) if folder else image.file_name,),
                objects=[obj for obj in objects if obj is not None],
                width=size[0] if size else None,
                height=size[1] if size else None,
            )

    return source.image_root(source.file.parent), records()


def image_folder(names: Sequence[str], source: Source) -> Path:
    """Return the folder where the images with these file names are."""
    return _near_folder(names, source) or source.image_root(source.file.parent)


def _near_folder(names: Sequence[str], source: Source) -> Path | None:
    """Return the folder of the first image if it is near the file and not the file's own folder, such as COCO's
    `train2017` beside `annotations`. The path is absolute."""
    # Relative paths of records start at the file's folder.
    own = source.file.absolute().parent
    if source.data.image_root is not None or not names or is_file(own / as_here(names[0], own)):
        return None
    split = source.file.stem.rpartition("_")[2]
    near = [place / name for place in (own, own.parent) for name in ("images", "data", split, f"images/{split}", "")]
    return next((folder for folder in near if is_file(folder / as_here(names[0], folder))), None)


def _read_file(source: Source) -> tuple[CocoFile, set[str]]:
    """Return the file, and the sections with unreadable items. The mistakes are added to `source.bad`."""
    # Outlines take most of a large file's memory, so only polygons read them.
    model = OutlinedFile if source.geometry == "poly" else CocoFile
    place = Place(source.file, "COCO JSON")
    try:
        content = json_bytes_in(source.file)
        try:
            return model.model_validate_json(content), set()
        except ValidationError:
            content = filled(content)
            return model.model_validate_json(content), set()
    except OSError as error:
        source.bad.meet("malformed", place.error("the file cannot be read", found=str(error), wanted="COCO JSON"))
    except ValidationError as error:
        source.bad.malformed(place, error)
        # Readable items are returned all the same, so that references to them are checked in the same run.
        return _items_without_mistake(content, model)
    return CocoFile(images=[], annotations=[], categories=[]), set()


def filled(content: bytes) -> bytes:
    """Return the file with parts that some tools leave out: an empty list of annotations, ids of annotations, and boxes
    that can be computed from polygons. This function is called only if the file could not be read unchanged."""
    try:
        sections = json_of(content)
        annotations = sections["annotations"] = sections["annotations"] or []
        taken = {str(one["id"]) for one in annotations if one.get("id") is not None}
        free = (number for number in count(1) if str(number) not in taken)
        for one in annotations:
            if one.get("id") is None:
                one["id"] = next(free)
            if not one.get("bbox") and isinstance(one.get("segmentation"), list):
                points = [value for ring in one["segmentation"] for value in numbers(ring)]
                (left, right), (top, bottom) = ((min(side), max(side)) for side in (points[0::2], points[1::2]))
                one["bbox"] = [left, top, right - left, bottom - top]
        return json.dumps(sections).encode()
    except (ValueError, TypeError, KeyError, AttributeError):  # the second reading reports the mistake
        return content


def _items_without_mistake(content: bytes, model: type[CocoFile]) -> tuple[CocoFile, set[str]]:
    """Return the readable items, and the sections that have unreadable items. Never raises."""
    try:
        sections = json_of(content)
    except ValueError:
        sections = None
    kept: dict[str, list[Any]] = {}
    broken: set[str] = set()
    for name, item in (("images", CocoImage), ("annotations", model.item), ("categories", CocoCategory)):
        listed = sections.get(name) if isinstance(sections, dict) else None
        values = listed if isinstance(listed, list) else [None]
        kept[name] = [made for value in values if (made := _made(item, value))]
        if len(kept[name]) < len(values):
            broken.add(name)
    return model.model_construct(None, **kept), broken


def _made(model: type[Item], value: object) -> Item | None:
    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError:
        return None


def category_ids(file: Path) -> dict[str, int]:
    """Return the category ids of class names in a COCO file that was read before. Class names are as in training.
    Return {} if the file can no longer be read."""
    try:
        content = json_in(file)
    except (OSError, ValueError):  # the file was replaced or removed meanwhile
        return {}
    listed = content.get("categories") if isinstance(content, dict) else None
    ids: dict[str, int] = {}
    for one in listed if isinstance(listed, list) else []:
        made = _made(CocoCategory, one)
        if isinstance(made, CocoCategory) and made.id.isdecimal():
            ids.setdefault(plain_name(made.name), int(made.id))
    return ids


def _names_by_id(categories: Sequence[CocoCategory], source: Source) -> Mapping[str, str]:
    names: dict[str, str] = {}
    for category in categories:
        first = names.setdefault(category.id, category.name)
        if first != category.name:
            place = Place(source.file, f"category {category.id}")
            found, wanted = f"{first!r} and {category.name!r}", "an id of its own for each category"
            source.bad.meet("malformed", place.error("its id is taken", found=found, wanted=wanted))
    return names


def _annotations_by_image(coco: CocoFile, broken: set[str], source: Source) -> Mapping[str, list[CocoAnnotation]]:
    image_ids = {image.id for image in coco.images}
    grouped: dict[str, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if annotation.image_id in image_ids:
            grouped[annotation.image_id].append(annotation)
            continue
        if "images" in broken:
            continue  # the annotation's image may be an unreadable image, which was reported already
        place, found = Place(source.file, f"annotation {annotation.id}"), f"image_id {annotation.image_id}"
        source.bad.meet("malformed", place.error("its image is not there", found=found, wanted="an id of `images`"))
    return grouped


def _check_size(image: CocoImage, place: Place, source: Source) -> None:
    """Report an image for which the file has a width or a height, but not both."""
    sides = {"width": image.width, "height": image.height}
    missing = [name for name, side in sides.items() if side is None]
    if len(missing) == 1:
        found = ", ".join(f"{name} {side}" for name, side in sides.items() if side)
        source.bad.meet("malformed", place.error(f"{missing[0]} is missing", found=found, wanted="both, or neither"))


def _size_of_run_lengths(annotations: Sequence[CocoAnnotation]) -> Size | None:
    """Return the size in the first run lengths, which is the image's size; None if no annotation has run lengths."""
    for annotation in annotations:
        outline = annotation.segmentation if isinstance(annotation, OutlinedAnnotation) else None
        if isinstance(outline, Mapping) and (size := size_of_mask(outline)):
            return size
    return None


def _of_annotation(
    annotation: CocoAnnotation, names: Mapping[str, str], size: Size | None, source: Source
) -> RawObject | None:
    place, desc = Place(source.file, f"annotation {annotation.id}"), names.get(annotation.category_id)
    x, y, width, height = annotation.bbox
    if source.data.box_format == "xyxy":
        width, height = width - x, height - y
    kind: GeometryKind = "bbox_2d"
    coords: Sequence[float] = (x, y, x + width, y + height)
    # A rotation by 180 degrees does not change a rectangle.
    if annotation.rotation % 180:
        outline = turned((x, y, x + width, y + height), annotation.rotation, size)
        kind, coords = ("poly", outline) if source.geometry == "poly" else ("bbox_2d", enclosing(outline))
        found = f"{annotation.rotation:g} degrees"
        source.bad.keep("rotated", place.error("a turned rectangle", found=found, wanted="an upright one"))
    written = f"bbox {[round(v, 3) for v in annotation.bbox]}"
    if isinstance(annotation, OutlinedAnnotation) and annotation.segmentation:
        try:
            limit = source.data.max_image_pixels
            coords = outline_of(annotation.segmentation, size, limit)
            kind, written = "poly", f"segmentation, {written}"
        except ValueError as error:
            found = f"{str(annotation.segmentation)[:100]} ({error})"
            wanted = "a list of polygons, or run lengths (RLE) of the image's size"
            source.bad.meet("malformed", place.error("its segmentation is wrong", found=found, wanted=wanted))
            return None
    return RawObject(
        desc=desc,
        kind=kind,
        coords=tuple(coords),
        written=written if desc else f"category_id {annotation.category_id}, not among `categories`",
        name=f"the object ({desc!r})" if desc else "the object",
        place=place,
        ignored=annotation.iscrowd or annotation.ignore,
    )


# ---- segmentations ---------------------------------------------------------------------------------------------------

_TOLERANCE = 1.0  # max distance in pixels between a polygon and the stepped edge of its mask.
# Reading a mask takes 33 us per run length.
MOST_RUNS = 1 << 16  # max run lengths of a mask
_MOST_CHARACTERS = 7  # max characters of one run length in a text: seven have 35 bits


def outline_of(segmentation: object, size: Size | None, max_pixels: int) -> list[float]:
    """Return x1, y1, x2, y2, ... of the segmentation's largest part, with holes filled. `size` is the image's size,
    which run lengths must state too; None if no annotation of the image states it. Raises ValueError."""
    import shapely

    if isinstance(segmentation, Mapping):
        if size is None:
            raise ValueError("a `size` that is not [height, width]")
        mask = mask_of(segmentation, *size, max_pixels)
        return ring_of(shapely.simplify(_shape_of(mask), _TOLERANCE)) or [0.0] * 6  # a polygon without area
    if not isinstance(segmentation, list):
        raise ValueError("neither polygons nor run lengths")
    rings = [numbers(ring) for ring in segmentation]
    if any(len(ring) < 6 or len(ring) % 2 for ring in rings):
        raise ValueError("a polygon has an even number of at least 6 coordinates")
    if len(rings) == 1:
        return rings[0]
    return max(rings, key=lambda ring: shapely.Polygon(list(zip(ring[0::2], ring[1::2], strict=True))).area)


def size_of_mask(rle: Mapping[str, object]) -> Size | None:
    """Return (width, height) as the run lengths give them; None if they give no size."""
    size = rle.get("size")
    try:
        height, width = map(whole, size) if isinstance(size, list) else (0, 0)
    except ValueError:
        return None
    return (width, height) if width and height else None


def mask_of(rle: Mapping[str, object], width: int, height: int, max_pixels: int) -> NDArray[np.int8]:
    """Return a mask [height, width] of zeros and ones. Run lengths go down the columns, and the first counts zeros."""
    import numpy as np

    counts = rle.get("counts")
    if size_of_mask(rle) != (width, height):
        raise ValueError(f"a size other than [{height}, {width}], which is the image's")
    if width * height > max_pixels:  # a mask takes one byte per pixel, and a small file can name any size
        raise ValueError(f"a mask of more than data.max_image_pixels ({max_pixels}) pixels")
    if not isinstance(counts, list | str):
        raise ValueError("no run lengths (`counts`)")
    # The length of the list or text bounds the number of runs before they are read.
    if len(counts) > (MOST_RUNS if isinstance(counts, list) else MOST_RUNS * _MOST_CHARACTERS):
        raise ValueError(f"run lengths in more than {MOST_RUNS} runs")
    runs = [whole(value) for value in counts] if isinstance(counts, list) else _runs_in(counts)
    if len(runs) > MOST_RUNS:
        raise ValueError(f"run lengths in more than {MOST_RUNS} runs")
    if sum(runs) != width * height:
        raise ValueError(f"run lengths of {sum(runs)} pixels in all, of an image of {width * height}")
    # Runs are numbered in int8 to save memory. int8 wraps around after 127, but even numbers stay even, and odd numbers
    # stay odd.
    return np.repeat(np.arange(len(runs), dtype=np.int8) % 2, runs).reshape(width, height).T


def _runs_in(text: str) -> list[int]:
    runs: list[int] = []
    value = num_characters = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or num_characters == _MOST_CHARACTERS:
            raise ValueError("a text that is not run lengths")
        value |= (bits & 0x1F) << 5 * num_characters
        num_characters += 1
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << 5 * num_characters
        if len(runs) > 2:
            value += runs[-2]
        if value < 0:
            raise ValueError("a negative run length")
        runs.append(value)
        value = num_characters = 0
    if num_characters:
        raise ValueError("run lengths that end in the middle of one")
    return runs


def _shape_of(mask: NDArray[np.int8]) -> BaseGeometry:
    """Return the exact union of the mask's runs, column by column. The edges of the union have a step at every
    pixel."""
    import numpy as np
    import shapely

    steps = np.diff(np.pad(mask, ((1, 1), (0, 0))), axis=0)
    x, top = np.nonzero(steps.T == 1)
    _, bottom = np.nonzero(steps.T == -1)
    return shapely.union_all(shapely.box(x, top, x + 1, bottom))
