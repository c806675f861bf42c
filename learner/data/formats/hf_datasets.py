"""`datasets`: a Hugging Face data set, given as `FOLDER_OR_NAME:train`, or the `metadata.jsonl` of an imagefolder.

The rows of the data set either have the columns of `jsonl`, or `image` and `objects` with `bbox` and `category` (or
`label`). Images that are stored in the data set become base64 strings.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.data.formats.jsonl import Row, of_row
from learner.data.formats.source import Source, name_and_split, need_split
from learner.data.formats.strict import any_flag, box, identity, whole
from learner.records import Place, RawObject, RawRecord
from shared.config.model import show
from shared.errors import DataError
from shared.reading import is_file, json_of, lines_in

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

METADATA = "metadata.jsonl"
CLASS_COLUMNS = ("category", "categories", "label", "labels", "class", "category_id", "name")
BOX_COLUMNS = ("bbox", "box", "bboxes", "boxes")


def read_datasets(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    if source.file.name == METADATA:
        return source.image_root(source.file.parent), _of_metadata(source)
    name, split = name_and_split(source.path)
    rows = _undecoded(open_dataset(name, split)[0])
    columns = set(rows.column_names)
    if {"messages", "objects"} <= columns:
        read = _of_dataset_row
    elif {"image", "objects"} <= columns:
        read = of_image_row
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


def _of_metadata(source: Source) -> Iterator[RawRecord]:
    """Read the rows of an imagefolder's `metadata.jsonl`, which is not loaded as a data set."""
    for number, text in _lines(source.file):
        place = Place(source.file, f"line {number}")
        try:
            row = json_of(text)
            row = {**row, "image": row["file_name"], "objects": row["objects"]}
        except (ValueError, TypeError, KeyError) as error:
            found, wanted = f"{type(error).__name__}: {error}"[:200], "file_name, and objects with bbox and categories"
            source.bad.meet("malformed", place.error("not a row of an imagefolder", found=found, wanted=wanted))
        else:
            yield from of_image_row(number, row, place, None, source)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, text) of each line. Raises DataError."""
    try:
        yield from lines_in(file)
    except OSError as error:
        raise Place(file, "lines").error(
            "the file cannot be read", found=str(error), wanted="one row a line"
        ) from error


def split_names(name: str) -> list[str]:
    """Return the names of a data set's splits; [] if it has none. Raises DataError."""
    found = _loaded(name)
    return list(found) if isinstance(found, dict) else []


def _loaded(name: str) -> Dataset | DatasetDict:
    """Return the data set that is saved in a folder or has this name on the hub. Raises DataError."""
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
        return datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # the hub, the file system and pyarrow raise errors of all kinds
        raise DataError(
            f"{name}: the data set can't be loaded",
            found=f"{type(error).__name__}: {str(error)[:300]}",
            wanted="a folder, or a name on the Hugging Face hub",
            remedy="correct the path or the name; data.format says which annotations are meant",
        ) from error


def open_dataset(name: str, split: str) -> tuple[Dataset, str]:
    """Return the rows, and the name of their split, which is empty if the data set has no splits. Raises DataError."""
    found = _loaded(name)
    if not isinstance(found, dict):
        return found, ""
    split = need_split(name, split, sorted(found))
    return found[split], split


def _undecoded(rows: Dataset) -> Dataset:
    """Return the rows with images as bytes or paths, not as decoded pictures."""
    import datasets

    for column, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return rows


def _image_string(image: object) -> str:
    """Return an image as a string: a path, a URL or base64. Raises ValueError."""
    if isinstance(image, str):
        return image
    if isinstance(image, Mapping):
        path, data = image.get("path"), image.get("bytes")
        if path and is_file(Path(path)):
            return str(Path(path).absolute())
        if data:
            return base64.b64encode(data).decode()
        if path:
            return str(path)
    if not hasattr(image, "save"):
        raise ValueError(f"{show(image)} instead of an image")
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _of_dataset_row(
    number: int, row: Mapping[str, object], place: Place, features: Features, source: Source
) -> Iterator[RawRecord]:
    """Read a row with the columns of the project's JSONL."""
    images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
    try:
        if not isinstance(images, list):
            raise ValueError(f"images: {show(images)} instead of a list")
        filled = {**row, "images": [_image_string(image) for image in images], "objects": objects_of(row["objects"])}
    except (TypeError, ValueError) as error:
        found, wanted = f"{error}"[:200], "images, and objects as rows or as columns of equal length"
        source.bad.meet("malformed", place.error("not a row of a data set", found=found, wanted=wanted))
        return
    # If a row has no value for a column, a data set gives None.
    yield from of_row(partial(Row.model_validate, _without_nones(filled)), str(number), place, source.bad)


