"""Dynamic sampling (`grpo.max_refills`): how much data a step takes, that nothing is used twice or lost, and that ranks
agree. Against a plain simulation over the epoch's order."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config.load import config_of
from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.data.batches import Batches
from learner.data.sampler import sampler_of
from learner.journal.log import PhaseClock
from learner.policy.parallel import Ranks
from learner.records import Segment
from learner.rollout.backend import MicroStep
from learner.steps.groups import GROUPS, NO_SIGNAL
from learner.steps.packing import CompleteRows
from learner.steps.refill import REFILLS, RefilledSteps
from learner.steps.segments import SegmentSource
from tests.examples import examples
from tests.tiers import slow
from tests.unit.learner.data.fakes import CountingEncoder, make_samples
from tests.unit.learner.steps.fakes import segment
from tests.unit.learner.trainer_log import events_of
from tests.unit.learner.trainer_world import Meeting, Seen, ThreadRanks, make_config, run

SIZE = 2  # rollouts of a group
GROUPS_PER_STEP = 4  # groups of all ranks


@dataclass(frozen=True)
class Case:
    num_samples: int
    silent: frozenset[int]  # samples whose groups have no signal
    max_refills: int
    micro_batches: int  # a step's
    steps: int


@dataclass
class World:
    case: Case
    used: dict[int, list[str]] = field(default_factory=dict)  # keys are steps: a sample for each group
    places: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # counts requests
    refills: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Scored(SegmentSource):
    """Groups of rollouts, with a signal or without."""

    channel = "B"
    needs_rollouts = True

    def __init__(self, world: World) -> None:
        self.world = world

    def segments(self, step: MicroStep, prompts: Sequence[Any], **place: Any) -> list[Segment]:
        samples = step.samples
        found = [segment(sample.sample_id, 1) for sample in samples]
        with self.world.lock:
            for i in range(len(samples)):
                key = (place["global_step"], step.micro_step_idx, step.first_req_idx + i)
                self.world.places[key] += 1
            for i in range(0, len(samples), SIZE):
                assert len({sample.sample_id for sample in samples[i : i + SIZE]}) == 1, "a group is torn"
                sample_id = samples[i].sample_id
                self.world.used.setdefault(place["global_step"], []).append(sample_id)
                is_silent = float(int(sample_id[1:]) in self.world.case.silent)
                found[i] = replace(found[i], stats={GROUPS: 1.0, NO_SIGNAL: is_silent})
        return found


def config_for(case: Case, num_ranks: int) -> RunConfig:
    per_device = GROUPS_PER_STEP * SIZE // case.micro_batches // num_ranks
    return RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "training": {
                "output_dir": "out",
                "seed": 7,
                "max_steps": case.steps,
                "effective_batch_size": GROUPS_PER_STEP * SIZE,
                "per_device_train_batch_size": per_device,
            },
            "custom": {"trainer_variant": "grpo", "extra": {"rollout_matching": {"rollout_backend": "hf"}}},
            "grpo": {"num_generations": SIZE, "max_refills": case.max_refills},
        }
    )


def run_rank(world: World, ranks: Ranks, start: int, stop: int, state: Any) -> Any:
    """Steps `start` to `stop` on one rank, as the trainer asks for them; the state after the last."""
    case, config = world.case, config_for(world.case, ranks.world_size)
    plan, samples = resolve(config, ranks.world_size), make_samples(case.num_samples)
    batches = Batches(samples, config=config, plan=plan, rank=ranks.rank, encoder=CountingEncoder())
    source = RefilledSteps(
        batches,
        Scored(world),
        CompleteRows(64),
        max_refills=case.max_refills,
        groups_per_step=GROUPS_PER_STEP,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        ranks=ranks,
        encoder=CountingEncoder(),
        clock=PhaseClock(),
    )
    if state is not None:
        source.restore(state)
    for step in range(start, stop):
        source.begin(step)
        number = 0
        for micro_step in source.micro_steps():
            list(micro_step)
            number += 1
        assert len(set(ranks.all_gather_object(number))) == 1, "ranks took different numbers of micro-steps"
        if ranks.is_main:
            world.refills.append(source.metrics()[REFILLS])
        state = json.loads(json.dumps(source.state()))
    batches.close()
    return state


def run_all(world: World, num_ranks: int, start: int, stop: int, state: Any) -> Any:
    if num_ranks == 1:
        return run_rank(world, Ranks(), start, stop, state)
    meeting = Meeting(num_ranks)

    def one(rank: int) -> Any:
        try:
            ranks = ThreadRanks(rank=rank, world_size=num_ranks, meeting=meeting)
            return run_rank(world, ranks, start, stop, state)
        except BaseException:
            meeting.fail()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        states = [future.result() for future in [pool.submit(one, rank) for rank in range(num_ranks)]]
    return states[0]


def simulated(case: Case) -> tuple[list[list[str]], list[int]]:
    """Return per step the samples that it uses, and its refills: one after the other along the epochs' orders."""
    config = config_for(case, 1)
    sampler = sampler_of(case.num_samples, config=config, plan=resolve(config, 1), rank=0)
    used: list[list[str]] = []
    refills: list[int] = []
    position = 0
    for _ in range(case.steps):
        taken: list[int] = []
        number = 0
        while True:
            share = sampler.share(position)
            taken += share.indices[::SIZE]
            position, number = position + 1, number + 1
            with_signal = sum(i not in case.silent for i in taken)
            planned = number < case.micro_batches
            wants = with_signal < GROUPS_PER_STEP and number < case.micro_batches + case.max_refills
            if share.ends_epoch or not (planned or wants):
                break
        used.append([f"s{i}" for i in taken])
        refills.append(max(0, number - case.micro_batches))
    return used, refills


