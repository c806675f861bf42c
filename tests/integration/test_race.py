"""The race's own side on CPU: a real learner with colocated vLLM, and what its file says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bench.test_race import photographs

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def test_this_side_runs_on_cpu_and_a_second_call_runs_nothing(tmp_path: Path) -> None:
    photographs(tmp_path / "data", 6)
    out = tmp_path / "race.json"
    argv = [sys.executable, "-m", "bench.race", "--data", str(tmp_path / "data"), "--out", str(out), "--size", "tiny"]
    argv += ["--steps", "3", "--scratch", str(tmp_path), "--row-tokens", "2048"]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=300)
    race = json.loads(out.read_text())
    assert race["race"]["row_tokens"] == 2048
    (side,) = race["sides"]
    assert side["ended"]
    assert len(side["steps"]) == 3
    assert {"sync/scores", "sync/merge", "sync/load", "sync/canary", "rollout/engine"} <= side["steps"][-1].keys()
    assert (tmp_path / "race-logs" / "ours.log").is_file()
    subprocess.run(argv, cwd=ROOT, check=True, timeout=60)
    assert json.loads(out.read_text())["sides"] == [side]
