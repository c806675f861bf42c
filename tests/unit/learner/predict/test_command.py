"""`recipe --only-measure` on the shipped checkpoint and real scenes, some of whose labels were removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from deploy.demo import build_data
from learner.__main__ import main
from learner.predict import recommend as rules
from learner.predict.features import MEANINGS

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"


def run_file(folder: Path, **sections: object) -> Path:
    train, val = str(folder / "train.jsonl"), str(folder / "val.jsonl")
    decoding = {"max_new_tokens": 160}
    config = {
        "model": {"path": str(CHECKPOINT)},
        "data": {"train": train, "val": val},
        "training": {"output_dir": str(folder / "run"), "max_steps": 1},
        "custom": {"trainer_variant": "sft", "extra": {"rollout_matching": {"decoding": decoding}}},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


def test_missing_labels_are_found_by_the_shipped_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_data.build(build_data.Build(train=10, val=2, test=0, annotation_dropout=0.5), tmp_path)
    out = tmp_path / "found" / "features.json"
    arguments = [
        "recipe",
        "--only-measure",
        "--config",
        str(run_file(tmp_path)),
        "--generations",
        "4",
        "--json",
        str(out),
    ]
    assert main(arguments) == 0
    shown, told = capsys.readouterr(), json.loads(out.read_text())
    found = told["features"]
    assert list(found) == list(MEANINGS)
    assert all(name in shown.out for name in MEANINGS)
    assert shown.err == ""
    assert found["missing_labels"] > 0.25
    assert told["recommendation"] == rules.COMPLETED_GRPO
    assert found["f1_greedy"] < found["f1_val"]  # the labels, not the model
    assert found["f1_best"] > found["f1_sampled"] > 0.2
    assert told["labels"]["source"] in ("votes", "appearance")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["task.type=key_value"], "task.type: detection"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.path=deploy"], "model.path"),
    ],
)
def test_what_cannot_be_measured_is_one_message(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_data.build(build_data.Build(train=2, val=2, test=0), tmp_path)
    assert main(["recipe", "--only-measure", "--config", str(run_file(tmp_path)), *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_one_sample_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_data.build(build_data.Build(train=1, val=2, test=0), tmp_path)
    assert main(["recipe", "--only-measure", "--config", str(run_file(tmp_path))]) == 2
    assert "too few samples" in capsys.readouterr().err
