"""The demo compares like with like, says what its numbers say, and avoids a slow bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo import run
from deploy.demo.summary import sentence
from learner.config.load import load_config

ROOT = Path(run.__file__).parents[2]


def configuration(name: str) -> dict[str, Any]:
    return load_config(str(ROOT / f"deploy/demo/{name}.yaml")).model_dump()


def test_both_runs_learn_as_many_samples_of_the_same_data_from_the_same_model() -> None:
    sft, rolled = configuration("sft"), configuration("stage2")
    assert (sft.pop("custom")["trainer_variant"], rolled.pop("custom")["trainer_variant"]) == (
        "sft",
        "rollout_matching_sft",
    )
    for config in (sft, rolled):
        config["training"] |= {"output_dir": "", "eval_on_start": None}
    assert sft == rolled


def test_both_begin_with_what_the_first_run_leaves() -> None:
    base = configuration("base")["training"]
    assert configuration("stage2")["model"]["path"] == f"{base['output_dir']}/checkpoint-{base['max_steps']}"
    assert configuration("base")["training"]["save_on_end"]


def summary(low: float, high: float) -> dict[str, Any]:
    values = {"base": 0.83, "sft": 0.55, "stage2": 0.82}
    return {
        "arms": {arm: {"f1@0.5": {"value": value}} for arm, value in values.items()},
        "stage2_minus_sft": {"f1@0.5": {"value": (low + high) / 2, "low": low, "high": high}},
    }


def test_the_sentence_follows_the_interval() -> None:
    ahead, undecided = sentence(summary(0.2, 0.3)), sentence(summary(-0.1, 0.3))
    assert ahead != undecided
    for said in (ahead, undecided):
        assert all(number in said for number in ("0.830", "0.550", "0.820"))
    assert "complete" in ahead
    assert "-0.100" in undecided


@pytest.mark.parametrize(("capability", "bf16"), [("AVX512", True), ("AVX512_VNNI", True), ("AVX2", False)])
def test_float32_where_bfloat16_is_slow(
    capability: str, bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(run.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    written = {name: yaml.safe_load(path.read_text()) for name, path in run._write_configs().items()}
    assert all(written[name].get("training", {}).get("bf16", True) is bf16 for name in ("base", "sft", "stage2"))
    assert written["server"].get("dtype", "auto") == ("auto" if bf16 else "float32")
