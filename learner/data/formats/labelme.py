"""`labelme`: one JSON file per image, in a folder and its sub-folders.

Rectangles have two corners, in any order. With `task.geometry: poly` polygons are read as polygons. With other
geometries, the box around a polygon is used. For a circle, the box around it is always used. Points and lines are left
out, and counted. If the image file is missing, the image stored in the JSON (`imageData`) is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from learner.data.formats.source import Source, enclosing, files_below
from learner.data.formats.strict import any_flag, class_name, numbers, whole
from learner.records import GeometryKind, Place, RawObject, RawRecord
from shared.errors import DataError
from shared.reading import as_here, is_file, json_in

_FLAGS = ("difficult", "iscrowd", "ignore")
_OUTLINES = ("polygon", "rotation", "quadrilateral")
_WITHOUT_AREA = ("point", "points", "line", "linestrip")


def labelme_files(path: Path) -> list[Path]:
    """Return the JSON files in a folder and its sub-folders, sorted; for a file, the file alone."""
    return sorted(file for file in files_below(path) if file.suffix == ".json") if path.is_dir() else [path]


def read_labelme(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    files, root = labelme_files(source.file), source.file if source.file.is_dir() else source.file.parent

    def records() -> Iterator[RawRecord]:
        for file in files:
            try:
                yield _record(file, json_in(file), root, source)
            except (OSError, ValueError, TypeError, KeyError) as error:
                found, wanted = f"{type(error).__name__}: {error}"[:200], "Labelme's shapes and imagePath"
                source.bad.meet("malformed", Place(file, "Labelme").error("not Labelme", found=found, wanted=wanted))

    return source.image_root(root), records()


def _record(file: Path, content: Mapping[str, Any], root: Path, source: Source) -> RawRecord:
    """Return the record of a file. Raises OSError, ValueError, TypeError, KeyError."""
    places = ((shape, Place(file, f"shape {number}")) for number, shape in enumerate(content["shapes"], start=1))
    width, height = (whole(content.get(key) or 0) or None for key in ("imageWidth", "imageHeight"))
    return RawRecord(
        place=Place(file, "Labelme"),
        sample_id=str(file.relative_to(root).with_suffix("")),
        messages=source.messages,
        images=(_image(file, content, source),),
        objects=[obj for shape, place in places if (obj := _of_shape(shape, place, source)) is not None],
        width=width,
        height=height,
    )


def _image(file: Path, content: Mapping[str, Any], source: Source) -> str:
    name = as_here(str(content["imagePath"]), file.parent)
    if source.data.image_root is None:
        beside = [file.parent / name, file.parent / Path(name).name]
        if (there := next((path for path in beside if is_file(path)), None)) is not None:
            return str(there.absolute())
    data = content.get("imageData")
    return str(data) if data else name


def _of_shape(shape: Mapping[str, Any], place: Place, source: Source) -> RawObject | None:
    desc = written = ""
    try:
        desc, kind = class_name(shape["label"]), shape.get("shape_type") or "polygon"
        points = [value for point in shape["points"] for value in numbers(point)]
        written = f"{kind} {[round(value, 2) for value in points]}"[:150]
        if kind in _WITHOUT_AREA:
            error = place.error(
                "it encloses nothing", found=f"{desc!r}: {kind}", wanted="a rectangle, circle or polygon"
            )
            source.bad.keep("other_shape", error)
            return None
        coords, geometry = _geometry(kind, points, source.geometry)
        ignored = any_flag(shape.get("flags") or {}, _FLAGS) or any_flag(shape, _FLAGS)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        found, wanted = f"{desc!r}: {written} ({error})"[:200], "label, points, shape_type"
        bad: DataError = place.error("not a shape of Labelme", found=found, wanted=wanted)
        source.bad.meet("malformed", bad)
        return None
    return RawObject(
        desc=desc,
        kind=geometry,
        coords=coords,
        written=written,
        name=f"the object ({desc!r})",
        place=place,
        ignored=ignored,
    )


def _geometry(kind: str, points: list[float], wanted: GeometryKind) -> tuple[tuple[float, ...], GeometryKind]:
    """Return a shape's coordinates and kind. Raises ValueError for a kind or a number of points that is not read."""
    least = {"rectangle": 4, "circle": 4, "mask": 4}.get(kind, 6)
    if len(points) < least or len(points) % 2 or (kind not in (*_OUTLINES, "rectangle", "circle", "mask")):
        raise ValueError("a rectangle, circle or polygon with its points")
    if kind == "circle":  # the points are its centre and a point on it
        radius = math.dist(points[:2], points[2:4])
        points = [points[0] - radius, points[1] - radius, points[0] + radius, points[1] + radius]
    if kind in _OUTLINES and wanted == "poly":
        return tuple(points), "poly"
    return enclosing(points), "bbox_2d"
