"""Several coroutines at once, with one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. If one fails, the others are cancelled. When all have ended, the first error is raised,
    with its own cause."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside of `except`, so that the group does not become its context
