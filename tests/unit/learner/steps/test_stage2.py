"""Whole runs of `stage2_ab_training` on threads as ranks: the step's gradient, its samples, its schedule (R26, R31)."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.load import config_of
from learner.config.schedule import scheduled_channel
from learner.config.schema import RunConfig
from learner.records import Rollout
from learner.steps.stage2 import CallTotals, call_metrics
from shared.errors import LossError, RolloutError
from tests.tiers import slow
from tests.unit.learner import trainer_world
from tests.unit.learner.trainer_world import Backwards, Seen, make_config, run

NUM_SAMPLES = 16


def stage2_config(
    model: Path,
    folder: Path,
    *,
    b_ratio: float,
    max_length: int = 256,
    num_samples: int = NUM_SAMPLES,
    **training: Any,
) -> RunConfig:
    """Return a run whose step is 8 samples over all ranks."""
    folder.mkdir(exist_ok=True)
    settings = {"effective_batch_size": 8, **training}
    plain = make_config(model, folder, num_samples=num_samples, global_max_length=max_length, **settings)
    values = plain.model_dump(exclude_unset=True)
    values["custom"]["trainer_variant"] = "stage2_ab_training"
    return config_of({**values, "stage2_ab": {"schedule": {"b_ratio": b_ratio}}})


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


@pytest.fixture(scope="module")
def one_rank_unpacked(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Run the reference: every segment of the step in a row of its own, on one rank, after all rollouts."""
    config = stage2_config(
        tiny_text, tmp_path_factory.mktemp("reference"), b_ratio=0.5, max_steps=2, packing=False, max_length=512
    )
    with pytest.MonkeyPatch.context() as patch:
        return run(config, patch)


