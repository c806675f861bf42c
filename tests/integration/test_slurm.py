"""The generated job in a real Slurm of several virtual nodes on this machine, with the demo's model (R17, R40, R46)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]
TRY = Path(__file__).with_name("try_slurm.sh")
SBIN = "/usr/sbin:/sbin"
MISSING = [
    program
    for program in ("slurmctld", "slurmd", "munged", "sbatch")
    if shutil.which(program, path=f"{os.environ['PATH']}:{SBIN}") is None
]


@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)}")
def test_a_job_outlives_a_server_a_drained_node_and_its_time_limit(tmp_path: Path) -> None:
    """The script ends with 0 only if it saw each of them; it leaves no job and no daemon."""
    done = subprocess.run(
        [str(TRY), str(tmp_path / "try")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    resumed = re.search(r"resumed at step (\d+)", done.stdout)
    requeued = re.search(r"requeued at step (\d+)", done.stdout)
    assert resumed is not None
    assert requeued is not None
    assert int(requeued[1]) - 2 <= int(resumed[1]) <= int(requeued[1]) + 1  # save_steps: 2
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(path)]
    assert left == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
