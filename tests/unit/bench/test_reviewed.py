"""Tests of what a review is worth: its runs as configurations, the simulated reviewer, what is kept in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.experiment.arms import FIRST_SEED
from bench.reviewed import (
    BUDGETS,
    WITHOUT_REVIEW,
    Data,
    ReviewedResults,
    ReviewedRun,
    config_of,
    judge,
    runs_of,
    tables,
)
from learner.config.load import load_config
from learner.records import DetectionObject, Sample
from shared.config.parse import write_yaml


def data(folder: Path, name: str = "digits") -> Data:
    return Data(name=name, work=folder / name, model=folder / "model", steps=3, max_new_tokens=16, row_tokens=4608)


def run_of(folder: Path, seed: int = FIRST_SEED) -> ReviewedRun:
    return ReviewedRun(data=data(folder), name="sft", arm=WITHOUT_REVIEW["sft"], seed=seed)


def test_every_run_is_a_configuration_that_the_learner_takes(tmp_path: Path) -> None:
    runs = runs_of([data(tmp_path), data(tmp_path, "blood cells")], None, None, seeds=2)
    assert len(runs) == 2 * 2 * (len(WITHOUT_REVIEW) + len(BUDGETS))
    assert len({(run.data.name, run.folder) for run in runs}) == len(runs)
    for run in runs:
        path = tmp_path / "run.yaml"
        write_yaml(path, config_of(run, tmp_path / "train.jsonl"), "test")
        assert load_config(str(path), world_size=1).training.seed == run.seed


def test_the_reviewer_accepts_each_missing_object_once_and_with_its_own_name() -> None:
    missing = DetectionObject("four", "bbox_2d", (100, 100, 300, 300))
    sample = Sample(sample_id="a", messages=(), images=("a.png",), width=1000, height=1000, objects=())
    boxes: list[tuple[float, ...]] = [(105, 100, 300, 300), (100, 100, 300, 300), (600, 600, 700, 700)]
    suggestions: list[dict[str, Any]] = [{"sample_id": "a", "name": "nine", "box": box} for box in boxes]
    assert judge(suggestions, {"a": (sample, [missing])}) == {
        "0": {"decision": "accept", "name": "four"},
        "1": {"decision": "reject", "name": "nine"},
        "2": {"decision": "reject", "name": "nine"},
    }


def test_what_is_in_the_file_is_not_done_again(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    ReviewedResults(file).keep(run_of(tmp_path), {"f1@0.5": 0.5})
    again = ReviewedResults(file)
    assert again.has(run_of(tmp_path))
    assert not again.has(run_of(tmp_path, FIRST_SEED + 1))


def test_the_table_has_the_mean_of_the_seeds(tmp_path: Path) -> None:
    results = ReviewedResults(tmp_path / "out.json")
    for seed, f1 in ((FIRST_SEED, 0.5), (FIRST_SEED + 1, 0.7)):
        found = {"f1@0.5": f1, "interval": [0.4, 0.8], "recall@0.5": 0.5, "precision@0.5": 0.5, "accepted": 7}
        results.keep(run_of(tmp_path, seed), found)
    row = tables(results.content["data"]).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")][1:5] == ["sft", "7", "2", "0.600"]


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import typer

    from bench.forgetting import Device
    from bench.reviewed import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="--device cpu"):
        main(out=tmp_path / "out.json", work=tmp_path, device=Device.cuda)
