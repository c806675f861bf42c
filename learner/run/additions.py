"""Writes a copy of annotations with more objects, in the same format.

In: the annotations of a split, as `data` names them, and new objects in pixels, by sample id. Out: a new file (COCO,
JSONL), a new folder of XML files (Pascal VOC), or a new folder with `data.yaml`, labels and links to the images (YOLO).
The format's reader gets from the copy the same samples, ids and images as before, with the new objects. The copy may be
in any folder. Other formats and user's readers are refused. Old files are not changed.

The copy says where a new object comes from, in the fields `origin`, `votes` and `answers`: `votes` of the model's
`answers` answers have the object. An object that a person added has only `origin`. YOLO files cannot have the three
fields.

`RunAnnotations` writes the annotations of a run with completed labels, again after each completion. An old file is
replaced only if its digest is in `labels/written.json` in the run directory. A file with such a digest was written by
the run, and nobody has changed it since.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import yaml

from learner.config.schema import RunConfig
from learner.config.sections.data import DataConfig
from learner.data.formats import coco, jsonl, voc, yolo
from learner.data.formats.folders import Annotations
from learner.data.formats.source import Nearby, Source, name_and_split, need_split
from learner.data.formats.strict import identity
from learner.data.raw import BadRecords
from learner.data.splits import annotations_of
from learner.data.units import sides_in, to_pixels
from learner.records import DetectionObject, Sample
from learner.run.files import why_unwritable, write_atomically, writing
from shared.errors import DataError, OutputError
from shared.reading import as_here, is_file, json_bytes_in

KEY = "labels.complete.write"
RECORD = Path("labels", "written.json")  # path in the run directory of the digests of written annotations
_LAST_BIN = 999  # coordinates of an object are bins 0 to 999; 999 is the image's right or lower edge
_DIGITS = 2  # decimals of a written pixel coordinate
_ORIGIN = "rollout-learner"
_OTHERS = {"datasets": "a Hugging Face data set", "labelme": "a folder of Labelme files"}  # formats that are refused


class Addition(NamedTuple):
    """A new object of class `desc`. `box`: x1, y1, x2, y2 in pixels. The object is in `votes` of the model's `answers`
    answers; both are 0 if a person added it. `outline`: a polygon's x1, y1, x2, y2, ... in pixels; empty for a box.
    `image`: number of the object's image, if its sample has several."""

    desc: str
    box: tuple[float, float, float, float]
    votes: int = 0
    answers: int = 0
    outline: tuple[float, ...] = ()
    image: int | None = None


def addition_of(obj: DetectionObject, sample: Sample) -> Addition:
    """Return the object with coordinates in pixels of its image. Converting the pixels to bins gives the object's bins
    again."""
    sides = sample.size_of(obj.image)
    points = tuple(round(value * sides[i % 2] / _LAST_BIN, _DIGITS) for i, value in enumerate(obj.bins))
    xs, ys = points[0::2], points[1::2]
    votes = (obj.votes.found, obj.votes.answers) if obj.votes is not None else (0, 0)
    outline = points if obj.kind == "poly" else ()
    return Addition(obj.desc, (min(xs), min(ys), max(xs), max(ys)), *votes, outline, obj.image)


Added = Mapping[str, Sequence[Addition]]  # sample id -> new objects


def write_with(data: DataConfig, path: str, samples: Sequence[Sample], added: Added, out: Path) -> None:
    """Write a copy of the annotations at `path` to `out`, with the objects `added` to their samples. `samples`: all
    samples of `path`. Raises OutputError if `out` exists, DataError if annotations of this format cannot be written."""
    found = writable_annotations(data, path)
    if _is_taken(out):
        raise _would_overwrite(out)
    if found.format != "yolo":
        added = _in_unit(data, samples, added)
    source = Source(data=data, path=found.path, geometry="bbox_2d", bad=BadRecords(data.bad_records))
    if found.format in ("coco", "jsonl"):
        write_atomically(out, (_coco if found.format == "coco" else _jsonl)(source, added, out))
    elif found.format == "voc":
        _in_new_folder(out, lambda folder: _voc(source, added, folder, out))
    else:
        sides = {sample.sample_id: (sample.width, sample.height) for sample in samples}
        _in_new_folder(out, lambda folder: _yolo(source, sides, added, folder))


