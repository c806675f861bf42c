"""Packs segments into rows, without padding (R36). Pure and deterministic: equal inputs in equal order give equal rows.

In: segments of at most `capacity` tokens (`packing_length`, from `global_max_length`), which are never cut. Out:
`PackedRow`s. Invariants: every segment is in exactly one row, or waits for a later row. No row exceeds the capacity.
The segments of a row are in order of arrival.

There are four ways to make rows of segments (D6, D9):
- `ArrivingRows` packs a step's segments while they arrive, in at most as many rows as FIFO.
- `CompleteRows` packs all segments of a micro-step by best-fit decreasing, in at most as many rows as FIFO.
- `CarriedRows` (`rollout_matching_sft`) makes one row and carries the other segments to later micro-steps. The row has
  the oldest segment and the segments that fill it best (exact subset sum). The row of `CarriedRows` is at least as full
  as FIFO's row. Each row takes the oldest segment, so with N carried segments no segment waits for more than N rows.
- `SingleRows` gives each segment a row of its own (`training.packing: false`).

FIFO is the baseline: it fills rows in order of arrival, and closes a row at the first segment that does not fit.

With `share_prompts` (`grpo`, R47) units are packed instead of segments. A unit is several segments with the same
prompt, and holds the prompt once. A unit that is longer than a row is cut into several units, each with the prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from learner.records import PackedRow, Segment, group_tokens
from shared.errors import ConfigError, DataError


def check_length(segment: Segment, capacity: int) -> None:
    """Raise DataError if `segment` is longer than a row."""
    if len(segment) > capacity:
        raise DataError(
            f"sample {segment.sample_id} does not fit a packed row",
            found=f"a segment of {len(segment)} tokens ({segment.prompt_length} of them prompt)",
            wanted=f"at most {capacity}",
            remedy="raise global_max_length (segments are never cut), or lower max_new_tokens or the image size",
        )


def pack_all(segments: Sequence[Segment], capacity: int, *, share_prompts: bool = False) -> list[PackedRow]:
    """Pack all of `segments`, by best-fit decreasing or FIFO, whichever needs fewer rows. Rows are in order of their
    oldest segment.

    Raises DataError if a segment is longer than `capacity`.
    """
    for segment in segments:
        check_length(segment, capacity)
    units = prompt_units(segments, capacity) if share_prompts else [(segment,) for segment in segments]
    rows = pack_lengths([group_tokens(unit) for unit in units], capacity)
    return [_row([units[i] for i in row], capacity, share_prompts) for row in rows]


def prompt_units(segments: Sequence[Segment], capacity: int) -> list[tuple[Segment, ...]]:
    """Return units: segments with the same prompt, in order of arrival, at most `capacity` tokens per unit. No segment
    may be longer than `capacity`."""
    units: list[list[Segment]] = []
    newest: dict[tuple[object, ...], list[Segment]] = {}
    for segment in segments:
        key = segment.prompt_key
        # Only the newest unit of a prompt is filled: an older one had no room for an earlier segment.
        unit = newest.get(key)
        if unit is not None and group_tokens([*unit, segment]) <= capacity:
            unit.append(segment)
            continue
        newest[key] = [segment]
        units.append(newest[key])
    return [tuple(unit) for unit in units]


def _row(units: Sequence[Sequence[Segment]], capacity: int, share_prompts: bool) -> PackedRow:
    segments = tuple(segment for unit in units for segment in unit)
    return PackedRow(segments=segments, capacity=capacity, share_prompts=share_prompts)


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows as lists of indices into `lengths`, by best-fit decreasing or FIFO, whichever needs fewer rows. Each
    length is at most `capacity`."""
    return min(_best_fit_decreasing(lengths, capacity), fifo(lengths, capacity), key=len)


