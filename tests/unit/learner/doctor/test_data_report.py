"""Tests of what `check` says to people about the data, and of the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.__main__ import main
from shared.config.parse import dump_yaml
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.config.model_sizes import MODELS
from tests.unit.learner.data.annotations import FINE, jsonl

NAMED = ("length", "time", "memory")


def write(folder: Path, **keys: object) -> str:
    train, val = jsonl(folder, *[FINE] * 6), jsonl(folder, FINE, name="val.jsonl")
    values = {"data.train": str(train), "data.val": str(val), **{key.replace("__", "."): v for key, v in keys.items()}}
    (folder / "run.yaml").write_text(dump_yaml(changed(minimal(), values)))
    return str(folder / "run.yaml")


def test_people_read_classes_boxes_sizes_and_shared_photographs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, model__max_pixels=4096)
    assert main(["check", "--config", path]) == 0
    told = capsys.readouterr().out
    for part in ("train", "x 6", "200 x 100", "max_pixels", "train, val", "ready"):
        assert part in told
    assert main(["check", "--config", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shared_images"] == {"train, val": 1}
    assert set(report["data"]) == {"train", "val"}
    assert any("to evaluate on" in warning for warning in report["data"]["val"]["warnings"])
    assert not any("to evaluate on" in warning for warning in report["data"]["train"]["warnings"])


def test_people_read_what_completed_labels_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, labels__complete={"rollouts": 5, "refresh": 7})
    assert main(["check", "--config", path]) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("labels.complete"))
    for number in ("5 answers", "6 training samples", "7 steps"):
        assert number in told
    assert main(["check", "--config", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels_complete"] == {"rollouts": 5, "refresh": 7}


def test_people_read_whether_labels_are_known_to_have_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No statistic of the labels tells: a model must look. What it said in the run's folder is repeated."""
    path = write(tmp_path, training__output_dir=str(tmp_path / "run"))
    for known in ("find-missing suggest", "804 added to 1628"):
        assert main(["check", "--config", path]) == 0
        (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("labels: "))
        assert known in told
        (tmp_path / "run" / "labels").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "labels" / "step_000000.json").write_text('{"text": "804 added to 1628"}')


def test_people_read_where_images_go_that_their_prompts_do_not_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    assert main(["check", "--config", path]) == 0
    assert "<image>" not in capsys.readouterr().out
    train = tmp_path / "data.jsonl"
    train.write_text(train.read_text().replace("<image>", "", 2))
    assert main(["check", "--config", path]) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if "<image>" in line)
    assert "2 of 6" in told
    assert "before the text" in told


def test_a_row_that_no_photograph_fits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, global_max_length=16, model__max_pixels=1 << 20)
    assert main(["check", "--config", path]) == 2
    assert "global_max_length" in capsys.readouterr().err


def test_people_read_length_time_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **MODELS["2B"]}))
    path = write(tmp_path, model__path=str(model), training__effective_batch_size=3)
    assert main(["check", "--config", path]) == 0
    told = capsys.readouterr().out.splitlines()
    length, time, memory = (next(line for line in told if line.startswith(f"{name}: ")) for name in NAMED)
    assert "10 steps of 3" in length
    assert "5 epochs" in length
    assert "not known" in time
    assert "gradients" in memory
    assert not any("variant" in line for line in told), "keys of the plan are for --json"
    assert main(["check", "--config", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["length"]["steps"] == 10
    assert f"{report['memory_gib']['total']:g} GiB" in memory
    assert "channels" not in report, "they are of stage 2"


@pytest.mark.parametrize(("warmup", "code"), [(4, 0), (5, 2)])
def test_a_run_of_epochs_ends_after_its_warmup(
    tmp_path: Path, warmup: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six samples, two epochs of two steps."""
    length = {"training__num_train_epochs": 2, "training__max_steps": None, "training__effective_batch_size": 3}
    path = write(tmp_path, **length, training__warmup_steps=warmup)
    assert main(["check", "--config", path]) == code
    told = capsys.readouterr().err
    assert told.startswith("training.warmup_steps: found 5" if code else "")
