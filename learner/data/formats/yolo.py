"""`yolo`: a `data.yaml` with `names`, and for each split a folder or a list of images, given as `data.yaml:train`. A
`classes.txt` with one name per line can replace the `data.yaml`. The `classes.txt` lies in the labels' folder, or in
the folder around the images' folder.

A label file has the image's name and lies in `labels` instead of `images`. With `task.geometry: poly` segments are read
as polygons, otherwise as boxes. Keypoints (`kpt_shape`) are left out and counted. An image without a label file is a
scene without objects, and is counted too. A split without any label file is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import yaml

from learner.data.formats.source import (
    SUFFIXES,
    Source,
    enclosing,
    name_and_split,
    need_split,
    photographs_below,
    text_of,
)
from learner.data.formats.strict import class_name, number, whole
from learner.records import GeometryKind, Place, RawObject, RawRecord
from shared.config.model import show
from shared.errors import DataError
from shared.reading import as_here, is_there, yaml_of

SPLITS = ("train", "val", "valid", "test")
CLASS_FILES = ("classes.txt", "obj.names")
_WANTED = "a mapping with `names` and, for each split, a folder or a list of images"
_MAX_BYTES = 1 << 20  # max characters of a data.yaml
_VISIBILITIES = (0.0, 1.0, 2.0)


def read_yolo(source: Source) -> tuple[Path, Iterator[RawRecord]]:
    name, split = name_and_split(source.path)
    file = Path(name)
    found = yolo_file(file)
    images = images_of(found, need_split(name, split, list(found.splits)), file)
    return source.image_root(found.root), _records(images, found, source)


# ---- data.yaml -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class YoloFile:
    """The content of a `data.yaml`."""

    root: Path
    written_root: str  # the key `path` as written; empty if it is missing
    classes: Mapping[int, str]
    splits: Mapping[str, list[str]]  # each split's folders of images or files that list images
    num_keypoint_values: int | None  # numbers after the box in each label; None: labels have no keypoints


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            # PyYAML would silently use the last of several values.
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key[1]!r:.80} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def yolo_file(file: Path) -> YoloFile:
    """Read a `data.yaml`, or a file of class names. Raises DataError."""
    place = Place(file, "YOLO")
    if file.name in CLASS_FILES:
        return _of_class_names(file, place)
    try:
        text = text_of(file, place, _WANTED)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"{len(text)} characters")
        content = yaml_of(text, _Loader)
        if not isinstance(content, dict) or not isinstance(content.get("names"), list | dict):
            raise ValueError("no `names`")
        return _of_content(content, file.parent)
    except (ValueError, OverflowError) as error:
        raise place.error("not a YOLO data set", found=str(error)[:300], wanted=_WANTED) from error


def _of_class_names(file: Path, place: Place) -> YoloFile:
    """Return the content of a file of class names. The images are in `images` or in the folder itself. Sub-folders
    named like splits are the splits. Raises DataError."""
    names = text_of(file, place, "a class name per line").rstrip().splitlines()
    try:
        classes = {number: class_name(name) for number, name in enumerate(names)}
    except ValueError as error:
        raise place.error("not a list of class names", found=str(names)[:300], wanted=f"{error} per line") from error
    if not classes:
        raise place.error("not a list of class names", found="an empty file", wanted="a class name per line")
    root = file.parent.parent if file.parent.name == "labels" else file.parent
    images = Path("images" if (root / "images").is_dir() else "")
    splits = {name: [str(images / name)] for name in SPLITS if (root / images / name).is_dir()}
    splits = splits or {"": [str(images)]}
    return YoloFile(root=root, written_root="", classes=classes, splits=splits, num_keypoint_values=None)


def class_file_in(folder: Path) -> Path | None:
    """Return the file of class names in a folder; None if there is no such file, or no image has labels."""
    places = (folder, folder / "labels")
    file = next((place / name for place in places for name in CLASS_FILES if (place / name).is_file()), None)
    if file is None:
        return None
    found = yolo_file(file)
    images = (image for split in found.splits for image in images_of(found, split, file))
    return file if any(is_there(label_file(image)) for image in images) else None


def _of_content(content: Mapping[object, object], beside: Path) -> YoloFile:
    """Return the content of a `data.yaml` in the folder `beside` (next to which the images are). Raises ValueError."""
    root = content.get("path")
    if root is not None and not isinstance(root, str):
        raise ValueError(f"path: {show(root)} instead of a folder")
    entries = {key: content[key] for key in SPLITS if content.get(key) is not None}
    splits: dict[str, list[str]] = {key: [] for key in entries}
    for key, entry in entries.items():
        for part in entry if isinstance(entry, list) else [entry]:
            if not isinstance(part, str) or not part or "\0" in part:
                raise ValueError(f"{key}: {show(part)} instead of a folder or a list of images")
            splits[key].append(part)
    names = content["names"]
    assert isinstance(names, list | dict), "the caller has looked"
    classes = _classes(names)
    if content.get("nc") is not None and _whole_of("nc", content["nc"]) != len(classes):
        raise ValueError(f"nc: {content['nc']}, but {len(classes)} names")
    return YoloFile(
        root=beside / as_here(root or "", beside),
        written_root=root or "",
        classes=classes,
        splits=splits,
        num_keypoint_values=_keypoint_values(content),
    )


def _classes(names: list[object] | dict[object, object]) -> dict[int, str]:
    """Return the class names by number. Raises ValueError."""
    classes: dict[int, str] = {}
    for key, value in names.items() if isinstance(names, dict) else enumerate(names):
        number_ = _whole_of("names", key)
        if number_ in classes:
            raise ValueError(f"names: two of {number_}")
        # YAML reads an unquoted 7 as a number and `no` as false. A number becomes its digits; true and false are
        # refused.
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e9 else value
        try:
            classes[number_] = class_name(text)
        except ValueError as error:
            raise ValueError(f"names: {show(value)} for {number_} instead of {error} (quote it)") from error
    if not classes:
        raise ValueError("no `names`")
    return classes


def _whole_of(key: str, value: object) -> int:
    """Return `value` as a whole number. Raises ValueError, which names `key`."""
    try:
        return whole(value)
    except ValueError as error:
        raise ValueError(f"{key}: {show(value)} instead of {error}") from error


def _keypoint_values(content: Mapping[object, object]) -> int | None:
    """Return how many keypoint values each label has; None without `kpt_shape`. Raises ValueError."""
    shape = content.get("kpt_shape")
    if shape is None:
        return None
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"kpt_shape: {show(shape)} instead of [keypoints, 2 or 3]")
    count, dims = (_whole_of("kpt_shape", value) for value in shape)
    return count * dims


def images_of(content: YoloFile, split: str, file: Path) -> list[Path]:
    """Return all images of a split, sorted by name, or in the order of a list. Raises DataError."""
    place, root, beside = Place(file, "YOLO"), content.root, file.parent
    found: list[Path] = []
    for part in content.splits[split]:
        # Some tools write paths that are right only without the leading ../ (the last form).
        named = [(root, part), (beside, part), (beside, part.removeprefix("../").removeprefix("..\\"))]
        choices = [folder / as_here(name, folder) for folder, name in named]
        path = next((choice for choice in choices if is_there(choice)), None)
        if path is None:
            for key, written in ((split, part), ("path", content.written_root)):
                if _is_of_windows(written):
                    remedy = f"write {key} relative to the folder of {file.name}, as in images/train, or as it is here"
                    raise _of_other_machine(place, f"{key}: {written}", remedy)
            raise place.error("its images are not there", found=f"no {choices[0]}", wanted="a folder or a list")
        if path.is_dir():
            found += photographs_below(path)
        else:
            text = text_of(path, Place(path, "list"), "names of images, one per line")
            lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
            found += [_listed(line, path, number, root) for number, line in lines if line]
    return found


def _listed(name: str, file: Path, number: int, root: Path) -> Path:
    """Return the image that a line of a list names. `./` means the folder of the list. Raises DataError."""
    folder = file.parent if name.startswith(("./", ".\\")) else root
    if _is_of_windows(name) and not is_there(folder / name):
        remedy = "write names relative to `path` of data.yaml, or with ./ in front relative to the folder of this list"
        raise _of_other_machine(Place(file, f"line {number}"), name, remedy)
    return folder / as_here(name, folder)


def _is_of_windows(name: str) -> bool:
    """Return True for an absolute Windows path, such as `C:\\cats` or `\\\\nas\\cats`."""
    return not name.startswith("/") and PureWindowsPath(name).is_absolute()


def _of_other_machine(place: Place, found: str, remedy: str) -> DataError:
    what, wanted = "an absolute path of Windows, which this machine does not have", "a path of this machine"
    return place.error(what, found=found, wanted=wanted, remedy=remedy)


# ---- labels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Labels:
    """The lines of an image's label file. `lines` is None if there is no such file."""

    image: Path
    file: Path
    lines: list[str] | None


