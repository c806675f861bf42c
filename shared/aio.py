"""Helpers that run coroutines, also from other threads, and collect their results and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Future
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
    # Inside the `except` block the error would carry the exception group as its context.
    raise first


def reason(error: BaseException) -> str:
    """Return an error's message. If the message is empty, return the name of the error's class, or for a CancelledError
    "the caller went away"."""
    nothing_said = "the caller went away" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    return str(error) or nothing_said


async def relay(work: Callable[[Callable[[T], None]], Coroutine[object, None, None]]) -> AsyncGenerator[T]:
    """Run `work(put)`, and yield each item as soon as `work` puts it. `put` never waits. After the last item, the error
    of `work` is raised. Close the generator to cancel `work`."""
    ended: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
    working = asyncio.create_task(work(lambda item: ended.put_nowait((item,))))
    working.add_done_callback(lambda _: ended.put_nowait(None))
    try:
        while (item := await ended.get()) is not None:
            yield item[0]
        working.result()
    finally:
        # Cancelled work may need time to end, so the caller waits for its end.
        working.cancel()
        await asyncio.wait({working})


class LoopThread:
    """An event loop in a thread of its own, on which other threads run coroutines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: after an error the interpreter must not wait for coroutines that still wait for an answer.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def submit(self, coroutine: Coroutine[object, None, T]) -> Future[T]:
        """Start `coroutine` on the loop, and return its future. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Return the coroutine's result, or raise its error. If the caller is interrupted, the coroutine is cancelled.
        `run` has no time limit, so the coroutine must have one."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """Cancel all running coroutines, then end the thread; each part may take `timeout_s`. Raises TimeoutError if a
        coroutine does not end. A second call does nothing."""
        if self.closed:
            return
        self.submit(_cancel_others()).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        # asyncio refuses to close a loop that runs.
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
