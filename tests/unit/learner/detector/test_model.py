"""The model that `predict` asks: what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.detector.model import name_of


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
