"""Waits with a deadline in which no time passes while this process itself stands still: Ctrl-Z and `fg`, a machine that
was paused or held up. What is waited for may have come meanwhile, and only this process has not seen it.

Each wait is cut into ticks, and a tick counts once, however long it took.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")
TICKS = 20


async def within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises TimeoutError after `limit_s`, and what it raises; it has ended then."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(TICKS):
            if (await asyncio.wait({task}, timeout=limit_s / TICKS))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        await asyncio.wait({task})


def wait_for(changed: threading.Condition, holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether `holds` became true within `limit_s`. The caller has the condition's lock."""
    return any(changed.wait_for(holds, timeout=limit_s / TICKS) for _ in range(TICKS))


def result_of(future: futures.Future[T], limit_s: float) -> T:
    """Raises TimeoutError after `limit_s`, and what the future's work raises."""
    for _ in range(TICKS):
        if futures.wait([future], timeout=limit_s / TICKS).done:
            return future.result()
    raise TimeoutError
