"""How a micro-step's segments become the rows that it learns (D6).

`rollout_matching_sft` with packing: one row per micro-step, from a carry buffer. Otherwise all segments of the
micro-step are learned in it: packed to completion, or one row each without packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from learner.packing import PackingBuffer, check_length, pack_all
from learner.records import PackedRow, Segment


class RowMaker(Protocol):
    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        """The rows to learn now. Raises DataError for a segment that is longer than a row."""
        ...

    def carried(self) -> list[str]:
        """Sample ids of segments that wait for a later micro-step, oldest first."""
        ...


class CarriedRows:
    """One row per micro-step; what does not fit is carried to the next ones."""

    def __init__(self, buffer: PackingBuffer) -> None:
        self._buffer = buffer

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        self._buffer.add(segments)
        return [self._buffer.next_row()]

    def carried(self) -> list[str]:
        return self._buffer.sample_ids()


class CompleteRows:
    """All segments now, packed into as few rows as they need."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        return pack_all(segments, self._capacity)

    def carried(self) -> list[str]:
        return []


class SingleRows:
    """All segments now, each in a row of its own (`training.packing: false`)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        for segment in segments:
            check_length(segment, self._capacity)
        return [PackedRow(segments=(segment,), capacity=self._capacity) for segment in segments]

    def carried(self) -> list[str]:
        return []
