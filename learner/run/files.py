"""Writes files of a run on a disk that may be full or read-only: a failed write leaves earlier content intact.

`write_atomically` writes a file, `AppendedLines` appends lines to a file; a failed write is an OutputError. If there is
a link at the path of a file, it is replaced or refused, never followed. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from shared.errors import OutputError
from shared.private import unlinked

log = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file. Even if the process is killed, `path` has either the whole old or the whole new text. Raises
    OutputError."""
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed process may have left this file, or another user may have made a link of this name.
            work.unlink(missing_ok=True)
            with work.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # The text is written to disk before the rename. Without `fsync` the file could be empty after a crash
                # of the machine.
                os.fsync(file.fileno())
            work.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                work.unlink()
            raise


def why_unwritable(folder: Path) -> str | None:
    """Return why no file can be written into `folder`, which may not exist yet; None if files can be written. No file
    is left there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there}, which is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there}, which cannot be written"
    try:
        # The only reliable test is to make a file: root may write anywhere, but file systems such as /proc refuse new
        # files.
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there}, which takes no new file ({error.strerror or error})"


def require_writable(folder: Path) -> None:
    """Raises OutputError if no file can be written into `folder`, which may not exist yet. Call this before long work
    whose results go there."""
    if (found := why_unwritable(folder)) is not None:
        raise OutputError(
            f"{folder}: no results can be written there",
            found=found,
            wanted="a folder that can be written",
            remedy="name another one, or change its permissions",
        )


class AppendedLines:
    """A text file to which whole lines are appended. Each line is passed to the operating system at once.

    If somebody removes the file or its folder, the next line begins a new file, and `tell` gets a warning.
    """

    def __init__(self, path: Path, tell: Callable[[str], None] = log.warning) -> None:
        """Open the file at `path`, or make it. Raises OutputError if that fails."""
        self._path, self._tell = path, tell
        with writing(path):
            # `FileIO` has no buffer, so a process that is killed loses no line.
            self._file = FileIO(path, "a+", opener=unlinked)
            # The process that wrote the last line may have been killed in the middle of it.
            if self._ends_within_a_line():
                self._file.write(b"\n")

    def append(self, line: str) -> None:
        """Append `line` and a line end. Raises OutputError if the write fails; the file then has no part of the
        line."""
        with writing(self._path):
            if not os.fstat(self._file.fileno()).st_nlink:
                self._begin_again()
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

    def _begin_again(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        removed, self._file = self._file, FileIO(self._path, "a+", opener=unlinked)
        removed.close()
        self._tell(f"{self._path} was removed while it was written: a new file goes on, without the lines so far")

    def _ends_within_a_line(self) -> bool:
        if not os.fstat(self._file.fileno()).st_size:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Run the `with` block, which writes `path`. If the block raises OSError, raises OutputError, which names
    `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path.name} can't be written",
            found=f"{path}: {error.strerror or error}",
            wanted="a writable folder with enough space",
            remedy="free space, or write into another folder (a run: training.output_dir)",
        ) from error