def writable_annotations(data: DataConfig, path: str) -> Annotations:
    """Return the annotations at `path`. Raises DataError if a copy of the annotations cannot be written: other
    programs' formats, a user's reader, or coordinates in another unit than the format's."""
    if data.reader is not None:
        raise DataError(
            "annotations of a reader of your own can't be written again",
            found=f"data.format: {data.reader}",
            wanted="COCO, JSONL, Pascal VOC or YOLO",
            remedy="convert the annotations to one of them first",
        )
    found = annotations_of(data, path)
    kind = found.format
    other = kind in ("labelme", "datasets")
    other = other or (kind == "jsonl" and not jsonl.is_own(Path(found.path)))
    unit = "shares" if kind == "yolo" and data.coordinates is None else data.coordinates
    if other or unit == "resized" or (kind == "yolo" and unit != "shares"):
        what = _OTHERS.get(kind, "rows of another program")
        raise DataError(
            "these annotations can't be written again",
            found=f"{found.path}: {what}" if other else f"data.coordinates: {unit}, and {kind}",
            wanted="COCO, the project's JSONL, Pascal VOC or YOLO, in a unit of the image",
            remedy="convert the annotations to one of them first",
        )
    return found


def _in_unit(data: DataConfig, samples: Sequence[Sample], added: Added) -> Added:
    """Return the new objects with their coordinates changed from pixels to the annotations' unit
    (`data.coordinates`)."""
    unit = data.coordinates
    if unit is None or unit == "pixels":
        return added
    by_id = {sample.sample_id: sample for sample in samples}

    def written(one: Addition, sample: Sample) -> Addition:
        size = sample.size_of(one.image)
        box, outline = (to_pixels(values, size, sides_in(unit, size)) for values in (one.box, one.outline))
        x1, y1, x2, y2 = (round(value, 5) for value in box)
        return one._replace(box=(x1, y1, x2, y2), outline=tuple(round(value, 5) for value in outline))

    return {name: [written(one, by_id[name]) for one in new] for name, new in added.items()}


# ---- formats --------------------------------------------------------------------------------------------------------


def _coco(source: Source, added: Added, out: Path) -> str:
    content: dict[str, Any] = json.loads(coco.filled(json_bytes_in(source.file)))
    images, annotations = content["images"], content["annotations"]
    if source.data.image_root is None and images:
        folder = coco.image_folder([image["file_name"] for image in images[:1]], source)
        nearby = Nearby(source.file.parent)
        for image in images:
            image["file_name"] = _seen_from(out.parent, image["file_name"], folder, nearby)
    number_of = _CocoNumbers(content)
    image_id_of = {identity(image["id"]): image["id"] for image in images}
    for sample_id, objects in added.items():
        for one in objects:
            x1, y1, x2, y2 = one.box
            width, height = round(x2 - x1, _DIGITS), round(y2 - y1, _DIGITS)
            annotations.append(
                {
                    "id": number_of.annotation(),
                    "image_id": image_id_of[sample_id],
                    "category_id": number_of.category(one.desc),
                    "bbox": [x1, y1, width, height] if source.data.box_format == "xywh" else [x1, y1, x2, y2],
                    "area": round(width * height, _DIGITS),
                    "iscrowd": 0,
                    **({"segmentation": [list(one.outline)]} if one.outline else {}),
                    **_provenance(one),
                }
            )
    return json.dumps(content) + "\n"


