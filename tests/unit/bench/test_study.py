"""Tests of which method pays where labels have gaps: regimes, arms as configurations, what a run needs, results."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import typer

from bench import study
from bench.study import ARMS, BETTER, COMPLETED, Regime, Study, StudyRun, run_config, runs_of
from learner.config.load import load_config
from learner.config.sections.labels import CompleteConfig
from shared.config.parse import write_yaml

REAL = Regime("real")
# Arms of keys that this version may lack.
TRAINED = [name for name, arm in ARMS.items() if arm.does != "finds"]


def data(folder: Path) -> Path:
    """Write two photographs to learn from and one to score by, in the layout of the data set; half is unlabelled."""
    (folder / "bccd_redone").mkdir(parents=True)
    for split, numbers in (("train", (1, 2)), ("val", (3,))):
        for labels, boxes in (("published", 1), ("redone", 2)):
            coco = {
                "images": [{"id": i, "file_name": f"{i}.jpg", "width": 640, "height": 480} for i in numbers],
                "categories": [{"id": 1, "name": "RBC"}],
                "annotations": [
                    {"id": k, "image_id": i, "category_id": 1, "bbox": [100.0 * k, 50.0, 80.0, 60.0]}
                    for i in numbers
                    for k in range(boxes)
                ],
            }
            (folder / "bccd_redone" / f"{split}_{labels}.json").write_text(json.dumps(coco))
    return folder


def made(folder: Path) -> Study:
    made = Study(
        out=folder / "out",
        work=folder / "work",
        deadline=time.monotonic() + 60,
        data=data(folder / "data"),
        on_gpu=False,
        photographs=None,
        steps=None,
        batch_size=None,
        max_new_tokens=None,
    )
    made.make_folders()
    study.write_data(made, REAL)
    return made


@pytest.mark.parametrize("arm", TRAINED)
def test_every_arm_is_a_configuration_that_the_learner_takes(arm: str, tmp_path: Path) -> None:
    method, one = ARMS[arm], made(tmp_path)
    unknown = {*(method.complete or {}), *(["audit"] * bool(method.verdicts))} - CompleteConfig.model_fields.keys()
    run = StudyRun(REAL, arm, 17)
    if run.first is not None:
        run.first.result(one.out).parent.mkdir(parents=True, exist_ok=True)
        text = one.rows(REAL, "train", "all").read_text()
        run.first.result(one.out).write_text('{"finds": [[2, 8, null, true]]}' if method.verdicts else text)
    config = run_config(one, run)
    assert Path(config["data"]["train"]).is_file()
    path = tmp_path / "run.yaml"
    write_yaml(path, config, "test")
    if unknown:
        return
    read = load_config(str(path), world_size=1)
    assert read.custom.trainer_variant == method.variant
    assert read.training.learning_rate == (5e-5 if method.grpo is not None else 1e-4)
    assert read.training.save_on_end == (arm in study.LENDS_WEIGHTS)


def test_data_are_read_with_both_sets_of_labels(tmp_path: Path) -> None:
    one = made(tmp_path)
    for split, photographs in (("train", 2), ("score", 1)):
        for labels, boxes in (("gaps", 1), ("all", 2)):
            rows = study.read_rows(one.rows(REAL, split, labels))  # type: ignore[arg-type]
            assert [len(row["objects"]) for row in rows] == [boxes] * photographs
    cells = Regime.read("cells-missing60")
    study.write_data(one, cells)
    numbers = [len(row["objects"]) for row in study.read_rows(one.rows(cells, "train", "gaps"))]
    assert all(1 <= number <= 2 for number in numbers)


@pytest.mark.parametrize("name", ["cells", "digits", "demo-missing", "cells-lost", "digits-missing7"])
def test_an_unknown_regime_is_refused(name: str) -> None:
    with pytest.raises(typer.BadParameter, match=name):
        Regime.read(name)


def test_runs_have_files_of_their_own_and_bring_those_that_they_need(tmp_path: Path) -> None:
    regimes = [Regime.read(name) for name in ("real", "digits-missing", "digits-missing20")]
    runs = runs_of(regimes, tuple(ARMS), (17, 18))
    assert len({run.folder for run in runs}) == len({run.result(tmp_path) for run in runs}) == len(runs)
    assert [run.arm for run in runs if run.seed == 18].count("find-missing") == 0, "the start is the same for all seeds"
    assert [run.arm for run in runs_of([REAL], ["completed twice"], (17,))] == [COMPLETED, BETTER, "completed twice"]


def test_a_run_waits_for_weights_that_another_machine_kept(tmp_path: Path) -> None:
    one = made(tmp_path)
    first, better, twice = (StudyRun(REAL, arm, 17) for arm in (COMPLETED, BETTER, "completed twice"))
    for run in (first, better):
        run.result(one.out).parent.mkdir(parents=True, exist_ok=True)
    first.result(one.out).write_text("{}")
    study.with_weights(one, [first, better, twice])
    assert one.unfinished([first, better, twice]) == [first, better, twice], "its weights are not here"
    first.result(one.out).write_text("{}")
    better.result(one.out).write_text("")
    study.with_weights(one, [first, better, twice])
    assert one.unfinished([first, better, twice]) == [twice], "labels are enough"


def test_the_report_has_every_regime_with_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arm, right in (("sft", 1), ("sft, all labels", 2)):
        run = StudyRun(REAL, arm, 17)
        scores = {"f1": right / 2, "fm": right / 2}
        result = {
            "arm": arm,
            "seed": 17,
            "seconds": 1.0,
            "evaluations": [{"step": 0, "gaps": scores, "all": scores, "counts": {"x": [right, 2, 2]}}],
            "labels": None,
        }
        run.result(tmp_path).parent.mkdir(parents=True, exist_ok=True)
        run.result(tmp_path).write_text(json.dumps(result))
    study.report(tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["regimes"]["real"]["arms"]["sft"]["f1_all"] == [0.5]
    assert "| sft, all labels | 1 | 1.000 |" in capsys.readouterr().out
    assert "real" in (tmp_path / "study.md").read_text()
