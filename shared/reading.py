"""Paths, JSON and YAML from files that somebody else may have written or damaged.

`json_of`, `json_in`, `yaml_of` and `lines_in` raise OSError or ValueError and nothing else. So a caller names the file
and the way out in an error of its own. `bytes_beside` reads a file that nobody named (D24).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_MARK = b"\xef\xbb\xbf"  # a byte order mark, as some editors and Windows tools write it


def json_in(path: Path) -> Any:
    """Return the content of a JSON file. A pipe or a device is refused, because it has no end."""
    _refuse_other_than_file(path)
    return json_of(path.read_bytes())


def json_bytes_in(path: Path) -> bytes:
    """Return the content of a JSON file without a byte order mark, which pydantic refuses. Raises OSError."""
    _refuse_other_than_file(path)
    return path.read_bytes().removeprefix(_MARK)


MOST_BESIDE = 16 << 20  # bytes of a file that was found, not named


def bytes_beside(path: Path) -> bytes:
    """Return the content of a file that nobody named: it was found beside a model or data (D24).

    Raises OSError if it cannot be read, is larger than `MOST_BESIDE`, or is a link that leaves its folder. What is
    checked is what was opened: a link that changes meanwhile gains nothing."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a file")
        if not is_inside(Path(f"/proc/self/fd/{handle}").readlink(), path.parent):
            raise OSError(f"{path} is a link that leaves its folder")
        content = file.read(MOST_BESIDE + 1)
    if len(content) > MOST_BESIDE:
        raise OSError(f"{path} has more than {MOST_BESIDE} bytes")
    return content


def is_inside(target: Path, folder: Path) -> bool:
    """Return True if a path without links is below the folder. In the cache of the Hugging Face hub, files are links
    from a model's `snapshots/REVISION` to its own `blobs`."""
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    return target.is_relative_to(real) or (real.parent.name == "snapshots" and target.is_relative_to(blobs))


def json_of(text: str | bytes) -> Any:
    """Return a JSON text as a value."""
    try:
        return json.loads(text)
    except RecursionError as error:  # `[` a thousand times
        raise ValueError("JSON that is nested too deeply") from error


def yaml_of(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """A YAML text as a value, with its tags. For a tag that does not fit its value PyYAML raises errors of many kinds
    (`!!bool 3`, `!!timestamp x`, `!!set [1]`)."""
    try:
        return yaml.load(text, loader)
    except RecursionError as error:
        raise ValueError("endless nesting") from error
    except (yaml.YAMLError, OverflowError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(str(error)[:300]) from error


def lines_in(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, content) of each line that is not empty, without a byte order mark."""
    _refuse_other_than_file(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if content := line.removeprefix(_MARK).strip():
                yield number, content


def as_here(name: str, folder: Path) -> str:
    """Return the path of a file or folder below `folder` as this machine writes it: Windows tools write backslashes. A
    name that really has some keeps them."""
    return name.replace("\\", "/") if "\\" in name and not is_there(folder / name) else name


def is_utf8(name: str) -> bool:
    """Return False for a name of a file with other bytes than UTF-8's, as old cameras and archives have. Python opens
    it, but no JSON, log or request can hold it."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def is_file(path: Path) -> bool:
    """Return False also for a name that no file can have: too long, or with a zero byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return True for a file and for a folder; False as in `is_file`."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _refuse_other_than_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    raise OSError(f"{path} is not a file") if path.exists() else FileNotFoundError(f"no file {path}")
