"""Helpers that run coroutines and collect their results and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")
_AT_A_TIME = 64


async def gather(calls: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Return all results in order. If a call fails, the others are cancelled. When all have ended, the first error is
    raised, with its own cause. Calls are started a few at a time, so that other tasks can run in between."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                tasks.append(group.create_task(call))
                if len(tasks) % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside of `except`, so that the group does not become its context


def reason(error: BaseException) -> str:
    """Return an error's message. Without one: the name of the error's class, or that the caller hung up."""
    nothing_said = "the caller went away" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    return str(error) or nothing_said


async def relay(work: Callable[[Callable[[T], None]], Coroutine[object, None, None]]) -> AsyncGenerator[T]:
    """Yield each item that `work(put)` puts, as it comes, then raise the error of `work`, if it failed. `work` never
    waits until an item is taken. Close the generator to cancel `work`."""
    ended: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    working = asyncio.create_task(work(lambda item: ended.put_nowait((item,))))
    working.add_done_callback(lambda _: ended.put_nowait(None))
    try:
        while (item := await ended.get()) is not None:
            yield item[0]
        working.result()
    finally:
        working.cancel()
        await asyncio.wait({working})
