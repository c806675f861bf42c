"""The distribution of requests to servers, and how many may be in flight at each (SPEC.md D4, D10; R07, R21, R23, R30).

`distribute` is pure. In: the number of this rank's requests, the rank, the servers' world sizes, `decode_batch_size`.
Out: contiguous spans of requests in request order, and this rank's quota on each server. Every rank computes its own
part without communication. A quota does not depend on the number of a rank's requests, so at every moment all ranks
together hold at most `decode_batch_size * s_i` sequences on server `i`.

The line of slots: the `n` requests of each of `W` ranks are `G = W * n` slots. Server `i` owns the next
`ceil(G * s_i / T)` slots, where `T = sum(s_i)`. Rank `r` owns the slots `[r * n, (r + 1) * n)`. A rank's quota on a
server is the number of slots that both own with `n = chunk`.

A `Dispatcher` sends one rank's requests to all servers and returns each answer as it ends. Invariants: a server has at
most its quota of requests in flight; requests start in request order; while a request waits, every server has its whole
quota in flight (D9), so a server without waiting requests takes requests from the server with most; unanswered requests
of a failed batch are sent again in halves. A server that becomes busy after some answers of a batch has not failed: the
other requests are sent again. A server that is gone, stays busy, or fails one request twice, is lost: its requests go
to other servers, with the same seeds (D15). `run` raises if a request also fails twice on a second server, or is
malformed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
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
    UnauthorizedError,
)

R = TypeVar("R")
log = logging.getLogger("learner.rollout")

# A server is refilled by a 32nd of its quota at a time: single requests up to 32, and 97% of a larger quota in use.
REFILLS = 32
# These errors belong to the request: any server would give them.
REQUEST_ERRORS = (RequestError, ConfigError, PromptMismatchError)
# These errors belong to the server: another try at the same server would not help.
LOST_ERRORS = (ServerUnreachableError, ServerBusyError, ServerPoisonedError, ServerMismatchError, UnauthorizedError)


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
    """`spans` cover this rank's requests in order; `quotas[i]` bounds its requests in flight on server `i`."""

    spans: tuple[ServerSpan, ...]
    quotas: tuple[int, ...]