def _records(images: Sequence[Path], content: YoloFile, source: Source) -> Iterator[RawRecord]:
    """Yield a record for each image. Raises DataError if no image has labels, or if outlines look like keypoints."""
    found = [_labels(image, source) for image in images]
    _check_files(found, source)
    if content.num_keypoint_values is None:
        _check_outlines(found, source)
    for labels in found:
        yield _record(labels, content, source)


def _labels(image: Path, source: Source) -> _Labels:
    file = label_file(image)
    if not is_there(file):
        return _Labels(image, file, None)
    try:
        text = text_of(file, Place(file, "labels"), "a text with one label per line")
    except DataError as error:
        source.bad.meet("malformed", error)
        return _Labels(image, file, [])
    return _Labels(image, file, [line.strip() for line in text.splitlines()])


def label_file(image: Path) -> Path:
    """Return an image's label file. The last folder `images` in the path becomes `labels`. Without such a folder, the
    file is in the image's folder."""
    return _other_folder(image, "images", "labels").with_suffix(".txt")


def _other_folder(path: Path, old: str, new: str) -> Path:
    parts = list(path.parts)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == old:
            parts[i] = new
            break
    return Path(*parts)


def _check_files(found: Sequence[_Labels], source: Source) -> None:
    """Count images without labels, and labels without an image. Raises DataError if no image has labels."""
    missing = [labels for labels in found if labels.lines is None]
    # Without this error, every photograph would be learned as a photograph without objects.
    if found and len(missing) == len(found):
        raise DataError(
            f"{source.path}: no image has a label file",
            found=f"{len(found)} images, and no {found[0].file}",
            wanted="labels beside the images, or in a folder `labels` where the images are in `images`",
            remedy="name the folders so (an empty label file says that an image has no objects)",
        )
    for labels in missing:
        error = Place(labels.image, "labels").error("has no label file", found=f"no {labels.file}", wanted="one")
        source.bad.keep("unlabelled", error)
    expected = {labels.file for labels in found}
    for folder in sorted({file.parent for file in expected}):
        for file in sorted(set(folder.glob("*.txt")) - expected):
            if _is_orphan(file):
                error = Place(file, "labels").error("has no image", found="labels", wanted="an image of its name")
                source.bad.keep("orphan_label", error)


