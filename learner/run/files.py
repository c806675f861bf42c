"""Files of a run, on a disk that may be full or read-only: whatever fails, what was written before is whole.

`write_atomically` writes a file, `AppendedLines` lets one grow; what cannot be written is an OutputError. Imports
neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shared.errors import OutputError


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that, whatever happens, the old or the new one stands there whole. Raises OutputError."""
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with work.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            work.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                work.unlink()
            raise


class AppendedLines:
    """A file that grows by whole lines, each on disk as soon as it is written."""

    def __init__(self, path: Path) -> None:
        """Raises OutputError."""
        self._path = path
        with writing(path):
            self._file = path.open("a+b", buffering=0)
            if self._ends_within_a_line():  # the process that wrote it was killed
                self._file.write(b"\n")

    def append(self, line: str) -> None:
        """Append `line`, which has no line end. If it cannot be written, no part of it is left. Raises OutputError."""
        with writing(self._path):
            num_bytes = os.fstat(self._file.fileno()).st_size
            left = memoryview(line.encode() + b"\n")
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(num_bytes)
                raise

    def close(self) -> None:
        self._file.close()

    def _ends_within_a_line(self) -> bool:
        if not os.fstat(self._file.fileno()).st_size:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Guard what writes `path`. Raises OutputError, which names it, if the disk is full or the folder read-only."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path.name} can't be written",
            found=f"{path}: {error.strerror or error}",
            wanted="a writable folder with enough space",
            remedy="free space, or write into another folder (a run: training.output_dir)",
        ) from error
