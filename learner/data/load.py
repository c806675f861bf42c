"""`load_samples`: a whole annotation file, read and checked before anything is trained (R12).

Nothing is skipped: the first record that can't be used stops the run, with file, line and reason. Only annotations are
held in memory (some 2 kB a sample); images are opened when a prompt is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

from learner.config.schema import DataConfig
from learner.data.coco import read_coco
from learner.data.jsonl import read_jsonl
from learner.data.row import Place
from learner.records import Sample
from shared.errors import DataError


class Validates(Protocol):
    """The part of a `Task` that is needed here."""

    def validate(self, sample: Sample) -> None: ...


def load_samples(data: DataConfig, path: str, task: Validates) -> list[Sample]:
    """Every sample of the annotation file `path`, in file order; of `data.train` at most `data.max_samples`.

    Raises DataError, with file and line, where a record is broken, an id comes twice, or the task can't use a sample.
    """
    limit = data.max_samples if path == data.train else None
    places: dict[str, Place] = {}
    samples = []
    for place, sample in islice(_read(data, Path(path)), limit):
        if sample.sample_id in places:
            raise place.error(
                "its id is taken",
                found=f"id {sample.sample_id!r}, also at {places[sample.sample_id].record}",
                wanted="an id of its own",
            )
        places[sample.sample_id] = place
        _validate(sample, task, place)
        samples.append(sample)
    if not samples:
        raise DataError(f"{path} has no samples", found="an empty file", wanted="one record or more")
    return samples


def _read(data: DataConfig, file: Path) -> Iterator[tuple[Place, Sample]]:
    if not file.is_file():
        raise DataError(
            "an annotation file is missing",
            found=f"no file {file.absolute()}",
            wanted=f"{data.format} annotations",
            remedy="correct the path under data; relative ones start at the working directory",
        )
    image_root = Path(data.image_root) if data.image_root is not None else file.parent
    if data.format == "coco":
        return read_coco(file, image_root=image_root, prompt=data.prompt)
    return read_jsonl(file, image_root=image_root)


def _validate(sample: Sample, task: Validates, place: Place) -> None:
    try:
        task.validate(sample)
    except DataError as error:
        raise place.error(error.what, found=error.found, wanted=error.wanted, remedy=error.remedy) from error
