"""Which request goes to which server, and how many may be in flight there (SPEC.md D4; R07, R21, R23, R30).

`distribute` is pure. In: the number of this rank's requests, the rank, the servers' world sizes, `decode_batch_size`.
Out: contiguous spans of requests in request order, and a cap per server. Every rank computes its own part without
talking to the others. If all ranks have the same number of requests, they together never hold more than
`decode_batch_size * s_i` sequences on server `i`.

The line of slots: `W` ranks with `n` requests each lay `G = W * n` slots. Server `i` owns the next `ceil(G * s_i / T)`
of them, `T = sum(s_i)`. Rank `r` owns `[r * n, (r + 1) * n)`.

A `ServerQueue` sends one server's spans, in batches. Invariants: never more than `cap` requests are in flight; batches
start in request order, and the next one as soon as it fits; a batch that fails is split in halves and sent again; a
single request that fails twice, or an error that repeating cannot fix, ends the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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

CALLS_IN_FLIGHT = 4  # a queue longer than its cap sends batches of a quarter of the cap, so that it can refill
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
class ServerSpan:
    """This rank's requests `[start, stop)`, which go to `server` (an index into the configured list)."""

    server: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """`spans` cover this rank's requests in order; `caps[i]` bounds its requests in flight on server `i`."""

    spans: tuple[ServerSpan, ...]
    caps: tuple[int, ...]


def chunk_size(*, decode_batch_size: int, server_world_sizes: Sequence[int], num_ranks: int) -> int:
    """Requests that one rank may have in flight over all servers: `floor(decode_batch_size * T / W)`.

    Raises ConfigError if that is zero: the cap cannot hold while every rank sends at least one request (R23).
    """
    total = sum(server_world_sizes)
    chunk = decode_batch_size * total // num_ranks
    if chunk == 0:
        raise ConfigError(
            "custom.extra.rollout_matching.decode_batch_size: too few sequences for the learner's ranks",
            found=f"decode_batch_size {decode_batch_size} x {total} rollout GPUs (servers: {list(server_world_sizes)}) "
            f"for {num_ranks} learner ranks",
            wanted="decode_batch_size x rollout GPUs >= learner ranks",
            remedy="raise decode_batch_size, add rollout servers (or GPUs to them), or start fewer learner ranks",
        )
    return chunk


def distribute(
    num_requests: int, *, rank: int, num_ranks: int, server_world_sizes: Sequence[int], decode_batch_size: int
) -> Distribution:
    """Formula D4 for one rank and one call. Raises ConfigError as `chunk_size` does.

    With more than `chunk` requests, a server on which the rank's cap is zero hands its slots to the next server, in
    order and cyclically, that has a cap. Only then can one server own two spans.
    """
    chunk = chunk_size(decode_batch_size=decode_batch_size, server_world_sizes=server_world_sizes, num_ranks=num_ranks)
    spans = _owned_spans(num_requests, rank, num_ranks, server_world_sizes)
    if num_requests <= chunk:
        return Distribution(spans=spans, caps=_totals(spans, len(server_world_sizes)))
    caps = _totals(_owned_spans(chunk, rank, num_ranks, server_world_sizes), len(server_world_sizes))
    return Distribution(spans=_moved_to_caps(spans, caps), caps=caps)


def _owned_spans(num_requests: int, rank: int, num_ranks: int, sizes: Sequence[int]) -> tuple[ServerSpan, ...]:
    num_slots, total = num_ranks * num_requests, sum(sizes)
    first, last = rank * num_requests, (rank + 1) * num_requests
    spans, edge = [], 0
    for server, size in enumerate(sizes):
        begin, edge = edge, min(num_slots, edge + -(-num_slots * size // total))
        start, stop = max(begin, first), min(edge, last)
        if start < stop:
            spans.append(ServerSpan(server=server, start=start - first, stop=stop - first))
    return tuple(spans)


def _totals(spans: Sequence[ServerSpan], num_servers: int) -> tuple[int, ...]:
    return tuple(sum(len(span) for span in spans if span.server == i) for i in range(num_servers))


def _moved_to_caps(spans: Sequence[ServerSpan], caps: Sequence[int]) -> tuple[ServerSpan, ...]:
    """Each span on the next server that has a cap; neighbours on one server become one span."""
    moved: list[ServerSpan] = []
    for span in spans:
        server = next(i % len(caps) for i in range(span.server, span.server + len(caps)) if caps[i % len(caps)])
        start = moved.pop().start if moved and moved[-1].server == server else span.start
        moved.append(ServerSpan(server=server, start=start, stop=span.stop))
    return tuple(moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests `[start, stop)` of one call; `failed`: they have failed before."""

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


def cut(spans: Sequence[ServerSpan], cap: int) -> list[Batch]:
    """One batch per span if all fit at once, else batches of a quarter of the cap."""
    size = cap if sum(len(span) for span in spans) <= cap else -(-cap // CALLS_IN_FLIGHT)
    return [
        Batch(start=start, stop=min(start + size, span.stop))
        for span in spans
        for start in range(span.start, span.stop, size)
    ]


class ServerQueue(Generic[R]):
    """`send(batch)` returns one result per request of the batch, in order. `on_split(batch, error)` is called before a
    retry."""

    def __init__(
        self,
        spans: Sequence[ServerSpan],
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
        """Results by request index. Raises the first final error, when what was in flight has been cancelled."""
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
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)
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
