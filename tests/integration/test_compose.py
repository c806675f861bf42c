"""The generated Compose files in a real engine, with a stub in place of both programs (R40, R46, R51)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
TRY = Path(__file__).with_name("try_compose.sh")
NO_ENGINE = 77


def test_a_run_outlives_its_server_and_ends_with_the_learners_exit_code(tmp_path: Path) -> None:
    """The script ends with 0 only if it saw each of them; it leaves no container, no network and no engine."""
    done = subprocess.run(
        [str(TRY), "--quick", str(tmp_path / "try")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NO_ENGINE:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "exit code 0" in done.stdout
    assert "exit code 3" in done.stdout
