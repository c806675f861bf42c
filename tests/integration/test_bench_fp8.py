"""`bench.fp8` on CPU, in bfloat16 only: real engines, both parts, and what its file says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.fp8 import WARM_UP
from tests.unit.bench.test_race import photographs

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def measured(folder: Path, part: str, *options: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run the part in bfloat16; return what FILE has of it."""
    out = folder / "fp8.json"
    argv = [sys.executable, "-m", "bench.fp8", "--data", str(folder / "data"), "--out", str(out), "--size", "tiny"]
    argv += ["--kind", "none", "--part", part, "--scratch", str(folder), *options]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=timeout_s)
    return dict(json.loads(out.read_text())["parts"][f"{part} none"])


def test_scenes_of_the_demo_are_scored(tmp_path: Path) -> None:
    """The checkpoint reaches about 0.67 on many scenes. An engine with other weights finds nothing."""
    found = measured(tmp_path, "f1", "--scenes", "8")
    assert found["scenes"] == 8
    assert found["metrics"]["f1@0.5"] > 0.4


def test_rounds_are_kept_and_a_second_call_measures_nothing(tmp_path: Path) -> None:
    photographs(tmp_path / "data", 6)
    options = ("--rounds", str(WARM_UP + 1))
    found = measured(tmp_path, "speed", *options)
    assert len(found["sync"]) == len(found["rollouts"]) == WARM_UP + 1
    assert measured(tmp_path, "speed", *options, timeout_s=60.0) == found
