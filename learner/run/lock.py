"""One run at a time in `training.output_dir`.

Rank 0 holds a lock on a file there as long as its process lives, however it ends. A process that was forked from it
does not hold it. On a file system without locks there is none, and nothing is refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

LOCK = ".lock"
_TRIES, _PAUSE_S = 10, 0.05  # `is_running` holds it for a moment
log = logging.getLogger("learner.run")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock inside this block. Raises ConfigError if another process has it, OSError if the file cannot be
    written."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+") as file:
        if not _taken(file.fileno(), run_dir):
            file.seek(0)
            raise ConfigError(
                "training.output_dir: another run writes there now",
                found=f"{run_dir}, held by {file.read(200).strip() or 'another process'}",
                wanted="a folder that no other run uses",
                remedy="wait for its end, or name another folder",
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def is_running(run_dir: Path) -> bool:
    """Return True if a run holds the lock. True too if there is no lock to ask."""
    try:
        with (run_dir / LOCK).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except OSError:
        return True


def _taken(handle: int, run_dir: Path) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            time.sleep(_PAUSE_S)
        except OSError as error:
            log.warning("%s: its file system has no locks (%s), so other runs are not kept out", run_dir, error)
            return True
    return False
