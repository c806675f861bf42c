"""Reads COCO results of any detector as boxes of an annotation file's samples, and checks the boxes (R52).

A result names its image by the annotation file's id, or by the file's name with or without its ending (as Ultralytics
writes it). A `file_name`, which results of `predict` have, is tried first. A result names its class by the annotation
file's category id, or by `category` or `category_name`. If the annotations have no ids, the number is the class's
position in the names, from 0 or from 1. YOLO's names have the order of data.yaml; other names are sorted.

The annotated objects help to find mistakes. If the boxes lie on the objects only in another unit, the results are
refused. If most boxes on an object have another name than the object, a warning says which numbering or names would
fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from learner.config.sections.data import DataConfig
from learner.data.formats.coco import category_ids
from learner.data.formats.source import name_and_split
from learner.data.formats.strict import plain_name
from learner.data.formats.yolo import yolo_file
from learner.data.splits import annotations_of
from learner.data.units import sides_in, to_pixels
from learner.detector.evaluation import Found, Scored
from learner.detector.inputs import images_of
from learner.records import DetectionObject, Sample, Unit
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.grammar import NUM_BINS
from shared.errors import DataError
from shared.reading import json_bytes_in
from shared.validation import fault_of

BoxFormat = Literal["xywh", "xyxy"]
_ON = 0.5  # min IoU of a box that lies on an object

# Results are refused if another unit or format makes the overlap with objects at least this many times as large.
_CLEAR = 1.3
_MOST_OUTSIDE = 0.25  # if more than this fraction of the boxes is outside the images, there is a warning
_LEAST = 3  # min number of boxes on objects; with fewer, names are not doubted
_MAX_NAMED = 5


class CocoResult(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    image_id: int | str
    category_id: int | None = None
    bbox: list[float] = Field(min_length=4, max_length=4)
    score: float
    category: str | None = None
    category_name: str | None = None
    file_name: str | None = None

    @property
    def name(self) -> str | None:
        """Return the class's name; None if the result has no name."""
        return plain_name(self.category or self.category_name or "") or None


_RESULTS = TypeAdapter(list[CocoResult])


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """The way in which results are read. `names` maps a class's number or name in the results to its name in the
    annotations; "" leaves the class out. `listed` has the names of the class numbers, in their order."""

    unit: Unit = "pixels"
    box_format: BoxFormat = "xywh"
    names: Mapping[str, str] = field(default_factory=dict)
    listed: Sequence[str] = ()

    @classmethod
    def of(cls, names: str, unit: Unit = "pixels", box_format: BoxFormat = "xywh") -> ReadAs:
        """Return the settings. `names` is a text such as `helmet,vest` or `0=helmet,Vest=vest`."""
        parts = [part.strip() for part in names.split(",") if part.strip()]
        pairs = [part.partition("=") for part in parts]
        mapping = {plain_name(old): plain_name(new) for old, equals, new in pairs if equals}
        listed = [plain_name(part) for part in parts if "=" not in part]
        return cls(unit=unit, box_format=box_format, names=mapping, listed=listed)

    def corners(self, bbox: Sequence[float], size: tuple[int, int]) -> list[float]:
        """Return x1, y1, x2, y2 in pixels of an image of `size`."""
        x, y, right, down = to_pixels(bbox, sides_in(self.unit, size), size)
        return [x, y, right, down] if self.box_format == "xyxy" else [x, y, x + right, y + down]

    def __str__(self) -> str:
        numbers = "x1, y1, x2, y2" if self.box_format == "xyxy" else "x, y, width, height"
        return f"{numbers} in {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that annotations name: COCO's ids by name, or YOLO's names in their order."""

    ids: Mapping[str, int] = field(default_factory=dict)
    names: Sequence[str] = ()


class Results(NamedTuple):
    """The boxes that were read (`found`). `notes` say how the results were read, `warnings` what may be a mistake."""

    found: Found
    notes: list[str]
    warnings: list[str]


class _Row(NamedTuple):
    """A result and its sample. `image` is the image's number, if the sample has several."""

    result: CocoResult
    sample: Sample
    image: int | None


def classes_of(annotations: str) -> Classes:
    """Return the classes of an annotation file. Raises DataError."""
    found = annotations_of(DataConfig(train=annotations), annotations)
    if found.format == "coco":
        return Classes(ids=category_ids(Path(found.path)))
    if found.format == "yolo":
        names = yolo_file(Path(name_and_split(found.path)[0])).classes
        return Classes(names=[plain_name(names[number]) for number in sorted(names)])
    return Classes()


