"""Paths, JSON and YAML from files that another program may have written or damaged.

`json_of`, `json_in`, `yaml_of` and `lines_in` raise only OSError and ValueError, which the caller turns into an error
with the file and the remedy. `bytes_beside` reads a file that no user named (D24).
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
    """Return the value in a JSON file. Raises ValueError. Raises OSError, also for a pipe, because reading a pipe might
    never end."""
    _refuse_other_than_file(path)
    return json_of(path.read_bytes())


def json_bytes_in(path: Path) -> bytes:
    """Return a JSON file's bytes without a byte order mark, which pydantic refuses. Raises OSError."""
    _refuse_other_than_file(path)
    return path.read_bytes().removeprefix(_MARK)


MOST_BESIDE = 16 << 20  # max bytes of a file that no user named in a configuration or command


def bytes_beside(path: Path) -> bytes:
    """Return the content of a file that no user named, but that was found in the folder of a model or of data (D24).

    Raises OSError if the file cannot be read, is larger than `MOST_BESIDE`, or is a link that leaves its folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: does not wait for a pipe
    with os.fdopen(handle, "rb") as file:
        # The opened file is checked, not its path, so changing a link meanwhile cannot bypass it.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a file")
        if not is_inside(Path(f"/proc/self/fd/{handle}").readlink(), path.parent):
            raise OSError(f"{path} is a link that leaves its folder")
        content = file.read(MOST_BESIDE + 1)
    if len(content) > MOST_BESIDE:
        raise OSError(f"{path} has more than {MOST_BESIDE} bytes")
    return content


def is_inside(target: Path, folder: Path) -> bool:
    """Return True if `target`, a path with its links resolved, is below the folder, or a file to which a link in the
    cache of the Hugging Face hub leads."""
    real = folder.resolve()
    # The files in a model's `snapshots/REVISION` in the hub's cache are links to its `blobs`.
    blobs = real.parent.parent / "blobs"
    return target.is_relative_to(real) or (real.parent.name == "snapshots" and target.is_relative_to(blobs))


def json_of(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:  # raised for text such as `[` a thousand times
        raise ValueError("JSON that is nested too deeply") from error


def yaml_of(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return a YAML text's value. Raises ValueError, also for a tag that does not fit its value (`!!bool 3`)."""
    try:
        return yaml.load(text, loader)
    except RecursionError as error:
        raise ValueError("endless nesting") from error
    # PyYAML raises errors of many kinds for a tag that does not fit its value (`!!timestamp x`, `!!set [1]`).
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
    """Return a path below `folder` with slashes in place of the backslashes that Windows tools write. Backslashes stay
    if a file or folder of that name exists."""
    return name.replace("\\", "/") if "\\" in name and not is_there(folder / name) else name


def is_utf8(name: str) -> bool:
    """Return True if a file's name is valid UTF-8. Old cameras and archives write other names: Python can open such
    files, but no JSON, log or request can hold the names."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def is_file(path: Path) -> bool:
    """Return True if the file exists; False also for an impossible name, too long or with a zero byte."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Return True if the file or folder exists; False also for an impossible name, as in `is_file`."""
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