def _is_orphan(file: Path) -> bool:
    """Return True if a file has labels but no image of its name exists. `classes.txt` has no labels."""
    image = _other_folder(file, "labels", "images")
    if any(is_there(image.with_suffix(suffix)) for end in SUFFIXES for suffix in (end, end.upper())):
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline(1000).split()
    except OSError:
        return False
    return len(first) >= 5 and _numbers(first) is not None


def _check_outlines(found: Sequence[_Labels], source: Source) -> None:
    """Raises DataError if labels with more than four numbers look like boxes with keypoints."""
    labels = [values for one in found for line in one.lines or () if (values := _numbers(line.split()[1:]))]
    if _are_keypoints(labels):
        raise DataError(
            f"{source.path}: labels look like boxes with keypoints",
            found=f"{len(labels[0])} numbers in every label: a box, and points inside it",
            wanted="`kpt_shape` in data.yaml, or boxes, or outlines",
            remedy="add kpt_shape: [KEYPOINTS, 2 or 3] to data.yaml; the boxes are used",
        )


def _are_keypoints(labels: Sequence[Sequence[float]]) -> bool:
    """Return True if the labels are boxes with keypoints, and not outlines. Three conditions must hold. All labels have
    the same length. All points lie in the boxes. If points have no visibilities, some label crosses itself when it is
    read as an outline."""
    if not labels or len(labels[0]) <= 4 or len({len(values) for values in labels}) > 1:
        return False
    if all(_is_box_with_points(values, 3) for values in labels):
        return True
    return all(_is_box_with_points(values, 2) for values in labels) and any(map(_crosses_itself, labels))


