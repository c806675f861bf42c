"""The demo compares like with like, says what its numbers say, and avoids a slow bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deploy.demo import run
from deploy.demo.build_data import Build, build
from deploy.demo.summary import draw_before_and_after, sentence, summarize
from learner.config.load import load_config
from learner.tasks.detection.metrics import COLUMNS
from tests.unit.learner.report.fake_run import make_scene

ROOT = Path(run.__file__).parents[2]


def configuration(name: str) -> dict[str, Any]:
    return load_config(str(ROOT / f"deploy/demo/{name}.yaml")).model_dump()


def test_both_runs_learn_as_many_samples_of_the_same_data_from_the_same_model() -> None:
    sft, ours = configuration("sft"), configuration("ours")
    assert (sft.pop("labels")["complete"], ours.pop("labels")["complete"] is None) == (None, False)
    for config in (sft, ours):
        config["data"]["val"] = None
        config["training"] |= {"output_dir": "", "eval_steps": None, "keep_best": None}
    assert sft == ours
    assert configuration("grpo")["model"] == ours["model"]


def summary(low: float, high: float) -> dict[str, Any]:
    values = {"base": 0.67, "sft": 0.68, "ours": 0.82}
    return {
        "arms": {arm: {"f1@0.5": {"value": value}} for arm, value in values.items()},
        "ours_minus_sft": {"f1@0.5": {"value": (low + high) / 2, "low": low, "high": high}},
    }


def test_the_sentence_follows_the_interval() -> None:
    ahead, undecided = sentence(summary(0.1, 0.2)), sentence(summary(-0.1, 0.3))
    assert ahead != undecided
    for said in (ahead, undecided):
        assert all(number in said for number in ("0.670", "0.680", "0.820"))
    assert "complete" in ahead
    assert "-0.100" in undecided


def write_run(folder: Path, quality: dict[str, float], event: dict[str, Any], images: Path | None = None) -> None:
    """Write a run. `quality`: the share of objects that are found, by evaluation. `images`: where scenes are that
    exist."""
    (folder / "eval").mkdir(parents=True)
    for name, share in quality.items():
        scenes = []
        for i in range(4):
            found = round(10 * share)
            counts = dict.fromkeys(COLUMNS, 0.0)
            counts |= {"truth": 10, "predictions": found, **{c: found for c in COLUMNS if c.startswith("tp")}}
            one = make_scene(i, folder / "images")
            right = one["truth"] if share > 0.5 else []
            answer = {"predictions": right, "pairs": [[k, k, 1.0] for k in range(len(right))]}
            paths = one["images"] if images is None else [str(images / f"{i:06d}.png")]
            scenes.append({**one, **answer, "images": paths, "id": f"test-{i:06d}", "counts": counts})
        (folder / "eval" / f"{name}.jsonl").write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    (folder / "metrics.jsonl").write_text(json.dumps(event) + "\n")


LABELS = {"event": "labels", "labels": 9, "added": 3, "min_votes": 2, "rollouts": 4, "estimate": {}}


@pytest.mark.parametrize(("validated", "step", "recall"), [((0.2, 0.1), 0, 0.3), ((0.2, 0.5), 12, 0.6)])
def test_validation_chooses_the_step_of_sft_and_test_scenes_are_counted(
    validated: tuple[float, float], step: int, recall: float, tmp_path: Path
) -> None:
    write_run(tmp_path / "ours", {"step_000000": 0.3, "step_000012": 0.9}, LABELS)
    scored = {"step_000000": 0.4, "step_000004": validated[0], "step_000012": validated[1], "test": 0.6}
    write_run(tmp_path / "sft", scored, {"event": "note"})
    found = summarize(tmp_path / "ours", tmp_path / "sft", tmp_path / "none.jsonl", {}, missing=0.4)
    assert found["step"] == {"ours": 12, "sft": step}
    assert found["scenes"] == 4
    by_arm = {arm: values["recall@0.5"]["value"] for arm, values in found["arms"].items()}
    assert by_arm == {"base": 0.3, "sft": recall, "ours": 0.9}
    assert found["sft_at_the_end"]["recall@0.5"]["value"] == 0.6


@pytest.mark.slow
def test_models_answer_the_scenes_that_are_shown_and_a_best_step_on_the_way(tmp_path: Path) -> None:
    """The shipped checkpoint stands for every model."""
    build(Build(train=0, val=0, test=4, seed=3), tmp_path)
    images = tmp_path / "images" / "test"
    write_run(tmp_path / "ours", {"step_000000": 0.3, "step_000012": 0.9}, LABELS, images)
    scored = {"step_000000": 0.1, "step_000004": 0.5, "step_000012": 0.2, "test": 0.6}
    write_run(tmp_path / "sft", scored, {"event": "note"}, images)
    for name in ("ours", "sft"):
        shutil.copytree(ROOT / "deploy/demo/checkpoint", tmp_path / name / "checkpoint-4")
        (tmp_path / name / "best").symlink_to("checkpoint-4")
    found = summarize(tmp_path / "ours", tmp_path / "sft", tmp_path / "test.jsonl", {}, missing=0.4)
    assert found["step"]["sft"] == 4
    assert 0.3 < found["arms"]["sft"]["f1@0.5"]["value"] < 1
    pictures = draw_before_and_after(ROOT / "deploy/demo/checkpoint", tmp_path / "ours", tmp_path / "pictures")
    assert len({path.read_bytes() for path in pictures}) == 3


@pytest.mark.parametrize(("capability", "bf16"), [("AVX512", True), ("AVX512_VNNI", True), ("AVX2", False)])
def test_float32_where_bfloat16_is_slow(
    capability: str, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    written = {name: yaml.safe_load(path.read_text()) for name, path in run._write_configs().items()}
    assert all(written[name].get("training", {}).get("bf16", True) is bf16 for name in ("sft", "ours"))
    assert written["server"].get("dtype", "auto") == ("auto" if bf16 else "float32")
