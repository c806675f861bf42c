"""Three ways to make rows (D6): each segment in one row, now or later, and no row above its capacity."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.journal.log import PhaseClock
from learner.records import PackedRow, Segment
from learner.steps.packing import CarriedRows, CompleteRows, RowMaker, SingleRows
from learner.steps.source import in_lockstep, padded
from shared.errors import DataError
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

CAPACITY = 20
MICRO_STEPS = st.lists(st.lists(st.integers(2, CAPACITY), max_size=4), min_size=1, max_size=8)


def carried_rows() -> CarriedRows:
    return CarriedRows(CAPACITY, max_segments=64)


MAKERS = {"carried": carried_rows, "complete": lambda: CompleteRows(CAPACITY), "single": lambda: SingleRows(CAPACITY)}


def segment(sample_id: str, length: int) -> Segment:
    ids = np.zeros(length, np.int64)
    weights = np.zeros(length, np.float32)
    return Segment(sample_id=sample_id, input_ids=ids, labels=ids, loss_weights=weights, prompt_length=1)


@pytest.mark.parametrize("kind", MAKERS)
@given(micro_steps=MICRO_STEPS)
def test_each_segment_is_in_one_row_or_waits(kind: str, micro_steps: list[list[int]]) -> None:
    """R12, R36."""
    maker: RowMaker = MAKERS[kind]()
    arrived: list[str] = []
    learned: list[str] = []
    for number, lengths in enumerate(micro_steps):
        segments = [segment(f"{number}.{i}", length) for i, length in enumerate(lengths)]
        rows = maker.rows(segments)
        arrived += [s.sample_id for s in segments]
        learned += [s.sample_id for row in rows for s in row.segments]
        assert all(row.num_tokens <= row.capacity == CAPACITY for row in rows)
        assert sorted(learned + maker.carried()) == sorted(arrived)
        if kind == "carried":
            assert len(rows) == 1
        else:
            assert maker.carried() == []
        if kind == "single":
            assert [len(row.segments) for row in rows] == [1] * len(segments)
    rest = maker.drain()
    assert all(0 < row.num_tokens <= CAPACITY for row in rest)
    assert sorted(learned + [s.sample_id for row in rest for s in row.segments]) == sorted(arrived)
    assert maker.carried() == maker.drain() == []


@pytest.mark.parametrize("kind", MAKERS)
def test_a_segment_longer_than_a_row_is_named_and_nothing_is_taken(kind: str) -> None:
    """R36: never split, never truncated."""
    maker: RowMaker = MAKERS[kind]()
    with pytest.raises(DataError, match="sample long does not fit"):
        maker.rows([segment("short", 3), segment("long", CAPACITY + 1)])
    assert maker.carried() == []


@pytest.mark.parametrize("evened", [padded, in_lockstep])
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=3))
@settings(deadline=None)
def test_ranks_run_as_many_rows(evened: Any, counts: list[int]) -> None:
    """D5, R24: each rank its own rows in their order, then empty ones; in lockstep, none runs ahead of the others by a
    row."""
    meeting, passes = Meeting(len(counts)), [0] * len(counts)

    def rank_main(rank: int) -> list[int]:
        ranks = ThreadRanks(rank=rank, world_size=len(counts), meeting=meeting)
        own = (PackedRow(segments=(segment(str(i), 2),), capacity=CAPACITY) for i in range(counts[rank]))
        seen = []
        for row in evened(own, ranks, CAPACITY, PhaseClock()):
            passes[rank] += 1
            assert evened is padded or max(passes) - min(passes) <= 1
            seen += [int(one.sample_id) for one in row.segments] or [-1]
        return seen

    with ThreadPoolExecutor(len(counts)) as pool:
        seen = list(pool.map(rank_main, range(len(counts))))
    most = max(counts)
    assert seen == [[*range(count), *[-1] * (most - count)] for count in counts]
