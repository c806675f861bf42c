"""Tests of `bench.learns`: the arms' configurations, which of them run, and equal time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.experiment.arms import TUNED
from bench.experiment.results import write_result
from bench.experiment.runner import Slot
from bench.learns import Lengths, Stage1, stage1_config
from bench.learns_arms import (
    ARMS,
    KEPT,
    REFERENCE,
    SEEDS,
    LearnsArm,
    LearnsRun,
    Settings,
    all_runs,
    choose,
    read_arm,
    run_config,
)
from bench.runs import Server
from deploy.launch import Process, Processes, supervised
from learner.config.load import load_config
from shared.config.parse import write_yaml
from shared.errors import ConfigError
from tests.unit.bench.experiment.runs import write_run


def python(processes: Processes, code: str) -> Process:
    return processes.start("python", [sys.executable, "-c", code])


def settings(folder: Path) -> Settings:
    return Settings(
        model=folder / "base",
        data=folder / "data",
        runs=folder / "runs",
        steps=48,
        batch_size=64,
        learning_rate=1e-4,
        max_new_tokens=640,
        decode_batch_size=256,
        eval_scenes=500,
        data_workers=0,
    )


@pytest.mark.parametrize("served", [True, False], ids=["served", "colocated"])
def test_every_arm_is_a_configuration_that_the_learner_takes(served: bool, tmp_path: Path) -> None:
    slot: Slot[LearnsRun] = Slot(index=0)
    if served:
        with supervised() as processes:
            slot.server = Server(process=python(processes, ""), url="http://127.0.0.1:9000")
    for arm in ARMS.values():
        path = tmp_path / "run.yaml"
        write_yaml(path, run_config(LearnsRun(arm=arm, seed=17), settings(tmp_path), slot.vllm(), 48), "test")
        config = load_config(str(path), world_size=1)
        assert config.custom.trainer_variant == arm.variant
        assert config.training.max_steps == 48


def test_stage_1_is_a_configuration_that_the_learner_takes(tmp_path: Path) -> None:
    first = Stage1(scenes=10, steps=24, batch_size=8, learning_rate=1e-3, limit_s=10.0)
    path = tmp_path / "stage1.yaml"
    write_yaml(path, stage1_config(first, tmp_path, tmp_path / "run", 2, 1), "test")
    assert load_config(str(path), world_size=2).training.per_device_train_batch_size == 4


def test_what_is_wanted_most_runs_first_and_each_run_once() -> None:
    runs = all_runs(ARMS.values())
    assert len({run.folder for run in runs}) == len(runs)
    main = [run for run in runs if run.arm.seeds == SEEDS]
    assert runs[: len(main)] == main
    assert {run.seed for run in runs[:3]} == {17}
    assert sum(run.evaluates_first for run in runs) == 1
    assert [run.folder for run in all_runs([ARMS["sft"]], 2)] == ["sft-17", "sft-18"]
    ablations = [run.arm for run in runs if run.arm.variant == REFERENCE and run.arm.seeds == 1]
    assert all(arm != replace(ARMS[REFERENCE], name=arm.name, seeds=1) for arm in ablations)
    assert ARMS[REFERENCE].loss == TUNED


def test_an_arm_can_be_added_in_words() -> None:
    arm = read_arm('{"name": "cooler", "decoding": {"temperature": 0.5}, "seeds": 2}')
    assert (arm.decoding, arm.loss, arm.seeds) == ({"temperature": 0.5}, TUNED, 2)
    for text in ("cooler", '{"name": "x", "temperature": 1}', "{}"):
        with pytest.raises(ConfigError, match="an arm cannot be read"):
            read_arm(text)


def test_equal_time_is_known_once_both_that_it_is_made_of_have_come_some_way(tmp_path: Path) -> None:
    results, runs = tmp_path / "results", tmp_path / "runs"
    results.mkdir()
    run = LearnsRun(arm=ARMS["sft, equal time"], seed=17)
    lengths = Lengths(results=results, run_dirs=runs, steps=48)
    assert lengths.num_steps(run) is None
    write_result(write_run(tmp_path / "sft", steps=10, step_s=0.5, hits=[5]), "sft", 17, results / "sft.json")
    assert lengths.num_steps(LearnsRun(arm=ARMS["b_ratio 0.25"], seed=17)) == 48
    write_run(runs / f"{REFERENCE}-17", steps=19, step_s=4.0, hits=[5])
    assert lengths.num_steps(run) is None
    under_way = write_run(runs / f"{REFERENCE}-18", steps=20, step_s=5.0, hits=[5])
    with (under_way / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert lengths.num_steps(run) == 480
    write_result(write_run(tmp_path / "rm", steps=5, step_s=4.0, hits=[5]), REFERENCE, 17, results / "rm.json")
    assert lengths.num_steps(run) == 384


def test_without_names_the_arms_are_those_that_fit_the_labels() -> None:
    added = LearnsArm(name="cooler")
    arms = {**ARMS, added.name: added}
    assert choose(arms, (), labels_are_complete=False) == list(arms.values())
    assert choose(arms, (), labels_are_complete=True) == [arm for arm in arms.values() if arm.name != KEPT]
    assert choose(arms, [KEPT, "sft"], labels_are_complete=True) == [ARMS["sft"], ARMS[KEPT], added]
