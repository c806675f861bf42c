"""Waits of tests: for a condition, never for a length of time.

Their deadline only ends a hang. It is far longer than a busy machine needs, and costs nothing where the test passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Returns when `condition` is true. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {timeout_s:g} s"
        time.sleep(0.005)


async def until(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Wait for the same on an event loop, whose other tasks go on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {timeout_s:g} s"
        await asyncio.sleep(0.001)


async def let_others_run(turns: int = 100) -> None:
    """Every task of this loop goes on until it waits for a timer, a thread or an event. For what must not happen."""
    for _ in range(turns):
        await asyncio.sleep(0)