class _CocoNumbers:
    """Returns an unused id for each new annotation, and the id of a category by its name. A category that the file
    lacks is added to `content`."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._categories: list[dict[str, Any]] = content["categories"]
        self._ids = {category["name"].strip(): category["id"] for category in self._categories}
        self._last = max((int(i) for a in content["annotations"] if (i := identity(a["id"])).isdecimal()), default=0)

    def annotation(self) -> int:
        self._last += 1
        return self._last

    def category(self, name: str) -> object:
        if name not in self._ids:
            numbers = [int(i) for value in self._ids.values() if (i := identity(value)).isdecimal()]
            self._ids[name] = 1 + max(numbers, default=0)
            self._categories.append({"id": self._ids[name], "name": name})
        return self._ids[name]


def _jsonl(source: Source, added: Added, out: Path) -> str:
    root, nearby, lines = source.file.parent, Nearby(source.file.parent), []
    for number, line in enumerate(source.file.read_bytes().decode("utf-8-sig").split("\n"), start=1):
        row = json.loads(line) if line.strip() else None
        if row is None:
            # Empty lines are kept, because a sample without an id has its line's number as id.
            lines.append(line)
            continue
        sample_id = str(number) if row.get("id") is None else identity(row["id"])
        row["objects"] += [
            {
                "desc": one.desc,
                **({} if one.image is None else {"image": one.image}),
                **({"poly": list(one.outline)} if one.outline else {"bbox_2d": list(one.box)}),
                **_provenance(one),
            }
            for one in added.get(sample_id, ())
        ]
        if source.data.image_root is None and "images" in row:
            row["images"] = [_seen_from(out.parent, image, root, nearby) for image in row["images"]]
        lines.append(json.dumps(row, ensure_ascii=False))
    return "\n".join(lines).rstrip("\n") + "\n"


def _voc(source: Source, added: Added, folder: Path, out: Path) -> None:
    """Write the VOC files into `folder`, which is renamed to `out` later."""
    annotations, files = voc.files_of(source)
    images, new = voc.VocImages(annotations, source), voc.VocImages(out, source).root
    for file in files:
        root = voc.parsed(file.read_bytes())
        content = ElementTree.ElementTree(root)
        if new.absolute() != images.root.absolute() or file.parent != annotations:
            name = root.find("filename")
            image = images.name_of(file, (root.findtext("filename") or "").strip())
            (ElementTree.SubElement(root, "filename") if name is None else name).text = _seen_from(
                new, image, images.root
            )
        for one in added.get(file.stem, ()):
            node = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(node, "name").text = one.desc
            ElementTree.SubElement(node, "difficult").text = "0"
            for key, value in _provenance(one).items():
                ElementTree.SubElement(node, key).text = str(value)
            box = ElementTree.SubElement(node, "bndbox")
            for key, corner in zip(("xmin", "ymin", "xmax", "ymax"), one.box, strict=True):
                ElementTree.SubElement(box, key).text = f"{corner:.10g}"
        ElementTree.indent(content)
        content.write(folder / file.name, encoding="utf-8")


def _yolo(source: Source, sides: Mapping[str, tuple[int, int]], added: Added, folder: Path) -> None:
    """Write a YOLO dataset into `folder`: links to the images, labels, and `SPLIT.txt`, which lists the images in their
    old order. `sides`: width and height of each image in pixels, by sample id."""
    name, split = name_and_split(source.path)
    content = yolo.yolo_file(Path(name))
    split = need_split(name, split, list(content.splits))
    number_of = {desc.strip(): number for number, desc in sorted(content.classes.items(), reverse=True)}
    listed = []
    for image in yolo.images_of(content, split, Path(name)):
        sample_id = yolo.sample_id_of(image, content)
        place = Path(*(part for part in Path(sample_id).parts if part not in ("/", "..")))
        link, old = folder / place, yolo.label_file(image)
        label = folder / yolo.label_file(place)
        for made in (link, label):
            made.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(image.absolute())
        listed.append(f"./{place}\n")
        lines = old.read_text(encoding="utf-8-sig").splitlines() if old.is_file() else []
        for one in added.get(sample_id, ()):
            number = number_of.setdefault(one.desc, 1 + max(number_of.values(), default=-1))
            lines.append(f"{number} {_yolo_numbers(one, sides[sample_id], content.num_keypoint_values)}")
        if old.is_file() or lines:
            label.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    split = split or "train"
    (folder / f"{split}.txt").write_text("".join(listed), encoding="utf-8")
    listed_classes = Path(name).name in yolo.CLASS_FILES
    whole = {} if listed_classes else yaml.safe_load(Path(name).read_text(encoding="utf-8-sig"))
    kept = {key: value for key, value in whole.items() if key == "kpt_shape"}
    names = {**content.classes, **{number: desc for desc, number in number_of.items()}}
    text = yaml.safe_dump({split: f"{split}.txt", "names": names, **kept}, sort_keys=False, allow_unicode=True)
    (folder / ("data.yaml" if listed_classes else Path(name).name)).write_text(text, encoding="utf-8")


def _yolo_numbers(one: Addition, sides: tuple[int, int], num_keypoint_values: int | None) -> str:
    """Return the numbers of an object's line (without its class), as fractions of the image's width and height `sides`.
    The keypoints of a new object are not known, so they are zeros."""
    if one.outline:
        return " ".join(f"{value / sides[i % 2]:.6f}" for i, value in enumerate(one.outline))
    x1, y1, x2, y2 = (value / sides[i % 2] for i, value in enumerate(one.box))
    box = f"{(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}"
    return box + " 0" * (num_keypoint_values or 0)


def _provenance(one: Addition) -> dict[str, object]:
    if not one.answers:
        return {"origin": _ORIGIN}
    return {"origin": _ORIGIN, "votes": one.votes, "answers": one.answers}


def _seen_from(new: Path, name: str, old: Path, nearby: Nearby | None = None) -> str:
    """Return the image's path relative to the folder `new`. `name` is its path relative to the folder `old`. URLs,
    encoded images and absolute paths are returned unchanged. `nearby` finds an image that is not at its path."""
    here, there = Path(os.path.realpath(old)), Path(os.path.realpath(new))
    name = as_here(name, here)
    if nearby is not None and not is_file(here / name) and (found := nearby.find(name)) is not None:
        return os.path.relpath(found, there)
    if here == there or Path(name).is_absolute() or not is_file(here / name):
        return name
    return os.path.relpath(here / name, there)


def _in_new_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder next to `out`, then rename this folder to `out`. If `fill` or the rename
    fails, nothing is left. Raises OutputError."""
    work = out.with_name(f".{out.name}.{os.getpid()}")
    with writing(out):
        _remove(work)
        work.mkdir(parents=True)
        try:
            fill(work)
            work.rename(out)
        finally:
            _remove(work)


