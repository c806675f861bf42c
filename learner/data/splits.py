"""Reads annotations of any format into samples, and checks all of them before training begins (R12, R41).

In: `data` of the configuration, and the path of a split. Out: the split's samples, and counts of dropped and clipped
records. Only annotations are held in memory (some 2 kB a sample). Only the headers of images are read here; their
pixels are read when a prompt is encoded. `learner.data.formats` has a reader for each format.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from learner.config.sections.data import DataConfig
from learner.config.split import as_read_for
from learner.data.formats.coco import category_ids
from learner.data.formats.detect import READERS, FormatReader, locate
from learner.data.formats.folders import Annotations
from learner.data.formats.parts import Part, part_of
from learner.data.formats.source import Nearby, Source
from learner.data.raw import BadRecords, SampleMaker, SeenImages, Validates, look_at_images
from learner.extensions import Reader, where_raised
from learner.records import GeometryKind, Place, RawRecord, Sample
from shared.errors import DataError
from shared.images import Images

log = logging.getLogger(__name__)

_THREADS = 8  # threads that read image headers; they mostly wait for the disk
_TELL_S = 5.0  # min seconds between two log lines about progress
_AHEAD = 256  # max records whose images are read in advance


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The samples of one split in the file's order, and its bad records."""

    samples: list[Sample]
    bad: BadRecords


def load_samples(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    reader: Reader | None = None,
) -> list[Sample]:
    """Read annotations with `load_split`, and return only the samples."""
    return load_split(data, path, task, geometry=geometry, reader=reader).samples


def load_split(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    too_long: Callable[[Sample], str | None] | None = None,
    reader: Reader | None = None,
    limit: int | None = None,
) -> Split:
    """Read the samples of the annotations at `path`, at most `limit`, in the file's order. For `data.train` each sample
    is followed by its tiles (`data.tile`).

    `too_long` returns the length of a sample that does not fit a row, as text. `reader` is the user's own. Dropped and
    clipped records are logged. Raises DataError, which lists all records that can't be used, with file and line or id.
    """
    split = read_split(data, path, task, geometry=geometry, too_long=too_long, reader=reader, limit=limit)
    split.bad.raise_errors(path)
    for kind, actions in split.bad.summary().items():
        for action, number in actions.items():
            log.warning("%s: %s %d (%s), for example: %s", path, action, number, kind, split.bad.examples[kind, action])
    if hint := split.bad.reach.hint():
        log.warning("%s: %s", path, hint)
    return split


def read_split(
    data: DataConfig,
    path: str,
    task: Validates,
    *,
    geometry: GeometryKind = "bbox_2d",
    too_long: Callable[[Sample], str | None] | None = None,
    reader: Reader | None = None,
    limit: int | None = None,
) -> Split:
    """Read like `load_split`, but return all errors in `bad`. Raises DataError only if the annotations are empty or
    unreadable."""
    bad = BadRecords(data.bad_records)
    whole, part = part_of(path)
    source = Source(data=data, path=whole, geometry=geometry, bad=bad)
    tile = data.tile if path == data.train else None
    maker = SampleMaker(task=task, bad=bad, coordinates=data.coordinates, too_long=too_long, exact=tile is not None)
    if reader is None:
        annotations = annotations_of(data, path)
        bad.reach.xywh = annotations.format in ("coco", "datasets") and data.box_format == "xywh"
        found = _samples(replace(source, path=annotations.path), READERS[annotations.format], maker, part)
    else:
        found = _samples_of_reader(reader, source, maker, part)
    # Records after the limit are not read.
    samples = list(islice(_new_ids_only(found, bad), limit))
    if tile is not None:
        # The import loads numpy, which is needed only for tiles.
        from learner.data.tiles import tiled

        samples = [one for sample in samples for one in tiled(sample, tile)]
    if not samples and not bad.num_errors:
        remedy = bad.reach.hint() or f"correct {whole}, or take a larger part of it"
        if "image_missing" in bad.summary():
            remedy = "set data.image_root to the folder where their names begin (init: --image-root)"
        elif path == whole:
            remedy = "correct the path, or the records"
        raise DataError(
            f"{path} has no samples",
            found=f"only bad records: {'; '.join(bad.in_words())}" if bad.counts else "no records",
            wanted="one record or more",
            remedy=remedy,
        )
    return Split(samples=samples, bad=bad)


