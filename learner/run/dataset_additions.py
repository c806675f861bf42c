"""Adds objects to a Hugging Face data set: the part of `additions` for `data.format: datasets`.

In: the rows of one split, as its reader reads them, and objects in pixels by sample id. Out: a folder that
`datasets.load_from_disk` and the reader read. It has that split only, with its images inside. Columns and fields stay
as they were, in their order. New fields of an object: `origin`, `votes` and `answers`; older objects have nothing
there. A name that is new joins the class names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from learner.data.formats.hf_datasets import BOX_COLUMNS, CLASS_COLUMNS, objects_of, open_dataset, sample_id_of
from learner.data.formats.source import Source, name_and_split
from shared.errors import DataError


class DatasetObject(NamedTuple):
    """A new object: x1, y1, x2, y2 in pixels; `outline` of a polygon; `image`: which of several images it is in."""

    desc: str
    box: tuple[float, float, float, float]
    outline: tuple[float, ...]
    image: int | None
    provenance: Mapping[str, object]


def save_with(source: Source, added: Mapping[str, Sequence[DatasetObject]], folder: Path) -> None:
    """Write the split with the new objects into `folder`. Raises DataError."""
    import datasets

    rows, split = open_dataset(*name_and_split(source.path))
    fields = _Fields(rows.features, source)
    keys = [name for name in ("id", "image_id", "objects") if name in rows.column_names]
    has_turns = {"messages": True} if "messages" in rows.column_names else {}
    column = []
    for number, row in enumerate(rows.select_columns(keys)):
        new = added.get(sample_id_of(number, row | has_turns), ())
        column.append([*objects_of(row["objects"]), *map(fields.entry, new)])
    order = list(rows.column_names)
    whole = rows.remove_columns("objects").add_column(
        "objects", [fields.arranged(objects) for objects in column], feature=fields.feature()
    )
    whole = whole.select_columns(order)
    with _without_bars():
        (datasets.DatasetDict({split: whole}) if split else whole).save_to_disk(str(folder))


class _Fields:
    """The fields of a data set's objects, with those of new ones."""

    def __init__(self, features: Mapping[str, Any], source: Source) -> None:
        """Raises DataError."""
        self._xywh = source.data.box_format == "xywh"
        self._has_turns = "messages" in features
        self._columns, self._fields = _fields_of(features["objects"])
        self._class = next((name for name in CLASS_COLUMNS if name in self._fields), "category")
        self._box = next((name for name in BOX_COLUMNS if name in self._fields), "bbox")
        self._names: list[str] | None = None
        if not self._has_turns and self._class in self._fields:
            self._names = getattr(self._fields[self._class], "names", None)
            if self._names is None and getattr(self._fields[self._class], "dtype", "") != "string":
                raise DataError(
                    f"{source.path}: its classes have no names",
                    found=f"objects.{self._class}: {self._fields[self._class]}",
                    wanted="names, or numbers with names (datasets.ClassLabel)",
                    remedy="cast the column to ClassLabel",
                )
            self._names = list(self._names) if self._names is not None else None

    def entry(self, one: DatasetObject) -> dict[str, object]:
        """Return a new object as the data set has its own. Fields of which nothing is known are left out."""
        place = self._place(one)
        for key, value in {**place, **one.provenance}.items():
            self._fields.setdefault(key, _feature_of(value))
            if isinstance(value, list):
                self._fields[key] = _for_floats(self._fields[key])
        return {**place, **one.provenance}

    def _place(self, one: DatasetObject) -> dict[str, object]:
        if self._has_turns:
            place: dict[str, object] = {"desc": one.desc} | ({} if one.image is None else {"image": one.image})
            return place | ({"poly": list(one.outline)} if one.outline else {"bbox_2d": list(one.box)})
        x1, y1, x2, y2 = one.box
        box = [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)] if self._xywh else [x1, y1, x2, y2]
        area = round((x2 - x1) * (y2 - y1), 2)
        whole = str(getattr(self._fields.get("area"), "dtype", "")).startswith("int")
        known = {"area": round(area) if whole else area} if "area" in self._fields else {}
        return {self._box: box, self._class: self._class_value(one.desc), **known}

    def _class_value(self, name: str) -> str | int:
        if self._names is None:
            return name
        known = [one.strip() for one in self._names]
        if name not in known:
            self._names.append(name)
            return len(known)
        return known.index(name)

    def feature(self) -> Any:
        """Return the column's feature, once every new object was an `entry`."""
        import datasets

        fields = dict(self._fields)
        if self._names is not None:
            fields[self._class] = datasets.ClassLabel(names=self._names)
        if not self._columns:
            return [fields]
        # A mapping of lists: version 3 keeps it as a Sequence of a mapping.
        return datasets.Sequence(fields)

    def arranged(self, objects: Sequence[Mapping[str, object]]) -> Any:
        """Return a row's objects as the column has them."""
        if self._columns:
            return {name: [one.get(name) for one in objects] for name in self._fields}
        return [{name: one.get(name) for name in self._fields} for one in objects]


def _fields_of(feature: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether objects are columns, a mapping of lists, and the feature of each field."""
    if isinstance(feature, Mapping):
        return True, {name: _inner(values) for name, values in feature.items()}
    inner = _inner(feature)
    columns = type(feature).__name__ == "Sequence"  # of version 3, where a list of mappings is a Python list
    return columns, dict(inner) if isinstance(inner, Mapping) else {}


def _inner(feature: Any) -> Any:
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)


def _feature_of(value: object) -> Any:
    import datasets

    if isinstance(value, list):
        return datasets.Sequence(datasets.Value("float64"))
    return datasets.Value("string" if isinstance(value, str) else "int64")


def _for_floats(feature: Any) -> Any:
    """Return the feature of a list of numbers, which hold fractions of pixels."""
    import datasets

    inner = _inner(feature)
    if not str(getattr(inner, "dtype", "")).startswith(("int", "uint")):
        return feature
    return datasets.Sequence(datasets.Value("float64"), length=getattr(feature, "length", -1))


@contextmanager
def _without_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
