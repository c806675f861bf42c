"""The buffer by itself: what it keeps, what it hands out, and what it does not take (R18)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.data.batches import MicroBatch, WindowRepeater, WindowStep
from learner.records import PackedRow, Segment, VisionInputs
from learner.run.log import PhaseClock
from learner.steps.buffered import RolloutBuffer, copy_row
from shared.errors import WindowMismatchError
from tests.unit.learner.data.fakes import make_samples

SAMPLES = make_samples(12)


def segment(sample_id: str) -> Segment:
    return Segment(
        sample_id=sample_id,
        input_ids=np.arange(6),
        labels=np.arange(6),
        loss_weights=np.ones(6, np.float32),
        prompt_length=2,
        vision=VisionInputs(pixel_values=torch.ones(4, 3), image_grid_thw=torch.tensor([[1, 2, 2]])),
        stats={"matched": 1.0},
    )


def row(*sample_ids: str) -> PackedRow:
    return PackedRow(segments=tuple(segment(sample_id) for sample_id in sample_ids), capacity=32)


def numbers(rows: Sequence[PackedRow]) -> list[Any]:
    return [
        (s.sample_id, *map(np.ndarray.tolist, (s.input_ids, s.labels, s.loss_weights)), _pixels(s), dict(s.stats))
        for r in rows
        for s in r.segments
    ]


def _pixels(segment: Segment) -> tuple[Any, Any]:
    assert segment.vision is not None
    return segment.vision.pixel_values.tolist(), segment.vision.image_grid_thw.tolist()


def spoil(rows: Sequence[PackedRow]) -> None:
    """What a training stack may do to a batch that it was given."""
    for one in (s for r in rows for s in r.segments):
        for array in (one.input_ids, one.labels, one.loss_weights):
            array[:] = 77
        assert one.vision is not None
        one.vision.pixel_values.zero_()
        one.vision.image_grid_thw.zero_()
        cast(dict[str, float], one.stats).clear()


class Fresh:
    """Rows of a micro-batch's own samples; `made` counts them, `carry` is what waits."""

    channel, needs_rollouts = "B", True

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.carry: list[str] = []

    def rows(self, batch: MicroBatch, *, global_step: int, micro_step_idx: int, clock: PhaseClock) -> list[PackedRow]:
        self.made.append((global_step, micro_step_idx))
        self.carry = [f"carried after {batch.fingerprint[2]}"]
        return [row(*(sample.sample_id for sample in batch.samples))]

    def waiting(self) -> list[str]:
        return self.carry

    due_on_resume = waiting

    def restore(self, sample_ids: Sequence[str]) -> None:
        self.carry = list(sample_ids)

    def metrics(self) -> dict[str, float]:
        return {}


class Script:
    """A dataloader that hands out what it is told to: (window, m_step, first sample)."""

    def __init__(self, *steps: tuple[int, int, int]) -> None:
        self._batches = [
            MicroBatch(
                samples=tuple(SAMPLES[first : first + 2]),
                prompts=(),
                epoch=0,
                micro_batch=first // 2,
                first_req_idx=0,
                ends_epoch=False,
                window_step=WindowStep(window, m_step),
            )
            for window, m_step, first in steps
        ]

    def __iter__(self) -> Iterator[MicroBatch]:
        while self._batches:
            yield self._batches.pop(0)

    @property
    def next_step(self) -> WindowStep:
        step = self._batches[0].window_step if self._batches else WindowStep(99, 0)
        assert step is not None
        return step


def make(script: Script) -> tuple[RolloutBuffer, Fresh]:
    fresh = Fresh()
    return RolloutBuffer(cast(Any, fresh), cast(WindowRepeater, script)), fresh


def learn(buffer: RolloutBuffer, script: Script, *, gas: int = 2, first_step: int = 0) -> list[Any]:
    """Every row that the script's micro-batches give; each is spoilt as soon as it was read."""
    seen = []
    for i, batch in enumerate(script):
        step, micro_step_idx = divmod(i, gas)
        rows = buffer.rows(batch, global_step=first_step + step, micro_step_idx=micro_step_idx, clock=PhaseClock())
        seen += numbers(rows)
        spoil(rows)
    return seen


TWO_WINDOWS = ((0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 2), (1, 0, 4), (1, 0, 6), (1, 1, 4), (1, 1, 6))


