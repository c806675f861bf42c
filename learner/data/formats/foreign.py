"""Recognizes annotations of other programs that are not read, and says what to export instead.

In: a file or a folder. Out: the name of the format and the remedy. Words in a file's first bytes decide; nothing is
parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from learner.data.formats.source import files_below
from shared.errors import DataError
from shared.reading import is_file

_HEAD_BYTES = 1 << 16
_MOST_FILES = 200  # max files of a folder that are read
_EXPORT = "export COCO from the tool instead"
_DATUM = "datum convert -f coco -if"
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")


class Foreign(NamedTuple):
    name: str
    remedy: str


# Words in the first bytes of a JSON or XML file. The first format is reported whose words all occur in the bytes.
_MARKS: tuple[tuple[tuple[str, ...], Foreign], ...] = (
    (('"rectanglelabels"', '"result"'), Foreign("Label Studio's JSON", "in Label Studio, export COCO (with images)")),
    (('"from_name"', '"result"'), Foreign("Label Studio's JSON", "in Label Studio, export COCO (with images)")),
    (('labels"', '"original_width"'), Foreign("Label Studio's JSON-MIN", "in Label Studio, export COCO (with images)")),
    (('"class_names"', '"type"', '"dataset"'), Foreign("Ultralytics' NDJSON", "export COCO or YOLO from the platform")),
    # Florence-2 comes before PaliGemma, because its files have PaliGemma's words too.
    (('"prefix"', '"suffix"', "<loc_"), Foreign("Florence-2's prefix and suffix", _EXPORT)),
    (('"prefix"', '"suffix"'), Foreign("PaliGemma's prefix and suffix", "in Roboflow, export COCO instead")),
    (("_via_img_metadata",), Foreign("VIA's project", "in VIA, Annotation > Export Annotations (COCO format)")),
    (('"shape_attributes"',), Foreign("VIA's JSON", "in VIA, Annotation > Export Annotations (COCO format)")),
    (('"classTitle"', '"exterior"'), Foreign("Supervisely's JSON", "run its app Export to COCO")),
    (
        ('"box2d"', '"category"'),
        Foreign("BDD100K's or Scalabel's JSON", "convert it: python -m scalabel.label.to_coco"),
    ),
    (('"data_row"', '"projects"'), Foreign("Labelbox's NDJSON", "convert it to COCO with labelbox's converter")),
    (('"coordinates"', '"annotations"', '"label"', '"width"'), Foreign("CreateML's JSON", _EXPORT)),
    (("darwin", '"item"'), Foreign("V7's Darwin JSON", "in V7, export COCO")),
    (('"data_units"',), Foreign("Encord's JSON", "in Encord, export COCO")),
    (('"className"', '"instances"'), Foreign("SuperAnnotate's JSON", "convert it: superannotate export to COCO")),
    (('"items"', '"label"', '"media_type"'), Foreign("Datumaro's JSON", "convert it: datum convert -f coco")),
    (('"segments_info"',), Foreign("COCO's panoptic annotations", "name the file of instances instead")),
    (('"caption"', '"annotations"'), Foreign("COCO's captions", "name the file of instances instead")),
    (
        ('"score"', '"image_id"', '"bbox"'),
        Foreign("COCO results of a detector", "name the annotations; results are for evaluate"),
    ),
    (
        ("<annotations>", "<image "),
        Foreign("CVAT's own XML", "in CVAT, export COCO 1.0, or convert it with globox (docs/howto/own-data.md)"),
    ),
    (("<dataset>", "<images>", "<box "), Foreign("dlib's XML (imglab)", _EXPORT)),
)
_NUMBER = r"-?\d+(?:\.\d+)?"
# Patterns of the first line of a text file.
_LINES: tuple[tuple[str, Foreign], ...] = (
    (rf"(?:{_NUMBER},){{7}}{_NUMBER},?", Foreign("VisDrone's text files", "convert them to YOLO or COCO first")),
    (rf"\d+,-?\d+(?:,{_NUMBER}){{5,8}}", Foreign("MOT's text files", f"convert them to COCO: {_DATUM} mot_seq")),
    (
        rf"[A-Za-z]\w*(?: {_NUMBER}){{14,15}}",
        Foreign("KITTI's text files", f"convert them to COCO: {_DATUM} kitti_detection"),
    ),
    (r"imagesource:.*", Foreign("DOTA's text files", "convert them to YOLO or COCO first")),
    (rf"(?:{_NUMBER} ){{8}}\S+ [012]", Foreign("DOTA's text files", "convert them to YOLO or COCO first")),
)
_NAMES = {
    ".tfrecord": Foreign("TFRecords", _EXPORT),
    ".record": Foreign("TFRecords", _EXPORT),
    ".mat": Foreign("a MATLAB file", "convert it to COCO first"),
}


def foreign_in(path: Path) -> tuple[Path, Foreign] | None:
    """Return the file, or the first file of a folder, whose format is known but not read; None if there is no such
    file."""
    files: Iterator[Path] = iter(sorted(islice(files_below(path), _MOST_FILES))) if path.is_dir() else iter([path])
    return next(((file, found) for file in files if (found := _of_file(file)) is not None), None)


def _of_file(file: Path) -> Foreign | None:
    suffix = file.suffix.lower()
    if suffix in _ARCHIVES:
        return Foreign(
            "an archive",
            f"unpack it first: unzip {file} -d {file.with_suffix('')}" if suffix == ".zip" else "unpack it first",
        )
    if suffix in _NAMES:
        return _NAMES[suffix]
    if suffix not in (".json", ".jsonl", ".ndjson", ".xml", ".txt") or not is_file(file):
        return None
    try:
        with file.open("rb") as content:
            head = content.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    if suffix == ".txt":
        first = head.partition("\n")[0].strip()
        return next((found for pattern, found in _LINES if re.fullmatch(pattern, first)), None)
    # Formats that this project reads have these words.
    if any(mark in head for mark in ('"shape_type"', '"messages"', '"conversations"', '"bbox_2d"', "<annotation>")):
        return None
    is_coco = '"images"' in head and '"file_name"' in head
    return next((found for words, found in _MARKS if not is_coco and all(word in head for word in words)), None)


def refuse_foreign(path: Path) -> None:
    """Raises DataError if `path` is, or contains, a file whose format is known but not read."""
    if (known := foreign_in(path)) is not None:
        file, found = known
        raise DataError(
            f"{file}: these annotations are not read",
            found=f"{found.name}",
            wanted="COCO, YOLO, Pascal VOC, JSONL, Labelme or a Hugging Face data set",
            remedy=found.remedy,
        )
