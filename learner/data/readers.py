"""Annotations of five formats into samples: all of a split is read and checked before anything is trained (R12, R41).

In: `data` of the configuration, and the path of a split. Out: its samples, and what was dropped and clipped. Only
annotations are held in memory (some 2 kB a sample); of images the header is read, and the pixels when a prompt is
encoded.

`jsonl`, the project's own: one record per line. Coordinates are pixels; image paths are relative to the file's folder
or `image_root`. An assistant's last turn is dropped. Without `id` the line number stands in. An object with
`"ignore": true` (or `iscrowd`, `difficult`) is an ignore region.

    {"id": "a-17", "messages": [{"role": "user", "content": "<image>Detect every digit."}], "images": ["images/17.png"],
     "objects": [{"desc": "seven", "bbox_2d": [12, 40, 31, 77]}], "width": 128, "height": 128}

`coco`: a sample per image, an object per annotation, its category's name as the description. Polygons and run lengths
are read with `task.geometry: poly`. `iscrowd` and `ignore` make ignore regions.

`voc`: Pascal VOC, one XML file per image; a folder of them, or a text file with the names of some, one per line (as
VOC's `ImageSets`). Pixel coordinates are taken as they stand. `difficult` makes ignore regions.

`yolo`: a `data.yaml` with `names` and a folder or list of images per split, given as `data.yaml:train`. A label file
has the image's name, in `labels` instead of `images`. Segments are polygons with `task.geometry: poly`, else boxes.

`datasets`: a Hugging Face data set, given as `FOLDER_OR_NAME:train`. Its rows are either as in `jsonl`, or have `image`
and `objects` with `bbox` and `category` (or `label`). Images that are inside the data set are held as base64.

`data.reader`: a function of the user's own (`learner.extensions.Reader`), for any other format.

Numbers may be written as 640, 640.0 or "640". An image without objects is a sample that teaches the empty answer.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar
from xml.etree import ElementTree

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from learner.config.schema import DataConfig
from learner.data.raw import (
    BadRecords,
    Place,
    RawObject,
    RawRecord,
    SampleMaker,
    SeenImages,
    Validates,
    look_at_images,
    ring_of,
)
from learner.extensions import Reader, where_raised
from learner.records import GeometryKind, Sample
from shared.errors import DataError
from shared.images import Images
from shared.wire import Message

log = logging.getLogger(__name__)

DEFAULT_PROMPT = "<image>Detect every object."
Format = Literal["jsonl", "coco", "voc", "yolo", "datasets"]
_THREADS = 8  # that look at images: mostly they wait for the disk
_AHEAD = 256  # records whose images are looked at together
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_RLE_TOLERANCE = 1.0  # pixels by which a polygon may leave the stairs of a mask's edge


# ---- a split -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The samples of one split in the file's order, and what was bad with it."""

    samples: list[Sample]
    bad: BadRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a reader is given."""

    data: DataConfig
    path: str
    geometry: GeometryKind
    bad: BadRecords

    @property
    def file(self) -> Path:
        return Path(self.path)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The user's turn of formats that have none."""
        return [{"role": "user", "content": self.data.prompt if self.data.prompt is not None else DEFAULT_PROMPT}]

    def image_root(self, default: Path) -> Path:
        return Path(self.data.image_root) if self.data.image_root is not None else default


def load_samples(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    reader: Reader | None = None,
) -> list[Sample]:
    """The samples of `load_split`."""
    return load_split(data, path, task, geometry=geometry, reader=reader).samples


def load_split(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    too_long: Callable[[Sample], str | None] | None = None,
    reader: Reader | None = None,
) -> Split:
    """Every sample of the annotations at `path`, in their order; of `data.train` at most `data.max_samples`.

    `too_long` says of a sample how long it is, where it does not fit a row. `reader` is `data.reader`. What is dropped
    or clipped is logged. Raises DataError, which lists all records that can't be used, with file and line or id.
    """
    split = read_split(data, path, task, geometry=geometry, too_long=too_long, reader=reader)
    split.bad.raise_errors(path)
    for kind, actions in split.bad.summary().items():
        for action, number in actions.items():
            log.warning("%s: %s %d (%s), for example: %s", path, action, number, kind, split.bad.examples[kind])  # type: ignore[index]
    return split