def test_the_same_rows_in_the_same_order_whatever_became_of_their_copies() -> None:
    """R18: immutability. The E-step's own rows are copies, too."""
    script = Script(*TWO_WINDOWS)
    buffer, fresh = make(script)
    seen = learn(buffer, script)
    first, second = numbers([row("s0", "s1"), row("s2", "s3")]), numbers([row("s4", "s5"), row("s6", "s7")])
    assert seen == first * 2 + second * 2
    assert fresh.made == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_copy_shares_nothing() -> None:
    one = row("s0")
    before = numbers([one])
    other = copy_row(one)
    assert numbers([other]) == before
    spoil([other])
    assert numbers([one]) == before


@given(m_steps=st.integers(1, 4), gas=st.integers(1, 3), windows=st.integers(1, 3), data=st.data())
def test_rollouts_are_needed_at_a_window_s_beginning_and_after_a_resume(
    m_steps: int, gas: int, windows: int, data: st.DataObject
) -> None:
    """R18: `needs_rollouts` is right before the step's first micro-batch is there, wherever a run begins."""
    steps = [(w, m) for w in range(windows) for m in range(m_steps)]
    begin = data.draw(st.integers(0, len(steps) - 1))
    script = Script(*((w, m, 2 * g) for w, m in steps[begin:] for g in range(gas)))
    buffer, fresh = make(script)
    for step, (window, m_step) in enumerate(steps[begin:], start=begin):
        needs = m_step == 0 or step == begin
        assert buffer.needs_rollouts == needs
        made = len(fresh.made)
        for micro_step_idx in range(gas):
            batch = next(iter(script))
            buffer.rows(batch, global_step=step, micro_step_idx=micro_step_idx, clock=PhaseClock())
        assert len(fresh.made) - made == (gas if needs else 0)
        age = step - max(begin, step - m_step)
        assert list(buffer.metrics().values()) == [window, m_step, age]


def test_in_the_middle_of_a_window_a_resume_owes_what_was_carried_into_it() -> None:
    """R12: the data begins the window anew, so its own samples, carried or not, come with it."""
    script = Script(*TWO_WINDOWS)
    buffer, _ = make(script)
    buffer.restore(["old"])
    assert buffer.due_on_resume() == ["old"]
    for i, batch in zip(range(3), script, strict=False):
        buffer.rows(batch, global_step=i // 2, micro_step_idx=i % 2, clock=PhaseClock())
        assert buffer.due_on_resume() == ["old"], f"after micro-step {i}"
        assert buffer.waiting() != ["old"]
    buffer.rows(next(iter(script)), global_step=1, micro_step_idx=1, clock=PhaseClock())
    assert buffer.due_on_resume() == buffer.waiting() == ["carried after ('s2', 's3')"]


def test_a_restored_buffer_is_empty() -> None:
    script = Script(*TWO_WINDOWS)
    buffer, fresh = make(script)
    for i in range(2):
        buffer.rows(next(iter(script)), global_step=0, micro_step_idx=i, clock=PhaseClock())
    assert not buffer.needs_rollouts
    buffer.restore([])
    assert buffer.needs_rollouts
    learn(buffer, script, first_step=1)
    assert fresh.made[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


OUT_OF_STEP = {
    "other samples": (2, ((0, 1, 0), (0, 1, 4))),
    "other order": (2, ((0, 1, 2), (0, 1, 0))),
    "skipped one": (2, ((0, 1, 2), (0, 1, 4))),
    "a window that ends in a step": (2, ((0, 1, 0), (1, 0, 2))),
    "a window that grows": (3, ((0, 1, 0), (0, 1, 2), (0, 1, 4))),
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_data_that_goes_out_of_step_is_an_error(case: str) -> None:
    """R18: fingerprints. Nothing is learned from the micro-batch that differs."""
    gas, steps = OUT_OF_STEP[case]
    begin = Script((0, 0, 0), (0, 0, 2))
    buffer, fresh = make(begin)
    learn(buffer, begin)
    with pytest.raises(
        WindowMismatchError, match=r"another micro-batch.*found window \d: micro-batch.*wanted window 0"
    ):
        learn(buffer, Script(*steps), gas=gas, first_step=1)
    assert fresh.made == [(0, 0), (0, 1)]


def test_an_equal_micro_batch_of_another_epoch_is_another_one() -> None:
    """Epochs of few samples have equal micro-batches; only their places tell them apart."""
    begin = Script((0, 0, 0))
    buffer, _ = make(begin)
    learn(buffer, begin, gas=1)
    (again,) = list(Script((0, 1, 0)))
    with pytest.raises(WindowMismatchError, match="of epoch 1"):
        buffer.rows(replace(again, epoch=1), global_step=1, micro_step_idx=0, clock=PhaseClock())
