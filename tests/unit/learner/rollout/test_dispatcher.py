"""Sending to several servers: quotas, refills, order of starts, split-and-retry (R21, R30, D9), on plain coroutines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.rollout.distribution import (
    REFILLS,
    Batch,
    Dispatcher,
    Distribution,
    ServerSpan,
    distribute,
    halves,
    quotas_of,
)
from shared.errors import (
    DeadlineError,
    MediaError,
    ProjectError,
    RolloutError,
    ServerBusyError,
    ServerUnreachableError,
    UnauthorizedError,
)


class Servers:
    """Answer a batch's requests one by one, each after `ticks(server, request)` turns of the event loop. While `times`
    last, a batch with the request `poison` fails after its other answers have been given."""

    def __init__(
        self,
        ticks: Callable[[int, int], int] = lambda server, request: 1 + 3 * (request % 2),
        *,
        error: ProjectError | None = None,
        poison: int = -1,
        times: int = 10**9,
    ) -> None:
        self.ticks, self.error, self.poison, self.times = ticks, error or RolloutError("broken"), poison, times
        self.in_flight: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.started: list[tuple[int, int, int]] = []  # server, start, stop

    async def __call__(self, server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
        self.started.append((server, batch.start, batch.stop))
        self.in_flight[server] += len(batch)
        self.peak[server] = max(self.peak[server], self.in_flight[server])

        async def one(request: int) -> None:
            for _ in range(self.ticks(server, request)):
                await asyncio.sleep(0)
            if request == self.poison and self.times:
                self.times -= 1
                await asyncio.sleep(0.001)
                raise self.error
            self.in_flight[server] -= 1
            left.remove(request)
            answered(request, request)

        left = set(range(batch.start, batch.stop))
        try:
            await asyncio.gather(*(one(request) for request in range(batch.start, batch.stop)))
        finally:
            self.in_flight[server] -= len(left)


def run(plan: Distribution, servers: Servers) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the requests in the order in which they were answered, and what was sent again."""
    answered: list[int] = []
    splits: list[tuple[int, ...]] = []
    dispatcher: Dispatcher[int] = Dispatcher(
        plan,
        send=servers,
        on_answer=lambda request, result: answered.append(result),
        on_split=lambda requests, error: splits.append(tuple(requests)),
    )
    asyncio.run(dispatcher.run())
    return answered, splits


def one_server(number: int, quota: int) -> Distribution:
    return Distribution(spans=(ServerSpan(server=0, start=0, stop=number),), quotas=(quota,))


@st.composite
def plans(draw: st.DrawFn) -> Distribution:
    """Spans in request order on servers that have a quota; some servers have none."""
    quotas = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    with_quota = [server for server, quota in enumerate(quotas) if quota]
    spans, start = [], 0
    for length in lengths:
        spans.append(ServerSpan(server=draw(st.sampled_from(with_quota)), start=start, stop=start + length))
        start += length
    return Distribution(spans=tuple(spans), quotas=tuple(quotas))


@settings(deadline=None)
@given(plans(), st.integers(0, 3), st.integers(0, 150))
def test_every_request_is_answered_once_within_the_quotas(plan: Distribution, failures: int, poison: int) -> None:
    """R21: never more than the quota in flight on a server, also while parts are sent again; all answered, once."""
    number = plan.spans[-1].stop
    servers = Servers(poison=poison % number, times=min(failures, 1))
    answered, splits = run(plan, servers)
    assert sorted(answered) == list(range(number))
    assert all(servers.peak[server] <= quota for server, quota in enumerate(plan.quotas))
    assert len(splits) == min(failures, 1)


@settings(deadline=None, max_examples=20)
@given(plans(), st.integers(0, 99))
def test_every_server_is_full_until_the_last_request_is_sent(plan: Distribution, salt: int) -> None:
    """D9: at 95% of its quota, whatever was planned for it. Answers take 100 to 300 turns of the loop."""
    number, total = plan.spans[-1].stop, sum(plan.quotas)
    servers = Servers(lambda server, request: 100 + hash((server, request, salt)) % 200)
    used: list[float] = []

    async def watch() -> None:
        await asyncio.sleep(0)
        while sum(stop - start for _, start, stop in servers.started) < number:
            await asyncio.sleep(0)
            used.append(sum(servers.in_flight.values()) / total)

    async def main() -> None:
        dispatcher: Dispatcher[int] = Dispatcher(
            plan, send=servers, on_answer=lambda *_: None, on_split=lambda *_: None
        )
        await asyncio.gather(dispatcher.run(), watch())

    asyncio.run(main())
    assert len(used) < 50 or sum(used) / len(used) >= 0.95, (sum(used) / len(used), plan)


