"""Accumulation windows, repeated: against chunking the epochs by hand, for any sizes, ranks and place of a resume."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from learner.config.plan import steps_per_epoch
from learner.data.batches import Batches, MicroBatch, WindowRepeater, WindowStep
from learner.data.sampler import DistributedSampler
from tests.unit.learner.data.fakes import CountingEncoder, make_run, make_samples

Ids = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`samples_per_micro_step` over all ranks."""

    num_samples: int
    samples_per_micro_step: int
    gas: int
    m_steps: int

    def repeater(self, rank: int = 0, ranks: int = 1) -> WindowRepeater:
        config, plan = make_run(samples_per_rank=self.samples_per_micro_step // ranks, ranks=ranks)
        samples = make_samples(self.num_samples)
        batches = Batches(samples, config=config, plan=plan, rank=rank, encoder=CountingEncoder())
        return WindowRepeater(batches, gradient_accumulation_steps=self.gas, m_steps=self.m_steps)

    def epoch_steps(self, epoch: int) -> list[list[Ids]]:
        """Return each optimizer step of an epoch as the samples of its micro-steps: the slow, obvious reference."""
        order = DistributedSampler(self.num_samples, num_ranks=1, rank=0, samples_per_rank=1, seed=7).order(epoch)
        ids = [f"s{i}" for i in order]
        size = self.samples_per_micro_step
        micro_batches = [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]
        windows = [micro_batches[i : i + self.gas] for i in range(0, len(micro_batches), self.gas)]
        return [window for window in windows for _ in range(self.m_steps if len(window) == self.gas else 1)]

    def steps(self) -> Iterator[list[Ids]]:
        return (step for epoch in itertools.count() for step in self.epoch_steps(epoch))


RANKS = st.sampled_from([1, 2, 3])
CASES = st.builds(
    Case,
    num_samples=st.integers(1, 40),
    samples_per_micro_step=st.sampled_from([6, 12]),
    gas=st.integers(1, 4),
    m_steps=st.integers(1, 4),
)


def optimizer_step(batches: WindowRepeater, gas: int) -> list[MicroBatch]:
    """Read what the trainer reads for one step; it is told before what that will be."""
    upcoming, taken = batches.upcoming(gas), []
    for _ in range(gas):
        taken.append(next(batches))
        if taken[-1].ends_epoch:
            break
    assert upcoming == [(batch.samples, batch.first_req_idx) for batch in taken]
    return taken


def read(repeaters: list[WindowRepeater], case: Case) -> list[Ids]:
    """One optimizer step of all ranks: the samples of each micro-step."""
    parts = [optimizer_step(repeater, case.gas) for repeater in repeaters]
    assert len({tuple((b.window_step, b.micro_batch) for b in part) for part in parts}) == 1, "ranks are out of step"
    return [sum((tuple(s.sample_id for s in b.samples) for b in step), ()) for step in zip(*parts, strict=True)]


def resumed(repeaters: list[WindowRepeater], case: Case, ranks: int) -> list[WindowRepeater]:
    """New ones, on `ranks` ranks, from the state as a checkpoint holds it."""
    states = [json.dumps(repeater.state()) for repeater in repeaters]
    assert len(set(states)) == 1, "the state differs between ranks"
    made = [case.repeater(rank, ranks) for rank in range(ranks)]
    for repeater in made:
        repeater.restore(json.loads(states[0]))
    return made


@given(case=CASES, ranks=RANKS, ranks_after=RANKS, before=st.integers(0, 12))
def test_steps_are_the_epochs_windows_each_m_times(case: Case, ranks: int, ranks_after: int, before: int) -> None:
    """R18, R12: also when training stops after any step and goes on, on another number of ranks."""
    repeaters = [case.repeater(rank, ranks) for rank in range(ranks)]
    found = [read(repeaters, case) for _ in range(before)]
    repeaters = resumed(repeaters, case, ranks_after)
    found += [read(repeaters, case) for _ in range(8)]
    assert found == list(itertools.islice(case.steps(), len(found)))


@given(case=CASES, ranks=RANKS, epochs=st.integers(1, 3))
def test_every_sample_is_handed_out_m_times_an_epoch(case: Case, ranks: int, epochs: int) -> None:
    """R18, R12: counted over epochs, ranks and passes; those of an epoch's short last window once."""
    repeaters = [case.repeater(rank, ranks) for rank in range(ranks)]
    per_epoch = -(-case.num_samples // case.samples_per_micro_step)
    num_steps = steps_per_epoch(per_epoch, gradient_accumulation_steps=case.gas, m_steps=case.m_steps)
    for epoch in range(epochs):
        handed_out = [i for _ in range(num_steps) for part in read(repeaters, case) for i in part]
        in_order = list(dict.fromkeys(handed_out))
        in_whole_windows = per_epoch // case.gas * case.gas * case.samples_per_micro_step
        assert len(in_order) == case.num_samples, f"epoch {epoch}"
        assert Counter(handed_out) == {
            sample_id: case.m_steps if place < in_whole_windows else 1 for place, sample_id in enumerate(in_order)
        }


@given(case=CASES, before=st.integers(0, 12), m_steps=st.integers(1, 4), gas=st.integers(1, 4))
def test_no_sample_is_skipped_when_a_resume_changes_the_window(case: Case, before: int, m_steps: int, gas: int) -> None:
    """R12: with other settings a sample may be learned another number of times, and never not at all."""
    repeater = case.repeater()
    learned = [sample_id for _ in range(before) for part in read([repeater], case) for sample_id in part]
    after = Case(
        num_samples=case.num_samples, samples_per_micro_step=case.samples_per_micro_step, gas=gas, m_steps=m_steps
    )
    (other,) = resumed([repeater], after, 1)
    while True:
        batches = optimizer_step(other, gas)
        learned += [sample.sample_id for batch in batches for sample in batch.samples]
        if batches[-1].ends_epoch:
            break
    assert set(learned) == {f"s{i}" for i in range(case.num_samples)}


@given(case=CASES, taken=st.integers(0, 30))
def test_each_micro_batch_says_where_it_belongs(case: Case, taken: int) -> None:
    """`next_step` is known before the micro-batch is, and equal marks mean equal samples."""
    repeater = case.repeater()
    seen: dict[tuple[WindowStep | None, int], Any] = {}
    for _ in range(taken):
        expected = repeater.next_step
        batch = next(repeater)
        assert batch.window_step == expected
        window, m_step = expected
        first = seen.setdefault((WindowStep(window, 0), batch.micro_batch), batch.fingerprint)
        assert batch.fingerprint == first
        assert m_step < case.m_steps


def test_a_state_in_the_middle_of_a_pass_is_that_of_its_beginning() -> None:
    """A step that was begun and given up is not part of a checkpoint: it comes again as a whole."""
    case = Case(num_samples=24, samples_per_micro_step=6, gas=2, m_steps=3)
    repeater = case.repeater()
    read([repeater], case)
    before = repeater.state()
    next(repeater)
    assert repeater.state() == before
    (again,) = resumed([repeater], case, 1)
    assert read([again], case) == list(itertools.islice(case.steps(), 2))[1]


def test_a_run_without_a_buffer_goes_on_from_a_buffered_one() -> None:
    """The window that was being repeated comes once more, whole."""
    case = Case(num_samples=24, samples_per_micro_step=6, gas=2, m_steps=3)
    repeater = case.repeater()
    for _ in range(4):
        read([repeater], case)
    config, plan = make_run(samples_per_rank=6)
    plain = Batches(make_samples(24), config=config, plan=plan, rank=0, encoder=CountingEncoder())
    plain.restore(json.loads(json.dumps(repeater.state())))
    found = [tuple(sample.sample_id for sample in batch.samples) for batch in optimizer_step(plain, 2)]
    assert found == case.epoch_steps(0)[3]