def chunk_size(*, decode_batch_size: int, server_world_sizes: Sequence[int], num_ranks: int) -> int:
    """Return the number of requests that one rank may have in flight over all servers: `floor(decode_batch_size * T /
    W)`.

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
    """Apply formula D4 for one rank and one call. A rank may always have one request in flight, even if servers were
    lost and `chunk_size` would raise.

    Up to `chunk` requests are all in flight at once: requests that exceed this rank's quota on a server go to the
    neighbouring servers. With more requests, the slots of a server whose quota is zero go to the next server with a
    quota, in cyclic order. Only in this case can one server own two spans.
    """
    quotas = quotas_of(
        rank=rank, num_ranks=num_ranks, server_world_sizes=server_world_sizes, decode_batch_size=decode_batch_size
    )
    owned = _slots(num_requests, rank, num_ranks, server_world_sizes)
    if num_requests <= sum(quotas):
        return Distribution(spans=_spans(_within(owned, quotas)), quotas=quotas)
    return Distribution(spans=_moved(_spans(owned), quotas), quotas=quotas)


def quotas_of(
    *, rank: int, num_ranks: int, server_world_sizes: Sequence[int], decode_batch_size: int
) -> tuple[int, ...]:
    """Return this rank's quota on each server, as in `distribute`. The quota of a server of size 0 is 0."""
    chunk = max(1, decode_batch_size * sum(server_world_sizes) // num_ranks)
    return _slots(chunk, rank, num_ranks, server_world_sizes)


def _slots(num_requests: int, rank: int, num_ranks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the rank's slots each server owns, in server order. The sum is `num_requests`."""
    num_slots, total = num_ranks * num_requests, sum(sizes)
    first, last = rank * num_requests, (rank + 1) * num_requests
    owned, edge = [], 0
    for size in sizes:
        begin, edge = edge, min(num_slots, edge + -(-num_slots * size // total))
        owned.append(max(0, min(edge, last) - max(begin, first)))
    return tuple(owned)


def _within(owned: Sequence[int], quotas: Sequence[int]) -> tuple[int, ...]:
    """Return `owned` with each number cut to its quota. The excess goes to later servers, or else to earlier ones."""
    edges = [0, *accumulate(owned)]
    total = edges[-1]
    for i, quota in enumerate(quotas):
        edges[i + 1] = min(edges[i + 1], edges[i] + quota)
    edges[-1] = total
    for i in range(len(quotas) - 1, 0, -1):
        edges[i] = max(edges[i], edges[i + 1] - quotas[i])
    return tuple(stop - start for start, stop in pairwise(edges))


def _spans(numbers: Sequence[int]) -> tuple[ServerSpan, ...]:
    stops = accumulate(numbers)
    return tuple(
        ServerSpan(server=server, start=stop - number, stop=stop)
        for server, (number, stop) in enumerate(zip(numbers, stops, strict=True))
        if number
    )


def _moved(spans: Sequence[ServerSpan], quotas: Sequence[int]) -> tuple[ServerSpan, ...]:
    """Return each span on the next server that has a quota; neighbours on one server become one span."""
    moved: list[ServerSpan] = []
    for span in spans:
        server = next(i % len(quotas) for i in range(span.server, span.server + len(quotas)) if quotas[i % len(quotas)])
        start = moved.pop().start if moved and moved[-1].server == server else span.start
        moved.append(ServerSpan(server=server, start=start, stop=span.stop))
    return tuple(moved)


# ---- sending -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests `[start, stop)` of one HTTP call. `failed`: the requests failed once on the server that they wait for.
    `suspect`: one of the requests made another server count as lost."""

    start: int
    stop: int
    failed: bool = False
    suspect: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, size: int) -> tuple[Batch, ...]:
        """Return a batch of the first `size` requests, and a batch of the rest unless it is empty."""
        middle = min(self.start + size, self.stop)
        first = replace(self, stop=middle)
        return (first,) if middle == self.stop else (first, replace(self, start=middle))


def halves(unanswered: Sequence[int], *, suspect: bool = False) -> list[Batch]:
    """Return the batches to send after a failure; each has consecutive requests."""
    middle = len(unanswered) // 2
    parts = (unanswered[:middle], unanswered[middle:])
    return [
        Batch(start=run.start, stop=run.stop, failed=True, suspect=suspect) for part in parts for run in _runs(part)
    ]


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield ascending numbers as ranges of consecutive numbers."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end


@dataclass(kw_only=True, slots=True)
class _ServerQueue:
    """One server's waiting batches, and the number of further requests that it may hold now (`free`)."""

    quota: int
    free: int
    waiting: deque[Batch] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return sum(len(batch) for batch in self.waiting)


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A batch that was sent. `given_up`: its server was lost, and other servers answer its unanswered requests."""

    server: int
    batch: Batch
    unanswered: set[int]
    given_up: bool = False


# `send(server, batch, answered)` sends one batch, calls `answered(request, result)` for each request as it ends, and
# returns when all requests have ended.
Answered = Callable[[int, R], None]
Send = Callable[[int, Batch, Answered[R]], Coroutine[object, None, None]]
# `lose(server, error)` leaves a server out; returns all servers' new quotas. Raises `error` if the run can't go on.
Lose = Callable[[int, ProjectError], Sequence[int]]


def lose_none(server: int, error: ProjectError) -> Sequence[int]:
    """Raises `error`: for runs that need every server."""
    raise error


class Dispatcher(Generic[R]):
    """Sends the batches of all spans; a batch never crosses a span's end. `on_answer(request, result)` is called when a
    request ends, `on_split(requests, error)` before requests are sent again; both on the event loop of `run`."""

    def __init__(
        self,
        plan: Distribution,
        *,
        send: Send[R],
        on_answer: Answered[R],
        on_split: Callable[[Sequence[int], ProjectError], None],
        lose: Lose = lose_none,
    ) -> None:
        self._servers = [_ServerQueue(quota=quota, free=quota) for quota in plan.quotas]
        for span in plan.spans:
            self._servers[span.server].waiting.append(Batch(start=span.start, stop=span.stop))
        self._send, self._on_answer, self._on_split, self._lose = send, on_answer, on_split, lose
        self._flying: dict[asyncio.Task[None], _Flight] = {}
        self._given_up: list[asyncio.Task[None]] = []  # calls that were in flight on servers that are lost
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Send all requests; return when every request is answered. Raises the first final error, after the calls in
        flight were cancelled."""
        try:
            self._launch()
            while self._flying:
                await self._changed.wait()
                self._changed.clear()
                for task in [task for task in self._flying if task.done()]:
                    if task in self._flying:  # not given up because of another call's failure
                        self._land(task)
                self._launch()
            assert not any(server.waiting for server in self._servers), "requests wait, and no server takes them"
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, *self._given_up, return_exceptions=True)

    def _launch(self) -> None:
        """Fill every server, first with its own requests, then with requests of the server where most wait."""
        for index, server in enumerate(self._servers):
            while batch := self._take(server, server.waiting):
                self._start(index, batch)
        full = [server for server in self._servers if server.waiting]
        if not full:  # the usual case after an answer: saves a comparison of hundreds of servers
            return
        for index, server in enumerate(self._servers):
            while server.free > 0 and not server.waiting:
                batch = self._take(server, max(full, key=lambda other: other.num_waiting).waiting)
                if batch is None:
                    break
                self._start(index, batch)

    def _take(self, server: _ServerQueue, waiting: deque[Batch]) -> Batch | None:
        """Return the next batch of `waiting` to send to `server` now."""
        size = min(server.free, len(waiting[0])) if waiting else 0
        if size <= 0 or size < min(len(waiting[0]), -(-server.quota // REFILLS)):
            return None
        batch, *rest = waiting.popleft().cut(size)
        waiting.extendleft(rest)
        server.free -= size
        return batch

    def _start(self, server: int, batch: Batch) -> None:
        flight = _Flight(server=server, batch=batch, unanswered=set(range(batch.start, batch.stop)))
        task = asyncio.ensure_future(self._send(server, batch, partial(self._answered, flight)))
        task.add_done_callback(lambda _: self._changed.set())
        self._flying[task] = flight

    def _answered(self, flight: _Flight, request: int, result: R) -> None:
        if flight.given_up:  # a cancelled call may still have had an answer
            return
        flight.unanswered.remove(request)
        self._servers[flight.server].free += 1
        self._changed.set()
        self._on_answer(request, result)

    def _land(self, task: asyncio.Task[None]) -> None:
        flight = self._flying.pop(task)
        self._servers[flight.server].free += len(flight.unanswered)
        try:
            task.result()
        except ProjectError as error:
            self._retry(flight, error)
        else:
            assert not flight.unanswered, "a batch ended without all of its answers"

    def _retry(self, flight: _Flight, error: ProjectError) -> None:
        # No `Retry`: the requests join a queue again at once, in smaller batches or for another server.
        batch, unanswered = flight.batch, sorted(flight.unanswered)
        if isinstance(error, REQUEST_ERRORS) and not isinstance(error, LOST_ERRORS):
            raise error
        if isinstance(error, ServerBusyError) and len(unanswered) < len(batch):
            again = [replace(batch, start=run.start, stop=run.stop) for run in _runs(unanswered)]
            self._send_again(flight.server, again, error)
            return
        failed_twice = batch.failed and len(batch) == 1
        if failed_twice and batch.suspect and not isinstance(error, LOST_ERRORS):
            raise error  # two servers failed the request, so the request is at fault
        if isinstance(error, LOST_ERRORS) or failed_twice:
            self._without(flight, error, suspect=failed_twice)
        else:
            self._send_again(flight.server, halves(unanswered, suspect=batch.suspect), error)

    def _send_again(self, server: int, again: Sequence[Batch], error: ProjectError) -> None:
        """Put the batches `again` in front of the server's queue. `again` is empty if every answer arrived."""
        if not again:
            return
        requests = [request for batch in again for request in range(batch.start, batch.stop)]
        kind = {DeadlineError: "timed out", ServerBusyError: "were refused"}.get(type(error), "failed")
        log.warning("%d request(s) %s and are sent again: %s", len(requests), kind, error)
        self._on_split(requests, error)
        self._servers[server].waiting.extendleft(reversed(again))

    def _without(self, flight: _Flight, error: ProjectError, *, suspect: bool) -> None:
        """Go on without the server that failed `flight`. All requests of that server wait for other servers to take
        them. Raises `error` if the run can't go on without this server."""
        lost = flight.server
        for server, quota in zip(self._servers, self._lose(lost, error), strict=True):
            server.free += quota - server.quota
            server.quota = quota
        flights = [(flight, suspect)]
        for task in [task for task, other in self._flying.items() if other.server == lost]:
            other = self._flying.pop(task)
            other.given_up = True
            flights.append((other, False))
            task.cancel()
            self._given_up.append(task)
        waiting = self._servers[lost].waiting
        again = [replace(batch, failed=False) for batch in waiting]
        for other, is_suspect in flights:
            is_suspect = is_suspect or other.batch.suspect
            again += [
                Batch(start=run.start, stop=run.stop, suspect=is_suspect) for run in _runs(sorted(other.unanswered))
            ]
        waiting.clear()
        waiting.extend(sorted(again, key=lambda batch: batch.start))
        num_moved = sum(len(batch) for batch in again)
        log.warning("%d request(s) go to other servers: %s", num_moved, error)
        if flight.unanswered:
            self._on_split(sorted(flight.unanswered), error)
