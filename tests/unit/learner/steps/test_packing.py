"""Post-rollout packing (R36): nothing lost, nothing cut, never worse than FIFO, deterministic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.records import Segment
from learner.steps.packing import CarriedRows, fifo, fullest_with_first, pack_all, pack_lengths
from shared.errors import ConfigError, DataError

CAPACITY = 20
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=30)


def segment(length: int, name: str = "s") -> Segment:
    zeros = np.zeros(length, dtype=np.int64)
    weights = np.zeros(length, dtype=np.float32)
    return Segment(sample_id=name, input_ids=zeros, labels=zeros, loss_weights=weights, prompt_length=1)


def fifo_take(lengths: list[int]) -> list[int]:
    """Return what FIFO puts into its first row."""
    return fifo(lengths, CAPACITY)[0]


@given(LENGTHS)
def test_every_segment_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack_lengths(lengths, CAPACITY)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= CAPACITY for row in rows)
    assert all(row == sorted(row) for row in rows)
    assert rows == sorted(rows)  # rows by their oldest segment
    assert len(rows) <= len(fifo(lengths, CAPACITY))
    assert pack_lengths(lengths, CAPACITY) == rows


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=7))
def test_rows_stay_near_the_optimum(lengths: list[int]) -> None:
    """Johnson 1973: best-fit decreasing needs at most 11/9 of the fewest rows, plus one."""

    def fewest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        first, rest = left[0], left[1:]
        options = (c for n in range(len(rest) + 1) for c in itertools.combinations(range(len(rest)), n))
        fitting = (c for c in options if first + sum(rest[i] for i in c) <= CAPACITY)
        return 1 + min(fewest(tuple(v for i, v in enumerate(rest) if i not in c)) for c in fitting)

    assert len(pack_lengths(lengths, CAPACITY)) <= fewest(tuple(lengths)) * 11 / 9 + 1


def test_best_fit_decreasing_saves_rows_where_fifo_wastes_them() -> None:
    assert pack_lengths([11, 12, 9, 8], CAPACITY) == [[0, 2], [1, 3]]
    assert len(fifo([11, 12, 9, 8], CAPACITY)) == 3


def test_fifo_is_taken_where_it_needs_fewer_rows() -> None:
    """Longest first is no optimum: it pairs 9 + 8 and is left with three rows."""
    lengths = [9, 6, 5, 8, 7, 5]
    assert fifo(lengths, CAPACITY) == [[0, 1, 2], [3, 4, 5]]
    assert len(pack_lengths(lengths, CAPACITY)) == 2


@given(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=9))
def test_row_with_the_oldest_is_as_full_as_any(lengths: list[int]) -> None:
    chosen = fullest_with_first(lengths, CAPACITY)
    total = sum(lengths[i] for i in chosen)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    subsets = (c for n in range(len(lengths)) for c in itertools.combinations(range(1, len(lengths)), n))
    sums = (lengths[0] + sum(lengths[i] for i in c) for c in subsets)
    assert total == max(s for s in sums if s <= CAPACITY)
    assert total >= sum(lengths[i] for i in fifo_take(lengths))


def test_of_equal_fills_the_older_segments_leave_first() -> None:
    assert fullest_with_first([10, 5, 5, 10, 5], CAPACITY) == [0, 1, 2]


@given(st.lists(st.lists(st.integers(1, CAPACITY), max_size=3), min_size=1, max_size=12))
def test_buffer_loses_nothing_and_takes_the_oldest_every_time(arrivals: list[list[int]]) -> None:
    def run() -> list[list[str]]:
        buffer = CarriedRows(CAPACITY, max_segments=99)
        waiting: list[Segment] = []
        rows, number = [], itertools.count()
        for lengths in arrivals:
            new = [segment(n, str(next(number))) for n in lengths]
            waiting += new
            (row,) = buffer.rows(new)
            assert bool(row.segments) == bool(waiting)
            if waiting:
                assert row.segments[0] is waiting[0]
                baseline = fifo_take([len(s) for s in waiting])
                assert row.num_tokens >= sum(len(waiting[i]) for i in baseline)
            assert row.num_tokens <= CAPACITY
            taken = {id(s) for s in row.segments}
            waiting = [s for s in waiting if id(s) not in taken]
            assert buffer.carried() == [s.sample_id for s in waiting]
            rows.append([s.sample_id for s in row.segments])
        rows += [[s.sample_id for s in row.segments] for row in buffer.drain()]
        assert buffer.carried() == []
        assert sorted(itertools.chain(*rows), key=int) == [str(i) for i in range(next(number))]
        assert all(row == sorted(row, key=int) for row in rows)
        return rows

    assert run() == run()


def test_oversized_segment_fails_at_insertion() -> None:
    """R36: the sample, its length, the cap and the key to raise are named; nothing of the batch is taken."""
    buffer = CarriedRows(CAPACITY, max_segments=9)
    for insert in (buffer.rows, lambda segments: pack_all(segments, CAPACITY)):
        with pytest.raises(DataError) as error:
            insert([segment(3), segment(21, "scene-4")])
        assert "scene-4" in error.value.what
        assert "21" in error.value.found
        assert "20" in error.value.wanted
        assert "global_max_length" in error.value.remedy
    assert buffer.carried() == []


def test_more_arrivals_than_rows_can_take_fail_before_the_buffer_outgrows_its_cap() -> None:
    """D6: `training.packing_buffer` bounds what is carried."""
    buffer = CarriedRows(CAPACITY, max_segments=2)
    (row,) = buffer.rows([segment(20), segment(19), segment(18)])
    assert row.num_tokens == 20
    with pytest.raises(ConfigError, match="packing_buffer") as error:
        buffer.rows([segment(20), segment(19)])
    assert "3 segments" in error.value.found


def test_empty_input_makes_no_rows_and_an_empty_buffer_an_empty_row() -> None:
    assert pack_all([], CAPACITY) == []
    (row,) = CarriedRows(CAPACITY, max_segments=2).rows([])
    assert row.segments == ()
    assert row.capacity == CAPACITY