def test_a_server_with_nothing_left_takes_what_waits_for_another() -> None:
    """D9: server 1 is four times as fast; it ends up with most requests, in request order."""
    plan = Distribution(
        spans=(ServerSpan(server=0, start=0, stop=10), ServerSpan(server=1, start=10, stop=12)), quotas=(2, 2)
    )
    servers = Servers(lambda server, request: 1 if server else 20)
    run(plan, servers)
    assert servers.started[:2] == [(0, 0, 2), (1, 10, 12)]
    starts = [start for server, start, _ in servers.started[2:] if server == 1]
    assert starts == sorted(starts)
    assert sum(stop - start for server, start, stop in servers.started if server == 1) >= 8


def test_what_fits_is_one_call_and_refills_are_as_small_as_answers_come() -> None:
    servers = Servers(lambda server, request: 3 * request)
    run(one_server(8, 8), servers)
    assert servers.started == [(0, 0, 8)]
    servers = Servers(lambda server, request: 3 * request if request < 4 else 50)
    run(one_server(8, 4), servers)
    assert servers.started == [(0, 0, 4), (0, 4, 5), (0, 5, 6), (0, 6, 7), (0, 7, 8)]


def test_a_large_quota_is_refilled_in_small_batches() -> None:
    """A call per answer would cost too much where hundreds are in flight."""
    servers = Servers(lambda server, request: request)
    run(one_server(400, 128), servers)
    sizes = [stop - start for _, start, stop in servers.started]
    assert sizes[0] == 128
    assert min(sizes[1:-1]) == 128 // REFILLS


def test_a_failed_batch_is_halved_until_the_bad_request_is_alone() -> None:
    """R30: 8, then what is unanswered of it; the request that fails alone after its batch failed ends all."""
    servers = Servers(lambda server, request: 1, poison=5)
    with pytest.raises(RolloutError, match="broken"):
        run(one_server(8, 8), servers)
    assert servers.started == [(0, 0, 8), (0, 5, 6)]


