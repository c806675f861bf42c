"""Finds the images that the arguments of `predict` name: photographs, folders, patterns, annotation files. Out:
`InputImage`s.

Order: as given, and inside a folder or a pattern by name. A photograph that is named twice is one image. Annotations
keep their ids, so that results can be compared with them; other photographs are numbered from 1.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner.config.sections.data import DataConfig
from learner.data.formats.coco import category_ids
from learner.data.formats.detect import format_of
from learner.data.formats.source import OTHER_SUFFIXES, SUFFIXES, files_below
from learner.data.splits import read_split
from learner.detector.results import LINES, PICTURES, REQUEST
from learner.extensions import Reader
from learner.records import Sample
from learner.tasks.detection.coco_results import image_id
from shared.errors import DataError
from shared.reading import is_utf8

_WANTED = "a photograph, a folder of photographs, a pattern such as 'photos/*.jpg', or an annotation file"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputImage:
    """An image to answer. `id` is the annotation's id, or a number. `source` is an image string, `name` is for people.
    If a sample has several images, which the model sees together, `record` is the sample, and `number` is the position
    of this image in the sample, from 1."""

    id: int | str
    source: str
    name: str
    record: Sample | None = None
    number: int = 1

    @property
    def image(self) -> int | None:
        """Return the value of `DetectionObject.image` for objects in this image."""
        return None if self.record is None else self.number


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The images, without bad records of annotation files. `bad` has a line for each bad record."""

    images: list[InputImage]
    bad: list[str] = field(default_factory=list)
    categories: Mapping[str, int] = field(default_factory=dict)  # ids of an annotation file's class names


class Anything:
    """Stands for a task, and accepts every sample, because predictions do not need labelled objects."""

    def validate(self, sample: Sample) -> None: ...


def find_inputs(inputs: Sequence[str], data: DataConfig | None = None, reader: Reader | None = None) -> Inputs:
    """Find all images of `inputs`. `data` says how annotation files are read; None: by the defaults.

    Raises DataError if an input is neither a photograph, a folder, a pattern nor annotations, or if there is no image.
    """
    sources: dict[str, InputImage | str] = {}  # image's path or URL -> image; for a photograph: its name
    bad: list[str] = []
    for text in inputs:
        files = _files(text)
        if files is not None:
            bad += _of_other_kinds(files)
            for file in _photographs(files):
                if is_utf8(source := str(file.absolute())):
                    # A path inside the given folder keeps files of equal names apart.
                    sources.setdefault(source, str(file.relative_to(text)) if Path(text).is_dir() else file.name)
                else:
                    bad.append(f"{str(file)!a}: its name is not UTF-8; rename the file or folder")
            continue
        annotated, wrong = _annotated(text, data or DataConfig(train=text), reader)
        bad += wrong
        for image in annotated:
            sources.setdefault(image.source if image.record is None else f"{image.id} {image.source}", image)
    if not sources and not bad:
        raise DataError("there is nothing to predict", found=", ".join(inputs) or "no input", wanted=_WANTED)
    return Inputs(images=list(_numbered(sources)), bad=bad, categories=coco_categories(inputs))


def coco_categories(inputs: Sequence[str]) -> dict[str, int]:
    """Return the ids of class names of the first input that is a COCO file; {} without one."""
    for text in inputs:
        if not Path(text).is_file() or not _is_annotated(text) or format_of(DataConfig(train=text), text) != "coco":
            continue
        return category_ids(Path(text))
    return {}


def _numbered(sources: Mapping[str, InputImage | str]) -> Iterator[InputImage]:
    """Yield the images. Photographs get numbers that are no id of an annotated image."""
    taken = {image.id for image in sources.values() if isinstance(image, InputImage)}
    number = 0
    for source, image in sources.items():
        if isinstance(image, str):
            number += 1
            while number in taken or str(number) in taken:
                number += 1
            image = InputImage(id=number, source=source, name=image)
        yield image


