"""The photographs as the runs read them: JSONL by split, and labels removed.

In: a clone of https://github.com/Shenggan/BCCD_Dataset, or a folder with the same files (`images/`, `voc/`, `splits/`).
Out: under a folder, `train.jsonl`, `val.jsonl` and `test.jsonl` with labels as published, and `train_missing.jsonl`, in
which each label is missing with a given probability. `AUGMENT` is the `data.augment` of the run that makes the base.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from learner.config.sections.data import DataConfig
from learner.data.formats.source import Source
from learner.data.formats.voc import read_voc
from learner.data.raw import BadRecords
from learner.records import RawRecord
from shared.errors import DataError

PROMPT = "<image>Detect every cell."
CLASSES = ("RBC", "WBC", "Platelets")
WIDTH, HEIGHT = 192, 144  # the model's processor makes this of 640 x 480
AUGMENT: Mapping[str, Any] = {  # a cell is a cell however it lies, and whatever the lamp
    "smallest_crop": 0.6,
    "horizontal_flip": 0.5,
    "quarter_turn": 0.75,
    "colors": 0.25,
}
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Photograph:
    """One photograph with its labels, in its own pixels."""

    name: str
    file: str
    width: int
    height: int
    objects: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The folders in which a copy of the data set has its parts."""

    images: Path
    annotations: Path
    lists: Path

    @classmethod
    def of(cls, data: Path) -> Folders:
        """Raises DataError where `data` is no copy of the data set."""
        clone = cls(
            images=data / "BCCD/JPEGImages", annotations=data / "BCCD/Annotations", lists=data / "BCCD/ImageSets/Main"
        )
        for found in (clone, cls(images=data / "images", annotations=data / "voc", lists=data / "splits")):
            if (found.lists / "train.txt").is_file():
                return found
        raise DataError(
            "the photographs are not there",
            found=f"no {clone.lists}/train.txt",
            wanted="a copy of BCCD",
            remedy="git clone https://github.com/Shenggan/BCCD_Dataset, and give its folder as --data",
        )


def read_photographs(data: Path, split: str) -> list[Photograph]:
    """Read a split as published, by the learner's own reader. A box without area is left out (there are two)."""
    folders = Folders.of(data)
    config = DataConfig(
        train=str(folders.lists / f"{split}.txt"),
        format="voc",
        image_root=str(folders.images.resolve()),
        annotation_root=str(folders.annotations),
        on_bad_record="clip",
    )
    bad = BadRecords(config.bad_records)
    _, records = read_voc(Source(data=config, path=config.train, geometry="bbox_2d", bad=bad))
    photographs = [_photograph(record, folders.images.resolve()) for record in records]
    bad.raise_errors(config.train)
    return photographs


def _photograph(record: RawRecord, images: Path) -> Photograph:
    size = (record.width or 640, record.height or 480)  # all of them are so large
    objects = []
    for obj in record.objects:
        x1, y1, x2, y2 = (min(max(value, 0.0), float(size[i % 2])) for i, value in enumerate(obj.coords))
        if x2 > x1 and y2 > y1:
            objects.append((obj.desc or "", (x1, y1, x2, y2)))
    return Photograph(record.sample_id, str(images / record.images[0]), *size, tuple(objects))


def without_labels(photographs: Iterable[Photograph], share: float, seed: int = 0) -> list[Photograph]:
    """Each label is missing with the probability `share`; where all would be, one stays."""
    kept = []
    for i, photograph in enumerate(photographs):
        rng = np.random.default_rng([seed, i])
        stays = rng.random(len(photograph.objects)) >= share
        if len(stays) and not stays.any():
            stays[rng.integers(len(stays))] = True
        objects = tuple(obj for obj, keep in zip(photograph.objects, stays, strict=True) if keep)
        kept.append(Photograph(photograph.name, photograph.file, photograph.width, photograph.height, objects))
    return kept


def write_jsonl(photographs: Iterable[Photograph], path: Path) -> None:
    path.write_text("".join(json.dumps(_row(photograph)) + "\n" for photograph in photographs))


def _row(photograph: Photograph) -> dict[str, Any]:
    return {
        "id": photograph.name,
        "messages": [{"role": "user", "content": PROMPT}],
        "images": [photograph.file],
        "objects": [{"desc": desc, "bbox_2d": [round(v, 2) for v in box]} for desc, box in photograph.objects],
        "width": photograph.width,
        "height": photograph.height,
    }