def read_split(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    too_long: Callable[[Sample], str | None] | None = None,
    reader: Reader | None = None,
) -> Split:
    """As `load_split`, with all errors in `bad`. Raises DataError only if the annotations are empty or unreadable."""
    bad = BadRecords(data.bad_records)
    source = Source(data=data, path=path, geometry=geometry, bad=bad)
    maker = SampleMaker(task=task, bad=bad, too_long=too_long)
    limit = data.max_samples if path == data.train else None
    found = _samples(source, maker) if reader is None else _samples_of_reader(reader, source, maker)
    samples = list(islice(_new_ids_only(found, bad), limit))
    if not samples and not bad.num_errors:
        raise DataError(
            f"{path} has no samples",
            found=f"only bad records: {bad.summary()}" if bad.counts else "no records",
            wanted="one record or more",
            remedy="correct the path, or the records",
        )
    return Split(samples=samples, bad=bad)


def _samples(source: Source, maker: SampleMaker) -> Iterator[tuple[Place, Sample]]:
    root, records = _READERS[format_of(source.data, source.path)](source)
    for record, seen in _looked_at(records, Images(source.data.image_rules), root):
        sample = maker.make(record, seen)
        if sample is not None:
            yield record.place, sample


def _samples_of_reader(reader: Reader, source: Source, maker: SampleMaker) -> Iterator[tuple[Place, Sample]]:
    """Of a reader of the user's own. What it raises, other than DataError, becomes one."""
    root = source.image_root(source.file if source.file.is_dir() else source.file.parent)
    for record, seen in _looked_at(_records_of(reader, source), Images(source.data.image_rules), root):
        if isinstance(record, RawRecord):
            place, sample = record.place, maker.make(record, seen)
        else:
            place = Place(source.file, f"sample {record.sample_id}")
            sample = maker.finish(record, seen, place)
        if sample is not None:
            yield place, sample


def _records_of(reader: Reader, source: Source) -> Iterator[RawRecord | Sample]:
    key = f"{source.path}: data.reader failed"
    wanted, remedy = "RawRecords or Samples, or a DataError for a record that cannot be used", "correct the reader"
    try:
        for number, record in enumerate(reader(source.path, source.data), start=1):
            if not isinstance(record, RawRecord | Sample):
                found = f"record {number} is a {type(record).__name__}"
                raise DataError(key, found=found, wanted=wanted, remedy=remedy)
            yield record
    except DataError:
        raise
    except Exception as error:
        raise DataError(key, found=where_raised(error), wanted=wanted, remedy=remedy) from error


Record = TypeVar("Record", RawRecord, RawRecord | Sample)


def _looked_at(records: Iterable[Record], images: Images, root: Path) -> Iterator[tuple[Record, SeenImages]]:
    """Each record with what its images are, some of them looked at ahead, side by side."""
    left = iter(records)
    with ThreadPoolExecutor(_THREADS) as pool:
        while window := list(islice(left, _AHEAD)):
            seen = pool.map(lambda record: look_at_images(record.images, images, root), window)
            yield from zip(window, seen, strict=True)


def _new_ids_only(samples: Iterable[tuple[Place, Sample]], bad: BadRecords) -> Iterator[Sample]:
    places: dict[str, Place] = {}
    for place, sample in samples:
        first = places.setdefault(sample.sample_id, place)
        if first is place:
            yield sample
        else:
            found = f"id {sample.sample_id!r}, also at {first.record}"
            bad.meet("malformed", place.error("its id is taken", found=found, wanted="an id of its own"))


# ---- which format --------------------------------------------------------------------------------------------------


