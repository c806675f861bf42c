"""A process that stands still for a while, as on a machine that was paused."""

from __future__ import annotations

import os
import subprocess


def pause_soon(after_s: float, for_s: float, *, wake: int | None = None) -> None:
    """Stop this process `after_s` from now, for `for_s`. The stopped process `wake` goes on when this one stops."""
    me = os.getpid()
    wake_it = f"kill -CONT {wake}; " if wake is not None else ""
    text = f"sleep {after_s}; kill -STOP {me}; {wake_it}sleep {for_s}; kill -CONT {me}"
    subprocess.Popen(["sh", "-c", text], start_new_session=True)
