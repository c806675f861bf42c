"""Tests of what is forgotten at equal new-task F1: regimes and arms as configurations, the evaluation that counts, a
report."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from bench import forgetting, study
from bench.experiment.runner import Slot, one_at_a_time
from bench.forgetting import (
    ARMS,
    REGIMES,
    ForgettingExperiment,
    ForgettingRun,
    at_level,
    compared,
    level_of,
    run_config,
)
from deploy.demo.scenes import DIGIT_WORDS
from deploy.launch import supervised
from learner.config.load import load_config
from shared.config.parse import write_yaml


def experiment(folder: Path) -> ForgettingExperiment:
    return ForgettingExperiment(
        out=folder / "out",
        work=folder / "work",
        deadline=0.0,
        engine=study.engine(False, 1),
        slots=[Slot(index=0, has_server=False)],
        run_s=1.0,
        base_steps=3,
        scenes=8,
        val=4,
        test=5,
    )


def test_every_arm_is_a_configuration_that_the_learner_takes(tmp_path: Path) -> None:
    for name, arm in ARMS.items():
        path = tmp_path / "run.yaml"
        write_yaml(path, run_config(experiment(tmp_path), ForgettingRun("even", name, 17)), "test")
        config = load_config(str(path), world_size=1)
        assert config.custom.trainer_variant == arm.variant
        assert (config.model.lora is not None) == arm.lora


@pytest.mark.parametrize("regime", REGIMES)
def test_a_new_task_has_a_prompt_and_labels_of_its_own(regime: str) -> None:
    objects = [{"desc": word, "bbox_2d": [30, 30, 60, 50 + 5 * i]} for i, word in enumerate(DIGIT_WORDS)]
    rows = [{"id": "a", "messages": [], "objects": objects}, {"id": "b", "messages": [], "objects": objects[1:2]}]
    made = forgetting.of_new_task(rows, REGIMES[regime])
    assert all(row["objects"] for row in made)
    assert made[0]["messages"][0]["content"].startswith("<image>")
    assert [one for row in made for one in row["objects"]] != [one for row in rows for one in row["objects"]]
    assert rows[0]["objects"] is objects
    assert len(made) == (1 if regime in ("even", "large") else 2)


def test_of_two_commands_the_second_waits_for_a_base_and_takes_it(tmp_path: Path) -> None:
    made = replace(experiment(tmp_path), deadline=time.monotonic() + 60)
    made.make_folders()
    (bases := made.out / "bases").mkdir()
    with supervised() as processes, ThreadPoolExecutor(1) as pool:
        with one_at_a_time(bases, 1.0):
            second = pool.submit(forgetting.make_bases, made, processes, ["even"])
            with pytest.raises(TimeoutError):
                second.result(0.5)
            made.base("even").mkdir()
        second.result(20.0)
    assert not list(made.runs_dir.glob("base-*")), "it trains none"


def test_the_data_of_a_regime(tmp_path: Path) -> None:
    """Old scenes of `mixed` are none of the new task's, and both tests have the same scenes. The files go along with
    the folder, to another machine."""
    made = experiment(tmp_path)
    forgetting.write_data(made, ["even"])
    parts = {name: study.read_rows(made.data("even", name)) for name in ("train", "mixed", "eval", "teaching")}
    for part in ("val", "old", "new"):
        parts[part] = [row for row in parts["eval"] if row["id"].startswith(f"{part}-")]
    prompts = {name: {row["messages"][0]["content"] for row in rows} for name, rows in parts.items()}
    assert len(prompts["train"]) == len(prompts["new"]) == len(prompts["old"]) == 1
    assert prompts["mixed"] == prompts["teaching"] == prompts["old"] | prompts["new"]
    assert prompts["val"] == prompts["train"] == prompts["new"]
    extra = {row["id"] for row in parts["mixed"]} - {row["id"] for row in parts["train"]}
    assert len(extra) == len(parts["mixed"]) - len(parts["train"]) == 1
    pictures = {name: {row["images"][0] for row in rows} for name, rows in parts.items()}
    assert pictures["new"] <= pictures["old"]
    assert not pictures["val"] & pictures["old"]
    assert all((made.work / "data" / picture).is_file() for some in pictures.values() for picture in some)


def test_a_base_that_is_there_needs_no_teaching(tmp_path: Path) -> None:
    made = experiment(tmp_path)
    made.base("even").mkdir(parents=True)
    forgetting.write_data(made, ["even"])
    assert made.data("even", "train").is_file()
    assert not made.data("even", "teaching").exists()


def test_an_evaluation_is_kept_by_its_parts(tmp_path: Path) -> None:
    """One file has the validation scenes and both tests; each scene counts for the part that its id names."""
    made, run = experiment(tmp_path), ForgettingRun("even", "sft", 17)
    folder = made.run_dir(run)
    (folder / "eval").mkdir(parents=True)
    hits = {"val": 1.0, "old": 0.0, "new": 1.0}
    counts = {"truth": 1.0, "predictions": 1.0}
    lines = [{"id": f"{part}-test-1", "counts": {**counts, "tp@0.50": hit}} for part, hit in hits.items()]
    run.result(made.out).parent.mkdir(parents=True)
    for step in (0, 1):
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        event = {"event": "eval", "global_step": step, "metrics": {"f1@0.5": 0.5}}
        took = {"event": "step", "global_step": 1, "metrics": {"step_s": 2.0}}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in ([took, event] if step else [event])))
        forgetting.keep_result(made, run)
        assert run.result(made.out).exists() == (step == 1), "its start alone is no result"
    first, last = json.loads(run.result(made.out).read_text())["course"]
    assert (first["step"], last["step"], last["seconds"], last["val"]) == (0, 1, 2.0, 1.0)
    assert [last[part][f"{part}-test-1"]["tp@0.50"] for part in ("old", "new")] == [0.0, 1.0]


def scenes(hits: int) -> dict[str, dict[str, float]]:
    """Return ten scenes of one object, so many found."""
    return {str(i): {"tp@0.50": float(i < hits), "predictions": 1.0, "truth": 1.0} for i in range(10)}


def course(*points: tuple[float, int]) -> list[dict[str, Any]]:
    """Return the evaluations that have these pairs of new-task F1 on validation and old objects found."""
    return [
        {"step": 8 * i, "seconds": float(i), "val": val, "new": scenes(round(10 * val)), "old": scenes(old)}
        for i, (val, old) in enumerate(points)
    ]


def test_arms_are_compared_where_the_slowest_learner_arrives() -> None:
    courses = {
        "sft": course((0.4, 9), (0.6, 7), (0.8, 4)),
        "grpo": course((0.4, 9), (0.5, 9), (0.6, 8)),
        "rollout matching": course((0.4, 9), (0.41, 9)),  # learned nothing, so it does not lower the level
    }
    level = level_of(courses)
    assert level == 0.6
    assert at_level(courses["rollout matching"], level) is None
    found = compared(courses)
    assert found["base"] == {"old": 0.9, "new": 0.4}
    sft, grpo = (found["arms"][arm]["at_level"] for arm in ("sft", "grpo"))
    assert (sft["step"], sft["old"], sft["new"], sft["kept"]) == (8, 0.7, 0.6, None)
    assert (grpo["step"], grpo["old"]) == (16, 0.8)
    estimate, low, high = grpo["kept"]
    assert estimate == pytest.approx(0.1)
    assert 0.0 <= low <= estimate <= high
    assert found["arms"]["rollout matching"]["at_level"] is None
    assert "not reached" in forgetting.table(found)


def test_nobody_learned() -> None:
    found = compared({"sft": course((0.4, 9), (0.4, 9))})
    assert found["level"] is None
    assert found["arms"]["sft"]["at_level"] is None
    assert forgetting.table(found)


def test_the_report_is_made_of_the_results_that_there_are(tmp_path: Path) -> None:
    for arm in ("sft", "grpo"):
        path = ForgettingRun("even", arm, 17).result(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"arm": arm, "seed": 17, "course": course((0.4, 9), (0.6, 7))}))
    forgetting.report(tmp_path)
    assert json.loads((tmp_path / "forgetting.json").read_text())["regimes"]["even"]["17"]["level"] == 0.6
    assert "even" in (tmp_path / "forgetting.md").read_text()


@pytest.mark.parametrize("asked", [{"arm": ["nothing"]}, {"regime": ["nowhere"]}, {"device": "cuda"}])
def test_what_is_not_there_is_refused(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter):
        forgetting.main(out=tmp_path, **asked)