def format_of(data: DataConfig, path: str) -> Format:
    """`data.format`, or what the files look like. Raises DataError where there is nothing, or nothing known."""
    if data.format == "datasets":
        return "datasets"
    file = Path(path)
    if not file.exists():
        file = Path(path.rpartition(":")[0] or path)  # without the split
    if not file.exists():
        raise DataError(
            "an annotation file is missing",
            found=f"no file {file.absolute()}",
            wanted="annotations" if data.format == "auto" else f"{data.format} annotations",
            remedy="correct the path under data (relative ones start at the working directory); a data set by its name "
            "on the Hugging Face hub needs data.format: datasets",
        )
    found = _detected(file) if data.format == "auto" else data.format
    if found is None:
        raise DataError(
            "the format of the annotations is not known",
            found=f"{'a folder' if file.is_dir() else 'a file'} {file}",
            wanted="JSONL (.jsonl), COCO (.json), Pascal VOC (a folder of .xml, or a list .txt), YOLO (data.yaml) or "
            "a saved Hugging Face data set",
            remedy="set data.format",
        )
    return found


def _detected(path: Path) -> Format | None:
    if path.is_dir():
        if next(path.glob("*.xml"), None):
            return "voc"
        marks = ("state.json", "dataset_dict.json", "dataset_info.json", "**/*.parquet", "**/*.arrow", "metadata.*")
        return "datasets" if any(next(path.glob(mark), None) for mark in marks) else None
    by_suffix: dict[str, Format] = {
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".yaml": "yolo",
        ".yml": "yolo",
        ".txt": "voc",
    }
    if path.suffix.lower() != ".json":
        return by_suffix.get(path.suffix.lower())
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:  # a document of several lines
            return "coco"
    return "jsonl" if isinstance(first, dict) and "messages" in first else "coco"


def _name_and_split(path: str) -> tuple[str, str]:
    """`data.yaml:train` as two; the split is empty where there is none."""
    name, colon, split = path.rpartition(":")
    return (name, split) if colon and "/" not in split and not Path(path).exists() else (path, "")


def _need_split(path: str, split: str, known: Sequence[str]) -> str:
    if split in known:
        return split
    if not split and len(known) == 1:
        return known[0]
    raise DataError(
        f"{path}: which split?",
        found=f"{split!r}" if split else "none named",
        wanted=f"one of {', '.join(known) or 'none at all'}",
        remedy=f"write {path}:{known[0] if known else 'train'}",
    )


class RowModel(BaseModel):
    """Fields that are not ours are let through: datasets carry provenance, scores, licences. 640.0 and "640" are
    numbers, too."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


# ---- JSONL ---------------------------------------------------------------------------------------------------------


class ObjectRow(RowModel):
    """Pixels: `bbox_2d` is x1, y1, x2, y2; `poly` is x1, y1, x2, y2, ...; exactly one of them."""

    desc: str = ""
    bbox_2d: list[float] | None = Field(default=None, min_length=4, max_length=4)
    poly: list[float] | None = Field(default=None, min_length=6)
    ignore: bool = False
    iscrowd: bool = False
    difficult: bool = False

    @property
    def ignored(self) -> bool:
        return self.ignore or self.iscrowd or self.difficult

    @model_validator(mode="after")
    def _is_one_object(self) -> ObjectRow:
        if not self.desc and not self.ignored:
            raise ValueError("wanted a desc")
        if (self.bbox_2d is None) == (self.poly is None):
            raise ValueError("wanted exactly one of bbox_2d and poly")
        if self.poly is not None and len(self.poly) % 2:
            raise ValueError("poly: wanted an even number of coordinates")
        return self


class Row(RowModel):
    """A line of the project's JSONL."""

    id: str | int | None = None
    messages: list[Message] = Field(min_length=1)
    images: list[str] = []
    objects: list[ObjectRow]
    width: int = Field(gt=0)
    height: int = Field(gt=0)


