"""The buffer by itself: what it keeps, what it hands out, and what it does not take (R18)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.data.batches import MicroBatch, Upcoming, WindowRepeater, WindowStep
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import EncodedPrompt, PackedRow, Sample, Segment, VisionInputs
from learner.rollout.backend import MicroStep
from learner.steps.buffered import BufferedSteps, copy_row
from learner.steps.packing import RowMaker
from learner.steps.segments import SegmentSource
from shared.errors import WindowMismatchError
from tests.unit.learner.data.fakes import CountingEncoder, make_samples

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
    """Overwrite a batch, as a training stack may do with what it was given."""
    for one in (s for r in rows for s in r.segments):
        for array in (one.input_ids, one.labels, one.loss_weights):
            array[:] = 77
        assert one.vision is not None
        one.vision.pixel_values.zero_()
        one.vision.image_grid_thw.zero_()
        cast(dict[str, float], one.stats).clear()


class Answers(SegmentSource):
    """One segment per sample; `made` are the micro-steps that were asked for."""

    channel, needs_rollouts = "B", True

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def segments(self, step: MicroStep, prompts: Any, **place: Any) -> list[Segment]:
        self.made.append((place["global_step"], step.micro_step_idx))
        return [segment(sample.sample_id) for sample in step.samples]


class OneRow(RowMaker):
    """All of a micro-step's segments in one row; a name of the newest one waits, as if a segment did."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def rows(self, segments: Sequence[Segment]) -> list[PackedRow]:
        self.waiting = [f"after {segments[-1].sample_id}"]
        return [PackedRow(segments=tuple(segments), capacity=32)]

    def carried(self) -> list[str]:
        return self.waiting


class Script:
    """A dataloader that hands out what it is told to: (window, m_step, first sample), `gas` of them a step."""

    def __init__(self, *steps: tuple[int, int, int], gas: int = 2) -> None:
        self._batches: list[MicroBatch] = []
        self.then(*steps, gas=gas)

    def then(self, *steps: tuple[int, int, int], gas: int = 2, epoch: int = 0) -> None:
        self._gas = gas
        self._batches += [
            MicroBatch(
                samples=tuple(SAMPLES[first : first + 2]),
                prompts=(EncodedPrompt(token_ids=(1,), vision=None),) * 2,
                epoch=epoch,
                micro_batch=first // 2,
                first_req_idx=0,
                ends_epoch=False,
                window_step=WindowStep(window, m_step),
            )
            for window, m_step, first in steps
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> MicroBatch:
        return self._batches.pop(0)

    def upcoming(self, number: int) -> list[Upcoming]:
        window = self._batches[: min(number, self._gas)]
        return [Upcoming(samples=batch.samples, first_req_idx=0) for batch in window]

    @property
    def next_step(self) -> WindowStep:
        step = self._batches[0].window_step if self._batches else WindowStep(99, 0)
        assert step is not None
        return step

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...

    def last_epochs(self, sample_ids: Sequence[str]) -> list[int]:
        return [0] * len(sample_ids)

    def seen_in(self, epoch: int, sample_id: str) -> Sample:
        return next(sample for sample in SAMPLES if sample.sample_id == sample_id)


def make(script: Script) -> tuple[BufferedSteps, Answers]:
    answers = Answers()
    buffer = BufferedSteps(
        cast(WindowRepeater, script),
        answers,
        OneRow(),
        gradient_accumulation_steps=9,
        ranks=Ranks(),
        encoder=CountingEncoder(),
        clock=PhaseClock(),
    )
    return buffer, answers


def learn(buffer: BufferedSteps, script: Script, *, first_step: int = 0) -> list[Any]:
    """Learn every row of the script's micro-batches; each is spoilt as soon as it was read."""
    seen, step = [], first_step
    while script:
        buffer.begin(step)
        for micro_step in buffer.micro_steps():
            rows = list(micro_step)
            seen += numbers(rows)
            spoil(rows)
        step += 1
    return seen


def carried(buffer: BufferedSteps) -> list[str]:
    """Return what a resume from here would owe."""
    (own,) = buffer.state()["carried"]
    return own


TWO_WINDOWS = ((0, 0, 0), (0, 0, 2), (0, 1, 0), (0, 1, 2), (1, 0, 4), (1, 0, 6), (1, 1, 4), (1, 1, 6))


def test_the_same_rows_in_the_same_order_whatever_became_of_their_copies() -> None:
    """R18: immutability. The E-step's own rows are copies, too."""
    script = Script(*TWO_WINDOWS)
    buffer, answers = make(script)
    seen = learn(buffer, script)
    first, second = numbers([row("s0", "s1"), row("s2", "s3")]), numbers([row("s4", "s5"), row("s6", "s7")])
    assert seen == first * 2 + second * 2
    assert answers.made == [(0, 0), (0, 1), (2, 0), (2, 1)]


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
    """R18: `wants_sync` is right before the step's first micro-batch is there, wherever a run begins."""
    steps = [(w, m) for w in range(windows) for m in range(m_steps)]
    begin = data.draw(st.integers(0, len(steps) - 1))
    script = Script(*((w, m, 2 * g) for w, m in steps[begin:] for g in range(gas)), gas=gas)
    buffer, answers = make(script)
    for step, (window, m_step) in enumerate(steps[begin:], start=begin):
        needs = m_step == 0 or step == begin
        assert buffer.wants_sync(step) == needs
        made = len(answers.made)
        buffer.begin(step)
        for micro_step in buffer.micro_steps():
            list(micro_step)
        assert len(answers.made) - made == (gas if needs else 0)
        age = step - max(begin, step - m_step)
        assert list(buffer.metrics().values()) == [window, m_step, age]


def test_in_the_middle_of_a_window_a_resume_owes_what_was_carried_into_it() -> None:
    """R12: the data begins the window anew, so its own samples, carried or not, come with it."""
    script = Script(*TWO_WINDOWS)
    buffer, _ = make(script)
    buffer.restore({"batches": {}, "carried": [["s9"]]})
    assert carried(buffer) == ["s9"]
    for step in range(2):
        buffer.begin(step)
        for micro_step in buffer.micro_steps():
            list(micro_step)
            if script.next_step.window == 0:
                assert carried(buffer) == ["s9"]
                assert buffer.waiting() != ["s9"]
    assert carried(buffer) == buffer.waiting() == ["after s3"]


def test_a_restored_buffer_is_empty() -> None:
    script = Script(*TWO_WINDOWS)
    buffer, answers = make(script)
    buffer.begin(0)
    for micro_step in buffer.micro_steps():
        list(micro_step)
    assert not buffer.wants_sync(1)
    buffer.restore({"batches": {}, "carried": [[]]})
    assert buffer.wants_sync(1)
    learn(buffer, script, first_step=1)
    assert answers.made[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


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
    script = Script((0, 0, 0), (0, 0, 2))
    buffer, answers = make(script)
    learn(buffer, script)
    script.then(*steps, gas=gas)
    with pytest.raises(
        WindowMismatchError, match=r"another micro-batch.*found window \d: micro-batch.*wanted window 0"
    ):
        learn(buffer, script, first_step=1)
    assert answers.made == [(0, 0), (0, 1)]


def test_an_equal_micro_batch_of_another_epoch_is_another_one() -> None:
    """Epochs of few samples have equal micro-batches; only their places tell them apart."""
    script = Script((0, 0, 0))
    buffer, _ = make(script)
    learn(buffer, script)
    script.then((0, 1, 0), epoch=1)
    with pytest.raises(WindowMismatchError, match="of epoch 1"):
        learn(buffer, script, first_step=1)
