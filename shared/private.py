"""Files and folders that no other user of the machine can have prepared: in a shared temporary folder, whoever makes a
name first decides what lies there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def unlinked(path: str, flags: int) -> int:
    """Open a file to write, but not through a link: the `opener` of `open`. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def cache_folder(environment: Mapping[str, str], program: str) -> Path:
    """Return this user's folder for what `program` compiles, which is code that a later start loads. If there is none
    that only this user can write, it is a new one that ends with this process."""
    try:
        root = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
        folder = root / program / "torch"
        folder.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder):
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
    if os.getpid() == pid:  # not of a fork
        shutil.rmtree(folder, ignore_errors=True)


def is_private(folder: Path) -> bool:
    """Return True if no other user can write the folder, nor can have made it, or one above it, in a folder in which
    everybody can."""
    me, others_write = {0, os.geteuid()}, False
    real = folder.resolve()
    for place in reversed(real.parents):
        about = place.stat()
        if others_write and about.st_uid not in me:
            return False
        others_write |= bool(about.st_mode & stat.S_IWOTH)
    about = real.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & _OTHERS_WRITE
