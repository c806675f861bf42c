"""Training with a rollout buffer, in the real loop: who is rolled out, synced and learned when, and how often (R18)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.data.batches import WindowRepeater
from learner.data.sampler import DistributedSampler
from learner.policy.loss import RowLoss
from learner.policy.parallel import Ranks
from learner.records import PackedRow
from learner.steps.source import FreshSteps
from shared.errors import WindowMismatchError
from tests.tiers import slow
from tests.unit.learner.trainer_log import all_learned, carried_at_end, events_of, everyone
from tests.unit.learner.trainer_world import Generate, Seen, make_config, run, trainer

CARRY = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "global_max_length": 192}
BUFFER = ("window", "m_step", "rollout_age")


pytestmark = pytest.mark.usefixtures("one_thread")


Train = Callable[..., list[Seen]]


@pytest.fixture
def train(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    def train(world_size: int = 1, **settings: Any) -> list[Seen]:
        config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
        return run(config, monkeypatch, world_size)

    return train


def named(event: Any) -> str:
    if isinstance(event, Generate):
        return f"{'eval' if event.greedy else 'rollout'}@{event.global_step}"
    return "sync" if event == "sync" else "+".join(event)


def buffer_metrics(folder: Path) -> list[tuple[int, ...]]:
    """Return window, m-step and age of each step's rollouts."""
    steps = events_of(folder, "step")
    return [tuple(int(step["metrics"][f"rollout_buffer/{name}"]) for name in BUFFER) for step in steps]


def test_one_window_s_rollouts_are_learned_in_m_steps(train: Train, tmp_path: Path) -> None:
    """R18, R10: rollouts and the sync before them in a window's first step only, the same micro-batches in all of them.
    An evaluation in the middle of a window syncs and rolls out as ever, and the M-step after it asks for nothing."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "packing": False}
    (seen,) = train(m_steps=3, max_steps=6, eval_steps=2, eval_samples=2, num_samples=8, **settings)
    events = [named(event) for event in seen.events if event != ()]
    rows = ["+".join(row) for row in seen.rows]
    first, second = rows[0:4], rows[12:16]
    assert events == [
        *("sync", "rollout@0", "rollout@0", *first),
        *first,
        *("sync", "eval@2"),
        *first,
        *("sync", "rollout@3", "rollout@3", *second),
        *("sync", "eval@4"),
        *second,
        *second,
        *("sync", "eval@6"),
    ]
    assert sorted(first + second) == sorted(everyone(8))
    assert [call.sample_ids for call in seen.calls if not call.greedy] == [
        tuple(pair) for half in (first, second) for pair in (half[:2], half[2:])
    ]
    assert buffer_metrics(tmp_path) == [(w, m, m) for w in (0, 1) for m in (0, 1, 2)]


@pytest.mark.parametrize(("world_size", "m_steps"), [slow(1, 2), (2, 3)])
def test_every_sample_is_learned_m_times_an_epoch(train: Train, tmp_path: Path, world_size: int, m_steps: int) -> None:
    """R12, R18: 9 samples are two whole windows and a short one, of one sample, which is learned once; under two ranks
    one of them has none of it. The second epoch is another order."""
    settings = {"per_device_train_batch_size": 2 // world_size, "gradient_accumulation_steps": 2, "packing": False}
    seen = train(world_size, m_steps=m_steps, num_samples=9, num_train_epochs=2, **settings)
    sampler = DistributedSampler(9, num_ranks=1, rank=0, samples_per_rank=1, seed=3)
    expected: Counter[str] = Counter()
    for epoch in range(2):
        *whole, last = sampler.order(epoch)
        expected += Counter({f"s{i}": m_steps for i in whole}) + Counter([f"s{last}"])
    assert all_learned(seen) == expected
    assert len(events_of(tmp_path, "step")) == 2 * (2 * m_steps + 1)
    assert len({len(one.rows) for one in seen}) == 1, "ranks ran different numbers of passes (D5)"
    rolled_out = Counter(sample_id for one in seen for call in one.calls for sample_id in call.sample_ids)
    assert rolled_out == everyone(9, times=2)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_m_steps_leave_the_packing_buffer_alone(train: Train, tmp_path: Path, world_size: int) -> None:
    """R18, D6: rows are too short for all segments, so some are carried from window to window; M-steps learn the
    E-step's rows, and in the end each sample was learned m times, or is told not to have been."""
    seen = train(world_size, m_steps=2, num_samples=24, num_train_epochs=1, **CARRY)
    for one in seen:
        steps = [one.rows[i : i + 2] for i in range(0, len(one.rows), 2)]
        assert steps[0::2] == steps[1::2]
    left = carried_at_end(tmp_path)
    assert left, "nothing was carried: the test shows nothing"
    assert all_learned(seen) + Counter(left * 2) == everyone(24, times=2)


