"""One server's lane through a `generate` call: batches wait, fly and come back (R21, R30).

In: spans of request indices for one server, its cap, and `send`, which turns a batch into rollouts. Invariants: never
more than `cap` requests in flight; batches start in request order, and the next one as soon as it fits; a batch that
fails is split in halves and sent again; a single request that fails twice, or an error that repeating can't mend,
ends the lane. Called by `server.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from learner.rollout.distribution import Span
from shared.errors import (
    ConfigError,
    DeadlineError,
    ProjectError,
    PromptMismatchError,
    RequestError,
    ServerBusyError,
    ServerMismatchError,
    ServerPoisonedError,
    ServerUnreachableError,
)

R = TypeVar("R")
log = logging.getLogger("learner.rollout")

CALLS_IN_FLIGHT = (
    4  # a lane with more requests than its cap cuts them into calls of a quarter of it, so that it can refill
)
FINAL_ERRORS = (
    RequestError,
    ConfigError,
    PromptMismatchError,
    ServerUnreachableError,
    ServerBusyError,
    ServerPoisonedError,
    ServerMismatchError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests `[start, stop)` that travel in one call; `failed`: they have failed before."""

    start: int
    stop: int
    failed: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    def retry(self) -> tuple[Batch, ...]:
        """What to send after a failure: halves, or the same single request once more."""
        if len(self) == 1:
            return (Batch(start=self.start, stop=self.stop, failed=True),)
        middle = (self.start + self.stop) // 2
        return tuple(Batch(start=a, stop=b, failed=True) for a, b in ((self.start, middle), (middle, self.stop)))


def cut(spans: Sequence[Span], cap: int) -> list[Batch]:
    """One batch per span where all of them fit at once; else batches of a quarter of the cap."""
    size = cap if sum(len(span) for span in spans) <= cap else -(-cap // CALLS_IN_FLIGHT)
    return [
        Batch(start=start, stop=min(start + size, span.stop))
        for span in spans
        for start in range(span.start, span.stop, size)
    ]


class Lane(Generic[R]):
    """`send(batch)` returns one result per request of the batch, in order. `on_split(batch, error)` hears of
    retries."""

    def __init__(
        self,
        spans: Sequence[Span],
        cap: int,
        *,
        send: Callable[[Batch], Awaitable[list[R]]],
        on_split: Callable[[Batch, ProjectError], None],
    ) -> None:
        self._waiting = deque(cut(spans, cap))
        self._free = cap
        self._send = send
        self._on_split = on_split
        self._flying: dict[asyncio.Future[list[R]], Batch] = {}

    async def run(self) -> dict[int, R]:
        """Results by request index. Raises the first final error, after cancelling what is in flight."""
        results: dict[int, R] = {}
        try:
            while self._waiting or self._flying:
                self._launch()
                done, _ = await asyncio.wait(self._flying, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    batch = self._flying.pop(task)
                    self._free += len(batch)
                    try:
                        results.update(zip(range(batch.start, batch.stop), task.result(), strict=True))
                    except ProjectError as error:
                        self._retry(batch, error)
        finally:
            await self._cancel()
        return results

    def _launch(self) -> None:
        while self._waiting and len(self._waiting[0]) <= self._free:
            batch = self._waiting.popleft()
            self._free -= len(batch)
            self._flying[asyncio.ensure_future(self._send(batch))] = batch

    def _retry(self, batch: Batch, error: ProjectError) -> None:
        if isinstance(error, FINAL_ERRORS) or (batch.failed and len(batch) == 1):
            raise error
        kind = "timed out" if isinstance(error, DeadlineError) else "failed"
        log.warning("requests [%d, %d) %s and are sent again in halves: %s", batch.start, batch.stop, kind, error)
        self._on_split(batch, error)
        self._waiting.extendleft(reversed(batch.retry()))

    async def _cancel(self) -> None:
        for task in self._flying:
            task.cancel()
        await asyncio.gather(*self._flying, return_exceptions=True)