CASES = st.builds(
    Case,
    num_samples=st.integers(1, 23),
    silent=st.frozensets(st.integers(0, 22)),
    max_refills=st.integers(0, 4),
    micro_batches=st.sampled_from([1, 2]),
    steps=st.integers(1, 6),
)


@settings(max_examples=examples(40), deadline=None)
@given(CASES, st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])), st.floats(0, 1))
def test_a_step_takes_what_it_needs_and_nothing_is_used_twice(
    case: Case, num_ranks: tuple[int, int], cut: float
) -> None:
    """R11, R12, R37: on 1 and 2 ranks, also if the run is resumed on another number of them."""
    world, middle = World(case), round(cut * case.steps)
    state = run_all(world, num_ranks[0], 0, middle, None) if middle else None
    run_all(world, num_ranks[1], middle, case.steps, state)
    used, refills = simulated(case)
    assert [sorted(world.used.get(step, [])) for step in range(case.steps)] == [sorted(ids) for ids in used]
    assert world.refills == refills
    assert set(world.places.values()) <= {1}, "two requests of a step had the same place, and so the same seed"
    flat = [sample_id for ids in used for sample_id in ids]
    for first in range(0, len(flat) - case.num_samples + 1, case.num_samples):
        assert len(set(flat[first : first + case.num_samples])) == case.num_samples, "not once per epoch"


def test_a_step_stops_at_its_bound_and_at_the_epoch_s_end() -> None:
    """The simulation itself, by hand: nothing has a signal."""
    everything = frozenset(range(23))
    case = Case(num_samples=20, silent=everything, max_refills=2, micro_batches=1, steps=3)
    used, refills = simulated(case)
    assert [len(ids) for ids in used] == [12, 8, 12]
    assert refills == [2, 1, 2]
    assert simulated(replace(case, silent=frozenset()))[1] == [0, 0, 0]


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_run_with_refills_learns_more_groups(
    world_size: int, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is the real one: groups of two answers of random length, which are often equal."""
    plain = make_config(tiny_text, tmp_path, num_samples=40, per_device_train_batch_size=4 // world_size, max_steps=3)
    values = plain.model_dump(exclude_unset=True)
    values["training"] |= {"effective_batch_size": 8}
    values["custom"]["trainer_variant"] = "grpo"
    values["custom"]["extra"]["rollout_matching"]["decoding"]["temperature"] = 1.0
    values["grpo"] = {"num_generations": 2, "max_refills": 3}
    seen: list[Seen] = run(config_of(values), monkeypatch, world_size)
    steps = events_of(tmp_path, "step")
    assert any(step["metrics"][REFILLS] for step in steps), "every step had a signal: the test shows nothing"
    for step in steps:
        metrics = step["metrics"]
        with_signal = metrics["grpo/groups"] * (1 - metrics["grpo/no_signal"])
        assert with_signal >= 4 - 1e-6 or metrics[REFILLS] == 3
        assert metrics["grpo/groups"] == 4 + 2 * metrics[REFILLS]
        assert step["num_segments"] == 2 * metrics["grpo/groups"]
    assert len({len(one.rows) for one in seen}) == 1, "ranks ran different numbers of passes (D5)"
    learned = Counter(sample_id for one in seen for sample_id in one.learned)
    assert set(learned.values()) == {2}, "a sample was used twice"
    assert len({call.global_step for one in seen for call in one.calls}) == 3