def test_one_m_step_is_no_buffer(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", m_steps=1, max_steps=1)
    with trainer(config, Ranks(), monkeypatch, Seen()) as made:
        assert type(made.source) is FreshSteps


# ---- resume --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [slow(1, 1), (2, 1), slow(1, 2)])
def test_a_resume_in_the_middle_of_a_window_makes_new_rollouts_of_it(
    train: Train, tmp_path: Path, before: int, after: int
) -> None:
    """R18, R12: the buffer begins empty, the window's other steps learn what it then makes: m times each in all."""

    def part(world_size: int, **changes: Any) -> list[Seen]:
        settings = {"per_device_train_batch_size": 2 // world_size, "gradient_accumulation_steps": 2, "packing": False}
        return train(world_size, m_steps=3, num_samples=8, **settings, **changes)

    first = part(before, max_steps=1, save_on_end=True)
    second = part(after, max_steps=6, resume_from_checkpoint="latest")
    assert all_learned(first) + all_learned(second) == everyone(8, times=3)
    assert sorted({call.global_step for call in second[0].calls}) == [1, 3]
    again = {s for one in second for call in one.calls if call.global_step == 1 for s in call.sample_ids}
    assert again == set(all_learned(first))
    assert buffer_metrics(tmp_path) == [(0, 0, 0), (0, 1, 0), (0, 2, 1), (1, 0, 0), (1, 1, 1), (1, 2, 2)]


def test_a_run_resumed_between_windows_ends_with_the_uninterrupted_run_s_weights(train: Train) -> None:
    """They are equal bit for bit, as without a buffer."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "packing": False, "m_steps": 2}
    settings |= {"num_samples": 8, "lr_scheduler_type": "constant"}
    (whole,) = train(max_steps=4, **settings)
    (first,) = train(max_steps=2, save_on_end=True, **settings)
    (second,) = train(max_steps=4, resume_from_checkpoint="latest", **settings)
    assert first.learned + second.learned == whole.learned
    for name, tensor in whole.weights.items():
        assert torch.equal(second.weights[name], tensor), name


@pytest.mark.parametrize("stops", [slow((4, 5)), (1, 2, 5)])
def test_nobody_who_was_carried_is_lost_in_the_middle_of_a_window(
    train: Train, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """R12: each part of the run stops inside a window. The next one makes all that the window had learned anew, what
    was carried into it too, and again where that part stops inside the same window."""
    settings = {**CARRY, "global_max_length": 144, "m_steps": 3, "num_samples": 24}  # every window carries some
    learned: Counter[str] = Counter()
    interrupted: set[str] = set()  # learned by the window that the last part stopped in
    for stop in stops:
        resume = {"resume_from_checkpoint": "latest"} if learned else {}
        (seen,) = train(max_steps=stop, save_on_end=True, **settings, **resume)
        assert interrupted <= samples_of_first_step(seen)
        interrupted = {sample_id for row in seen.rows[-2:] for sample_id in row}
        learned += all_learned([seen])
        cursor = json.loads((tmp_path / "run" / f"checkpoint-{stop}" / "trainer_state.json").read_text())["cursor"]
        assert cursor["batches"]["m_step"] == stop % 3
    notes = len(events_of(tmp_path, "note"))
    (seen,) = train(num_train_epochs=1, resume_from_checkpoint="latest", **settings)
    assert interrupted <= samples_of_first_step(seen)
    left = {i for note in events_of(tmp_path, "note")[notes:] for i in note["carried_and_not_learned"]}
    assert set(learned + all_learned([seen])) | left == set(everyone(24))


def samples_of_first_step(seen: Seen) -> set[str]:
    begin = seen.calls[0].global_step
    return {sample_id for call in seen.calls if call.global_step == begin for sample_id in call.sample_ids}


# ---- reuse is safe -------------------------------------------------------------------------------------------------


def test_what_a_step_does_to_its_rows_does_not_reach_the_next(
    train: Train, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: a training stack that ruins each row it has learned ends with the same weights as one that does not."""
    settings: dict[str, Any] = {"m_steps": 3, "max_steps": 3, "num_samples": 4, "per_device_train_batch_size": 4}
    (careful,) = train(**settings)
    seen = Seen()
    config = make_config(tiny_text, tmp_path, variant="rollout_matching_sft", **settings)
    with trainer(config, Ranks(), monkeypatch, seen) as made:
        backward = made.policy.backward

        def ruinous(row: PackedRow) -> RowLoss:
            loss = backward(row)
            for segment in row.segments:
                segment.input_ids[:], segment.labels[:], segment.loss_weights[:] = 0, -100, 0
            return loss

        made.policy.backward = ruinous  # type: ignore[method-assign]
        made.run()
    for name, tensor in careful.weights.items():
        assert torch.equal(seen.weights[name], tensor), name


def test_a_dataloader_that_does_not_repeat_stops_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R18: it claims to give the window again and gives the next one; no M-step learns rows of other samples."""

    def forgetful(self: WindowRepeater, *, is_whole: bool) -> None:
        window, m_step = self._next
        self._taken, self._kept = 0, []
        self._next = type(self._next)(window, m_step + 1)

    monkeypatch.setattr(WindowRepeater, "_end_pass", forgetful)
    with pytest.raises(WindowMismatchError, match="micro-step 0 of a repeated window got another micro-batch"):
        train(m_steps=3, max_steps=3, num_samples=8, per_device_train_batch_size=4)
    assert len(events_of(tmp_path, "step")) == 1