def read_results(
    path: Path, name: str, samples: Sequence[Sample], classes: Classes, read_as: ReadAs | None = None
) -> Results:
    """Read and check COCO results. Raises DataError if the file has no results, if it names images or classes that the
    annotations lack, or if its boxes are in another unit."""
    read_as = read_as or ReadAs()
    results, by_key = _rows(path), _samples_by_key(samples)
    places = [by_key.get(Path(row.file_name or "").name) or by_key.get(str(row.image_id)) for row in results]
    rows = [_Row(row, *place) for row, place in zip(results, places, strict=True) if place is not None]
    if len(rows) < len(results):
        first = next(row for row, place in zip(results, places, strict=True) if place is None)
        wanted = f"images such as {next(iter(by_key), 'none')!r}"
        raise _strangers(path, len(results) - len(rows), len(results), f"image_id {first.image_id!r}", wanted)
    # Unit and format of the boxes are checked, because perfect boxes that are read in a wrong unit score 0 or 0.5.
    _check_unit(path, rows, read_as)
    below = _names_below(rows, read_as)
    naming = _Naming(rows, below, samples, classes, read_as)
    names, notes, warnings = naming.chosen(path)
    boxes: dict[str, list[Scored]] = {}
    flat = outside = 0
    for row, desc in zip(rows, names, strict=True):
        width, height = row.sample.size_of(row.image)
        x1, y1, x2, y2 = corners = read_as.corners(row.result.bbox, (width, height))
        flat += x2 <= x1 or y2 <= y1
        outside += min(x1, y1) < -1 or x2 > width + 1 or y2 > height + 1
        if x2 > x1 and y2 > y1 and desc:
            scored = Scored(box_in_sample(corners, desc, row.sample, row.image), row.result.score)
            boxes.setdefault(row.sample.sample_id, []).append(scored)
    warnings += _doubts(rows, samples, flat, outside)
    return Results(Found(name=name, boxes=boxes), notes, warnings)


def _doubts(rows: Sequence[_Row], samples: Sequence[Sample], flat: int, outside: int) -> Iterator[str]:
    """Yield warnings about boxes, and about pictures without results."""
    if flat:
        yield f"{flat} of {len(rows)} boxes have no area, and are left out"
    if outside > _MOST_OUTSIDE * len(rows):
        yield f"{outside} of {len(rows)} boxes reach out of their photographs"
    seen = {(row.sample.sample_id, row.image) for row in rows}
    number = sum(len(images_of(sample)) for sample in samples)
    if rows and len(seen) < number:
        yield (
            f"no result for {number - len(seen)} of {number} pictures: their objects count as missed; if the detector "
            "did not see them, name annotations of those that it saw"
        )


def _strangers(path: Path, number: int, total: int, example: str, wanted: str, remedy: str = "") -> DataError:
    return DataError(
        f"{path}: results that belong to other annotations",
        found=f"{number} of {total}, for example {example}",
        wanted=wanted,
        remedy=remedy or "name the annotation file that the detector was run on",
    )


# ---- units ---------------------------------------------------------------------------------------------------------


def _check_unit(path: Path, rows: Sequence[_Row], read_as: ReadAs) -> None:
    """Raises DataError if the boxes lie on the objects only in another unit or format."""
    units: tuple[Unit, ...] = ("pixels", "shares", "thousandths", "percent")
    formats: tuple[BoxFormat, ...] = ("xywh", "xyxy")
    ways = [ReadAs(unit=unit, box_format=one) for unit in units for one in formats]
    scores = {str(way): _overlap(rows, way) for way in ways}
    taken = scores[str(ReadAs(unit=read_as.unit, box_format=read_as.box_format))]
    best = max(ways, key=lambda way: scores[str(way)])
    if scores[str(best)] >= max(_ON, _CLEAR * taken):
        raise DataError(
            f"{path}: boxes in another form",
            found=f"as {read_as} they overlap the objects by {taken:.0%} in the mean, as {best} by "
            f"{scores[str(best)]:.0%}",
            wanted=f"{read_as}, as they are read",
            remedy=f"give --coordinates {best.unit} --box-format {best.box_format}, or convert them",
        )


def _overlap(rows: Sequence[_Row], way: ReadAs) -> float:
    """Return the mean of each object's best IoU with a box. Only objects in images with results count."""
    best = [
        iou_matrix(_objects(sample, image), boxes).max(axis=1)
        for sample, image, boxes, _ in _by_image(rows, way)
        if _objects(sample, image)
    ]
    return float(np.concatenate(best).mean()) if best else 0.0


def _objects(sample: Sample, image: int | None) -> list[DetectionObject]:
    return [obj for obj in sample.objects if obj.image == image]


