"""Learns the rows of one accumulation window in several optimizer steps (R18).

The first step of a window is its E-step. An E-step makes, matches and packs rollouts like a run without this buffer,
and keeps the rows. The window's other steps are M-steps. An M-step learns the same rows in the same order, without
rollouts, syncs or packing. `WindowRepeater` hands out the window's micro-batches again in each M-step, so an M-step
takes no new samples.

Invariants: steps get copies of the kept rows, so no step changes the rows of the next step. The packing buffer changes
in E-steps only. An M-step raises an error if its micro-batch is not the micro-batch of the kept rows. The buffer is not
part of a checkpoint. A run resumed in the middle of a window begins with an E-step: it makes rollouts of all samples of
the window, and of the samples that earlier windows carried into it. Evaluations do not use this buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from learner.data.batches import MicroBatch, Upcoming, WindowRepeater
from learner.records import PackedRow, Segment, VisionInputs
from learner.steps.source import FreshSteps
from shared.errors import WindowMismatchError

Fingerprint = tuple[int, int, tuple[str, ...]]  # (epoch, micro-batch, sample ids) of a `MicroBatch`


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRows:
    """The rows of one micro-batch, made by the E-step, which rolls out the samples of a window."""

    fingerprint: Fingerprint
    rows: list[PackedRow]


class BufferedSteps(FreshSteps):
    """Steps that learn a window's rows several times. `repeater` hands out the micro-batches."""

    def __init__(self, repeater: WindowRepeater, *args: Any, **settings: Any) -> None:
        super().__init__(repeater, *args, **settings)
        self._repeater = repeater
        self._window: int | None = None  # number of the window whose rows are kept; None: no rows
        self._kept: list[KeptRows] = []
        self._due_before: list[str] = []  # ids of the samples that earlier windows carried into this one
        self._made_at = 0  # `global_step` at which the window's rollouts were made
        self._metrics: dict[str, float] = {}

    @property
    def _is_midway(self) -> bool:
        """True if the next step learns the kept rows."""
        return self._window == self._repeater.next_step.window

    def wants_sync(self, global_step: int) -> bool:
        return super().wants_sync(global_step) and not self._is_midway

    def metrics(self) -> Mapping[str, float]:
        """Return the window's number, the step's number in the window (from 0), and the number of updates since the
        window's rollouts were made (0 in an E-step)."""
        return self._metrics

    def restore(self, state: Mapping[str, Any]) -> None:
        # Kept rows are in no checkpoint, so a window that was interrupted begins again with its rollouts.
        self._window, self._kept = None, []
        super().restore(state)

    def _begin_window(self, window: Sequence[Upcoming]) -> None:
        """In an E-step, make the window's rollouts. In an M-step, which learns the same rollouts again, make no
        rollouts. Then set the metrics."""
        if not self._is_midway:
            self._due_before = super()._due_on_resume()
            self._window, self._made_at, self._kept = self._repeater.next_step.window, self._global_step, []
            super()._begin_window(window)
        self._metrics = {
            "rollout_buffer/window": float(self._repeater.next_step.window),
            "rollout_buffer/m_step": float(self._repeater.next_step.m_step),
            "rollout_buffer/rollout_age": float(self._global_step - self._made_at),  # age of the rollouts, in updates
        }

    def _rows(self, batch: MicroBatch, micro_step_idx: int) -> list[PackedRow]:
        """Return copies of the rows of `batch`. Raises WindowMismatchError if the kept rows are of another batch."""
        if self._global_step == self._made_at:
            rows = super()._rows(batch, micro_step_idx)
            self._kept.append(KeptRows(fingerprint=batch.fingerprint, rows=rows))
        self._check(batch, micro_step_idx)
        with self._clock.phase("pack"):
            # The rows are copied, because a step may change its rows, and the window's next step needs them unchanged.
            return [copy_row(row) for row in self._kept[micro_step_idx].rows]

    def _due_on_resume(self) -> list[str]:
        return self._due_before if self._is_midway else super()._due_on_resume()

    def _check(self, batch: MicroBatch, micro_step_idx: int) -> None:
        """Raise WindowMismatchError if the rows kept at `micro_step_idx` were not made of `batch`."""
        assert batch.window_step is not None, "the dataloader does not repeat windows"
        found = (batch.window_step.window, batch.fingerprint)
        kept = self._kept[micro_step_idx].fingerprint if micro_step_idx < len(self._kept) else None
        if found == (self._window, kept):
            return
        raise WindowMismatchError(
            f"micro-step {micro_step_idx} of a repeated window got another micro-batch than the rollouts were made of",
            found=f"window {found[0]}: {_words(batch.fingerprint)}",
            wanted=f"window {self._window}: {_words(kept) if kept else f'only {len(self._kept)} micro-batches'}",
            remedy="resume from the last checkpoint with rollout_buffer.enabled: false, and report it: the dataloader "
            "and the rollout buffer are out of step",
        )


def copy_row(row: PackedRow) -> PackedRow:
    """Return a copy of `row`. Only the arrays of `policy` are shared with `row`, because the first pass writes values
    into these arrays that all copies need."""
    return replace(row, segments=tuple(_copy_segment(segment) for segment in row.segments))


def _copy_segment(segment: Segment) -> Segment:
    vision = segment.vision
    if vision is not None:
        vision = VisionInputs(pixel_values=vision.pixel_values.clone(), image_grid_thw=vision.image_grid_thw.clone())
    return replace(
        segment,
        input_ids=segment.input_ids.copy(),
        labels=segment.labels.copy(),
        loss_weights=segment.loss_weights.copy(),
        vision=vision,
        stats=dict(segment.stats),
    )


def _words(fingerprint: Fingerprint) -> str:
    epoch, micro_batch, sample_ids = fingerprint
    return f"micro-batch {micro_batch} of epoch {epoch}, samples {list(sample_ids)}"
