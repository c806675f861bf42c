"""The photographs as the runs read them: JSONL by split, labels removed, and augmented copies to train on from nothing.

In: a clone of https://github.com/Shenggan/BCCD_Dataset, or a folder with the same files (`images/`, `voc/`, `splits/`).
Out: under a folder, `train.jsonl`, `val.jsonl` and `test.jsonl` with labels as published, `train_missing.jsonl`, in
which each label is missing with a given probability, and `augmented.jsonl` with its images.

The augmentation is Pillow and 60 lines: a crop at a random scale, mirrored and turned by quarters, four of them side
by side at times, with other brightness, contrast and color. Libraries for it (albumentations, torchvision's v2) need
OpenCV or torchvision, which the learner does not need. Boxes stay exact, because nothing is turned by other angles.
Image i depends on (seed, i) alone, so neither on the number of processes nor on the number of images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from learner.config.schema import DataConfig
from learner.data.raw import BadRecords, RawRecord
from learner.data.readers import Source, read_voc
from shared.errors import DataError

PROMPT = "<image>Detect every cell."
CLASSES = ("RBC", "WBC", "Platelets")
WIDTH, HEIGHT = 192, 144  # what the model's processor makes of 640 x 480
SMALLEST_PART = 0.35  # a label stays with a crop that holds so much of its box ...
SMALLEST_SIDE = 4.0  # ... and so many pixels across
MOSAICS = 0.3  # share of the augmented images that are four crops
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
    """Where a copy of the data set has its parts."""

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
    """A split as published, by the learner's own reader. A box without area is left out (there are two)."""
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
    size = (record.width or 640, record.height or 480)  # what all of them are
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


# ---- augmentation ----------------------------------------------------------------------------------------------------


def write_augmented(photographs: Sequence[Photograph], number: int, out: Path, *, seed: int = 0) -> None:
    """`number` images under `out/augmented`, and `out/augmented.jsonl`, which is written last."""
    folder = out / "augmented"
    folder.mkdir(parents=True, exist_ok=True)
    workers = min(os.cpu_count() or 1, 32)
    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(tuple(photographs), folder, seed)) as pool:
        made = list(pool.map(_write_one, range(number), chunksize=max(1, min(64, number // workers))))
    write_jsonl(made, out / "augmented.jsonl")


_given: tuple[tuple[Photograph, ...], Path, int]


def _begin(photographs: tuple[Photograph, ...], folder: Path, seed: int) -> None:
    global _given
    _given = photographs, folder, seed


def _write_one(index: int) -> Photograph:
    photographs, folder, seed = _given
    rng = np.random.default_rng([seed, index])
    image, objects = augment(rng, photographs)
    path = folder / f"{index:06d}.jpg"
    image.save(path, quality=92)
    return Photograph(f"augmented-{index:06d}", str(path.resolve()), WIDTH, HEIGHT, tuple(objects))


def augment(rng: np.random.Generator, photographs: Sequence[Photograph]) -> tuple[Image.Image, list[tuple[str, Box]]]:
    """An image of WIDTH x HEIGHT from one photograph, or from four."""
    if rng.random() >= MOSAICS:
        image, objects = _crop(rng, _drawn(rng, photographs), (WIDTH, HEIGHT), least=0.6)
        return _recolored(rng, image), objects
    image, objects = Image.new("RGB", (WIDTH, HEIGHT)), []
    x, y = int(rng.integers(WIDTH // 3, 2 * WIDTH // 3)), int(rng.integers(HEIGHT // 3, 2 * HEIGHT // 3))
    for left, right, top, bottom in ((0, x, 0, y), (x, WIDTH, 0, y), (0, x, y, HEIGHT), (x, WIDTH, y, HEIGHT)):
        photograph = _drawn(rng, photographs)
        tile, found = _crop(rng, photograph, (right - left, bottom - top), least=0.45)
        image.paste(tile, (left, top))
        objects += [(desc, (x1 + left, y1 + top, x2 + left, y2 + top)) for desc, (x1, y1, x2, y2) in found]
    return _recolored(rng, image), objects


def _crop(
    rng: np.random.Generator, photograph: Photograph, size: tuple[int, int], *, least: float
) -> tuple[Image.Image, list[tuple[str, Box]]]:
    """A part of the photograph as an image of `size`, at times mirrored or turned by a quarter, and what is in it."""
    turned = bool(rng.random() < 0.5)
    width, height = size[::-1] if turned else size  # before turning
    most = min(photograph.width / width, photograph.height / height)
    scale, stretch = most * rng.uniform(least, 1.0), rng.uniform(0.85, 1.0)
    across, down = (
        (width * scale * stretch, height * scale) if rng.random() < 0.5 else (width * scale, height * scale * stretch)
    )
    left, top = rng.uniform(0, photograph.width - across), rng.uniform(0, photograph.height - down)
    part = (left, top, left + across, top + down)
    image = _opened(photograph.file).resize((width, height), Image.Resampling.BICUBIC, box=part)
    kx, ky = width / across, height / down
    objects: list[tuple[str, Box]] = [
        (desc, ((x1 - left) * kx, (y1 - top) * ky, (x2 - left) * kx, (y2 - top) * ky))
        for desc, (x1, y1, x2, y2) in photograph.objects
    ]
    if turned:  # mirrored along the diagonal: with the two mirrors below, all eight ways to lay a picture
        image = image.transpose(Image.Transpose.TRANSPOSE)
        objects = [(desc, (y1, x1, y2, x2)) for desc, (x1, y1, x2, y2) in objects]
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        objects = [(desc, (size[0] - x2, y1, size[0] - x1, y2)) for desc, (x1, y1, x2, y2) in objects]
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        objects = [(desc, (x1, size[1] - y2, x2, size[1] - y1)) for desc, (x1, y1, x2, y2) in objects]
    return image, [(desc, seen) for desc, box in objects if (seen := _visible(box, size)) is not None]


def _drawn(rng: np.random.Generator, photographs: Sequence[Photograph]) -> Photograph:
    return photographs[int(rng.integers(len(photographs)))]


def _visible(box: Box, size: tuple[int, int]) -> Box | None:
    """The part of the box inside an image of `size`; None where little of it is."""
    x1, y1, x2, y2 = box
    left, top, right, bottom = max(x1, 0.0), max(y1, 0.0), min(x2, float(size[0])), min(y2, float(size[1]))
    if min(right - left, bottom - top) < SMALLEST_SIDE:
        return None
    share = (right - left) * (bottom - top) / ((x2 - x1) * (y2 - y1))
    return (left, top, right, bottom) if share >= SMALLEST_PART else None


def _recolored(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(0.75, 1.25))
    return image


@cache  # 205 photographs of 0.9 MB
def _opened(file: str) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")