def _by_image(
    rows: Sequence[_Row], way: ReadAs
) -> Iterator[tuple[Sample, int | None, list[DetectionObject], list[int]]]:
    """Yield for each image its sample, its number in the sample, its boxes, and their indices in `rows`."""
    grouped: dict[tuple[str, int | None], list[int]] = {}
    for number, row in enumerate(rows):
        grouped.setdefault((row.sample.sample_id, row.image), []).append(number)
    for numbers in grouped.values():
        sample, image = rows[numbers[0]].sample, rows[numbers[0]].image
        corners = (way.corners(rows[number].result.bbox, sample.size_of(image)) for number in numbers)
        boxes = [box if box[0] < box[2] and box[1] < box[3] else (0, 0, 0, 0) for box in corners]
        yield sample, image, [box_in_sample(box, "", sample, image) for box in boxes], numbers


def _names_below(rows: Sequence[_Row], way: ReadAs) -> list[set[str]]:
    """Return the names of the objects that each result lies on."""
    below: list[set[str]] = [set() for _ in rows]
    for sample, image, boxes, numbers in _by_image(rows, way):
        objects = _objects(sample, image)
        for number, overlaps in zip(numbers, iou_matrix(boxes, objects), strict=True):
            below[number] = {obj.desc for obj, overlap in zip(objects, overlaps, strict=True) if overlap >= _ON}
    return below


# ---- names ---------------------------------------------------------------------------------------------------------


class _Naming:
    """Finds the annotations' class for each class of the results."""

    def __init__(
        self,
        rows: Sequence[_Row],
        below: Sequence[set[str]],
        samples: Sequence[Sample],
        classes: Classes,
        read_as: ReadAs,
    ) -> None:
        self.rows, self.below, self.read_as = rows, below, read_as
        self.is_closed = bool(classes.ids or classes.names)  # True: the annotations have a list of all classes
        self.known = [*(classes.ids or classes.names or sorted({o.desc for s in samples for o in s.objects}))]
        self.numbered = self._numberings(classes)

    def _numberings(self, classes: Classes) -> dict[str, Mapping[int, str]]:
        """Return the possible meanings of class numbers, the likeliest first."""
        if classes.ids and not self.read_as.listed:
            return {
                "the annotations' category ids": {number: name for name, number in classes.ids.items()}
            } | self._by_place()
        from_0, from_1 = self._by_place().items()
        has_0 = any(row.result.category_id == 0 for row in self.rows)
        # Ultralytics counts classes from 1; older versions of Ultralytics count from 0.
        return dict([from_0, from_1] if has_0 else [from_1, from_0])

    def _by_place(self) -> dict[str, Mapping[int, str]]:
        names = self.read_as.listed or self.known
        return {
            f"places in the names ({', '.join(names)[:60]}) from {first}": dict(enumerate(names, first))
            for first in (0, 1)
        }

    def chosen(self, path: Path) -> tuple[list[str], list[str], list[str]]:
        """Return each result's name, notes and warnings. Raises DataError for names that the annotations lack."""
        notes, warnings = [], []
        way, *others = self.numbered
        has_numbers = any(row.result.name is None for row in self.rows)
        if has_numbers:
            # Without ids the numbering is only a guess: another numbering may fit the objects better.
            if not way.startswith("the annotations'"):
                way = max(self.numbered, key=lambda one: (self._on(self._named(one)), one == way))
            notes.append(f"its category_id are {way}")
        named = self._named(way)
        self._refuse_strangers(path, named)
        on, right = sum(map(bool, self.below)), self._on(named)
        if on >= _LEAST and right < on / 2:
            told = f"{on - right} of {on} boxes on an object lie on one of another name"
            fitting = {one: self._on(self._named(one)) for one in others} if has_numbers else {}
            if fitting and max(fitting.values()) > 2 * right:
                best = max(fitting, key=lambda one: fitting[one])
                told += f"; {fitting[best]} lie on one of their own if category_id are {best}"
            if renaming := self._renaming(on, right):
                told += f"; with {renaming[0]} {renaming[1]} do"
            warnings.append(told)
        if open_names := Counter(name for name in named if name and name not in self.known):
            shown = ", ".join(f"{name} {number}" for name, number in open_names.most_common(_MAX_NAMED))
            warnings.append(f"boxes of names that no object has, which count as wrong: {shown}")
        return [name or "" for name in named], notes, warnings

    def _named(self, way: str) -> list[str | None]:
        """Return each result's name, with class numbers read by the numbering `way`. None: the name is unknown. An
        empty name: the result is left out."""
        numbers, mapped = self.numbered[way], self.read_as.names
        found: list[str | None] = []
        for row in self.rows:
            key = row.result.name or str(row.result.category_id)
            number = -1 if row.result.category_id is None else row.result.category_id
            name = row.result.name or numbers.get(number)
            found.append(mapped.get(key, mapped.get(name, name) if name else None))
        return found

    def _on(self, named: Sequence[str | None]) -> int:
        """Return how many results lie on an object of their own name."""
        return sum(name in below for name, below in zip(named, self.below, strict=True))

    def _renaming(self, on: int, right: int) -> tuple[str, int] | None:
        """Return the option `--names` with which most boxes get the name of the object below them, and the number of
        these boxes. None if no renaming fits well."""
        pairs: dict[str, Counter[str]] = {}
        for row, below in zip(self.rows, self.below, strict=True):
            key = row.result.name or str(row.result.category_id)
            pairs.setdefault(key, Counter()).update(below)
        names = {key: counted.most_common(1)[0][0] for key, counted in pairs.items() if counted}
        fitting = sum(pairs[key][name] for key, name in names.items())
        if len(set(names.values())) < len(names) or fitting < max(_LEAST, 0.8 * on) or fitting <= 2 * right:
            return None
        return f"--names {','.join(f'{key}={name}' for key, name in sorted(names.items()))}", fitting

    def _refuse_strangers(self, path: Path, named: Sequence[str | None]) -> None:
        """Raises DataError for class numbers without a name, for names that the annotations lack, and for names in
        another spelling than the annotations'. Also raises DataError if no name is known."""
        alike = {_folded(name): name for name in self.known}
        strange: Counter[str] = Counter()
        for row, name in zip(self.rows, named, strict=True):
            if name is None:
                strange[f"category_id {row.result.category_id}"] += 1
            elif name and name not in self.known and (self.is_closed or _folded(name) in alike):
                strange[repr(name)] += 1
        unknown = [name for name in named if name and name not in self.known]
        if not strange and (not unknown or len(unknown) < sum(map(bool, named))):
            return
        strange = strange or Counter(map(repr, unknown))
        example = strange.most_common(1)[0][0]
        key = example.removeprefix("category_id ").strip("'\"")
        other = alike.get(_folded(key))
        remedy = (
            f"name it with --names {key}={other or 'NAME'}, leave it out with --names {key}=, or name the annotation "
            "file that the detector was run on"
        )
        if other is None and (renaming := self._renaming(sum(map(bool, self.below)), 0)):
            remedy = f"give {renaming[0]}: {renaming[1]} boxes lie on objects of these names"
        wanted = f"classes {', '.join(self.known)[:200]}"
        shown = f"{example}{f' (the annotations say {other!r})' if other else ''}"
        raise _strangers(path, strange.total(), len(self.rows), shown, wanted, remedy)


