"""A server's queue: cap, refill, order of starts, split-and-retry (R21, R30), on plain coroutines."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.rollout.distribution import Batch, ServerQueue, ServerSpan, cut
from shared.errors import DeadlineError, MediaError, ProjectError, RolloutError, ServerUnreachableError


class Sender:
    """Answers a batch with its indices after `delays`; fails batches while `fails(batch)` says so."""

    def __init__(self, *, error: ProjectError | None = None, poison: int = -1, times: int = 10**9) -> None:
        self.error, self.poison, self.times = error or RolloutError("broken"), poison, times
        self.in_flight = self.peak = 0
        self.started: list[tuple[int, int]] = []
        self.cancelled = 0

    async def __call__(self, batch: Batch) -> list[int]:
        self.started.append((batch.start, batch.stop))
        self.in_flight += len(batch)
        self.peak = max(self.peak, self.in_flight)
        try:
            # every other batch is slow, so that answers overtake each other
            for _ in range(1 + 3 * (len(self.started) % 2)):
                await asyncio.sleep(0)
            if batch.start <= self.poison < batch.stop and self.times:
                self.times -= 1
                raise self.error
            return list(range(batch.start, batch.stop))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= len(batch)


def run(spans: list[ServerSpan], cap: int, sender: Sender) -> tuple[dict[int, int], list[Batch]]:
    splits: list[Batch] = []
    queue = ServerQueue(spans, cap, send=sender, on_split=lambda batch, error: splits.append(batch))
    return asyncio.run(queue.run()), splits


SPANS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=2).map(
    lambda pairs: [
        ServerSpan(server=0, start=start, stop=start + length)
        for start, length in zip(
            [pairs[0][1], pairs[0][1] + pairs[0][0] + 7], [length for length, _ in pairs], strict=False
        )
    ]
)


@settings(deadline=None)
@given(SPANS, st.integers(1, 12), st.booleans())
def test_every_request_is_answered_once_within_the_cap(spans: list[ServerSpan], cap: int, fail_once: bool) -> None:
    """R21: never more than the cap in flight, also while halves are sent again; all answered, in place."""
    sender = Sender(poison=spans[0].start, times=int(fail_once))
    results, splits = run(spans, cap, sender)
    wanted = [i for span in spans for i in range(span.start, span.stop)]
    assert sorted(results) == wanted
    assert all(results[i] == i for i in wanted)
    assert sender.peak <= cap
    assert len(splits) == fail_once


@given(SPANS, st.integers(1, 12))
def test_batches_are_cut_in_order_and_fit_the_cap(spans: list[ServerSpan], cap: int) -> None:
    batches = cut(spans, cap)
    assert [i for b in batches for i in range(b.start, b.stop)] == [i for s in spans for i in range(s.start, s.stop)]
    assert all(0 < len(batch) <= cap for batch in batches)
    if sum(len(span) for span in spans) <= cap:
        assert len(batches) == len(spans)


def test_refills_before_the_slowest_call_is_back() -> None:
    """More requests than the cap: calls of a quarter of it, the next one as soon as it fits."""
    sender = Sender()
    run([ServerSpan(server=0, start=0, stop=16)], 8, sender)
    assert sender.started == [(i, i + 2) for i in range(0, 16, 2)]
    assert sender.peak == 8


def test_a_failed_batch_is_halved_until_the_bad_request_is_alone() -> None:
    """R30: 8, then 4 and 4, ...; the request that fails alone after its batch failed ends the queue."""
    sender = Sender(poison=5)
    with pytest.raises(RolloutError, match="broken"):
        run([ServerSpan(server=0, start=0, stop=8)], 8, sender)
    assert [s for s in sender.started if s[0] <= 5 < s[1]] == [(0, 8), (4, 8), (4, 6), (5, 6)]


def test_a_single_request_is_sent_twice_at_most() -> None:
    sender = Sender(poison=0, error=DeadlineError("slow"))
    with pytest.raises(DeadlineError):
        run([ServerSpan(server=0, start=0, stop=1)], 4, sender)
    assert sender.started == [(0, 1), (0, 1)]


@pytest.mark.parametrize("error", [MediaError("no such image"), ServerUnreachableError("gone")])
def test_what_repeating_cannot_mend_is_not_repeated(error: ProjectError) -> None:
    """R30: a wrong request or a missing server ends the call at once, and what is in flight is cancelled."""
    sender = Sender(poison=1, error=error)
    with pytest.raises(type(error)):
        run([ServerSpan(server=0, start=0, stop=16)], 4, sender)
    assert sender.started.count((1, 2)) == 1
    assert sender.in_flight == 0
