"""The model that `predict` asks: what it is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from learner.config.inference import INFERENCE_NAME
from learner.detector.model import find_model, name_of
from learner.run.best import BEST_FILE, BEST_LINK

CHECKPOINT = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"


@pytest.mark.parametrize(
    ("named", "folder", "name"),
    [
        ("runs/cells", "runs/cells/checkpoint-40", "cells, step 40"),
        ("runs/cells/checkpoint-40", "runs/cells/checkpoint-40", "cells, step 40"),
        ("runs/cells/best", "runs/cells/best", "cells, step 8"),
        ("runs/recipe", "runs/recipe/sft/checkpoint-4", "recipe, step 4"),
        ("exported", "exported", "exported"),
        ("demo/checkpoint", "demo/checkpoint", "demo/checkpoint"),
    ],
)
def test_a_model_is_called_by_its_run_and_step(
    named: str, folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/cells/checkpoint-8").mkdir(parents=True)
    (tmp_path / "runs/cells/best").symlink_to("checkpoint-8")
    assert name_of(Path(named), Path(folder)) == name


def test_a_run_that_only_became_worse_says_so(tmp_path: Path) -> None:
    """`--model RUN` is its best checkpoint. A run whose start was best has none, and its newest was asked without a
    word."""
    newest = tmp_path / "run" / "checkpoint-4"
    newest.mkdir(parents=True)
    for name in ("config.json", INFERENCE_NAME):
        shutil.copy(CHECKPOINT / name, newest / name)
    assert find_model(tmp_path / "run").warnings == ()
    measured = {"metric": "f1@0.5", "best_step": 0, "values": {"0": 0.728, "4": 0.696}}
    (tmp_path / "run" / BEST_FILE).write_text(json.dumps(measured))
    found = find_model(tmp_path / "run")
    assert found.folder == newest
    assert len(found.warnings) == 1
    for part in ("f1@0.5", "0.728", "checkpoint-4"):
        assert part in found.warnings[0]
    assert find_model(newest).warnings == (), "it was asked for by name"
    (tmp_path / "run" / BEST_LINK).symlink_to("checkpoint-4")
    assert find_model(tmp_path / "run").warnings == (), "a run that went on became better"