def _folded(name: str) -> str:
    return name.casefold().replace("_", " ").replace("-", " ")


def _rows(path: Path) -> list[CocoResult]:
    try:
        return _RESULTS.validate_json(json_bytes_in(path))
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{path}: no COCO results",
            found=_found(error),
            wanted="a JSON list of {image_id, category_id, bbox: [x, y, width, height], score}",
            remedy="write it with the detector's own COCO export (see docs/howto/predict.md)",
        ) from error


def _found(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    details = error.errors(include_url=False)
    fault = fault_of(details[0], whole="the file")
    more = f", and {len(details) - 1} more" if len(details) > 1 else ""
    not_wanted = "" if details[0]["type"] == "missing" else f" is not {fault.wanted}"
    return f"{fault.what}: {fault.found}{not_wanted}{more}"


def _samples_by_key(samples: Sequence[Sample]) -> dict[str, tuple[Sample, int | None]]:
    """Return each image's sample, and the image's number if the sample has several. Keys are the image's id, and the
    name and the stem of its file if no other image has the same."""
    places = [(one, (sample, one.image)) for sample in samples for one in images_of(sample)]
    found = {str(one.id): place for one, place in places}
    for key in (lambda path: path.name, lambda path: path.stem):
        own: dict[str, list[tuple[Sample, int | None]]] = {}
        for one, place in places:
            own.setdefault(key(Path(one.source[-300:])), []).append(place)
        for text, those in own.items():
            if len(those) == 1:
                found.setdefault(text, those[0])
    return found


def box_in_sample(box: Sequence[float], desc: str, sample: Sample, image: int | None = None) -> DetectionObject:
    """Return a box x1, y1, x2, y2 in pixels as an object in bins that are not rounded. `image` is the number of its
    image, if the sample has several."""
    width, height = sample.size_of(image)
    scale = ((NUM_BINS - 1) / width, (NUM_BINS - 1) / height)
    corners: Any = tuple(value * scale[i % 2] for i, value in enumerate(box))
    return DetectionObject(desc, "bbox_2d", corners, image=image)
