"""The host's memory: what is free, and what page-locked tensors take of it.

torch rounds each page-locked allocation up to a power of two, and keeps what was freed for the next one. So a check
must count the rounded bytes, and memory counts as free again only after `release_page_locked`.
"""

from __future__ import annotations

from pathlib import Path

import torch

SPARE_BYTES = 256 << 20  # left for what else allocates


def page_locked_bytes(num_bytes: int) -> int:
    """Return the bytes that torch takes for a page-locked tensor of `num_bytes` (`CachingHostAllocator.h`)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def available_bytes() -> int:
    """Return the bytes of the host that may still be taken, as the kernel estimates it."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def release_page_locked() -> None:
    """Give the page-locked memory that no tensor uses back to the system. Without CUDA there is none."""
    if not torch.cuda.is_available():
        return
    # The public function is newer than torch 2.11, where the private one does the same.
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
