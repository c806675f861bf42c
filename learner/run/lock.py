"""One run at a time in `training.output_dir`.

Rank 0 holds a lock (`flock`) on a file there as long as its process lives, however it ends. Forked processes do not
hold the lock. On a file system without locks, no run is refused.

Other users may write to the folder, so a link is not followed, and a file with a second hard link is not written.
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
_LOCK_S, _PAUSE_S = 0.5, 0.05  # max wait for the lock, which `is_running` holds briefly; pause between tries
_MOST_READ = 200  # max bytes read of the text that names the lock's holder
log = logging.getLogger("learner.run")
_held: set[int] = set()


def _close_in_child() -> None:
    """Close inherited handles of locks: a forked process would keep the lock after its parent's end."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock inside this block. Raises ConfigError if another process has it, or if the file is somebody else's,
    OSError if it cannot be written."""
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
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        if handle in _held:  # False in a forked process, which has closed the handle
            _held.remove(handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # releases it even if a forked child still has the handle open
            os.close(handle)


def is_running(run_dir: Path) -> bool:
    """Return True if a run holds the lock, or if the lock cannot be tested."""
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
    """Open the lock file. Raises ConfigError for a link, a file with other hard links, or no regular file; OSError."""
    found = "a link" if path.is_symlink() else ""
    if not found:
        # If a link is made between the two lines, `os.open` raises OSError.
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
