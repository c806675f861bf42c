"""D9, R31, R32, R34, R36: a step's rows while its rollouts arrive: which there are, when, and what ends them."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.records import PackedRow, Segment
from learner.steps import in_step
from learner.steps.in_step import StepRollouts
from learner.steps.packing import ArrivingRows, fifo, pack_lengths
from learner.steps.segments import SegmentStream
from shared.errors import DataError, DeadlineError, RolloutError
from tests.waits import wait_until

CAPACITY = 20
DEADLINE_S = 60.0
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=30)


def segment(length: int, place: int) -> Segment:
    zeros = np.zeros(length, dtype=np.int64)
    return Segment(
        sample_id=f"s{place}",
        input_ids=zeros,
        labels=zeros,
        loss_weights=zeros.astype(np.float32),
        prompt_length=1,
        ver=1,
    )


def order_of_ends(seconds: Sequence[float], num_slots: int) -> list[int]:
    """Return the order in which requests end on a server that decodes `num_slots` at once and is refilled at once."""
    running: list[tuple[float, int]] = []
    ended: list[int] = []
    now = 0.0
    for place, duration in enumerate(seconds):
        if len(running) == num_slots:
            now, first = heapq.heappop(running)
            ended.append(first)
        heapq.heappush(running, (now + duration, place))
    return ended + [place for _, place in sorted(running)]


def rows_of(lengths: Sequence[int], order: Sequence[int], pulls: Callable[[], bool], **how: Any) -> list[list[int]]:
    """Return the places of the segments in each row. `pulls()`: whether the learner asks for rows after this
    arrival."""
    rows = ArrivingRows(CAPACITY, number=len(lengths), **how)
    taken: list[PackedRow] = []
    for place in order:
        rows.add(place, segment(lengths[place], place))
        while pulls() and (row := rows.take()) is not None:
            taken.append(row)
    while (row := rows.take()) is not None:
        taken.append(row)
    assert rows.complete
    assert not rows.closed
    return [[int(one.sample_id[1:]) for one in row.segments] for row in taken]


# ---- the rows ------------------------------------------------------------------------------------------------------


@given(LENGTHS, st.randoms(use_true_random=False), st.sampled_from([1, 2, 8]), st.booleans())
def test_every_segment_is_in_one_row_and_rows_are_never_more_than_fifos(
    lengths: list[int], chance: random.Random, decode_batch_size: int, eager: bool
) -> None:
    """R34, R36: whatever the servers decode at once, in whatever order rollouts end, whenever the learner asks: the
    same segments, no row too long, the oldest always in the next row, and at most FIFO's rows of the same order."""
    order = order_of_ends([chance.random() for _ in lengths], decode_batch_size)
    rows = rows_of(lengths, order, lambda: eager or chance.random() < 0.3)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= CAPACITY for row in rows)
    assert len(rows) <= len(fifo([lengths[place] for place in order], CAPACITY))
    left = list(order)
    for row in rows:
        assert left[0] in row, "the oldest segment waits no longer"
        left = [place for place in left if place not in row]


@given(st.permutations(range(8)), st.sampled_from([1, 2, 8]))
def test_what_fits_one_row_is_one_row(durations: list[int], decode_batch_size: int) -> None:
    """R31: the number of rows follows from the step, not from how many calls made it."""
    order = order_of_ends([float(one) for one in durations], decode_batch_size)
    assert [sorted(row) for row in rows_of([2] * 8, order, lambda: True)] == [list(range(8))]


@given(LENGTHS, st.randoms(use_true_random=False), st.sampled_from([1, 2, 8]))
def test_in_request_order_the_rows_follow_from_the_segments_alone(
    lengths: list[int], chance: random.Random, decode_batch_size: int
) -> None:
    """D9, `training.deterministic`: FIFO's rows, whatever ends first and whenever the learner asks."""
    order = order_of_ends([chance.random() for _ in lengths], decode_batch_size)
    assert rows_of(lengths, order, lambda: chance.random() < 0.5, in_order=True) == fifo(lengths, CAPACITY)


@given(LENGTHS)
def test_a_learner_that_asks_late_gets_the_rows_of_the_whole_step(lengths: list[int]) -> None:
    order = range(len(lengths))
    assert len(rows_of(lengths, order, lambda: False)) == len(pack_lengths(lengths, CAPACITY))


def test_a_row_is_closed_when_it_is_full_or_the_next_segment_does_not_fit() -> None:
    """D9: and not before, so that the learner's haste makes no thin rows."""
    rows = ArrivingRows(CAPACITY, number=6)
    rows.add(0, segment(10, 0))
    assert rows.take() is None
    rows.add(1, segment(10, 1))  # exactly full
    full = rows.take()
    assert full is not None
    assert full.num_tokens == CAPACITY
    rows.add(2, segment(12, 2))
    assert not rows.closed
    rows.add(3, segment(9, 3))  # does not fit
    rows.add(4, segment(8, 4))  # fits behind the oldest, though it came later
    closed = rows.take()
    assert closed is not None
    assert [one.sample_id for one in closed.segments] == ["s2", "s4"]
    assert rows.take() is None
    rows.add(5, segment(1, 5))
    last = rows.take()
    assert last is not None
    assert [one.sample_id for one in last.segments] == ["s3", "s5"]
    assert rows.take() is None


def test_a_segment_longer_than_a_row_is_refused_as_it_arrives() -> None:
    with pytest.raises(DataError, match="s7 does not fit"):
        ArrivingRows(CAPACITY, number=8).add(7, segment(21, 7))