def _files(text: str) -> list[Path] | None:
    """Return the photographs of any kind that an input names; None for an annotation file. Raises DataError for other
    inputs."""
    path = Path(text)
    if path.is_file():
        return _of_any_kind([path]) or None
    if path.is_dir():
        given = (file for file in files_below(path) if not _is_drawn(file, path))
        return _of_any_kind(given) or (None if _is_annotated(text) else _nothing(text, "no photographs in it"))
    if glob.has_magic(text):
        matching = [Path(name) for name in glob.glob(text, recursive=True)]  # noqa: PTH207 - absolute patterns too
        return _of_any_kind(matching) or _nothing(text, "no photograph of that pattern")
    return None if _is_annotated(text) else _nothing(text, "no such file or folder")


def _is_drawn(file: Path, given: Path) -> bool:
    """Return True for a picture that `predict` drew, unless the folder of these pictures itself is given."""
    folder = file.parent
    marks = (folder.parent / name for name in (REQUEST, LINES))
    return folder.name == PICTURES and folder != given and all(mark.is_file() for mark in marks)


def _of_any_kind(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES) and path.is_file())


def _photographs(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.suffix.lower() in SUFFIXES]


def _of_other_kinds(files: Sequence[Path]) -> list[str]:
    """Return a line for each photograph of a kind that cannot be read. A photograph that also exists as a readable file
    gets no line."""
    # A photograph that also exists as a JPEG needs no line, because cameras write a readable JPEG for each raw file
    # that cannot be read.
    readable = {file.with_suffix("") for file in _photographs(files)}
    return [
        f"{file}: photographs of this kind cannot be read ({file.suffix}); convert it to JPEG or PNG"
        for file in files
        if file.suffix.lower() in OTHER_SUFFIXES and file.with_suffix("") not in readable
    ]


def _is_annotated(text: str) -> bool:
    try:
        format_of(DataConfig(train=text), text)
    except DataError:
        return False
    return True


def _nothing(text: str, found: str) -> list[Path]:
    raise DataError(
        f"{text}: there is nothing to predict",
        found=found,
        wanted=_WANTED,
        remedy=f"correct the path; photographs end in {', '.join(SUFFIXES)}",
    )


def _annotated(text: str, data: DataConfig, reader: Reader | None) -> tuple[list[InputImage], list[str]]:
    """Return the images of an annotation file, and a line for each bad record. Bad objects are left out, without a
    line."""
    lenient = {kind: "error" if kind in ("image_missing", "image_shape") else "drop" for kind in data.bad_records}
    changed = {"train": text, "on_bad_record": lenient}
    try:
        split = read_split(data.model_copy(update=changed), text, Anything(), reader=reader)
    except DataError as error:
        raise DataError(
            f"{text}: there is nothing to predict",
            found=f"no photograph, and no annotations: {error.what}; {error.found}",
            wanted=_WANTED,
            remedy="correct the path, or name the folder of the photographs",
        ) from error
    bad = [str(error) for error in split.bad.errors]
    bad += [f"{text}: sample {sample.sample_id} has no image" for sample in split.samples if not sample.images]
    if split.bad.num_errors > len(bad):
        bad.append(f"{text}: {split.bad.num_errors - len(bad)} more records that cannot be used")
    return [image for sample in split.samples for image in images_of(sample)], bad


def images_of(sample: Sample) -> list[InputImage]:
    """Return an input for each image of a sample. If there are several, the sample's id is followed by `#1`, `#2`, as
    in a run's COCO results."""
    several = len(sample.images) > 1
    return [
        InputImage(
            id=image_id(f"{sample.sample_id}#{number}" if several else sample.sample_id),
            source=source,
            name=Path(source[-200:]).name,
            record=sample if several else None,
            number=number,
        )
        for number, source in enumerate(sample.images, start=1)
    ]
