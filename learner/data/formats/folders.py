"""Finds the splits in a folder of photographs and annotations, as tools export it, and each split's format and path.

In: a folder. Out: paths that `data.train` could name, by `train`, `val` and `test`, or by "" if nothing is split. The
names of files decide; only `data.yaml`, `classes.txt` and the beginning of JSON files are read. Six layouts are known:

    YOLO        data.yaml, which names its splits; or classes.txt beside images and labels
    a folder per split (Roboflow), with _annotations.coco.json, XML files or JSONL: train/, valid/, test/
    COCO        *.json, in the folder or its `annotations`: instances_train2017.json, val.json
    JSONL       *.jsonl
    Labelme     *.json with shapes, in the folder or where VOC has its XML files
    VOC         XML files in the folder, Annotations, annotations, voc, xml or labels, or in sub-folders of these, which
                may have the names of splits; lists of names in ImageSets/Main, ImageSets or splits

If a folder has only one sub-folder with a known layout, that sub-folder is used. If several sub-folders have XML files
and nothing else, all XML files together are one VOC data set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learner.data.formats.chat import row_kind
from learner.data.formats.voc import xml_below
from learner.data.formats.yolo import class_file_in, yolo_file
from shared.errors import DataError
from shared.reading import json_of

Format = Literal["jsonl", "coco", "voc", "yolo", "labelme", "datasets"]
_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_XML_FOLDERS = ("", "Annotations", "annotations", "voc", "xml", "xmls", "labels")
# A whole COCO file may be one line.
_LONGEST_ROW = 1 << 20  # max bytes of the first line that are read
_LIST_FOLDERS = ("ImageSets/Main", "ImageSets", "splits")


@dataclass(frozen=True, slots=True)
class Annotations:
    """The annotations that `data.train`, `data.val` or `data.test` names: a path for a reader, and its format."""

    format: Format
    path: str


Found = dict[str, Annotations]  # split -> its annotations; "" if nothing is split


def splits_in(folder: Path) -> Found:
    """Return the annotations by split, `train` first; {} if no layout is known. Raises DataError if a data.yaml or
    classes.txt is wrong."""
    if found := _in_folder(folder):
        return {split: found[split] for split in ("train", "val", "test", "") if split in found}
    inside = [found for child in _folders(folder) if (found := _in_folder(child))]
    if len(inside) == 1:
        return inside[0]
    whole = all(found.keys() == {""} and found[""].format == "voc" for found in inside)
    return {"": Annotations("voc", str(folder))} if whole and xml_below(folder) else {}


def _in_folder(folder: Path) -> Found:
    return next((found for look in _LOOKS if (found := look(folder))), {})


def split_named(name: str) -> str | None:
    """Return `train`, `val` or `test` if a word in a file's name names that split; None if no word names a split, or if
    words name two splits."""
    words = {_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _WORDS}
    return words.pop() if len(words) == 1 else None


def split_called(name: str) -> str | None:
    """Return `train`, `val` or `test` if the whole name means it, such as `validation`; else None."""
    return _WORDS.get(name.lower())


def _yolo(folder: Path) -> dict[str, Annotations]:
    files = [there for name in ("data.yaml", "data.yml", "dataset.yaml") if (there := folder / name).is_file()]
    file = files[0] if files else class_file_in(folder)
    if file is None:
        return {}
    splits = {_WORDS.get(split, split): split for split in yolo_file(file).splits}
    return {split: Annotations("yolo", f"{file}:{name}" if name else str(file)) for split, name in splits.items()}


def _folder_each(folder: Path) -> dict[str, Annotations]:
    found: dict[str, Annotations] = {}
    for child in _folders(folder):
        split = _WORDS.get(child.name.lower())
        inside = (
            _only(_coco(child)) or _only(_jsonl(child)) or (_only(_labelme(child) or _voc(child)) if split else None)
        )
        if split and inside:
            found[split] = inside
    return found


def _only(found: dict[str, Annotations]) -> Annotations | None:
    return next(iter(found.values())) if len(found) == 1 else None


def _coco(folder: Path) -> dict[str, Annotations]:
    own = folder / "_annotations.coco.json"  # file name in Roboflow's exports
    if own.is_file():
        return {"": Annotations("coco", str(own))}
    for place in (folder / "annotations", folder / "Annotations", folder):
        files = sorted(place.glob("*.json")) if place.is_dir() else []
        # JSON files may also be Labelme's, which writes one for each image.
        if files and is_labelme(files[0]):
            return {}
        instances = [file for file in files if file.name.startswith("instances")]  # without captions and keypoints
        if found := _by_name(instances or files, "coco"):
            return {split: Annotations(json_format(Path(one.path)), one.path) for split, one in found.items()}
    return {}


def _jsonl(folder: Path) -> dict[str, Annotations]:
    metadata = folder / "metadata.jsonl"  # Hugging Face's imagefolder
    if metadata.is_file():
        return {"": Annotations("datasets", str(metadata))}
    return _by_name(sorted(folder.glob("*.jsonl")), "jsonl")


def _by_name(files: list[Path], format_: Format) -> dict[str, Annotations]:
    """Return one file per split, or the only file under ""; {} if several files could be meant."""
    named = [(split, file) for file in files if (split := split_named(file.stem))]
    if named and len({split for split, _ in named}) == len(named):
        return {split: Annotations(format_, str(file)) for split, file in named}
    return {"": Annotations(format_, str(files[0]))} if len(files) == 1 else {}


def _voc(folder: Path) -> dict[str, Annotations]:
    inner = [folder / name for name in _XML_FOLDERS[1:]]
    xml = next((place for place in (folder, *inner) if _has_xml(place)), None)
    xml = xml or next((place for place in inner if place.is_dir() and xml_below(place)), None)
    if xml is None:
        return {}
    for lists in (folder / name for name in _LIST_FOLDERS):
        named = {split: lists / f"{split}.txt" for split in ("train", "val", "test")}
        there = {split: Annotations("voc", str(file)) for split, file in named.items() if file.is_file()}
        if "train" in there:
            return there
    parts = [child for child in _folders(xml) if xml_below(child)]
    are_splits = not _has_xml(xml) and all(child.name.lower() in _WORDS for child in parts)
    return (_folder_each(xml) if are_splits else {}) or {"": Annotations("voc", str(xml))}


def _labelme(folder: Path) -> dict[str, Annotations]:
    for place in (folder, *(folder / name for name in (*_XML_FOLDERS[1:], "json", "jsons", "labelme"))):
        first = next(iter(sorted(place.glob("*.json"))), None) if place.is_dir() else None
        if first is not None and is_labelme(first):
            return {"": Annotations("labelme", str(place))}
    return {}


def is_labelme(file: Path) -> bool:
    """Return True if a JSON file begins like a file of Labelme."""
    try:
        with file.open("rb") as content:
            head = content.read(1 << 16)
    except OSError:
        return False
    return b'"shapes"' in head and (b'"shape_type"' in head or b'"imagePath"' in head) and b'"images"' not in head


def json_format(file: Path) -> Format:
    """Return the format of a .json file. Rows, in a list or one per line, are `jsonl`."""
    try:
        with file.open("rb") as content:
            # Tools on Windows begin files with a byte order mark.
            first = content.readline(_LONGEST_ROW).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:  # the format's reader will report the error
        return "coco"
    if is_labelme(file):
        return "labelme"
    return "jsonl" if first[:1] == b"[" or _is_row(first) else "coco"


def _is_row(line: bytes) -> bool:
    """Return True if a line is one whole record (JSONL), not a part of one and not a whole file in one line."""
    try:
        row = json_of(line)
    except ValueError:
        return False
    return isinstance(row, dict) and row_kind(row) is not None


_LOOKS: tuple[Callable[[Path], dict[str, Annotations]], ...] = (_yolo, _folder_each, _coco, _jsonl, _labelme, _voc)


def _has_xml(folder: Path) -> bool:
    return folder.is_dir() and next(folder.glob("*.xml"), None) is not None


def _folders(folder: Path) -> Iterator[Path]:
    return (child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith("."))


def choose(folder: Path, split: str, wanted: str | None) -> Annotations | None:
    """Return the annotations of one split of a folder; None if the folder has no known layout. `split` is the split in
    the path (`data:val`), empty if the path has none. `wanted` is the key that has the path (`train`), None if several
    keys have it. Raises DataError."""
    found = splits_in(folder)
    if not found:
        return None
    name = _WORDS.get(split, split) or ("" if "" in found else wanted or "")
    if name in found:
        return found[name]
    named = ", ".join(filter(None, found)) or "none: all annotations are one set"
    raise DataError(
        f"{folder}: which split?",
        found=f"{split!r}" if split else "none named",
        wanted=f"one of the folder's splits ({named})",
        remedy=f"write {folder}:{next(iter(found))}" if "" not in found else f"write {folder}",
    )
