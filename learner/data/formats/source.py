"""Defines a reader's input (`Source`), and helpers that readers of several formats use."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

from pydantic import BaseModel, ConfigDict

from learner.config.sections.data import DataConfig
from learner.data.raw import BadRecords
from learner.records import GeometryKind, Place, Size
from shared.errors import DataError
from shared.generation import Turn
from shared.reading import is_there

_LONGEST_NAME = 1024  # max characters of an image's path; longer strings are encoded images
DEFAULT_PROMPT = "<image>Detect every object."
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# Suffixes of photographs that `shared.images` cannot read.
OTHER_SUFFIXES = (
    *(".heic", ".heif", ".hif", ".avif", ".jxl", ".jp2", ".j2k", ".psd"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw"),
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The input of a reader: settings, the annotations' path, the geometry to read, and the list for bad records."""

    data: DataConfig
    path: str
    geometry: GeometryKind
    bad: BadRecords

    @cached_property
    # The path is cached, because readers need it at each annotation, and making a path is slow.
    def file(self) -> Path:
        return Path(self.path)

    @property
    def messages(self) -> list[Turn]:
        """Return the prompt as a user's turn, for formats that have no messages."""
        return [{"role": "user", "content": self.data.prompt if self.data.prompt is not None else DEFAULT_PROMPT}]

    def image_root(self, default: Path) -> Path:
        return Path(self.data.image_root) if self.data.image_root is not None else default


def name_and_split(path: str) -> tuple[str, str]:
    """Split `data.yaml:train` into path and split. The split is empty if the path has none."""
    name, colon, split = path.rpartition(":")
    return (name, split) if colon and "/" not in split and not is_there(Path(path)) else (path, "")


def need_split(path: str, split: str, known: Sequence[str]) -> str:
    if split in known:
        return split
    if not split and len(known) == 1:
        return known[0]
    raise DataError(
        f"{path}: which split?",
        found=f"{split!r}" if split else "none named",
        wanted=f"one of {', '.join(known) or 'none at all'}",
        remedy=f"write {path}:{known[0] if known else 'train'}",
    )


class RowModel(BaseModel):
    """A row of an annotation file. Unknown fields are ignored, because data sets carry provenance, scores and licences.
    640.0 and "640" are accepted as numbers."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def photographs_below(folder: Path) -> list[Path]:
    """Return the images in a folder and its sub-folders, sorted."""
    return sorted(file for file in files_below(folder) if file.suffix.lower() in SUFFIXES)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its sub-folders. Links are followed, and each folder is read once. Hidden folders
    are left out, as are the files that macOS adds on other file systems (`._a.jpg`)."""
    seen: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        # A link to a folder above would be followed without end.
        real = os.path.realpath(base)
        # os.walk enters the folders that are left in this list.
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        yield from () if real in seen else (Path(base, name) for name in names if not name.startswith("._"))
        seen.add(real)


def turned(box: Sequence[float], degrees: float, size: Size | None) -> tuple[float, ...]:
    """Return the corners of the box x1, y1, x2, y2 turned clockwise around its centre, clipped to an image of
    `size`."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x1, y1, x2, y2 = box
    x, y, across, down = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2
    corners = ((-across, -down), (across, -down), (across, down), (-across, down))
    points = [value for a, b in corners for value in (x + a * cos - b * sin, y + a * sin + b * cos)]
    limits = size or (math.inf, math.inf)
    return tuple(min(max(value, 0.0), float(limits[i % 2])) for i, value in enumerate(points))


def enclosing(points: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the box x1, y1, x2, y2 around points x1, y1, x2, y2, ..."""
    return min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])


_UPLOADED = re.compile(r"[0-9a-f]{8}-(.+)")  # Label Studio puts eight hexadecimal digits before a name
_BESIDE = {"annotations", "annotation", "labels", "label", "json", "ann"}  # images may be next to a folder of this name


class Nearby:
    """Finds an image by its file name, if it is not at the path that its record gives. The search covers the folder
    where image paths start, and its sub-folders. If that folder has no photographs and has a name such as
    `annotations`, the parent folder is searched. If several files have the name, the file whose folders match the
    written path best is taken."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = Lock()  # a lock, because several threads call `find`
        self._by_name: dict[str, list[Path]] | None = None

    def find(self, written: str) -> Path | None:
        """Return the file that `written` means; None if no file fits, or if two fit equally well."""
        if len(written) > _LONGEST_NAME or written[:5].lower() in ("http:", "https", "data:"):
            return None
        parts = [part for part in re.split(r"[\\/]+", written.lower()) if part]
        if not parts:
            return None
        files, name = self._files(), parts[-1]
        short = _UPLOADED.fullmatch(name)
        for key in (name, Path(name).stem, *((short[1], Path(short[1]).stem) if short else ())):
            if found := files.get(key):
                common = [self._common(file, parts[:-1]) for file in found]
                best = [file for file, number in zip(found, common, strict=True) if number == max(common)]
                return best[0] if len(best) == 1 else None
        return None

    def _files(self) -> dict[str, list[Path]]:
        """Return the photographs by file name and by stem, both in lower case."""
        with self._lock:
            if self._by_name is None:
                beside = self._root.absolute().name.lower() in _BESIDE
                files = photographs_below(self._root) or (photographs_below(self._root.parent) if beside else [])
                self._by_name = {}
                for file in files:
                    for key in {file.name.lower(), file.stem.lower()}:
                        self._by_name.setdefault(key, []).append(file)
        return self._by_name

    @staticmethod
    def _common(file: Path, folders: Sequence[str]) -> int:
        """Return how many folders, counted from the last one, are equal in the file's path and in `folders`."""
        own = [part.lower() for part in file.parts[:-1]]
        pairs = zip(reversed(own), reversed(folders), strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(own), len(folders)))


def text_of(file: Path, place: Place, wanted: str) -> str:
    """Return a file's text without a byte order mark. Raises DataError."""
    try:
        # A pipe or a device is not read, because it may never end.
        if not file.is_file():
            raise FileNotFoundError(f"no file {file}")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"a byte that is not UTF-8 at offset {error.start}"
        raise place.error("not a text", found=found, wanted=wanted, remedy="save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise place.error("the file cannot be read", found=str(error), wanted=wanted) from error