def _without_nones(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nones(part) for key, part in value.items() if part is not None}
    return [_without_nones(part) for part in value] if isinstance(value, list) else value


def sample_id_of(number: int, row: Mapping[str, object]) -> str:
    """Return a row's id, or its number if it has no id. Raises ValueError."""
    keys = ("id",) if "messages" in row else ("image_id", "id")
    return identity(next((row[key] for key in keys if row.get(key) is not None), number))


def objects_of(objects: Any) -> list[dict[str, Any]]:
    """Return the objects as a list of mappings. Some data sets have a mapping of lists."""
    if not isinstance(objects, Mapping):
        return [dict(obj) for obj in objects or ()]
    columns = {key: values for key, values in objects.items() if isinstance(values, list)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def of_image_row(
    number: int, row: Mapping[str, object], place: Place, features: Features | None, source: Source
) -> Iterator[RawRecord]:
    """Read a row with `image` and `objects`."""
    try:
        names = (_class_names(features["objects"]) if features is not None else None) or source.data.names or None
        objects = [
            _of_dataset_object(n, obj, names, place, source) for n, obj in enumerate(objects_of(row["objects"]), 1)
        ]
        width, height = (whole(row[key]) if row.get(key) else None for key in ("width", "height"))
        sample_id, image = sample_id_of(number, row), _image_string(row["image"])
    except (TypeError, ValueError) as error:
        wanted = "objects with bbox (four numbers) and category or label"
        source.bad.meet("malformed", place.error("not an annotated image", found=f"{error}"[:200], wanted=wanted))
        return
    yield RawRecord(
        place=place,
        sample_id=sample_id,
        messages=source.messages,
        images=(image,),
        objects=objects,
        width=width,
        height=height,
    )


_FLAGS = ("iscrowd", "is_crowd", "difficult", "ignore")


def _class_names(feature: object) -> list[str] | None:
    """Return the names in the first `ClassLabel` column; None if there is no such column."""
    for _ in range(2):  # the objects are a list of mappings, or a mapping of lists
        inner = getattr(feature, "feature", None)
        feature = feature[0] if isinstance(feature, list) else inner if inner is not None else feature
    columns = feature if isinstance(feature, Mapping) else {}
    for name in CLASS_COLUMNS:
        names = getattr(getattr(columns.get(name), "feature", columns.get(name)), "names", None)
        if names is not None:
            return list(names)
    return None


def _of_dataset_object(
    number: int, obj: Mapping[str, object], names: Sequence[str] | None, place: Place, source: Source
) -> RawObject:
    """Return an object of a row. Raises ValueError."""
    label = next((obj[column] for column in CLASS_COLUMNS if column in obj), None)
    try:
        desc = label if isinstance(label, str) else name_of_label(label, names)
        x1, y1, x2, y2 = corners = box(next((obj[column] for column in BOX_COLUMNS if column in obj), None))
        ignored = any_flag(obj, _FLAGS)
    except ValueError as error:
        raise ValueError(f"object {number}: {obj!r:.150} instead of {error}") from error
    if source.data.box_format == "xywh":
        x2, y2 = x1 + x2, y1 + y2
    return RawObject(
        desc=desc or None,
        kind="bbox_2d",
        coords=(x1, y1, x2, y2),
        written=f"bbox {[round(v, 3) for v in corners]}, class {label!r:.100}"
        + (" without a name (data.names)" if desc is None and label is not None else ""),
        name=f"object {number} ({desc!r})",
        place=place,
        ignored=ignored,
    )


def name_of_label(label: object, names: Sequence[str] | None) -> str | None:
    """Return the name of a class number; None if `label` is no number, or if `names` lacks it. Raises ValueError."""
    if label is None or names is None:
        return None
    index = whole(label)
    return names[index] if index < len(names) else None