@pytest.mark.parametrize("world_size", [slow(1), 2, slow(4)])
def test_ranks_packing_and_overlap_do_not_change_a_step(
    world_size: int, one_rank_unpacked: list[Seen], tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R31, D5, D8: answers of random length, a Channel-A and a Channel-B step; gradients of the first are exactly of
    the same weights, those of the second of weights that one update made."""
    config = stage2_config(tiny_text, tmp_path, b_ratio=0.5, max_steps=2, max_length=200)
    seen = run(config, monkeypatch, world_size)
    (reference,) = one_rank_unpacked
    assert Counter(i for rank in seen for i in rank.learned) == Counter(reference.learned)
    assert len({len(rank.rows) for rank in seen}) == 1, "every rank runs as many passes"
    assert any(len(row) > 1 for rank in seen for row in rank.rows) or world_size == 4, "nothing was packed"
    for rank in seen:
        for found, wanted in zip(rank.gradients, reference.gradients, strict=True):
            assert found.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name], atol=2e-5, rtol=2e-3)


def test_an_uneven_share_is_padded_with_zero_weight_rows(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D5: answers of different lengths need different numbers of rows on the ranks; the shorter ones run empty rows,
    all of them at the end of their step."""
    config = stage2_config(tiny_text, tmp_path, b_ratio=0.5, max_steps=6, max_length=260)
    seen = run(config, monkeypatch, world_size=2)
    assert len({len(rank.rows) for rank in seen}) == 1
    steps = steps_of(tmp_path)
    learned = [row for rank in seen for row in rank.rows if row]
    assert len(learned) < sum(len(rank.rows) for rank in seen), "no rank was padded: the test shows nothing"
    assert len(learned) == sum(step["num_rows"] for step in steps)
    assert sum(map(len, learned)) == 48 == sum(step["num_segments"] for step in steps)


def test_each_sample_is_rolled_out_and_learned_once_an_epoch(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12, R31, R35: over both channels and all ranks; only Channel-B's samples are rolled out, each by its own
    place in the step."""
    config = stage2_config(tiny_text, tmp_path, b_ratio=0.5, num_train_epochs=2)
    seen = run(config, monkeypatch, world_size=2)
    assert Counter(i for rank in seen for i in rank.learned) == {f"s{i}": 2 for i in range(NUM_SAMPLES)}
    calls = [call for rank in seen for call in rank.calls]
    assert all(call.micro_step_idx == 0 for call in calls)
    for step in (1, 3):
        places = [c.first_req_idx + i for c in calls if c.global_step == step for i in range(len(c.sample_ids))]
        assert sorted(places) == list(range(8))
    assert {call.global_step for call in calls} == {1, 3}
    measured = [step["metrics"] for step in steps_of(tmp_path)]
    assert [one["stage2_ab/calls"] for one in measured] == [0.0, 1.0, 0.0, 1.0]
    assert [one["stage2_ab/rollout_s"] > 0.0 for one in measured] == [False, True, False, True]
    assert [rank.events.count("sync") for rank in seen] == [2, 2], "a sync before each Channel-B step, and no other"


@pytest.mark.parametrize("b_ratio", [0.3, slow(0.0)])
def test_the_executed_share_is_the_scheduled_one(
    b_ratio: float, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26; without Channel-B no server is needed."""
    run(stage2_config(tiny_text, tmp_path, b_ratio=b_ratio, max_steps=7), monkeypatch)
    steps = steps_of(tmp_path)
    assert [step["channel"] for step in steps] == [scheduled_channel(i, b_ratio) for i in range(7)]
    assert steps[-1]["metrics"]["stage2_ab/executed_b_share"] == pytest.approx(int(7 * b_ratio) / 7)


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_resume_in_the_middle_of_the_schedule_changes_nothing(
    world_size: int, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: the same channels, samples, weights and counted share as the run that was never interrupted."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    settings: dict[str, Any] = {"b_ratio": 0.5, "lr_scheduler_type": "constant", "deterministic": True}
    straight = run(stage2_config(tiny_text, whole, max_steps=4, **settings), monkeypatch, world_size)
    settings |= {"save_on_end": True}
    first = run(stage2_config(tiny_text, halves, max_steps=3, **settings), monkeypatch, world_size)
    settings |= {"resume_from_checkpoint": "latest"}
    second = run(stage2_config(tiny_text, halves, max_steps=4, **settings), monkeypatch, world_size)
    for rank in range(world_size):
        assert first[rank].learned + second[rank].learned == straight[rank].learned
        for name, tensor in straight[rank].weights.items():
            assert torch.equal(second[rank].weights[name], tensor), name
    for name in ("stage2_ab/executed_b_share", "stage2_ab/channel_b"):
        assert [s["metrics"][name] for s in steps_of(halves)] == [s["metrics"][name] for s in steps_of(whole)]


def test_a_run_that_goes_on_from_plain_training_counts_its_own_channel_b_steps(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: of all steps, those before had no Channel-B."""
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "effective_batch_size": 8, "save_on_end": True}
    plain = {"num_samples": NUM_SAMPLES, "max_steps": 2, "per_device_train_batch_size": 8, **settings}
    run(make_config(tiny_text, tmp_path, **plain), monkeypatch)
    settings |= {"max_steps": 4, "resume_from_checkpoint": "latest"}
    run(stage2_config(tiny_text, tmp_path, b_ratio=0.5, **settings), monkeypatch)
    shares = [step["metrics"].get("stage2_ab/executed_b_share") for step in steps_of(tmp_path)]
    assert shares == [None, None, 0.0, 0.25]


class Broken(Backwards):
    """The third rollout fails."""

    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        yield from list(super().__iter__())[:2]
        raise RolloutError("the third rollout broke")


def no_producer_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "rollout-producer"]


def test_a_failed_rollout_ends_the_run_and_its_producer(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R32: the producer's error is the run's, with its type; no thread is left; nothing of the step was applied."""
    monkeypatch.setattr(trainer_world, "Backwards", Broken)
    with pytest.raises(RolloutError, match="third rollout broke"):
        run(stage2_config(tiny_text, tmp_path, b_ratio=1.0, max_steps=1), monkeypatch)
    assert no_producer_is_left()
    assert steps_of(tmp_path) == []


def test_an_error_while_learning_gives_the_rollouts_under_way_up(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row is learned while others roll out; what breaks then is the run's error, and nothing goes on."""
    closed = threading.Event()

    class Endless(Backwards):
        def __iter__(self) -> Iterator[tuple[int, Rollout]]:
            yield from list(super().__iter__())[:-1]
            closed.wait(30.0)

        def close(self) -> None:
            closed.set()

    def out_of_order(*_: Any) -> None:
        raise LossError("the first row broke")

    monkeypatch.setattr(trainer_world, "Backwards", Endless)
    monkeypatch.setattr(trainer_world, "_told", lambda *_: out_of_order)
    with pytest.raises(LossError, match="the first row broke"):
        run(stage2_config(tiny_text, tmp_path, b_ratio=1.0, max_steps=1, max_length=130), monkeypatch)
    assert closed.is_set()
    assert no_producer_is_left()


def test_equal_rollouts_are_learned_in_equal_rows_if_asked_for(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: `training.deterministic` packs in request order, whatever ends first."""
    settings: dict[str, Any] = {"b_ratio": 1.0, "max_steps": 2, "max_length": 200, "deterministic": True}
    found = []
    for folder, order in ((tmp_path / "a", Backwards), (tmp_path / "b", Forwards)):
        monkeypatch.setattr(trainer_world, "Backwards", order)
        (seen,) = run(stage2_config(tiny_text, folder, **settings), monkeypatch)
        found.append(seen)
    assert found[0].rows == found[1].rows
    assert any(len(row) > 1 for row in found[0].rows)
    for name, tensor in found[0].weights.items():
        assert torch.equal(tensor, found[1].weights[name]), name


class Forwards(Backwards):
    def __iter__(self) -> Iterator[tuple[int, Rollout]]:
        return reversed(list(super().__iter__()))


def test_channel_a_of_grpo_learns_each_ground_truth_once(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample has a place for each of its rollouts; its ground truth is one segment, also in a short last step."""
    plain = stage2_config(tiny_text, tmp_path, b_ratio=0.0, num_samples=6, num_train_epochs=1, max_steps=None)
    values = plain.model_dump(exclude_unset=True)
    values["custom"]["trainer_variant"] = "grpo"
    values["training"]["per_device_train_batch_size"] = 2
    values["custom"]["extra"]["rollout_matching"]["decoding"] = {"temperature": 1.0, "max_new_tokens": 64}
    seen = run(config_of({**values, "grpo": {"num_generations": 2}}), monkeypatch)
    counted = Counter(i for rank in seen for i in rank.learned)
    assert len(counted) == 6
    assert set(counted.values()) == {1}
    first, last = steps_of(tmp_path)
    assert first["metrics"].get("batch_share", 1.0) == 1.0
    assert last["metrics"]["batch_share"] == 0.5  # 2 of the 4 samples that 8 places hold


def test_calls_are_counted_since_the_last_step() -> None:
    ended = CallTotals(number=7, seconds=5.0)
    assert call_metrics(ended) == {"stage2_ab/calls": 7.0, "stage2_ab/rollout_s": 5.0}
    since = call_metrics(ended, CallTotals(number=4, seconds=1.5))
    assert since == {"stage2_ab/calls": 3.0, "stage2_ab/rollout_s": 3.5}
    assert call_metrics(CallTotals()) == {"stage2_ab/calls": 0.0, "stage2_ab/rollout_s": 0.0}
