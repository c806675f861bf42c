"""What this version does not run: a note of `--check`, an error of a run, before anything is loaded (R02, R04)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner import build
from learner.config.built import not_built
from learner.config.check import run_check
from shared.config_errors import ConfigErrors
from shared.config_io import dump_yaml
from tests.unit.learner.config.examples import ROLLOUT, changed, minimal, stage2, valid

MODE = f"{ROLLOUT}.vllm.mode"
COLOCATE = {MODE: "colocate"}


def test_the_plan_is_printed_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), COLOCATE)))
    assert run_check(str(path)) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["vllm_mode"] == "colocate"
    assert err.startswith(f"note: {MODE}: found colocate")


def test_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(changed(minimal(), COLOCATE)))
    monkeypatch.setattr(build, "build", None)  # which loads
    with pytest.raises(ConfigErrors, match=rf"{MODE}: found colocate, .*; wanted server"):
        build.train(str(path), environment={})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ROLLOUT}.rollout_backend": "hf"},
        {**COLOCATE, "custom.trainer_variant": "sft"},
        {f"{ROLLOUT}.rollout_buffer": {"enabled": True, "m_steps": 2}},
    ],
)
def test_the_rest_runs(changes: dict[str, Any]) -> None:
    assert not list(not_built(valid(minimal(), changes)))


@pytest.mark.parametrize("changes", [{}, {"stage2_ab.async_actor_learner.enabled": True}])
def test_stage2_runs(changes: dict[str, Any]) -> None:
    assert not list(not_built(valid(stage2(), changes)))
