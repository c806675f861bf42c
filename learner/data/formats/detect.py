"""Finds the format of annotations, and names the reader of each format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from learner.config.sections.data import DataConfig
from learner.data.formats.coco import read_coco
from learner.data.formats.folders import Annotations, Format, choose, json_format
from learner.data.formats.foreign import refuse_foreign
from learner.data.formats.hf_datasets import METADATA, read_datasets
from learner.data.formats.jsonl import read_jsonl
from learner.data.formats.labelme import read_labelme
from learner.data.formats.source import Source, name_and_split, photographs_below
from learner.data.formats.voc import read_voc
from learner.data.formats.yolo import CLASS_FILES, read_yolo
from learner.records import RawRecord
from shared.errors import DataError
from shared.reading import is_there


def locate(data: DataConfig, path: str, wanted: str | None) -> Annotations:
    """Return the format, and the path that a reader takes, for a file or for a folder in a known layout. `wanted` is
    the split that `path` is read for, None if several keys have the same path. Raises DataError."""
    name, split = name_and_split(path)
    if is_there(Path(name)) and Path(name).is_dir() and data.format != "datasets" and not is_saved(Path(name)):
        found = choose(Path(name), split, wanted)
        if found is not None and data.format in ("auto", found.format):
            if data.format == "auto" and Path(found.path).is_file():
                refuse_foreign(Path(found.path))
            return found
    return Annotations(format_of(data, path), path)


def format_of(data: DataConfig, path: str) -> Format:
    """Return `data.format`; with `auto` the format that the files look like. Raises DataError if there is no file, or
    if its format is not known."""
    if data.format == "datasets":
        return "datasets"
    file = Path(path)
    if not is_there(file):
        file = Path(path.rpartition(":")[0] or path)  # the path without `:split`, if it has one
    if not is_there(file):
        raise DataError(
            "an annotation file is missing",
            found=f"no file {file.absolute()}",
            wanted="annotations" if data.format == "auto" else f"{data.format} annotations",
            remedy="correct the path under data (relative ones start at the working directory); a data set by its name "
            "on the Hugging Face hub needs data.format: datasets",
        )
    # A file of a format that is not read is refused here. If a file of another format were read as a known format,
    # every row would be a mistake.
    if data.format == "auto" and file.is_file():
        refuse_foreign(file)
    found = _detected(file) if data.format == "auto" else cast("Format", data.format)  # `format` names no reader here
    if found is None:
        refuse_foreign(file)
        raise DataError(
            "the format of the annotations is not known",
            found=_described(file),
            wanted="JSONL (.jsonl), COCO (.json), Pascal VOC (a folder of .xml, or a list .txt), YOLO (data.yaml, or "
            "classes.txt), Labelme (a folder of .json), a folder with one of them per split, or a saved Hugging Face "
            "data set",
            remedy="set data.format, or correct the path, down to the file if there are several; photographs alone "
            "need labels first: of any tool that exports one of these formats, or init --label-with MODEL",
        )
    return found


def _described(path: Path) -> str:
    if not path.is_dir():
        return f"a file {path}"
    files = sorted(file.name for suffix in ("*.json", "*.jsonl") for file in path.glob(suffix))
    if len(files) > 1:
        shown = ", ".join(files[:3])
        return f"{path}, a folder with {len(files)} files whose names do not say which split they are ({shown})"
    if tables := sorted(path.rglob("*.csv")):
        return f"{tables[0]}, a table: tables are read by a reader of your own (data.format; docs/extending.md has one)"
    if labels := [file for file in sorted(path.rglob("*.txt")) if _is_yolo_label(file)]:
        names = f"none of {', '.join(CLASS_FILES)} and no data.yaml names their classes"
        return f"{path}, a folder with YOLO label files ({labels[0].relative_to(path)}), but {names}"
    number = len(photographs_below(path))
    photographs = f"{number} photograph{'s' if number != 1 else ''}"
    return f"{path}, a folder with {photographs} and no annotations" if number else f"a folder {path}"


def _is_yolo_label(file: Path) -> bool:
    """Return True if the first line is a class number and four numbers from 0 to 1 (fractions of the photograph's
    sides)."""
    try:
        with file.open(encoding="utf-8") as lines:
            number, *shares = lines.readline(200).split()
        return number.isdecimal() and len(shares) == 4 and all(0 <= float(share) <= 1 for share in shares)
    except (OSError, ValueError):
        return False


def is_saved(folder: Path) -> bool:
    """Return True if the folder is a saved Hugging Face data set."""
    marks = ("state.json", "dataset_dict.json", "dataset_info.json", "**/*.parquet", "**/*.arrow", "metadata.csv")
    return any(next(folder.glob(mark), None) for mark in marks)


def _detected(path: Path) -> Format | None:
    if path.is_dir():
        if next(path.glob("*.xml"), None):
            return "voc"
        return "datasets" if is_saved(path) else None
    by_suffix: dict[str, Format] = {
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".yaml": "yolo",
        ".yml": "yolo",
        ".txt": "voc",
    }
    if path.name in CLASS_FILES:
        return "yolo"
    if path.name == METADATA:
        return "datasets"
    if path.suffix.lower() != ".json":
        return by_suffix.get(path.suffix.lower())
    # A pipe or a device may never end, so it is not read.
    return json_format(path) if path.is_file() else None


FormatReader = Callable[[Source], tuple[Path, Iterator[RawRecord]]]
READERS: Mapping[Format, FormatReader] = {
    "jsonl": read_jsonl,
    "coco": read_coco,
    "voc": read_voc,
    "yolo": read_yolo,
    "labelme": read_labelme,
    "datasets": read_datasets,
}