# ---- the thread ----------------------------------------------------------------------------------------------------


class Stream(SegmentStream):
    """Segments that are handed on when the test says so; ends when it is closed."""

    def __init__(self, lengths: Sequence[int], *, error: Exception | None = None) -> None:
        self._lengths, self._error = lengths, error
        self._ready = threading.Semaphore(0)
        self.closed = threading.Event()

    def release(self, number: int) -> None:
        self._ready.release(number)

    def __iter__(self) -> Iterator[tuple[int, Segment]]:
        for place, length in enumerate(self._lengths):
            while not self._ready.acquire(timeout=0.01):
                if self.closed.is_set():
                    return
            yield place, segment(length, place)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.closed.set()


def step(stream: Stream, number: int, check: Callable[[int, Segment], None] = lambda *_: None) -> StepRollouts:
    return StepRollouts(stream, ArrivingRows(CAPACITY, number=number), check=check)


def test_the_first_row_is_learned_while_the_others_roll_out() -> None:
    stream = Stream([10] * 6)
    with step(stream, 6) as rollouts:
        stream.release(2)
        first = rollouts.next_row(DEADLINE_S)
        assert first is not None
        assert [one.sample_id for one in first.segments] == ["s0", "s1"]
        stream.release(4)
        assert [row is not None for row in (rollouts.next_row(DEADLINE_S) for _ in range(3))] == [True, True, False]
    assert rollouts.seconds > 0.0


def test_rollouts_go_on_while_nobody_takes_a_row() -> None:
    """No server waits for the learner: all segments of the step may wait here."""
    stream = Stream([5] * 40)
    stream.release(40)
    rows = ArrivingRows(CAPACITY, number=40)
    with StepRollouts(stream, rows, check=lambda *_: None) as rollouts:
        wait_until(lambda: rows.complete)
        assert len(list(iter(lambda: rollouts.next_row(DEADLINE_S), None))) == 10


@pytest.mark.parametrize("error", [RolloutError("a rollout broke"), ValueError("a bug")])
def test_the_first_error_is_raised_with_its_type(error: Exception) -> None:
    stream = Stream([10, 10], error=error)
    stream.release(2)
    with pytest.raises(type(error), match=str(error)), step(stream, 3) as rollouts:
        list(iter(lambda: rollouts.next_row(DEADLINE_S), None))


def test_an_error_ends_a_wait_at_once() -> None:
    breaks = threading.Event()

    class Breaking(Stream):
        def __iter__(self) -> Iterator[tuple[int, Segment]]:
            assert breaks.wait(DEADLINE_S)
            raise RolloutError("a rollout broke")
            yield

    stream, began = Breaking([]), time.monotonic()
    threading.Timer(0.2, breaks.set).start()
    with pytest.raises(RolloutError, match="broke"), step(stream, 3) as rollouts:
        rollouts.next_row(DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 4


def test_a_wrong_segment_ends_the_step() -> None:
    def check(place: int, _: Segment) -> None:
        raise RolloutError("a segment is not the one that was asked for")

    stream = Stream([10, 10])
    stream.release(2)
    with pytest.raises(RolloutError, match="not the one"), step(stream, 2, check) as rollouts:
        rollouts.next_row(DEADLINE_S)


def test_rollouts_that_end_early_are_reported() -> None:
    """R12: no sample is skipped in silence."""
    stream = Stream([10])
    stream.release(1)
    with pytest.raises(RolloutError, match="ended early"), step(stream, 2) as rollouts:
        rollouts.next_row(DEADLINE_S)


def test_a_wait_for_a_row_has_a_deadline() -> None:
    stream = Stream([10, 10])
    stream.release(1)
    with pytest.raises(DeadlineError, match="collective_timeout_s") as caught, step(stream, 2) as rollouts:
        rollouts.next_row(0.1)
    assert "1 segments" in caught.value.found
    assert stream.closed.is_set()


def test_leaving_gives_up_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded in time, and never in the way of the first error."""
    stream = Stream([10] * 4)
    with pytest.raises(KeyError), step(stream, 4) as rollouts:
        raise KeyError("learning broke")
    assert not rollouts._thread.is_alive()

    class Deaf(Stream):
        def close(self) -> None: ...

    monkeypatch.setattr(in_step, "CLOSE_S", 0.1)
    deaf = Deaf([10] * 4)
    with pytest.raises(KeyError), step(deaf, 4) as rollouts:
        raise KeyError("learning broke")
    other = Deaf([10] * 4)
    with pytest.raises(DeadlineError, match="to end"), step(other, 4):
        pass
    for left in (deaf, other):
        left.closed.set()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=12), st.integers(0, 10**6))
def test_threads_change_nothing_about_what_is_learned(lengths: list[int], salt: int) -> None:
    stream = Stream(lengths)
    chance = random.Random(salt)

    def release() -> None:
        for _ in lengths:
            time.sleep(chance.random() * 0.002)
            stream.release(1)

    releasing = threading.Thread(target=release)
    releasing.start()
    with step(stream, len(lengths)) as rollouts:
        rows = list(iter(lambda: rollouts.next_row(DEADLINE_S), None))
    releasing.join()
    found = [one.sample_id for row in rows for one in row.segments]
    assert sorted(found) == sorted(f"s{place}" for place in range(len(lengths)))
    assert len(rows) <= len(fifo(lengths, CAPACITY))