def read_jsonl(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    if source.data.prompt is not None:
        remedy = "remove data.prompt, or correct data.format"
        found = f"data.prompt {source.data.prompt!r:.100}, and JSONL rows"
        raise DataError("JSONL rows carry their own messages", found=found, wanted="no data.prompt", remedy=remedy)

    def records() -> Iterator[RawRecord]:
        with source.file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if text := line.strip():
                    place = Place(source.file, f"line {number}")
                    yield from _of_row(partial(Row.model_validate_json, text), str(number), place, source.bad)

    return source.image_root(source.file.parent), records()


def _of_row(parse: Callable[[], Row], default_id: str, place: Place, bad: BadRecords) -> Iterator[RawRecord]:
    """The row's record, if it is one."""
    try:
        row = parse()
        messages = _prompt_turns(row.messages, place)
    except ValidationError as error:
        bad.malformed(place, error)
    except DataError as error:
        bad.meet("malformed", error)
    else:
        yield RawRecord(
            place=place,
            sample_id=default_id if row.id is None else str(row.id),
            messages=messages,
            images=tuple(row.images),
            objects=[_of_object_row(number, obj, place) for number, obj in enumerate(row.objects, start=1)],
            width=row.width,
            height=row.height,
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


# ---- COCO ----------------------------------------------------------------------------------------------------------


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
    iscrowd: bool = False
    ignore: bool = False


class OutlinedAnnotation(CocoAnnotation):
    """With what is read for polygons only: in large files it takes most of the memory."""

    segmentation: Any = None


class CocoCategory(RowModel):
    id: int | str
    name: str = Field(min_length=1)


class CocoFile(RowModel):
    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


class OutlinedFile(CocoFile):
    annotations: list[OutlinedAnnotation]  # type: ignore[assignment]


def read_coco(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    """Samples in the order of `images`."""

    def records() -> Iterator[RawRecord]:
        try:
            model = OutlinedFile if source.geometry == "poly" else CocoFile
            coco = model.model_validate_json(source.file.read_bytes())
        except ValidationError as error:
            source.bad.malformed(Place(source.file, "COCO JSON"), error)
            return
        by_image = _annotations_by_image(coco, source)
        names = {str(category.id): category.name for category in coco.categories}
        for image in coco.images:
            objects = [_of_annotation(a, names, image, source) for a in by_image.get(str(image.id), ())]
            yield RawRecord(
                place=Place(source.file, f"image {image.id}"),
                sample_id=str(image.id),
                messages=source.messages,
                images=(image.file_name,),
                objects=[obj for obj in objects if obj is not None],
                width=image.width,
                height=image.height,
            )

    return source.image_root(source.file.parent), records()


def _annotations_by_image(coco: CocoFile, source: Source) -> Mapping[str, list[CocoAnnotation]]:
    image_ids = {str(image.id) for image in coco.images}
    grouped: dict[str, list[CocoAnnotation]] = defaultdict(list)
    for annotation in coco.annotations:
        if str(annotation.image_id) in image_ids:
            grouped[str(annotation.image_id)].append(annotation)
            continue
        place, found = Place(source.file, f"annotation {annotation.id}"), f"image_id {annotation.image_id!r}"
        source.bad.meet("malformed", place.error("its image is not there", found=found, wanted="an id of `images`"))
    return grouped


def _of_annotation(
    annotation: CocoAnnotation, names: Mapping[str, str], image: CocoImage, source: Source
) -> RawObject | None:
    place, desc = Place(source.file, f"annotation {annotation.id}"), names.get(str(annotation.category_id))
    x, y, width, height = annotation.bbox
    kind: GeometryKind = "bbox_2d"
    coords: Sequence[float] = (x, y, x + width, y + height)
    written = f"bbox {[round(v, 3) for v in annotation.bbox]}"
    if isinstance(annotation, OutlinedAnnotation) and annotation.segmentation:
        try:
            coords, kind, written = _outline(annotation.segmentation, image), "poly", f"segmentation, {written}"
        except (TypeError, ValueError, KeyError) as error:
            found = f"{str(annotation.segmentation)[:100]} ({error})"
            wanted = "a list of polygons, or run lengths (RLE) of the image's size"
            source.bad.meet("malformed", place.error("its segmentation is wrong", found=found, wanted=wanted))
            return None
    return RawObject(
        desc=desc,
        kind=kind,
        coords=tuple(coords),
        written=written if desc else f"category_id {annotation.category_id!r}, not among `categories`",
        name=f"the object ({desc!r})" if desc else "the object",
        place=place,
        ignored=annotation.iscrowd or annotation.ignore,
    )


def _outline(segmentation: Any, image: CocoImage) -> list[float]:
    """x1, y1, x2, y2, ... of the largest part, holes filled. Raises ValueError, TypeError or KeyError."""
    import shapely

    if isinstance(segmentation, Mapping):
        shape = shapely.simplify(_shape_of_mask(_mask(segmentation, image)), _RLE_TOLERANCE)
        return ring_of(shape) or [0.0] * 6  # which has no area
    rings = [[float(value) for value in ring] for ring in segmentation]
    if not rings or any(len(ring) < 6 or len(ring) % 2 for ring in rings):
        raise ValueError("a polygon has an even number of at least 6 coordinates")
    if len(rings) == 1:
        return rings[0]
    return max(rings, key=lambda ring: shapely.Polygon(list(zip(ring[0::2], ring[1::2], strict=True))).area)


def _mask(rle: Mapping[str, Any], image: CocoImage) -> Any:
    """[height, width] of zeros and ones. Run lengths are a list of numbers, or COCO's text of them."""
    from pycocotools import mask

    size, counts = [int(v) for v in rle["size"]], rle["counts"]
    if size != [image.height, image.width]:
        raise ValueError(f"size {size}, of an image of height {image.height} and width {image.width}")
    if isinstance(counts, list):
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"run lengths of {sum(counts)} pixels in all")
        return mask.decode(mask.frPyObjects({"size": size, "counts": counts}, *size))
    return mask.decode({"size": size, "counts": counts.encode() if isinstance(counts, str) else counts})


def _shape_of_mask(mask: Any) -> Any:
    """The union of the mask's runs, column by column: exact, stairs and all."""
    import numpy as np
    import shapely

    steps = np.diff(np.pad(mask.astype(np.int8), ((1, 1), (0, 0))), axis=0)
    x, top = np.nonzero(steps.T == 1)
    _, bottom = np.nonzero(steps.T == -1)
    return shapely.union_all(shapely.box(x, top, x + 1, bottom))


# ---- Pascal VOC ----------------------------------------------------------------------------------------------------


def read_voc(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    folder, files = _voc_files(source)
    near = [folder.parent / "JPEGImages", folder.parent / "images", folder]
    root = source.image_root(next(path for path in near if path.is_dir()))

    def records() -> Iterator[RawRecord]:
        for file in files:
            record = _of_xml(file, root, source)
            if record is not None:
                yield record

    return root, records()


def _voc_files(source: Source) -> tuple[Path, list[Path]]:
    """The folder of the XML files, and those of this split. Raises DataError."""
    listing = source.file
    if listing.is_dir():
        return listing, sorted(listing.glob("*.xml"))
    if listing.suffix.lower() == ".xml":
        return listing.parent, [listing]
    given = source.data.annotation_root
    near = [p / name for p in list(listing.absolute().parents)[:4] for name in ("Annotations", "voc", "annotations")]
    folders = [Path(given)] if given is not None else near
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        raise DataError(
            f"{listing}: the XML files that it lists are not found",
            found=f"no folder {folders[0]}",
            wanted="the folder of the annotations",
            remedy="set data.annotation_root",
        )
    names = [line.split()[0] for line in listing.read_text(encoding="utf-8").splitlines() if line.strip()]
    return folder, [folder / f"{name.removesuffix('.xml')}.xml" for name in names]


def _of_xml(file: Path, root: Path, source: Source) -> RawRecord | None:
    place = Place(file, "annotation")
    try:
        tree = ElementTree.parse(file).getroot()
        size = tree.find("size")
        width, height = (_whole(size, name) for name in ("width", "height"))
        objects = [_of_voc_object(n, node, file) for n, node in enumerate(tree.findall("object"), start=1)]
    except OSError as error:
        source.bad.meet("malformed", place.error("the file is missing", found=str(error), wanted="an XML file"))
        return None
    except (ElementTree.ParseError, ValueError) as error:
        found, wanted = str(error)[:300], "Pascal VOC: size, and objects with name and bndbox"
        source.bad.meet("malformed", place.error("not Pascal VOC", found=found, wanted=wanted))
        return None
    return RawRecord(
        place=place,
        sample_id=file.stem,
        messages=source.messages,
        images=(_voc_image((tree.findtext("filename") or "").strip(), file, root),),
        objects=objects,
        width=width,
        height=height,
    )


def _whole(node: ElementTree.Element | None, name: str) -> int | None:
    """A number of pixels; None where it is missing or 0, as some tools write it where they do not know."""
    text = node.findtext(name) if node is not None else None
    value = float(text) if text and text.strip() else 0.0
    if value < 0 or value != int(value):
        raise ValueError(f"{name} {text}")
    return int(value) or None


def _of_voc_object(number: int, node: ElementTree.Element, file: Path) -> RawObject:
    desc, bounds = (node.findtext("name") or "").strip(), node.find("bndbox")
    corners = ("xmin", "ymin", "xmax", "ymax")
    texts = [(bounds.findtext(corner) or "").strip() if bounds is not None else "" for corner in corners]
    written = ", ".join(f"{corner} {text}" for corner, text in zip(corners, texts, strict=True))
    if not all(map(_is_number, texts)):
        raise ValueError(f"object {number} ({desc!r}): {written}")
    flags = [(node.findtext(flag) or "0").strip().lower() for flag in ("difficult", "ignore", "iscrowd")]
    return RawObject(
        desc=desc or None,
        kind="bbox_2d",
        coords=tuple(map(float, texts)),
        written=written,
        name=f"the object ({desc!r})",
        place=Place(file, f"object {number}"),
        ignored=any(flag not in ("0", "false", "") for flag in flags),
    )


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) is not None


def _voc_image(name: str, file: Path, root: Path) -> str:
    """The image that the XML names; some tools leave its ending out, or rename the files afterwards."""
    if name and (root / name).is_file():
        return name
    stems = [Path(name).name, Path(name).stem, file.stem]
    found = (f"{stem}{suffix}" for stem in stems if stem for suffix in (*_SUFFIXES, *map(str.upper, _SUFFIXES)))
    return next((image for image in found if (root / image).is_file()), name or file.stem)


# ---- YOLO ----------------------------------------------------------------------------------------------------------


def read_yolo(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    name, split = _name_and_split(source.path)
    file = Path(name)
    place = Place(file, "YOLO")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("names"), list | dict):
            raise ValueError("no `names`")
        listed = content["names"]
        classes = {int(k): str(v) for k, v in (listed.items() if isinstance(listed, dict) else enumerate(listed))}
    except (yaml.YAMLError, ValueError) as error:
        wanted = "a mapping with `names` and, for each split, a folder or a list of images"
        raise place.error("not a YOLO data set", found=str(error)[:300], wanted=wanted) from error
    known = [key for key in ("train", "val", "valid", "test") if content.get(key)]
    root = file.parent / (content.get("path") or "")
    images = _yolo_images(content[_need_split(name, split, known)], root, file.parent, place)
    return source.image_root(root), (_of_yolo_image(image, root, classes, source) for image in images)


def _yolo_images(entry: str | list[str], root: Path, beside: Path, place: Place) -> list[Path]:
    """All images of a split, in the order of their names, or in that of a list. Raises DataError."""
    found: list[Path] = []
    for part in [entry] if isinstance(entry, str) else entry:
        choices = [root / part, beside / part, beside / part.removeprefix("../")]  # as some tools export it
        path = next((choice for choice in choices if choice.exists()), None)
        if path is None:
            raise place.error("its images are not there", found=f"no {choices[0]}", wanted="a folder or a list")
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES)
        else:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            found += [path.parent / line if line.startswith("./") else root / line for line in lines if line]
    return found


def _of_yolo_image(image: Path, root: Path, classes: Mapping[int, str], source: Source) -> RawRecord:
    labels = _label_file(image)
    lines = labels.read_text(encoding="utf-8").splitlines() if labels.is_file() else []
    objects = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                objects.append(_of_yolo_line(line.strip(), Place(labels, f"line {number}"), classes, source.geometry))
            except DataError as error:
                source.bad.meet("malformed", error)
    return RawRecord(
        place=Place(labels, "labels"),
        sample_id=str(image.relative_to(root) if image.is_relative_to(root) else image),
        messages=source.messages,
        images=(str(image.absolute()),),
        objects=objects,
        width=None,
        height=None,
        relative=True,
    )


def _label_file(image: Path) -> Path:
    """The last folder `images` on the way is `labels`; without one, the labels are beside the images."""
    parts = list(image.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "images":
            parts[i] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _of_yolo_line(line: str, place: Place, classes: Mapping[int, str], geometry: GeometryKind) -> RawObject:
    """`class x y width height` (of the centre), or `class x1 y1 x2 y2 x3 y3 ...`. Raises DataError."""
    first, *rest = line.split()
    if not _is_number(first) or not all(map(_is_number, rest)) or (len(rest) != 4 and (len(rest) < 6 or len(rest) % 2)):
        wanted = "class, x, y, width, height, or class and three points or more"
        raise place.error("not a YOLO label", found=line[:200], wanted=wanted)
    values, desc = [float(text) for text in rest], classes.get(int(float(first)))
    kind: GeometryKind = "bbox_2d"
    if len(values) == 4:
        x, y, width, height = values
        coords = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    elif geometry == "poly":
        coords, kind = values, "poly"
    else:
        coords = [min(values[0::2]), min(values[1::2]), max(values[0::2]), max(values[1::2])]
    return RawObject(
        desc=desc,
        kind=kind,
        coords=tuple(coords),
        written=line[:200],
        name=f"the object ({desc!r})" if desc else "the object",
        place=place,
    )


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def read_datasets(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    name, split = _name_and_split(source.path)
    rows = _open_dataset(name, split)
    columns = set(rows.column_names)
    if {"messages", "objects"} <= columns:
        read = _of_dataset_row
    elif {"image", "objects"} <= columns:
        read = _of_dataset_image
    else:
        raise DataError(
            f"{name}: not a data set for detection",
            found=f"the columns {sorted(columns)}",
            wanted="image and objects (with bbox and category), or the columns of the project's JSONL",
            remedy="rename the columns, or export the data set as COCO or JSONL",
        )

    def records() -> Iterator[RawRecord]:
        for number, row in enumerate(rows):
            yield from read(number, row, Place(Path(name), f"row {number}"), rows.features, source)

    return source.image_root(Path()), records()


def _open_dataset(name: str, split: str) -> Any:
    """The rows, images not decoded. Raises DataError."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: data.format: datasets needs the package `datasets`",
            found="it is not installed",
            wanted="the package, which the extra `datasets` of this project brings",
            remedy="pip install 'datasets>=3'",
        ) from error
    folder = Path(name)
    try:
        saved = any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # what the hub, the file system and pyarrow raise
        raise DataError(
            f"{name}: the data set can't be loaded",
            found=f"{type(error).__name__}: {str(error)[:300]}",
            wanted="a folder, or a name on the Hugging Face hub",
            remedy="correct the path or the name; data.format says which annotations are meant",
        ) from error
    rows = found[_need_split(name, split, sorted(found))] if isinstance(found, dict) else found
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return rows


def _image_string(image: Any) -> str:
    """Of an undecoded image, a string, or a picture that Pillow has."""
    if isinstance(image, str):
        return image
    if isinstance(image, Mapping):
        path, data = image.get("path"), image.get("bytes")
        if path and Path(path).is_file():
            return str(Path(path).absolute())
        if data:
            return base64.b64encode(data).decode()
        return str(path)
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _of_dataset_row(
    number: int, row: Mapping[str, Any], place: Place, features: Any, source: Source
) -> Iterator[RawRecord]:
    """A row with the columns of the project's JSONL. Columns fill what a row lacks with None."""
    images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
    filled = {**row, "images": [_image_string(image) for image in images], "objects": _rows_of(row["objects"])}
    yield from _of_row(partial(Row.model_validate, _without_nones(filled)), str(number), place, source.bad)


def _without_nones(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nones(part) for key, part in value.items() if part is not None}
    return [_without_nones(part) for part in value] if isinstance(value, list) else value


def _rows_of(objects: Any) -> list[dict[str, Any]]:
    """Objects as rows: some data sets keep a list per field."""
    if not isinstance(objects, Mapping):
        return [dict(obj) for obj in objects or ()]
    columns = {key: values for key, values in objects.items() if isinstance(values, list)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_dataset_image(
    number: int, row: Mapping[str, Any], place: Place, features: Any, source: Source
) -> Iterator[RawRecord]:
    """A row with `image` and `objects`."""
    try:
        names = _class_names(features["objects"])
        objects = [
            _of_dataset_object(n, obj, names, place, source) for n, obj in enumerate(_rows_of(row["objects"]), 1)
        ]
        width, height = (int(row[key]) if row.get(key) else None for key in ("width", "height"))
    except (KeyError, TypeError, ValueError) as error:
        wanted = "objects with bbox (four numbers) and category or label"
        source.bad.meet("malformed", place.error("not an annotated image", found=f"{error!r:.200}", wanted=wanted))
        return
    yield RawRecord(
        place=place,
        sample_id=str(row.get("image_id", row.get("id", number))),
        messages=source.messages,
        images=(_image_string(row["image"]),),
        objects=objects,
        width=width,
        height=height,
    )


_CLASS_COLUMNS = ("category", "label", "labels", "class", "category_id", "name")
_BOX_COLUMNS = ("bbox", "box", "bboxes", "boxes")


def _class_names(feature: Any) -> list[str] | None:
    """The names of a `ClassLabel` column, where there is one."""
    for _ in range(2):  # a list of mappings, or a mapping of lists
        inner = getattr(feature, "feature", None)
        feature = feature[0] if isinstance(feature, list) else inner if inner is not None else feature
    columns = feature if isinstance(feature, Mapping) else {}
    for name in _CLASS_COLUMNS:
        label: Any = getattr(columns.get(name), "feature", columns.get(name))
        if hasattr(label, "names"):
            return list(label.names)
    return None


def _of_dataset_object(
    number: int, obj: Mapping[str, Any], names: Sequence[str] | None, place: Place, source: Source
) -> RawObject:
    """Raises KeyError, TypeError or ValueError."""
    label = next(obj[column] for column in _CLASS_COLUMNS if column in obj) if set(_CLASS_COLUMNS) & set(obj) else None
    desc = label if isinstance(label, str) else _named(label, names)
    box = next((obj[column] for column in _BOX_COLUMNS if column in obj), None)
    if box is None:
        raise KeyError("bbox")
    x1, y1, x2, y2 = (float(v) for v in box)
    if source.data.box_format == "xywh":
        x2, y2 = x1 + x2, y1 + y2
    return RawObject(
        desc=desc or None,
        kind="bbox_2d",
        coords=(x1, y1, x2, y2),
        written=f"bbox {[round(float(v), 3) for v in box]}, class {label!r}",
        name=f"object {number} ({desc!r})",
        place=place,
        ignored=any(bool(obj.get(flag)) for flag in ("iscrowd", "is_crowd", "difficult", "ignore")),
    )


def _named(label: Any, names: Sequence[str] | None) -> str | None:
    if label is None or names is None:
        return None
    return names[int(label)] if 0 <= int(label) < len(names) else None


_READERS: Mapping[Format, Callable[[Source], tuple[Path, Iterator[RawRecord]]]] = {
    "jsonl": read_jsonl,
    "coco": read_coco,
    "voc": read_voc,
    "yolo": read_yolo,
    "datasets": read_datasets,
}
