"""A reader's input, and what the readers of several formats share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from learner.config.sections.data import DataConfig
from learner.data.raw import BadRecords
from learner.records import GeometryKind, Place
from shared.errors import DataError
from shared.reading import is_there
from shared.wire import Turn

DEFAULT_PROMPT = "<image>Detect every object."
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# Photographs that `shared.images` does not read.
OTHER_SUFFIXES = (
    *(".heic", ".heif", ".hif", ".avif", ".jxl", ".jp2", ".j2k", ".psd"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The input of a reader."""

    data: DataConfig
    path: str
    geometry: GeometryKind
    bad: BadRecords

    @property
    def file(self) -> Path:
        return Path(self.path)

    @property
    def messages(self) -> list[Turn]:
        """The user's turn of formats that have none."""
        return [{"role": "user", "content": self.data.prompt if self.data.prompt is not None else DEFAULT_PROMPT}]

    def image_root(self, default: Path) -> Path:
        return Path(self.data.image_root) if self.data.image_root is not None else default


def name_and_split(path: str) -> tuple[str, str]:
    """Split `data.yaml:train` in two; the split is empty where there is none."""
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
    """A row of somebody else's file. Fields that are not ours are let through: datasets carry provenance, scores,
    licences. 640.0 and "640" are numbers, too."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


def photographs_below(folder: Path) -> list[Path]:
    """Return the images in a folder and its sub-folders, sorted."""
    return sorted(file for file in files_below(folder) if file.suffix.lower() in SUFFIXES)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its sub-folders, those behind links too, each folder once. Hidden folders and
    what macOS writes beside files of other systems (`._a.jpg`) are left out."""
    seen: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(base)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        yield from () if real in seen else (Path(base, name) for name in names if not name.startswith("._"))
        seen.add(real)


def text_of(file: Path, place: Place, wanted: str) -> str:
    """Return a file's text, without a byte order mark. Raises DataError."""
    try:
        if not file.is_file():  # a pipe or a device has no end
            raise FileNotFoundError(f"no file {file}")
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"a byte that is not UTF-8 at offset {error.start}"
        raise place.error("not a text", found=found, wanted=wanted, remedy="save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise place.error("the file cannot be read", found=str(error), wanted=wanted) from error
