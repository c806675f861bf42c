"""What is freed goes back to the kernel, from between blocks that are in use, in a process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import re
from pathlib import Path

import pytest

from rollout_server.processes import give_memory_back

NUM_BLOCKS, NUM_BYTES = 1000, 100_000  # 95 MiB, in blocks that glibc takes from its heap


def resident_mib() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) // 1024


def kept_mib() -> tuple[int, int]:
    """MiB that a process still has of what it has freed, before and after it gives memory back."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    begin = resident_mib()
    blocks = [libc.malloc(NUM_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, NUM_BYTES)
    for block in blocks[:-1]:  # the last one holds the heap's end
        libc.free(block)
    before = resident_mib()
    give_memory_back()
    return before - begin, resident_mib() - begin


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_given_back() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, after = pool.apply(kept_mib)
    assert before > 80, "nothing is kept: the test shows nothing"
    assert after < 10
