"""Decides which server answers which request, and how many requests each server may have in flight (SPEC.md D4, D10;
R07, R21, R23, R30).

`distribute` is pure. In: the number of this rank's requests, the rank, the servers' world sizes, `decode_batch_size`.
Out: contiguous spans of requests in request order, and this rank's quota on each server (max requests in flight). Every
rank computes its own part without communication. The quotas do not depend on the number of requests. Together all ranks
have at most `decode_batch_size * s_i` sequences in flight on server `i`, where `s_i` is its world size.

Formula D4 counts slots. There are `W` ranks with `n` slots each, so `G = W * n` slots in all. Rank `r` owns the slots
`[r * n, (r + 1) * n)`. The servers own the same slots, in server order: server `i` owns the next `ceil(G * s_i / T)`
slots, where `T = sum(s_i)`. So each slot belongs to one rank and one server. For spans, `n` is the rank's number of
requests, and each request is one slot: it goes to the server that owns the slot. For quotas, `n =
floor(decode_batch_size * T / W)` (`chunk_size`). A rank's quota on a server is the number of slots that belong to both
the rank and the server.

A `Dispatcher` sends one rank's requests to all servers and passes on each answer as it ends. Invariants: a server has
at most its quota of requests in flight; requests start in request order; while any request waits, every server has its
whole quota in flight (D9). So a server whose queue is empty takes requests from the longest queue.

If a batch fails, its unanswered requests are sent again in halves. If a server becomes busy after some answers of a
batch, it has not failed, and the other requests are sent again. A server is lost (this rank stops using it) if it is
gone, stays busy, or fails one request twice. The requests of a lost server go to other servers, with the same seeds
(D15). `run` raises an error if a request also fails twice on a second server, or if the request is malformed.
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

# If enough requests wait, a batch has at least a 32nd of the server's quota. So quotas up to 32 are refilled one
# request at a time, and at least 97% of a larger quota is in use.
REFILLS = 32
# With one of these errors the request is at fault: any server would answer with the same error.
REQUEST_ERRORS = (RequestError, ConfigError, PromptMismatchError)
# With one of these errors the server is at fault: sending the request to the same server again would not help.
# UnauthorizedError is among them: otherwise a restarted server with a new token would end the run.
LOST_ERRORS = (ServerUnreachableError, ServerBusyError, ServerPoisonedError, ServerMismatchError, UnauthorizedError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpan:
    """The requests `[start, stop)` of this rank, which go to `server` (an index into the list of servers)."""

    server: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Says which server answers which requests of one rank. `spans` cover the rank's requests in order. `quotas[i]`:
    max requests that the rank may have in flight on server `i`."""

    spans: tuple[ServerSpan, ...]
    quotas: tuple[int, ...]


