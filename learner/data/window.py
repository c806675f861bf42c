"""`WindowRepeater`: each accumulation window `m_steps` times, so that rollouts can be reused without a sample skipped.

In: a rank's `Batches`. Out: the same micro-batches, an accumulation window of them at a time, `m_steps` times over,
each marked with its `WindowStep`. A window of fewer than `gradient_accumulation_steps` micro-batches, which an epoch
may end with, is given once (R18). Read by the trainer, and by `learner.rollout_buffer`, which keeps the window's rows.

Invariants: over ranks, an epoch hands out each sample `m_steps` times, those of its short last window once, also across
a resume in the middle of a window. State counts whole passes: a pass that was begun and not ended comes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from learner.data.batches import Batches, MicroBatch, Upcoming, WindowStep


def steps_per_epoch(per_epoch: int, *, gradient_accumulation_steps: int, m_steps: int) -> int:
    """Optimizer steps that learn an epoch of `per_epoch` micro-batches."""
    whole_windows, rest = divmod(per_epoch, gradient_accumulation_steps)
    return whole_windows * m_steps + (rest > 0)


class WindowRepeater(Iterator[MicroBatch]):
    """Stands before a rank's `Batches`, with the same state and iterator, and keeps one window of it in memory."""

    def __init__(self, batches: Batches, *, gradient_accumulation_steps: int, m_steps: int) -> None:
        assert gradient_accumulation_steps > 0
        assert m_steps > 0
        self._batches = batches
        self._window_size, self._m_steps = gradient_accumulation_steps, m_steps
        self._next = WindowStep(0, 0)
        self._begin_window()

    @property
    def next_step(self) -> WindowStep:
        """Where the next micro-batch belongs."""
        return self._next

    def __next__(self) -> MicroBatch:
        """The next micro-batch, new or again. Raises DataError where a sample can't be encoded."""
        if self._taken == len(self._kept):  # only in a window's first pass
            self._kept.append(next(self._batches))
        batch = replace(self._kept[self._taken], window_step=self._next)
        self._taken += 1
        if self._taken == self._window_size or batch.ends_epoch:
            self._end_pass(is_whole=self._taken == self._window_size)
        return batch

    def upcoming(self, number: int) -> list[Upcoming]:
        """See `Batches`, at the beginning of a pass: the window's micro-batches."""
        assert self._taken == 0, "in the middle of a pass"
        if self._kept:
            return [Upcoming(samples=batch.samples, first_req_idx=batch.first_req_idx) for batch in self._kept]
        return self._batches.upcoming(number)

    def state(self) -> dict[str, Any]:
        """The data's own state at the window's beginning, and how many passes over the window are done; as JSON."""
        return {**self._start, **self._next._asdict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the passes that the window has left, at least one of them, whatever `m_steps` was.

        Raises CheckpointError where the data is another.
        """
        self._batches.restore(state)
        m_step = min(int(state.get("m_step", 0)), self._m_steps - 1)
        self._next = WindowStep(int(state.get("window", 0)), m_step)
        self._begin_window()

    def _begin_window(self) -> None:
        self._start = self._batches.state()
        self._kept: list[MicroBatch] = []
        self._taken = 0  # of the present pass

    def _end_pass(self, *, is_whole: bool) -> None:
        window, m_step = self._next
        self._taken = 0
        if is_whole and m_step + 1 < self._m_steps:
            self._next = WindowStep(window, m_step + 1)
        else:
            self._next = WindowStep(window + 1, 0)
            self._begin_window()
