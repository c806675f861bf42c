"""docs/stage2.md lists the metrics of `stage2_ab_training`: those that its runs write, each with unit and meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.learner.steps.test_ahead import Servers, ahead_config, patient, servers
from tests.unit.learner.steps.test_stage2 import stage2_config, stand_in, steps_of
from tests.unit.learner.trainer_world import run

__all__ = ["patient", "servers"]  # fixtures
PAGE = Path(__file__).parents[4] / "docs" / "stage2.md"


def documented() -> dict[str, tuple[str, str]]:
    """Unit and meaning by metric."""
    rows = re.findall(r"^\| `([\w/]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text().split("## Metrics")[1], re.M)
    assert len({name for name, *_ in rows}) == len(rows), "a metric is listed twice"
    return {name: (unit, meaning) for name, unit, meaning in rows}


def test_the_page_lists_what_runs_write(
    servers: Servers, patient: None, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both modes, both channels, a short step, an evaluation and a checkpoint. `patient` and `servers` stand in for
    what is slow."""
    settings = {"b_ratio": 0.5, "num_samples": 17, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
    run(ahead_config(tiny_text, tmp_path / "ahead", **settings), monkeypatch)
    stand_in(monkeypatch)
    run(stage2_config(tiny_text, tmp_path / "within", **settings), monkeypatch)
    run(stage2_config(tiny_text, tmp_path / "unpacked", **settings, packing=False), monkeypatch)
    steps = [step for way in ("ahead", "within", "unpacked") for step in steps_of(tmp_path / way)]
    written = {name for step in steps for name in step["metrics"]}
    written = {"drop/REASON" if name.startswith("drop/") else name for name in written}
    page = documented()
    assert written - page.keys() == set(), "not on the page"
    stage2 = {name for name in page if name.startswith("stage2_ab/")}
    assert stage2 - written == set(), "on the page, and nobody writes it"


def test_each_metric_has_a_unit_and_a_meaning() -> None:
    assert all(unit.strip() and meaning.strip() for unit, meaning in documented().values())


def test_the_picture_is_there() -> None:
    (name,) = re.findall(r"!\[.*\]\((.+)\)", PAGE.read_text())
    assert (PAGE.parent / name).read_text().startswith("<svg")