# ---- RunAnnotations -------------------------------------------------------------------------------------------------


def run_annotations(config: RunConfig) -> RunAnnotations | None:
    """Return the writer of a run's completed annotations; None if `labels.complete.write` is not set."""
    complete, training = config.labels.complete, config.training
    if complete is None or complete.write is None:
        return None
    run_dirs, where = [Path(training.output_dir)], training.resume_from_checkpoint
    if where is not None and where != "latest":
        run_dirs.append(Path(where).parent)
    return RunAnnotations(config.data, Path(complete.write), *run_dirs)


class RunAnnotations:
    """Writes a run's annotations, with completed labels, to `labels.complete.write`. `run_dirs`: the run's directory,
    and, if the run resumes from a checkpoint at another path, the directory of that checkpoint's run."""

    def __init__(self, data: DataConfig, out: Path, *run_dirs: Path) -> None:
        self._data, self._out, self._run_dirs = data, out, run_dirs

    def check(self) -> None:
        """Raises OutputError if the path has a file that this run did not write, or if the folder cannot be written.
        Raises DataError if annotations of this format cannot be written."""
        writable_annotations(self._data, self._data.train)
        if (found := why_unwritable(self._out.parent)) is not None:
            raise OutputError(
                f"{KEY}: {self._out} can't be written",
                found=found,
                wanted="a folder that can be written",
                remedy="name another file, or change the folder's permissions",
            )
        if _is_taken(self._out) and _digest(self._out) not in self._written():
            raise _would_overwrite(self._out, f"{KEY}: ")

    def write(self, samples: Sequence[Sample]) -> None:
        """Write the annotations with the completed labels of `samples`. An earlier file of this run is replaced. Raises
        the errors of `check`, and OutputError if the write fails."""
        self.check()
        added = {
            sample.sample_id: [addition_of(obj, sample) for obj in sample.objects if obj.votes is not None]
            for sample in samples
        }
        new = self._out.with_name(f".{self._out.name}.new")
        with writing(self._out):
            _remove(new)
            write_with(self._data, self._data.train, samples, added, new)
            # The digests of the old and the new file are recorded before the old file is replaced. If the run is killed
            # here, a resumed run may replace either of them.
            digests = [_digest(path) for path in (self._out, new) if _is_taken(path)]
            record = {"file": str(self._out.absolute()), "digests": digests}
            write_atomically(self._run_dirs[0] / RECORD, json.dumps(record) + "\n")
            # A rename replaces a file, but no folder that has files.
            if self._out.is_dir():
                _remove(self._out)
            new.replace(self._out)

    def _written(self) -> list[str]:
        """Return the recorded digests of the annotations at this path. This run, or the run that it resumes, recorded
        them when it last wrote the annotations."""
        found: list[str] = []
        for path in (run_dir / RECORD for run_dir in self._run_dirs):
            try:
                record = json.loads(path.read_text())
                if record["file"] == str(self._out.absolute()):
                    found += record["digests"]
            except (OSError, ValueError, KeyError, TypeError):
                # Without a record, an existing file is not replaced.
                continue
        return found


def _digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file, or of a folder: the names and contents of its files, and the targets of its
    links."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)}\0".encode(errors="surrogateescape"))
        if file.is_symlink():
            digest.update(str(file.readlink()).encode(errors="surrogateescape"))
        elif file.is_file():
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _is_taken(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _would_overwrite(out: Path, where: str = "") -> OutputError:
    return OutputError(
        f"{where}the new annotations would overwrite something",
        found=f"{out} exists",
        wanted="a name that is free",
        remedy="choose another name, or remove it",
    )
