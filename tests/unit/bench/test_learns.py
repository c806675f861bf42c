"""Whether it learns: the arms' configurations, equal time, slots, and intervals over scenes and seeds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from bench import learns
from bench.learns import Slot, Stage1, make_slots, run_all, slot_server, stage1_config
from bench.learns_arms import (
    ARMS,
    KEPT,
    REFERENCE,
    SEEDS,
    TUNED,
    Arm,
    Run,
    Settings,
    all_runs,
    choose,
    read_arm,
    run_config,
)
from bench.learns_report import Draws, Result, markdown, read_results, summarize, write_result
from bench.runs import LearnerRun, Server
from deploy.launch import Process, Processes, supervised
from learner.config.load import load_config
from learner.tasks.detection.metrics import COLUMNS
from rollout_server.config import load_server_config
from shared.config.parse import write_yaml
from shared.errors import ConfigError


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
    slot: Slot[Run] = Slot(index=0)
    if served:
        with supervised() as processes:
            slot.server = Server(process=python(processes, ""), url="http://127.0.0.1:9000")
    for arm in ARMS.values():
        path = tmp_path / "run.yaml"
        write_yaml(path, run_config(Run(arm=arm, seed=17), settings(tmp_path), slot.vllm(), 48), "test")
        config = load_config(str(path), world_size=1)
        assert config.custom.trainer_variant == arm.variant
        assert config.training.max_steps == 48


@pytest.mark.parametrize(("on_gpu", "eager"), [(True, False), (True, True), (False, False)])
def test_a_slots_server_is_a_configuration_that_the_server_takes(on_gpu: bool, eager: bool, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    write_yaml(path, slot_server(tmp_path, tmp_path, on_gpu=on_gpu, eager=eager), "test")
    assert load_server_config(path).enforce_eager is (eager or not on_gpu)


def test_stage_1_is_a_configuration_that_the_learner_takes(tmp_path: Path) -> None:
    first = Stage1(scenes=10, steps=24, batch_size=8, learning_rate=1e-3, limit_s=10.0)
    path = tmp_path / "stage1.yaml"
    write_yaml(path, stage1_config(first, tmp_path, tmp_path / "run", 2, 1), "test")
    assert load_config(str(path), world_size=2).training.per_device_train_batch_size == 4


def test_what_is_wanted_most_runs_first_and_each_run_once() -> None:
    runs = all_runs(ARMS.values())
    assert len({run.name for run in runs}) == len(runs)
    main = [run for run in runs if run.arm.seeds == SEEDS]
    assert runs[: len(main)] == main
    assert {run.seed for run in runs[:3]} == {17}
    assert sum(run.evaluates_first for run in runs) == 1
    assert [run.name for run in all_runs([ARMS["sft"]], 2)] == ["sft-17", "sft-18"]
    ablations = [run.arm for run in runs if run.arm.variant == REFERENCE and run.arm.seeds == 1]
    assert all(arm != replace(ARMS[REFERENCE], name=arm.name, seeds=1) for arm in ablations)
    assert ARMS[REFERENCE].loss == TUNED


def test_an_arm_can_be_added_in_words() -> None:
    arm = read_arm('{"name": "cooler", "decoding": {"temperature": 0.5}, "seeds": 2}')
    assert (arm.decoding, arm.loss, arm.seeds) == ({"temperature": 0.5}, TUNED, 2)
    for text in ("cooler", '{"name": "x", "temperature": 1}', "{}"):
        with pytest.raises(ConfigError, match="an arm cannot be read"):
            read_arm(text)


def test_two_gpus_hold_servers_and_learners_crosswise() -> None:
    found = make_slots(2, 2)
    assert [(slot.server_devices, slot.learner_devices) for slot in found] == [((0,), (1,)), ((1,), (0,))] * 2
    assert [slot.has_server for slot in make_slots(1, 3)] == [False] * 3
    assert [slot.has_server for slot in make_slots(0, 3)] == [True]


def write_run(folder: Path, *, steps: int, step_s: float, hits: Sequence[int]) -> Path:
    (folder / "eval").mkdir(parents=True)
    events = [
        {"event": "step", "loss": 1.0, "metrics": {"step_s": step_s, "learn_s": step_s / 2}, "global_step": i}
        for i in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step, factor in ((0, 0), (steps, 1)):
        lines = [
            {"id": str(i), "counts": {"samples": 1.0, "truth": 10.0, "predictions": 10.0, "tp@0.50": factor * hit}}
            for i, hit in enumerate(hits)
        ]
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_equal_time_is_known_once_both_that_it_is_made_of_have_come_some_way(tmp_path: Path) -> None:
    results, runs = tmp_path / "results", tmp_path / "runs"
    results.mkdir()
    run = Run(arm=ARMS["sft, equal time"], seed=17)
    queue = learns.Queue(runs=[run, Run(arm=ARMS["b_ratio 0.25"], seed=17)], results=results, run_dirs=runs, steps=48)
    assert queue.num_steps(run) is None
    write_result(write_run(tmp_path / "sft", steps=10, step_s=0.5, hits=[5]), "sft", 17, results / "sft.json")
    first = queue.next_run()
    assert first is not None
    assert first.arm.name == "b_ratio 0.25"
    write_run(runs / f"{REFERENCE}-17", steps=19, step_s=4.0, hits=[5])
    assert queue.next_run() is None
    under_way = write_run(runs / f"{REFERENCE}-18", steps=20, step_s=5.0, hits=[5])
    with (under_way / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert queue.num_steps(run) == 480
    write_result(write_run(tmp_path / "rm", steps=5, step_s=4.0, hits=[5]), REFERENCE, 17, results / "rm.json")
    assert queue.num_steps(run) == 384
    assert queue.next_run() is run


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, step_s=2.0, hits=[5, 7])
    (tmp_path / "r").mkdir()
    write_result(folder, "sft", 17, tmp_path / "r" / "a.json")
    write_result(folder, "base", 17, tmp_path / "r" / "b.json", at_start=True)
    after, before = read_results(tmp_path / "r")
    assert (after.steps, after.train_s, after.medians["learn_s"]) == (3, 6.0, 1.0)
    assert after.scenes[:, COLUMNS.index("tp@0.50")].tolist() == [5, 7]
    assert before.scenes[:, COLUMNS.index("tp@0.50")].tolist() == [0, 0]


def made_up(arm: str, seed: int, hits: Sequence[float]) -> Result:
    scenes = np.zeros((len(hits), len(COLUMNS)))
    for name, value in (("samples", 1.0), ("truth", 10.0), ("predictions", 10.0)):
        scenes[:, COLUMNS.index(name)] = value
    scenes[:, COLUMNS.index("tp@0.50")] = hits
    ids = tuple(map(str, range(len(hits))))
    return Result(arm=arm, seed=seed, steps=1, train_s=1.0, medians={}, sample_ids=ids, scenes=scenes)


def test_intervals_hold_what_scenes_and_seeds_change() -> None:
    """F1@0.5 of such scenes is mean(hits) / 10, so both spreads are known."""
    rng = np.random.default_rng(0)
    hits = rng.integers(0, 11, size=400).astype(float)
    same = summarize([made_up("sft", seed, hits) for seed in (1, 2, 3)])["arms"]["sft"]["metrics"]["f1@0.5"]
    assert same["value"] == pytest.approx(hits.mean() / 10, abs=1e-3)
    assert same["high"] - same["low"] == pytest.approx(2 * 1.96 * hits.std() / 10 / 20, rel=0.15)
    apart = [made_up("sft", seed, np.full(400, level)) for seed, level in ((1, 4.0), (2, 5.0), (3, 6.0))]
    spread = summarize(apart)["arms"]["sft"]["metrics"]["f1@0.5"]
    assert (spread["low"], spread["value"], spread["high"]) == (0.4, 0.5, 0.6)


def test_arms_are_compared_on_the_same_draws_of_scenes() -> None:
    """One more hit in every scene is a difference without any spread, however scenes differ."""
    hits = np.random.default_rng(1).integers(0, 10, size=300).astype(float)
    summary = summarize([made_up("sft", 1, hits), made_up(REFERENCE, 1, hits + 1), made_up("base", 1, hits[:7])])
    minus = summary["arms"][REFERENCE]["minus"]["sft"]["f1@0.5"]
    assert minus == {"value": 0.1, "low": 0.1, "high": 0.1}
    assert "base" not in summary["arms"], "runs of other scenes than the first one's can't be compared with it"
    assert f"| {REFERENCE} | 1 |" in markdown(summary, [REFERENCE])
    assert markdown(summarize([]), ["sft"]) == "no run has ended\n"


def test_draws_are_the_same_every_time() -> None:
    runs = [np.random.default_rng(i).random((20, len(COLUMNS))) for i in range(3)]
    first, second = (Draws(20, num_draws=50).sums("sft", runs) for _ in range(2))
    assert (first == second).all()
    assert first.mean(axis=0) == pytest.approx(sum(run.sum(axis=0) for run in runs), rel=0.15)


@dataclass(frozen=True)
class Job:
    name: str
    code: str

    def start(self, processes: Processes, folder: Path) -> LearnerRun:
        return LearnerRun(process=python(processes, self.code), log=folder / "log", run_dir=folder)


def test_slots_run_everything_side_by_side_and_report_how_it_ended(tmp_path: Path) -> None:
    jobs = [Job("good", "pass"), Job("bad", "raise SystemExit(3)"), Job("slow", "import time; time.sleep(60)")]
    ends: dict[str, int | None] = {}
    left = list(jobs)
    began = time.monotonic()
    with supervised() as processes:
        run_all(
            [Slot(index=i) for i in range(2)],
            next_run=lambda: left.pop(0) if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=began + 30.0,
            run_limit_s=2.0,
        )
    assert ends == {"good": 0, "bad": 3, "slow": None}
    assert time.monotonic() - began < 20.0


def test_at_the_deadline_what_runs_is_stopped_and_not_reported(tmp_path: Path) -> None:
    left, ends = [Job("slow", "import time; time.sleep(60)")], []
    with supervised() as processes:
        run_all(
            [Slot(index=0)],
            next_run=lambda: left.pop() if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.append(job),
            deadline=time.monotonic() + 1.0,
            run_limit_s=60.0,
        )
        assert processes.started[-1].popen.poll() is not None
    assert ends == []


def test_a_slot_whose_server_has_ended_takes_no_more_runs(tmp_path: Path) -> None:
    left, ends = [Job("first", "import time; time.sleep(60)"), Job("second", "pass")], {}
    with supervised() as processes:
        slot: Slot[Job] = Slot(
            index=0, server=Server(process=python(processes, "import time; time.sleep(0.5)"), url="")
        )
        run_all(
            [slot],
            next_run=lambda: left.pop(0) if left else None,
            start=lambda job, slot: job.start(processes, tmp_path),
            ended=lambda job, code: ends.update({job.name: code}),
            deadline=time.monotonic() + 20.0,
            run_limit_s=60.0,
        )
    assert ends == {"first": None}
    assert [job.name for job in left] == ["second"]


def test_without_names_the_arms_are_those_that_fit_the_labels() -> None:
    added = Arm(name="cooler")
    arms = {**ARMS, added.name: added}
    assert choose(arms, (), labels_are_complete=False) == list(arms.values())
    assert choose(arms, (), labels_are_complete=True) == [arm for arm in arms.values() if arm.name != KEPT]
    assert choose(arms, [KEPT, "sft"], labels_are_complete=True) == [ARMS["sft"], ARMS[KEPT], added]
