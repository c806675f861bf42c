"""The host's memory: what is free, and what page-locked tensors take of it.

torch rounds each page-locked allocation up to a power of two, and keeps what was freed for the next one. So a check
must count the rounded bytes, and memory counts as free again only after `release_page_locked`. Several workers of a
host, and a learner beside them, take memory at the same time. So each looks and takes inside `taking`.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from shared.waits import SLICE_S, Deadline

log = logging.getLogger(__name__)
_MEMORY = Path("/proc/meminfo")
# Enough for a few workers that take some GB each. A worker that waits answers no ping and uses no CPU time: after a
# server's `engine_stall_s` its engine would count as stopped.
OTHERS_S = 10.0
SPARE_BYTES = 256 << 20  # left for what else allocates


def page_locked_bytes(num_bytes: int) -> int:
    """Return the bytes that torch takes for a page-locked tensor of `num_bytes` (`CachingHostAllocator.h`)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def available_bytes() -> int:
    """Return the bytes of the host that may still be taken, as the kernel estimates it."""
    fields = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


@contextmanager
def taking(others_s: float = OTHERS_S) -> Iterator[None]:
    """Hold back the other processes of this machine that do this, from a look at what is free until it is taken. After
    `others_s` it is done without: what does not fit is then found by whoever allocates. Processes in other containers
    are not seen."""
    # A lock on the file that is read: it needs no folder that all users can write to, and ends with its process. Each
    # container has a /proc of its own, though the memory is the same.
    with _MEMORY.open() as file:
        deadline = Deadline(others_s)
        while not _locked(file):
            if not deadline.left_s():
                log.warning("another process has been taking memory of this host for %g s", others_s)
                break
            time.sleep(SLICE_S)
        yield


def _locked(file: IO[str]) -> bool:
    """Lock the file until it is closed, also where the system has no such locks; False if another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("memory of this host is taken without regard to other processes: %s", error)
    return True


def release_page_locked() -> None:
    """Give the page-locked memory that no tensor uses back to the system. Without CUDA there is none."""
    if not torch.cuda.is_available():
        return
    # The public function is newer than torch 2.11, where the private one does the same.
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
