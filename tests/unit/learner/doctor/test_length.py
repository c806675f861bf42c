"""Tests of how long a run is: against the batches that it would draw, and against an earlier run's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config.load import config_of
from learner.config.plan import Plan, resolve, steps_of_epoch
from learner.config.schema import RunConfig
from learner.data.sampler import DistributedSampler
from learner.doctor.data_report import length_in_words, length_report
from tests.unit.learner.config.examples import REMOVE, ROLLOUT, changed, minimal, stage2

GROUPS = {
    "custom.trainer_variant": "grpo",
    "grpo.num_generations": 4,
    f"{ROLLOUT}.decoding.temperature": 1.0,
    "training.effective_batch_size": 8,
    "training.per_device_train_batch_size": 8,
}
EPOCHS = {"training.max_steps": REMOVE, "training.num_train_epochs": 2}


def run_of(changes: dict[str, Any], world_size: int = 1, base: dict[str, Any] | None = None) -> tuple[RunConfig, Plan]:
    config = config_of(changed(base or minimal(), changes))
    return config, resolve(config, world_size)


def words(config: RunConfig, plan: Plan, num_samples: int) -> list[str]:
    report = plan.to_json() | {"samples": {"train": num_samples}} | length_report(config, plan, num_samples)
    return length_in_words(report)


@given(
    num_samples=st.integers(1, 300), world_size=st.integers(1, 4), per_device=st.integers(1, 5), gas=st.integers(1, 4)
)
def test_an_epoch_has_as_many_steps_as_it_has_batches(
    num_samples: int, world_size: int, per_device: int, gas: int
) -> None:
    """Counted one micro-batch after the other: a step ends after `gas` of them, or with the epoch."""
    sizes = {"training.per_device_train_batch_size": per_device, "training.gradient_accumulation_steps": gas}
    config, plan = run_of(sizes, world_size)
    sampler = DistributedSampler(num_samples, num_ranks=world_size, rank=0, samples_per_rank=per_device, seed=0)
    num_steps, in_step = 0, 0
    for position in range(sampler.per_epoch):
        in_step += 1
        if in_step == gas or sampler.share(position).ends_epoch:
            num_steps, in_step = num_steps + 1, 0
    assert steps_of_epoch(config, plan, num_samples) == num_steps


def test_a_step_of_stage_2_takes_a_whole_batch() -> None:
    config, plan = run_of({}, 2, stage2())
    assert [steps_of_epoch(config, plan, n) for n in (8, 9, 16)] == [1, 2, 2]


def test_an_epoch_of_groups_has_every_sample_once() -> None:
    config, plan = run_of(GROUPS)
    assert steps_of_epoch(config, plan, 10) == 5  # two photographs a step


def test_m_steps_learn_a_window_again() -> None:
    buffer = {"enabled": True, "m_steps": 3}
    config, plan = run_of({f"{ROLLOUT}.rollout_buffer": buffer, "training.effective_batch_size": 2})
    assert steps_of_epoch(config, plan, 5) == 7  # two windows three times, and the rest once


def test_steps_and_epochs_follow_from_each_other(tmp_path: Path) -> None:
    folder = {"training.output_dir": str(tmp_path), "training.effective_batch_size": 4}
    assert length_report(*run_of({**folder, **EPOCHS}), 10)["length"] == {
        "steps": 6,
        "epochs": 2.0,
    }
    config, plan = run_of(folder)
    assert length_report(config, plan, 16)["length"]["epochs"] == 2.5
    assert "10 steps" in words(config, plan, 16)[0]
    assert "about 2.5 epochs" in words(config, plan, 16)[0]


def test_time_is_known_only_from_an_earlier_run(tmp_path: Path) -> None:
    """The first steps compile, so they do not count. A torn line is left out."""
    config, plan = run_of({"training.output_dir": str(tmp_path), "training.max_steps": 3600})
    assert "step_s" not in length_report(config, plan, 16)["length"]
    assert "not known" in words(config, plan, 16)[1]
    seconds = [90.0, 5.0, 5.0, 2.0, 2.0, 4.0]
    lines = [json.dumps({"event": "step", "step_s": s}) for s in seconds]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "step", "step_s']))
    assert length_report(config, plan, 16)["length"]["step_s"] == 2.0
    assert "2.0 hours" in words(config, plan, 16)[1]


@pytest.mark.parametrize("value", ['"x"', "null", "-1", "NaN", "true"])
def test_a_damaged_time_is_none(tmp_path: Path, value: str) -> None:
    config, plan = run_of({"training.output_dir": str(tmp_path)})
    (tmp_path / "metrics.jsonl").write_text(f'{{"event": "step", "step_s": {value}}}\n' * 9)
    assert "step_s" not in length_report(config, plan, 16)["length"]
