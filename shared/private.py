"""Files and folders that no other user of the machine can have prepared. In a shared temporary folder, another user may
create a predictable name first, with any content.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def unlinked(path: str, flags: int) -> int:
    """Return the descriptor of an opened file. Raises OSError if the path is a link. `unlinked` is for the argument
    `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def cache_folder(environment: Mapping[str, str], program: str) -> Path:
    """Return this user's cache folder for compiled code of `program`. The next start of `program` loads this code. If
    other users could write to the folder, return a new one, which is removed when this process ends."""
    try:
        root = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
        folder = root / program / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder):
            # A folder of another user cannot be changed; `is_private` refuses it below.
            if made.stat().st_uid == os.geteuid():
                made.chmod(0o700)
        if is_private(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    own = tempfile.mkdtemp(prefix="torch-")
    atexit.register(_remove_own, own, os.getpid())
    return Path(own)


def _remove_own(folder: str, pid: int) -> None:
    # A forked child must not remove the folder of its parent.
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def is_private(folder: Path) -> bool:
    """Return True if the folder belongs to this user and no other user can write to it. Below a folder that everybody
    can write, all folders on the way must belong to this user or root."""
    me, others_write = {0, os.geteuid()}, False
    real = folder.resolve()
    for place in reversed(real.parents):
        about = place.stat()
        if others_write and about.st_uid not in me:
            return False
        others_write |= bool(about.st_mode & stat.S_IWOTH)
    about = real.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & _OTHERS_WRITE


LOCK, PIDS = "process.lock", "pids"
SHARED_MEMORY = Path("/dev/shm")


def locked_folder(prefix: str, around: Path, *, leave: Callable[[Path], bool] = lambda _: True) -> str:
    """Make a folder for the temporary files of this process and its forked children. The folder is removed when this
    process ends. If SIGKILL prevents that, the next call with the same `prefix` removes it, unless `leave(folder)` is
    False."""
    for lock in around.glob(f"{prefix}*/{LOCK}"):
        if (handle := _lock(lock)) is not None:
            if leave(lock.parent):
                shutil.rmtree(lock.parent, ignore_errors=True)
            os.close(handle)
    folder = tempfile.mkdtemp(prefix=prefix, dir=around)
    # Another process that started at the same moment may have locked, and will remove, the new folder.
    while _lock(Path(folder, LOCK), new=True) is None:
        folder = tempfile.mkdtemp(prefix=prefix, dir=around)
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _lock(path: Path, *, new: bool = False) -> int | None:
    """Return the file's descriptor, locked until this process and its forked children have ended. None if another
    process has locked the file, or another user owns it."""
    handle = -1
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if new else 0), 0o600)
        # `flock` is used, because a process loses its POSIX lock as soon as it closes any other descriptor of the file.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if handle >= 0:
            os.close(handle)
        return None
    return handle


def note_processes(folder: str, pids: Collection[int]) -> None:
    """Write the ids of an engine's processes into a folder of `locked_folder`, for `remove_semaphores`."""
    Path(folder, PIDS).write_text("\n".join(map(str, pids)))


def remove_semaphores(folder: Path) -> bool:
    """Remove the semaphores that an engine's killed processes left. Returns False if a process still runs."""
    try:
        pids = [int(line) for line in (folder / PIDS).read_text().split()]
    except (OSError, ValueError):  # the program ended before its engine had started
        return True
    ended = [pid for pid in pids if not Path(f"/proc/{pid}").exists()]
    for file in (file for pid in ended for file in SHARED_MEMORY.glob(f"sem.loky-{pid}-*")):
        with contextlib.suppress(OSError):  # fails if another user owns the file
            file.unlink()
    return len(ended) == len(pids)