def test_only_what_is_unanswered_is_sent_again() -> None:
    """R30: in halves, each as runs of consecutive requests, because a call has one seed."""
    servers = Servers(lambda server, request: 1 if request in (2, 6) else 10**4, poison=6, times=1)
    servers.ticks = lambda server, request: 1 if request in (2, 6) or servers.times == 0 else 10**4
    answered, splits = run(one_server(8, 8), servers)
    assert sorted(answered) == list(range(8))
    assert splits == [(0, 1, 3, 4, 5, 6, 7)]
    assert servers.started[1:] == [(0, 0, 2), (0, 3, 4), (0, 4, 8)]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_halves_hold_all_in_order(unanswered: set[int]) -> None:
    parts = halves(sorted(unanswered))
    assert [i for part in parts for i in range(part.start, part.stop)] == sorted(unanswered)
    assert all(part.failed for part in parts)
    assert all(len(part) <= -(-len(unanswered) // 2) for part in parts)


def test_a_reply_that_breaks_after_its_last_answer_is_complete() -> None:
    class Late(Servers):
        async def __call__(self, server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
            await super().__call__(server, batch, answered)
            raise RolloutError("the connection broke")

    answered, splits = run(one_server(3, 4), Late())
    assert (sorted(answered), splits) == ([0, 1, 2], [])


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_server_that_is_busy_after_some_answers_is_not_lost(number: int, quota: int) -> None:
    """It may be busy any number of times if each call has an answer: neither the server nor a request has failed."""

    async def answer_one(server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
        await asyncio.sleep(0)
        assert not batch.failed
        answered(batch.stop - 1, server)
        raise ServerBusyError("too much memory")

    answers: list[int] = []
    dispatcher: Dispatcher[int] = Dispatcher(
        one_server(number, quota),
        send=answer_one,
        on_answer=lambda request, _: answers.append(request),
        on_split=lambda requests, error: None,
    )
    asyncio.run(dispatcher.run())
    assert sorted(answers) == list(range(number))


def test_a_server_that_stays_busy_is_lost() -> None:
    """The client has waited already: no answer after all of its patience."""
    servers = Servers(poison=0, error=ServerBusyError("draining"))
    with pytest.raises(ServerBusyError):
        run(one_server(1, 4), servers)
    assert len(servers.started) == 1


def test_a_single_request_is_sent_twice_at_most() -> None:
    servers = Servers(poison=0, error=DeadlineError("slow"))
    with pytest.raises(DeadlineError):
        run(one_server(1, 4), servers)
    assert servers.started == [(0, 0, 1), (0, 0, 1)]


@pytest.mark.parametrize("error", [MediaError("no such image"), ServerUnreachableError("gone")])
def test_what_repeating_cannot_fix_is_not_repeated(error: ProjectError) -> None:
    """R30: a wrong request or a missing server ends the call at once, and what is in flight is cancelled."""
    servers = Servers(poison=1, error=error)
    with pytest.raises(type(error)):
        run(one_server(16, 4), servers)
    assert sum(start <= 1 < stop for _, start, stop in servers.started) == 1
    assert servers.in_flight[0] == 0


# ---- servers that are lost (D15) -----------------------------------------------------------------------------------


class MortalServers(Servers):
    """Server `s` dies when it has answered `lives[s]` requests: all that it holds then fails, and all that comes."""

    def __init__(self, lives: dict[int, int]) -> None:
        super().__init__()
        self.lives, self.num_answered = lives, Counter[int]()
        self.death: ProjectError | None = None  # instead of "gone"

    async def __call__(self, server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
        self.started.append((server, batch.start, batch.stop))
        for request in range(batch.start, batch.stop):
            for _ in range(1 + request % 3):
                await asyncio.sleep(0)
            if self.num_answered[server] >= self.lives.get(server, 10**9):
                raise self.death or ServerUnreachableError(f"server {server} is gone")
            self.num_answered[server] += 1
            answered(request, request)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 3),
    st.data(),
)
def test_requests_of_lost_servers_are_answered_once_by_the_others(
    sizes: list[int], number: int, decode_batch_size: int, num_ranks: int, data: st.DataObject
) -> None:
    """Whichever servers die, and whenever: every request is answered once if one lives, even where this rank had no
    quota on it; else the run hears of the loss."""
    place = {"rank": data.draw(st.integers(0, num_ranks - 1)), "num_ranks": num_ranks}
    lives = data.draw(st.dictionaries(st.integers(0, len(sizes) - 1), st.integers(0, 20)))
    plan = distribute(number, server_world_sizes=sizes, decode_batch_size=decode_batch_size, **place)
    left, answered = list(sizes), []
    splits: list[list[int]] = []

    def moved(requests: Sequence[int], error: ProjectError) -> None:
        assert not set(requests) & set(answered)
        splits.append(list(requests))

    def lose(server: int, error: ProjectError) -> Sequence[int]:
        assert left[server], "lost twice"
        left[server] = 0
        if not any(left):
            raise error
        return quotas_of(server_world_sizes=left, decode_batch_size=decode_batch_size, **place)

    servers = MortalServers(lives)
    dispatcher: Dispatcher[int] = Dispatcher(
        plan,
        send=servers,
        on_answer=lambda request, _: answered.append(request),
        on_split=moved,
        lose=lose,
    )
    try:
        asyncio.run(dispatcher.run())
    except ServerUnreachableError:
        assert not any(left)
        assert len(answered) < number
    else:
        assert sorted(answered) == list(range(number))
        assert len(splits) >= left.count(0), "the record of the call names what a lost server did not answer"
    assert all(splits)
    assert len(set(answered)) == len(answered)
    for server, start, stop in servers.started:  # nothing begins beyond a span: the seeds of a call are consecutive
        assert any(span.start <= start < stop <= span.stop for span in plan.spans), server


def test_a_request_that_fails_on_two_servers_is_the_request_s_fault() -> None:
    """The first server is lost for it, the second is not."""
    plan = Distribution(spans=(ServerSpan(server=0, start=0, stop=4),), quotas=(2, 2, 2))
    lost = []

    def lose(server: int, error: ProjectError) -> Sequence[int]:
        lost.append(server)
        return [0 if i in lost else 2 for i in range(3)]

    dispatcher: Dispatcher[int] = Dispatcher(
        plan,
        send=Servers(lambda server, request: 1, poison=1),
        on_answer=lambda request, result: None,
        on_split=lambda requests, error: None,
        lose=lose,
    )
    with pytest.raises(RolloutError):
        asyncio.run(dispatcher.run())
    assert len(lost) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_calls_that_were_given_up_have_ended_when_the_run_ends(lost: bool) -> None:
    """Whoever closes the clients then cuts no call off."""
    one_call_each = tuple(ServerSpan(server=0, start=i, stop=i + 1) for i in range(2))
    ended: list[str] = []

    async def send(server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
        if server == 0 and batch.start == 0:
            await asyncio.sleep(0)  # lets the other call begin
            raise ServerUnreachableError("server 0 is gone") if lost else MediaError("no image")
        if server == 0:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                ended.append("call")
        for request in range(batch.start, batch.stop):
            answered(request, server)

    dispatcher: Dispatcher[int] = Dispatcher(
        Distribution(spans=one_call_each, quotas=(2, 2)),
        send=send,
        on_answer=lambda request, server: None,
        on_split=lambda requests, error: None,
        lose=lambda server, error: (0, 2),
    )

    async def run_and_note() -> None:
        try:
            await dispatcher.run()
        finally:
            ended.append("run")

    with nullcontext() if lost else pytest.raises(MediaError):
        asyncio.run(run_and_note())
    assert ended == ["call", "run"]


@pytest.mark.parametrize("death", [ServerUnreachableError("gone"), UnauthorizedError("it has another token now")])
def test_what_is_wrong_with_a_server_is_not_wrong_with_its_requests(death: ProjectError) -> None:
    """D15: the others take them."""
    servers, answered = MortalServers({0: 2}), list[int]()
    servers.death = death
    dispatcher: Dispatcher[int] = Dispatcher(
        Distribution(
            spans=(ServerSpan(server=0, start=0, stop=8), ServerSpan(server=1, start=8, stop=16)), quotas=(4, 4)
        ),
        send=servers,
        on_answer=lambda request, _: answered.append(request),
        on_split=lambda *_: None,
        lose=lambda server, error: (0, 4),
    )
    asyncio.run(dispatcher.run())
    assert sorted(answered) == list(range(16))


def test_an_answer_that_comes_after_its_server_was_lost_is_dropped() -> None:
    """A cancelled call may still give an answer that had arrived. Its request is another server's by then."""
    one_call_each = tuple(ServerSpan(server=0, start=i, stop=i + 1) for i in range(2))
    answers: list[tuple[int, int]] = []

    async def send(server: int, batch: Batch, answered: Callable[[int, int], None]) -> None:
        if server == 0 and batch.start == 0:
            await asyncio.sleep(0)  # lets the other call begin
            raise ServerUnreachableError("server 0 is gone")
        if server == 0:
            try:
                await asyncio.Event().wait()
            finally:
                answered(1, server)
        for request in range(batch.start, batch.stop):
            answered(request, server)

    dispatcher: Dispatcher[int] = Dispatcher(
        Distribution(spans=one_call_each, quotas=(2, 2)),
        send=send,
        on_answer=lambda request, server: answers.append((request, server)),
        on_split=lambda requests, error: None,
        lose=lambda server, error: (0, 2),
    )
    asyncio.run(dispatcher.run())
    assert sorted(answers) == [(0, 1), (1, 1)]


def test_an_answer_costs_little_with_hundreds_of_servers() -> None:
    """It once compared every server with every other one after each answer: 45 ms of CPU each time with 512 of them."""
    number = 512
    spans = tuple(ServerSpan(server=i, start=i, stop=i + 1) for i in range(64))
    begin = time.process_time()
    answered, _ = run(Distribution(spans=spans, quotas=(64,) * number), Servers(lambda _, request: 1 + request))
    assert sorted(answered) == list(range(64))
    assert time.process_time() - begin < 1.0
