"""The demo compares like with like, says what its numbers say, and avoids a slow bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo import run
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
        config["training"] |= {"output_dir": "", "eval_on_start": None}
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


def write_run(folder: Path, quality: dict[int, tuple[float, float]], event: dict[str, Any]) -> None:
    """`quality`: the share of objects that are found, in validation and test scenes, by step."""
    (folder / "eval").mkdir(parents=True)
    for step, (val, test) in quality.items():
        scenes = []
        for split, share in (("val", val), ("test", test)):
            for i in range(4):
                found = round(10 * share)
                counts = dict.fromkeys(COLUMNS, 0.0)
                counts |= {"truth": 10, "predictions": found, **{c: found for c in COLUMNS if c.startswith("tp")}}
                one = make_scene(i, folder / "images")
                right = [] if step == 0 else one["truth"]
                answer = {"predictions": right, "pairs": [[k, k, 1.0] for k in range(len(right))]}
                scenes.append({**one, **answer, "id": f"{split}-{i}", "counts": counts})
        lines = "".join(json.dumps(scene) + "\n" for scene in scenes)
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text(lines)
    (folder / "metrics.jsonl").write_text(json.dumps(event) + "\n")


def test_validation_chooses_the_step_of_sft_and_test_scenes_are_counted(tmp_path: Path) -> None:
    labels = {"event": "labels", "labels": 9, "added": 3, "min_votes": 2, "rollouts": 4, "estimate": {}}
    write_run(tmp_path / "ours", {0: (0.3, 0.3), 6: (0.8, 0.7), 12: (0.6, 0.9)}, labels)
    write_run(tmp_path / "sft", {6: (0.2, 0.9), 12: (0.1, 0.1)}, {"event": "note"})
    found = summarize(tmp_path / "ours", tmp_path / "sft", {}, missing=0.4)
    assert found["step"] == {"ours": 12, "sft": 0}
    assert found["scenes"] == 4
    recall = {arm: values["recall@0.5"]["value"] for arm, values in found["arms"].items()}
    assert recall == {"base": 0.3, "sft": 0.3, "ours": 0.9}
    assert found["sft_at_the_end"]["recall@0.5"]["value"] == 0.1
    pictures = draw_before_and_after(tmp_path / "ours", 6, tmp_path / "pictures")
    assert len({path.read_bytes() for path in pictures}) == 3


@pytest.mark.parametrize(("capability", "bf16"), [("AVX512", True), ("AVX512_VNNI", True), ("AVX2", False)])
def test_float32_where_bfloat16_is_slow(
    capability: str, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(run.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    written = {name: yaml.safe_load(path.read_text()) for name, path in run._write_configs().items()}
    assert all(written[name].get("training", {}).get("bf16", True) is bf16 for name in ("sft", "ours"))
    assert written["server"].get("dtype", "auto") == ("auto" if bf16 else "float32")
