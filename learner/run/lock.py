"""Lets only one run at a time use `training.output_dir`.

Rank 0 holds a lock (`flock`) on a file in that folder. The lock ends with rank 0's process, even if the process is
killed. Processes that rank 0 forks do not hold the lock. On a file system without locks, no run is refused.

Other users may be able to write to the folder. So the lock file is refused if it is a link or has a second hard link:
writing to it would change another file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.waits import Retry

LOCK = ".lock"
# Another process that calls `is_running` may hold the lock briefly. So this process tries to get the lock every 0.05 s,
# for 0.5 s.
_LOCK_S, _PAUSE_S = 0.5, 0.05
_MOST_READ = 200  # max bytes that are read of the lock file; it names the process that holds the lock
log = logging.getLogger("learner.run")
_held: set[int] = set()  # descriptors of the lock files that this process has locked


def _close_in_child() -> None:
    """Close the lock files in a forked process. With an open lock file the child would keep the lock after its parent's
    end."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock in the `with` block. Raises ConfigError if another process holds it, or if the lock file
    is a link or has other hard links. Raises OSError if the lock file cannot be written."""
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = _open(run_dir / LOCK, os.O_CREAT)
    _held.add(handle)
    try:
        if not _taken(handle, run_dir):
            holder = os.pread(handle, _MOST_READ, 0).decode(errors="replace").strip()
            raise ConfigError(
                "training.output_dir: another run writes there now",
                found=f"{run_dir}, held by {holder or 'another process'}",
                wanted="a folder that no other run uses",
                remedy="wait for its end, or name another folder",
            )
        # The text is used only in the error of another run that finds the folder locked. The lock itself is in the
        # kernel.
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        # A forked process has already closed the handle, and must not close another file that has got its number.
        if handle in _held:
            _held.remove(handle)
            with suppress(OSError):
                # Unlocking releases the lock even if a forked child has not closed its handle yet.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def is_running(run_dir: Path) -> bool:
    """Return True if a process holds the folder's lock, or if that cannot be found out (there is no lock file)."""
    try:
        handle = _open(run_dir / LOCK, 0)
    except (OSError, ConfigError):
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def _open(path: Path, flags: int) -> int:
    """Open the lock file and return its descriptor. Raises ConfigError if the file is a link, has other hard links, or
    is no regular file. Raises OSError if it cannot be opened."""
    found = "a link" if path.is_symlink() else ""
    if not found:
        # If the file has become a link since then, `os.open` raises OSError.
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
        about = os.fstat(handle)
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            return handle
        os.close(handle)
        found = "a file with other names" if stat.S_ISREG(about.st_mode) else "no file"
    raise ConfigError(
        "training.output_dir: its lock is not a run's",
        found=f"{path}, {found}",
        wanted="a file that a run made: writing there would change another one",
        remedy="remove it, or name another folder",
    )


def _taken(handle: int, run_dir: Path) -> bool:
    retry = Retry(_LOCK_S, _PAUSE_S)
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if not retry.wait():
                return False
        except OSError as error:
            log.warning("%s: its file system has no locks (%s), so other runs are not kept out", run_dir, error)
            return True
