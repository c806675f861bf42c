"""R47: rows are filled by what is computed: a group's prompt counts once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.records import PackedRow, Segment, group_tokens
from learner.steps.packing import ArrivingRows, CompleteRows, fifo, pack_all, prompt_units

CAPACITY = 50
groups_of_lengths = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), max_size=6
)


def group(number: int, prompt: int, answers: list[int]) -> list[Segment]:
    return [one_segment(f"s{number}", prompt, answer) for answer in answers]


def one_segment(sample_id: str, prompt: int, answer: int) -> Segment:
    length = prompt + answer
    return Segment(
        sample_id=sample_id,
        input_ids=np.arange(length),
        labels=np.full(length, -100),
        loss_weights=np.zeros(length, np.float32),
        prompt_length=prompt,
    )


def segments_of(drawn: list[tuple[int, list[int]]]) -> list[Segment]:
    return [one for i, (prompt, answers) in enumerate(drawn) for one in group(i, prompt, answers)]


def computed(row: PackedRow) -> int:
    """Count token by token: each of a prompt once in a run of segments that share it."""
    tokens, last = 0, None
    for one in row.segments:
        tokens += len(one) - (one.prompt_length if one.sample_id == last else 0)
        last = one.sample_id
    return tokens


def check(rows: list[PackedRow], segments: list[Segment]) -> None:
    assert sorted(id(one) for row in rows for one in row.segments) == sorted(map(id, segments))
    for row in rows:
        assert row.num_tokens == computed(row) <= CAPACITY
        assert len(row.groups()) == len({one.sample_id for one in row.segments}), "a group is in one piece"


@given(drawn=groups_of_lengths)
@settings(deadline=None)
def test_every_segment_is_in_one_row_and_no_row_is_too_long(drawn: list[tuple[int, list[int]]]) -> None:
    segments = segments_of(drawn)
    rows = CompleteRows(CAPACITY, share_prompts=True).rows(segments)
    check(rows, segments)
    assert len(rows) <= len(fifo([group_tokens(unit) for unit in prompt_units(segments, CAPACITY)], CAPACITY))
    assert sum(row.num_tokens for row in rows) <= sum(row.num_tokens for row in pack_all(segments, CAPACITY))


@given(drawn=groups_of_lengths, in_order=st.booleans(), data=st.data())
@settings(deadline=None)
def test_segments_that_arrive(drawn: list[tuple[int, list[int]]], in_order: bool, data: st.DataObject) -> None:
    segments = segments_of(drawn)
    rows = ArrivingRows(CAPACITY, number=len(segments), in_order=in_order, share_prompts=True)
    taken: list[PackedRow] = []
    for place, one in enumerate(segments):
        rows.add(place, one)
        if data.draw(st.booleans()):
            while (row := rows.take()) is not None:
                taken.append(row)
    while (row := rows.take()) is not None:
        taken.append(row)
    assert sorted(id(one) for row in taken for one in row.segments) == sorted(map(id, segments))
    assert all(row.num_tokens == computed(row) <= CAPACITY for row in taken)


def test_a_whole_group_fills_a_row() -> None:
    """Eight answers of 5 to a prompt of 10: 50 tokens, not 120."""
    (row,) = pack_all(group(0, 10, [5] * 8), CAPACITY, share_prompts=True)
    assert (row.num_tokens, row.fill) == (50, 1.0)
    assert len(pack_all(group(0, 10, [5] * 8), CAPACITY)) == 3


def test_a_group_that_is_longer_than_a_row_is_cut() -> None:
    rows = pack_all(group(0, 10, [15] * 5), CAPACITY, share_prompts=True)
    assert sorted(len(row.segments) for row in rows) == [1, 2, 2]
    assert sorted(row.num_tokens for row in rows) == [25, 40, 40]
