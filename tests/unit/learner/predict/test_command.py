"""`recipe --only-measure` on the shipped checkpoint and real scenes, some of whose labels were removed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from deploy.demo import build_data
from learner.__main__ import main
from learner.predict import recommend as rules
from learner.predict.command import predicted, report
from learner.predict.features import MEANINGS, FeatureEstimate
from learner.predict.gain import PACKAGED, Formula, read_calibration, write_calibration

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
    formula = Formula(intercept=0.01, coefficients={"missing_labels": 0.0}, r2=0.5, rmse=0.02, num_regimes=12)
    write_calibration({"grpo": formula}, tmp_path / "calibration.json")
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
    assert main([*arguments, "--calibration", str(tmp_path / "calibration.json")]) == 0
    shown, told = capsys.readouterr(), json.loads(out.read_text())
    found = told["features"]
    assert list(found) == list(MEANINGS)
    assert all(name in shown.out for name in MEANINGS)
    assert shown.err == ""
    assert found["missing_labels"] > 0.25
    assert told["recommendation"] == rules.COMPLETED_GRPO
    assert found["f1_greedy"] < found["f1_val"]  # the labels, not the model
    assert found["f1_best"] > found["f1_sampled"] > 0.2
    assert told["predicted_gain_points"] == {"grpo": pytest.approx(1.0)}
    assert "+1.0 F1 points" in shown.out
    assert not (tmp_path / "run").exists()


def test_the_shipped_calibration_predicts_more_where_more_labels_are_missing() -> None:
    formulas = read_calibration(PACKAGED)
    usual = {"f1_greedy": 0.6, "parse_rate": 1.0}
    complete, missing, blind = (
        {
            name: FeatureEstimate(value, value, value)
            for name, value in ({**dict.fromkeys(MEANINGS, v), **usual} | more).items()
        }
        for v, more in ((0.0, {}), (0.5, {"overfit_f1": 0.0}), (0.5, {"overfit_f1": 0.0, "f1_greedy": 0.0}))
    )
    method = "rollout matching, keep_unmatched"
    gains, without = (predicted(formulas, one, rules.recommend(one)) for one in (missing, complete))
    assert gains[method] > without[method] + 10
    nothing_known = predicted(formulas, blind, rules.recommend(blind))
    assert set(nothing_known.values()) == {None}, "no model that finds nothing was measured"
    shown = io.StringIO()
    report(Console(file=shown, width=200), blind, rules.recommend(blind), formulas, nothing_known)
    assert "F1 points, give or take" not in shown.getvalue()
    assert "f1_greedy 0.000" in shown.getvalue()
    out = io.StringIO()
    report(Console(file=out, width=200), missing, rules.recommend(missing), formulas, gains)
    assert f"{gains[method]:+.1f} F1 points" in out.getvalue()
    assert all(name in out.getvalue() for name in MEANINGS)


def test_no_gain_is_predicted_where_a_rule_finds_none() -> None:
    """Labels with gaps that the model fills already: the formula knows the gaps alone, and said 12 points."""
    formulas = read_calibration(PACKAGED)
    values = {**dict.fromkeys(MEANINGS, 0.02), "f1_greedy": 0.65, "parse_rate": 1.0, "missing_labels": 0.4}
    values |= {"recall_places": 0.96, "unlabelled_right": 0.6, "no_signal": 0.2}
    found = {name: FeatureEstimate(value, value, value) for name, value in values.items()}
    recommendation = rules.recommend(found)
    assert recommendation.method == rules.NOTHING
    gains = predicted(formulas, found, recommendation)
    assert set(gains.values()) == {None}
    shown = io.StringIO()
    report(Console(file=shown, width=200), found, recommendation, formulas, gains)
    assert shown.getvalue().count("none, by the rule that recommends") == len(formulas)
    assert "F1 points, give or take" not in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["task.type=key_value"], "task.type: detection"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["model.path=deploy"], "model.path"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
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