def annotations_of(data: DataConfig, path: str) -> Annotations:
    """Return the format of a split's annotations, and the path for its reader. Raises DataError."""
    keys = [key for key, named in (("train", data.train), ("val", data.val), ("test", data.test)) if named == path]
    return locate(data, part_of(path)[0], keys[0] if len(keys) == 1 else None)


def category_ids_of(config: DataConfig, split: str | None) -> dict[str, int]:
    """Return the COCO ids of a split's class names; {} if the split is not COCO, or its file is gone."""
    path = None if split is None else config.path_of(split)
    if split is None or path is None or (data := as_read_for(config, split)).reader is not None:
        return {}
    try:
        annotations = annotations_of(data, path)
        return category_ids(Path(annotations.path)) if annotations.format == "coco" else {}
    # A file that is moved during a run must not end the run.
    except (DataError, OSError, ValueError):
        return {}


def _samples(source: Source, read: FormatReader, maker: SampleMaker, part: Part) -> Iterator[tuple[Place, Sample]]:
    root, records = read(source)
    chosen = (record for record in records if part.has(record.sample_id))
    for record, seen in _looked_at(chosen, Images(source.data.image_rules), root):
        sample = maker.make(record, seen)
        if sample is not None:
            yield record.place, sample


def _samples_of_reader(
    reader: Reader, source: Source, maker: SampleMaker, part: Part
) -> Iterator[tuple[Place, Sample]]:
    """Yield the samples of a reader of the user's own. The reader's exceptions become DataErrors."""
    chosen = (record for record in _records_of(reader, source) if part.has(record.sample_id))
    root = source.image_root(source.file if source.file.is_dir() else source.file.parent)
    for record, seen in _looked_at(chosen, Images(source.data.image_rules), root):
        if isinstance(record, RawRecord):
            place, sample = record.place, maker.make(record, seen)
        else:
            place = Place(source.file, f"sample {record.sample_id}")
            sample = maker.finish(record, seen, place)
        if sample is not None:
            yield place, sample


def _records_of(reader: Reader, source: Source) -> Iterator[RawRecord | Sample]:
    key = f"{source.path}: the reader of data.format failed"
    wanted, remedy = "RawRecords or Samples, or a DataError for a record that cannot be used", "correct the reader"
    try:
        for number, record in enumerate(reader(source.path, source.data), start=1):
            if not isinstance(record, RawRecord | Sample):
                found = f"record {number} is a {type(record).__name__}"
                raise DataError(key, found=found, wanted=wanted, remedy=remedy)
            yield record
    # A DataError that the reader raises names the record already.
    except DataError:
        raise
    except Exception as error:
        raise DataError(key, found=where_raised(error), wanted=wanted, remedy=remedy) from error


Record = TypeVar("Record", RawRecord, RawRecord | Sample)


def _looked_at(records: Iterable[Record], images: Images, root: Path) -> Iterator[tuple[Record, SeenImages]]:
    """Yield each record with its images. Threads read the images of up to `_AHEAD` records in advance."""
    left, nearby, number, told_s = iter(records), Nearby(root), 0, time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        while window := list(islice(left, _AHEAD)):
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                # Progress is logged, because reading 100,000 photographs takes minutes.
                log.info(
                    "%s: %d records read", window[0].place.file if isinstance(window[0], RawRecord) else root, number
                )
            number += len(window)
            seen = pool.map(lambda record: look_at_images(record.images, images, root, nearby), window)
            yield from zip(window, seen, strict=True)


def _new_ids_only(samples: Iterable[tuple[Place, Sample]], bad: BadRecords) -> Iterator[Sample]:
    places: dict[str, Place] = {}
    for place, sample in samples:
        first = places.setdefault(sample.sample_id, place)
        if first is place:
            yield sample
        else:
            elsewhere = first.record if first.file == place.file else f"{first.file}, {first.record}"
            found = f"id {sample.sample_id!r}, also at {elsewhere}"
            bad.meet("malformed", place.error("its id is taken", found=found, wanted="an id of its own"))
