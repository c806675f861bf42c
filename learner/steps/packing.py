"""Segments to packed rows, padding-free (R36). Pure and deterministic: equal inputs in equal order give equal rows.

In: segments, atomic, each of at most `capacity` tokens (`packing_length`, from `global_max_length`). Out:
`PackedRow`s. Invariants: every segment is in exactly one row; no row exceeds the capacity; inside a row segments
stand in order of arrival.

Two ways, one for each trainer (D6):
- `pack_all` packs a whole step to completion: best-fit decreasing, never more rows than FIFO makes.
- `PackingBuffer` gives one row per micro-step and carries the rest: the oldest segment and whatever fills its row best
  (exact subset sum), never below FIFO's fill. As the oldest always goes, nothing waits longer than the buffer is long.

FIFO, the baseline: rows filled in order of arrival, each closed by the first segment that does not fit.

How a micro-step's segments become the rows that it learns (D6).

`rollout_matching_sft` with packing: one row per micro-step, from a carry buffer. Otherwise all segments of the
micro-step are learned in it: packed to completion, or one row each without packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Protocol

from learner.records import PackedRow, Segment
from shared.errors import ConfigError, DataError


def check_length(segment: Segment, capacity: int) -> None:
    """Raise DataError where `segment` could not be in any row."""
    if len(segment) > capacity:
        raise DataError(
            f"sample {segment.sample_id} does not fit a packed row",
            found=f"a segment of {len(segment)} tokens ({segment.prompt_length} of them prompt)",
            wanted=f"at most {capacity}",
            remedy="raise global_max_length (segments are never cut), or lower max_new_tokens or the image size",
        )


def pack_all(segments: Sequence[Segment], capacity: int) -> list[PackedRow]:
    """All of `segments` in as few rows as best-fit decreasing or FIFO needs, rows in order of their oldest segment.

    Raises DataError where a segment is longer than `capacity`.
    """
    for segment in segments:
        check_length(segment, capacity)
    rows = pack_lengths([len(segment) for segment in segments], capacity)
    return [PackedRow(segments=tuple(segments[i] for i in row), capacity=capacity) for row in rows]


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` per row; each length is at most `capacity`. O(n log n) comparisons."""
    return min(_best_fit_decreasing(lengths, capacity), fifo(lengths, capacity), key=len)


def fifo(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The baseline: rows in order of arrival."""
    rows: list[list[int]] = []
    free = -1
    for index, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = capacity
        rows[-1].append(index)
        free -= length
    return rows


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest row that can take it (Johnson 1973: at most 11/9 of the optimum + 1)."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(free, (lengths[index], 0))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(free, (left - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def fullest_with_first(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices of the subset with the largest sum up to `capacity` among those that hold index 0.

    Exact: reachable sums are bits of one integer, so an item costs one shift. Of equal sums the one without the later
    items is taken, so that old segments leave first.
    """
    room = capacity - lengths[0]
    mask = (1 << (room + 1)) - 1
    reachable = [1]  # bit s of entry i: some of the first i items behind the oldest make the sum s
    for length in lengths[1:]:
        reachable.append((reachable[-1] | (reachable[-1] << length)) & mask)
    total = reachable[-1].bit_length() - 1
    chosen = []
    for index in range(len(lengths) - 1, 0, -1):
        if not reachable[index - 1] >> total & 1:
            chosen.append(index)
            total -= lengths[index]
    return [0, *reversed(chosen)]


class PackingBuffer:
    """A rank's carry buffer: segments go in as rollouts become targets, one row per micro-step comes out.

    It holds at most `max_segments` (`training.packing_buffer`) after a row was taken. Rows below `min_fill_ratio` are
    given all the same, since every micro-step needs its row, and are counted in `underfilled`.
    """

    def __init__(self, *, capacity: int, max_segments: int, min_fill_ratio: float) -> None:
        self.capacity = capacity
        self.max_segments = max_segments
        self.min_fill_ratio = min_fill_ratio
        self.underfilled = 0
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def sample_ids(self) -> list[str]:
        """The samples whose segments wait here, oldest first."""
        return [segment.sample_id for segment in self._segments]

    def add(self, segments: Sequence[Segment]) -> None:
        """Append `segments`, newest last, all or none. Raises DataError where one is longer than a row."""
        for segment in segments:
            check_length(segment, self.capacity)
        self._segments.extend(segments)

    def next_row(self) -> PackedRow:
        """The oldest segment and what fills its row best; an empty row where there is none.

        Raises ConfigError where more segments than allowed would have to be carried on.
        """
        if not self._segments:
            return PackedRow(segments=(), capacity=self.capacity)
        chosen = fullest_with_first([len(segment) for segment in self._segments], self.capacity)
        num_left = len(self._segments) - len(chosen)
        if num_left > self.max_segments:
            raise ConfigError(
                "more segments arrive than packed rows can take",
                found=f"{num_left} segments left over, training.packing_buffer: {self.max_segments}",
                wanted=f"at most training.packing_buffer of them; a row of {self.capacity} tokens took {len(chosen)}",
                remedy="lower per_device_train_batch_size, or raise global_max_length or training.packing_buffer",
            )
        row = PackedRow(segments=tuple(self._segments[i] for i in chosen), capacity=self.capacity)
        taken = set(chosen)
        self._segments = [segment for i, segment in enumerate(self._segments) if i not in taken]
        self.underfilled += row.fill < self.min_fill_ratio
        return row

    def drain(self) -> list[PackedRow]:
        """Everything that is left, packed; the buffer is empty afterwards (end of training)."""
        rows = pack_all(self._segments, self.capacity)
        self._segments = []
        return rows


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
