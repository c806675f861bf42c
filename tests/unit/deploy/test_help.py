"""`--help` of every program starts nothing and writes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = ("deploy.demo.run", "deploy.docs", "deploy.launch", "deploy.torchrun", "deploy.wait_ready", "rollout_server")


@pytest.mark.parametrize("module", MODULES)
def test_help_starts_nothing(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["--help", "gpu"])
def test_set_up_takes_two_devices_and_installs_nothing_else(word: str) -> None:
    done = subprocess.run(["bash", ROOT / "deploy" / "setup.sh", word], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cpu|cuda" in done.stderr