def _is_keypoints(values: Sequence[float]) -> bool:
    """Return True if one label is a box with keypoints, although not all labels are. An outline can look like a label
    with keypoints by chance. So the label must also cross itself as an outline, or have three or more visibilities."""
    if _is_box_with_points(values, 3) and len(values) >= 4 + 3 * 3:
        return True
    crosses = len(values) % 2 == 0 and _crosses_itself(values)
    return crosses and (_is_box_with_points(values, 2) or _is_box_with_points(values, 3))


def _crosses_itself(values: Sequence[float]) -> bool:
    # shapely is imported only here, because most labels are boxes.
    import shapely

    return not shapely.Polygon(list(zip(values[0::2], values[1::2], strict=True))).is_valid


def _is_box_with_points(values: Sequence[float], dims: int) -> bool:
    """Return True if the numbers are a box and points inside it. With `dims` 3 a visibility follows each point. A point
    that was not labelled is 0, 0."""
    x, y, width, height = values[:4]
    rest = values[4:]
    if len(rest) % dims or (dims == 3 and any(value not in _VISIBILITIES for value in rest[2::3])):
        return False
    return all(
        (px == py == 0) or (abs(px - x) <= width / 2 + 1e-3 and abs(py - y) <= height / 2 + 1e-3)
        for px, py in zip(rest[0::dims], rest[1::dims], strict=True)
    )


def _numbers(words: Sequence[str]) -> list[float] | None:
    try:
        return [number(word) for word in words]
    except ValueError:
        return None


def _record(labels: _Labels, content: YoloFile, source: Source) -> RawRecord:
    objects = []
    for line_number, line in enumerate(labels.lines or (), start=1):
        if line:
            try:
                objects.append(_of_line(line, Place(labels.file, f"line {line_number}"), content, source))
            except DataError as error:
                source.bad.meet("malformed", error)
    return RawRecord(
        place=Place(labels.file, "labels"),
        sample_id=sample_id_of(labels.image, content),
        messages=source.messages,
        # The path is made absolute, because a relative path would be searched in the images' folder again.
        images=(str(labels.image.absolute()),),
        objects=objects,
        width=None,
        height=None,
        unit="shares",
    )


def sample_id_of(image: Path, content: YoloFile) -> str:
    return str(image.relative_to(content.root) if image.is_relative_to(content.root) else image)


def _of_line(line: str, place: Place, content: YoloFile, source: Source) -> RawObject:
    """Read `class x y width height`, with x and y of the centre, or `class x1 y1 x2 y2 x3 y3 ...`. Raises DataError."""
    try:
        first, *rest = line.split()
        desc, values = content.classes.get(whole(first)), [number(text) for text in rest]
    except ValueError as error:
        found, wanted = f"{line:.200}", f"{error}: a class, then numbers"
        raise place.error("not a YOLO label", found=found, wanted=wanted) from error
    if content.num_keypoint_values is not None:
        values = _without_keypoints(values, line, place, content.num_keypoint_values)
        left_out = place.error("keypoints are not read", found=f"{line:.200}", wanted="a box", remedy="nothing to do")
        source.bad.keep("keypoints", left_out)
    elif len(values) != 4 and (len(values) < 6 or len(values) % 2):
        wanted = "class, x, y, width, height, or class and three points or more (with keypoints: kpt_shape in the YAML)"
        raise place.error("not a YOLO label", found=f"{line:.200}", wanted=wanted)
    elif len(values) > 4 and _is_keypoints(values):
        wanted = "class and box, or class and an outline (with keypoints: kpt_shape in the YAML)"
        raise place.error("a label that looks like a box with keypoints", found=f"{line:.200}", wanted=wanted)
    kind: GeometryKind = "bbox_2d"
    if len(values) == 4:
        x, y, width, height = values
        coords = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    elif source.geometry == "poly":
        coords, kind = values, "poly"
    else:
        coords = [*enclosing(values)]
    return RawObject(
        desc=desc,
        kind=kind,
        coords=tuple(coords),
        written=f"{line:.200}",
        name=f"the object ({desc!r})" if desc else "the object",
        place=place,
    )


def _without_keypoints(values: list[float], line: str, place: Place, num_keypoint_values: int) -> list[float]:
    """Return the box without the keypoints. Raises DataError if the number of keypoints differs from `kpt_shape`."""
    if len(values) != 4 + num_keypoint_values:
        wanted = f"class, box and {num_keypoint_values} numbers of keypoints, as kpt_shape says"
        raise place.error("not a YOLO label with keypoints", found=f"{line:.200}", wanted=wanted)
    return values[:4]
