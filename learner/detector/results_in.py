"""COCO results of any detector, as boxes of the samples of an annotation file.

A result names its image by the annotation file's id, or by the file's name with or without its ending (as Ultralytics
writes it). If it has a `file_name`, as those of `predict` do, that counts. It names its class by the annotation file's
category id; by `category` or `category_name`; or, if the annotations have no ids, by its place in the names, from 1, or
from 0 if a result has 0. YOLO's names have an order of their own, that of data.yaml; others are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from learner.config.sections.data import DataConfig
from learner.data.formats.coco import category_ids
from learner.data.formats.source import name_and_split
from learner.data.formats.yolo import yolo_file
from learner.data.splits import annotations_of
from learner.detector.evaluation import Found, Scored
from learner.detector.inputs import images_of
from learner.records import DetectionObject, Sample
from learner.tasks.detection.grammar import NUM_BINS
from shared.errors import DataError
from shared.reading import json_bytes_in
from shared.validation import fault_of


class CocoResult(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    image_id: int | str
    category_id: int | None = None
    bbox: list[float] = Field(min_length=4, max_length=4)
    score: float
    category: str | None = None
    category_name: str | None = None
    file_name: str | None = None


_RESULTS = TypeAdapter(list[CocoResult])


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that annotations name: COCO's ids by name, or YOLO's names in their order."""

    ids: Mapping[str, int] = field(default_factory=dict)
    names: Sequence[str] = ()


def classes_of(annotations: str) -> Classes:
    """Raises DataError."""
    found = annotations_of(DataConfig(train=annotations), annotations)
    if found.format == "coco":
        return Classes(ids=category_ids(Path(found.path)))
    if found.format == "yolo":
        names = yolo_file(Path(name_and_split(found.path)[0])).classes
        return Classes(names=[names[number] for number in sorted(names)])
    return Classes()


def read_results(path: Path, name: str, samples: Sequence[Sample], classes: Classes) -> Found:
    """Raises DataError if the file is none, or names images or classes that the annotations lack."""
    rows = _rows(path)
    by_key = _samples_by_key(samples)
    names = _names(rows, samples, classes)
    boxes: dict[str, list[Scored]] = {}
    strangers: list[str] = []
    for row in rows:
        place = by_key.get(Path(row.file_name or "").name) or by_key.get(str(row.image_id))
        desc = row.category or row.category_name or names.get(row.category_id if row.category_id is not None else -1)
        if place is None or desc is None:
            strangers.append(f"image_id {row.image_id!r}" if place is None else f"category_id {row.category_id}")
            continue
        sample, image = place
        if row.bbox[2] > 0 and row.bbox[3] > 0:
            x, y, width, height = row.bbox
            corners = (x, y, x + width, y + height)
            boxes.setdefault(sample.sample_id, []).append(
                Scored(box_in_sample(corners, desc, sample, image), row.score)
            )
    if strangers:
        raise DataError(
            f"{path}: results that belong to other annotations",
            found=f"{len(strangers)} of {len(rows)}, for example {strangers[0]}",
            wanted=f"images such as {next(iter(by_key), 'none')!r}, classes {', '.join(sorted(set(names.values())))}",
            remedy="name the annotation file that the detector was run on",
        )
    return Found(name=name, boxes=boxes)


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
    """Return the sample that each image is in, and its number if there are several: by the image's id, and where it is
    unambiguous by its name and stem."""
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


def _names(rows: Sequence[CocoResult], samples: Sequence[Sample], classes: Classes) -> dict[int, str]:
    if classes.ids:
        return {number: name for name, number in classes.ids.items()}
    first = 0 if any(row.category_id == 0 for row in rows) else 1
    return dict(enumerate(classes.names or sorted({obj.desc for sample in samples for obj in sample.objects}), first))


def box_in_sample(box: Sequence[float], desc: str, sample: Sample, image: int | None = None) -> DetectionObject:
    """Return a box x1, y1, x2, y2 in pixels, in the scale of bins, but not rounded to them. `image`: which of several
    it is in."""
    width, height = sample.size_of(image)
    scale = ((NUM_BINS - 1) / width, (NUM_BINS - 1) / height)
    corners: Any = tuple(value * scale[i % 2] for i, value in enumerate(box))
    return DetectionObject(desc, "bbox_2d", corners, image=image)