def chunk_size(*, decode_batch_size: int, server_world_sizes: Sequence[int], num_ranks: int) -> int:
    """Return the number of requests that one rank may have in flight on all servers together: `floor(decode_batch_size
    * T / W)`, with T rollout GPUs and W ranks.

    Raises ConfigError if that is zero: then one request per rank would be more than `decode_batch_size` allows (R23).
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
    """Return one rank's spans and quotas by formula D4 (see the module). A rank may always have at least one request in
    flight, even if so many servers were lost that `chunk_size` would raise.

    If the quotas have room for all requests, all are sent at once: requests above the quota of their server go to the
    neighbouring servers. With more requests, the requests of a server whose quota is zero go to the next server with a
    quota, in cyclic order. Only in this case one server may get two spans.
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
    """Return this rank's quota on each server, in server order. A server of size 0 has quota 0."""
    # Without a quota a rank could never answer, so each rank has at least one request, even after servers were lost.
    chunk = max(1, decode_batch_size * sum(server_world_sizes) // num_ranks)
    return _slots(chunk, rank, num_ranks, server_world_sizes)


def _slots(num_requests: int, rank: int, num_ranks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the rank's slots belong to each server, in server order. The numbers add up to
    `num_requests`."""
    num_slots, total = num_ranks * num_requests, sum(sizes)
    first, last = rank * num_requests, (rank + 1) * num_requests
    owned, edge = [], 0
    for size in sizes:
        begin, edge = edge, min(num_slots, edge + -(-num_slots * size // total))
        owned.append(max(0, min(edge, last) - max(begin, first)))
    return tuple(owned)


def _within(owned: Sequence[int], quotas: Sequence[int]) -> tuple[int, ...]:
    """Return `owned` (requests per server), changed so that no number is above its server's quota. Requests above a
    quota go to later servers, or else to earlier servers."""
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
    """Return the spans, each moved to the next server with a quota (in cyclic order) if its own server has none.
    Neighbouring spans of one server become one span."""
    moved: list[ServerSpan] = []
    for span in spans:
        server = next(i % len(quotas) for i in range(span.server, span.server + len(quotas)) if quotas[i % len(quotas)])
        start = moved.pop().start if moved and moved[-1].server == server else span.start
        moved.append(ServerSpan(server=server, start=start, stop=span.stop))
    return tuple(moved)


# ---- sending -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Requests `[start, stop)` of one HTTP call. `failed`: the requests have failed once on this queue's server, and
    are tried there again. `suspect`: one of the requests may be bad, because it failed twice on an earlier server,
    which is no longer used."""

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
    """Return the batches in which the `unanswered` requests of a failed batch are sent again: at least two batches, if
    there are two requests. Each batch has consecutive requests."""
    # Halving isolates a bad request in a few tries, while the good requests are answered.
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
    """The batches that wait for one server."""

    quota: int  # max requests in flight
    free: int  # number of requests that may be sent now; negative after the quota has fallen
    waiting: deque[Batch] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return sum(len(batch) for batch in self.waiting)


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A batch that was sent. `given_up`: its server was lost, so its unanswered requests go to other servers, and late
    answers of the lost server are ignored."""

    server: int
    batch: Batch
    unanswered: set[int]
    given_up: bool = False


# `send(server, batch, answered)` sends one batch, calls `answered(request, result)` for each request as it ends, and
# returns when all requests have ended.
Answered = Callable[[int, R], None]
Send = Callable[[int, Batch, Answered[R]], Coroutine[object, None, None]]
# `lose(server, error)` stops using a server and returns all servers' new quotas. Raises if the run can't go on.
Lose = Callable[[int, ProjectError], Sequence[int]]


def lose_none(server: int, error: ProjectError) -> Sequence[int]:
    """Raises `error`. This is the `Lose` function of a run that needs every server."""
    raise error


class Dispatcher(Generic[R]):
    """Sends one rank's requests to the servers, in batches. All requests of a batch are in the same span
    (`ServerSpan`). `on_answer(request, result)` is called when a request ends, `on_split(requests, error)` before
    requests are sent again. The event loop of `run` calls both functions."""

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
        self._given_up: list[asyncio.Task[None]] = []  # cancelled calls to servers that were lost
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Send all requests; return when every request is answered. If an error ends the run, the calls in flight are
        cancelled and the error is raised."""
        try:
            self._launch()
            while self._flying:
                await self._changed.wait()
                self._changed.clear()
                for task in [task for task in self._flying if task.done()]:
                    if task in self._flying:  # False if this loop has meanwhile stopped using the call's server
                        self._land(task)
                self._launch()
            assert not any(server.waiting for server in self._servers), "requests wait, and no server takes them"
        finally:
            for task in self._flying:
                task.cancel()
            # Cancelled calls may still run callbacks, so `run` returns only after their end.
            await asyncio.gather(*self._flying, *self._given_up, return_exceptions=True)

    def _launch(self) -> None:
        """Send requests until every quota is in use. Each server gets requests from its own queue first, then from the
        longest queue."""
        for index, server in enumerate(self._servers):
            while batch := self._take(server, server.waiting):
                self._start(index, batch)
        # With 512 servers the loop below takes 45 ms of CPU, and most answers do not need it.
        full = [server for server in self._servers if server.waiting]
        if not full:  # after most answers no request waits
            return
        for index, server in enumerate(self._servers):
            while server.free > 0 and not server.waiting:
                batch = self._take(server, max(full, key=lambda other: other.num_waiting).waiting)
                if batch is None:
                    break
                self._start(index, batch)

    def _take(self, server: _ServerQueue, waiting: deque[Batch]) -> Batch | None:
        """Remove the next batch for `server` from `waiting` and return it. Return None if no batch waits, or if the
        server's quota has too little room for a batch (REFILLS)."""
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
        if flight.given_up:  # an answer may arrive before the cancelled call ends
            return
        flight.unanswered.remove(request)
        # The quota is free as soon as one request ends, so the server need not wait for the rest of its batch.
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
        # No `Retry` with pauses: the requests join a queue at once, in smaller batches or for another server.
        batch, unanswered = flight.batch, sorted(flight.unanswered)
        if isinstance(error, REQUEST_ERRORS) and not isinstance(error, LOST_ERRORS):
            raise error
        # The server has answered a part of the batch, so it works, and only the rest is sent again.
        if isinstance(error, ServerBusyError) and len(unanswered) < len(batch):
            again = [replace(batch, start=run.start, stop=run.stop) for run in _runs(unanswered)]
            self._send_again(flight.server, again, error)
            return
        failed_twice = batch.failed and len(batch) == 1
        if failed_twice and batch.suspect and not isinstance(error, LOST_ERRORS):
            # Two servers failed on the request, so the request is the cause.
            raise error
        if isinstance(error, LOST_ERRORS) or failed_twice:
            self._without(flight, error, suspect=failed_twice)
        else:
            self._send_again(flight.server, halves(unanswered, suspect=batch.suspect), error)

    def _send_again(self, server: int, again: Sequence[Batch], error: ProjectError) -> None:
        """Put the batches `again` at the front of the server's queue. `again` is empty if every answer had arrived
        before the error."""
        if not again:
            return
        requests = [request for batch in again for request in range(batch.start, batch.stop)]
        kind = {DeadlineError: "timed out", ServerBusyError: "were refused"}.get(type(error), "failed")
        log.warning("%d request(s) %s and are sent again: %s", len(requests), kind, error)
        self._on_split(requests, error)
        # Requests that are sent again go to the front of the queue, because requests start in request order.
        self._servers[server].waiting.extendleft(reversed(again))

    def _without(self, flight: _Flight, error: ProjectError, *, suspect: bool) -> None:
        """Stop using the server on which `flight` failed, and cancel its calls. The unanswered requests stay in that
        server's queue, and other servers take them from there. `suspect`: `flight` failed twice. Raises if the run
        needs this server."""
        lost = flight.server
        for server, quota in zip(self._servers, self._lose(lost, error), strict=True):
            server.free += quota - server.quota
            server.quota = quota
        flights = [(flight, suspect)]
        for task in [task for task, other in self._flying.items() if other.server == lost]:
            other = self._flying.pop(task)
            # Late answers of the lost server must be ignored, because its requests now go to other servers.
            other.given_up = True
            flights.append((other, False))
            task.cancel()
            self._given_up.append(task)
        waiting = self._servers[lost].waiting
        # The waiting requests have not failed yet on another server.
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