def fifo(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows as lists of indices into `lengths`. Rows are filled in order of arrival."""
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
    """Return rows as lists of indices into `lengths`. Lengths are packed from the longest to the shortest, each into
    the fullest row that has room for it (Johnson 1973: at most 11/9 of the fewest possible rows + 1)."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, index of the row), ascending.
    # Segments of equal length keep their order of arrival, so that equal inputs give equal rows.
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


def fullest_with_first(lengths: Sequence[int], capacity: int, num_first: int = 1) -> list[int]:
    """Return the indices of the lengths that fill a row best: the first `num_first` lengths, and the subset of the
    others that brings the sum closest to `capacity` without exceeding it.

    The result is exact: each reachable sum is a bit of one integer, so an item costs one shift. If several choices have
    the same sum, the choice with earlier items is returned, so that old segments are learned first.
    """
    room = capacity - sum(lengths[:num_first])
    # Bits of sums that do not fit the row are dropped, so the integers stay short.
    mask = (1 << (room + 1)) - 1
    reachable = [1]  # bit s of entry i is 1 if some of the first i items after `num_first` have the sum s
    for length in lengths[num_first:]:
        reachable.append((reachable[-1] | (reachable[-1] << length)) & mask)
    # The highest bit that is set is the largest sum that fits.
    total = reachable[-1].bit_length() - 1
    chosen = []
    for index in range(len(lengths) - 1, num_first - 1, -1):
        if not reachable[index - num_first] >> total & 1:
            chosen.append(index)
            total -= lengths[index]
    return [*range(num_first), *reversed(chosen)]


class ArrivingRows:
    """Packs one step's `number` segments while they arrive. A segment's `place` is its index in the order of requests.

    A row is closed as soon as FIFO would close it, or when the last segment has arrived. The row has FIFO's segments,
    and the subset of the other arrived segments that fills it best. FIFO would put these other segments into later
    rows, so there are never more rows than with FIFO. The segments that remain when the last one arrives are packed
    together. `in_order`: segments are taken in the order of requests, not of arrival, so that equal segments give equal
    rows.
    """

    def __init__(self, capacity: int, *, number: int, in_order: bool = False, share_prompts: bool = False) -> None:
        self._capacity, self._number, self._in_order = capacity, number, in_order
        self._share_prompts = share_prompts
        self._early: dict[int, Segment] = {}  # with `in_order`: segments that wait for the segment `_next`, by place
        self._next = 0
        self._waiting: list[Segment] = []
        self._last: deque[PackedRow] = deque()  # rows of the segments that remained when the last one arrived
        self.num_arrived = 0

    @property
    def complete(self) -> bool:
        """True if all segments have been added."""
        return self.num_arrived == self._number

    def add(self, place: int, segment: Segment) -> None:
        """Add the segment of `place`, which has arrived. Raises DataError if it is longer than a row."""
        check_length(segment, self._capacity)
        self._early[place if self._in_order else self.num_arrived] = segment
        self.num_arrived += 1
        while self._next in self._early:
            self._waiting.append(self._early.pop(self._next))
            self._next += 1

    @property
    def closed(self) -> bool:
        """True if `take` would return a row now."""
        if self.complete:
            return bool(self._last or self._waiting)
        # If the segments have at least `_capacity` tokens, FIFO's first row is full, or the next segment does not fit
        # it. So the content of the row is known.
        return sum(map(group_tokens, self._units())) >= self._capacity

    def take(self) -> PackedRow | None:
        """Return the next closed row, oldest first. Return None while no row is closed, and after the last row."""
        if not self.closed:
            return None
        if self.complete and not self._in_order:
            if not self._last:
                rows = pack_all(self._waiting, self._capacity, share_prompts=self._share_prompts)
                self._last, self._waiting = deque(rows), []
            return self._last.popleft()
        units = self._units()
        lengths = [group_tokens(unit) for unit in units]
        # FIFO's segments are always taken, so the oldest segment is always in the next row.
        chosen = fifo(lengths, self._capacity)[0]
        if not self._in_order:
            chosen = fullest_with_first(lengths, self._capacity, len(chosen))
        taken = set(chosen)
        self._waiting = [segment for i, unit in enumerate(units) if i not in taken for segment in unit]
        return _row([units[i] for i in chosen], self._capacity, self._share_prompts)

    def _units(self) -> list[tuple[Segment, ...]]:
        if self._share_prompts:
            return prompt_units(self._waiting, self._capacity)
        return [(segment,) for segment in self._waiting]


class RowMaker(Protocol):
    """Makes packed rows of segments. The subclasses differ in which segments share a row."""

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        """Return the rows to learn in this micro-step. Raises DataError for a segment that is longer than a row."""
        ...

    def carried(self) -> list[str]:
        """Sample ids of segments that wait for a later micro-step, oldest first."""
        return []

    def drain(self) -> list[PackedRow]:
        """Return rows of all segments that wait. No segment waits afterwards."""
        return []


class CompleteRows(RowMaker):
    """A row maker that packs all segments at once, in as few rows as they need."""

    def __init__(self, capacity: int, *, share_prompts: bool = False) -> None:
        self._capacity, self._share_prompts = capacity, share_prompts

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        return pack_all(segments, self._capacity, share_prompts=self._share_prompts)


class SingleRows(RowMaker):
    """A row maker that gives each segment a row of its own at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        for segment in segments:
            check_length(segment, self._capacity)
        return [PackedRow(segments=(segment,), capacity=self._capacity) for segment in segments]


class CarriedRows(RowMaker):
    """A row maker that makes one row at a time, an empty one if no segment waits. At most `max_segments` segments
    (`training.packing_buffer`) are carried."""

    def __init__(self, capacity: int, *, max_segments: int) -> None:
        self._capacity, self._max_segments = capacity, max_segments
        self._waiting: list[Segment] = []  # oldest first

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        """See `RowMaker`. Raises ConfigError, and takes no segment, if more than `max_segments` would be carried."""
        for segment in segments:
            check_length(segment, self._capacity)
        self._waiting.extend(segments)
        lengths = [len(segment) for segment in self._waiting]
        chosen = set(fullest_with_first(lengths, self._capacity) if lengths else ())
        num_left = len(lengths) - len(chosen)
        if num_left > self._max_segments:
            raise ConfigError(
                "more segments arrive than packed rows can take",
                found=f"{num_left} segments left over, training.packing_buffer: {self._max_segments}",
                wanted=f"at most training.packing_buffer of them; a row of {self._capacity} tokens took {len(chosen)}",
                remedy="lower per_device_train_batch_size, or raise global_max_length or training.packing_buffer",
            )
        row = tuple(segment for i, segment in enumerate(self._waiting) if i in chosen)
        self._waiting = [segment for i, segment in enumerate(self._waiting) if i not in chosen]
        return [PackedRow(segments=row, capacity=self._capacity)]

    def carried(self) -> list[str]:
        return [segment.sample_id for segment in self._waiting]

    def drain(self) -> list[PackedRow]:
        rows, self._waiting = pack_all(self._waiting, self._capacity), []
        return rows
