"""Tests of what `--check` says of a start that would fail: a folder that cannot be written, and nothing to resume
from."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.run.output_dir import check_resume, check_writable
from shared.errors import ConfigError
from tests.unit.learner.config.examples import minimal, valid


def start(**training: object) -> None:
    config = valid(minimal(), {f"training.{name}": value for name, value in training.items()})
    check_writable(config)
    check_resume(config)


def test_a_folder_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    start(output_dir=str(tmp_path / "runs" / "mine"))


@pytest.mark.parametrize("below", ["", "runs/mine"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError) as caught:
        start(output_dir=str(tmp_path / "taken" / below))
    assert str(tmp_path / "taken") in caught.value.found
    assert "training.output_dir" in caught.value.what


@pytest.mark.parametrize("where", ["latest", "elsewhere/checkpoint-3"])
def test_nothing_to_resume_from(tmp_path: Path, where: str) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)  # a manifest is missing: not complete
    resumed = where if where == "latest" else str(tmp_path / where)
    with pytest.raises(ConfigError) as caught:
        start(output_dir=str(tmp_path / "run"), resume_from_checkpoint=resumed)
    assert "training.resume_from_checkpoint" in caught.value.what
    (tmp_path / "run" / "checkpoint-3" / "manifest.json").write_text("{}")
    start(output_dir=str(tmp_path / "run"), resume_from_checkpoint="latest")
    start(output_dir=str(tmp_path / "run"), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
