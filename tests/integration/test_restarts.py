"""A learner whose rank dies is started again by torchrun, from its newest checkpoint; one whose torchrun dies ends.

Real processes: `deploy.torchrun`, two ranks over gloo, the hf backend, the tiny model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.demo_model import build
from learner.config.load import write_resolved
from shared.processes import descendants
from tests.runs import events, steps
from tests.servers import stop, wait_gone
from tests.unit.learner.rollout.test_hf_run import hf_config

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_pid(torchrun_pid: int, rank: int) -> int:
    (found,) = (pid for pid in descendants(torchrun_pid) if f"RANK={rank}".encode() in _environment(pid))
    return found


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_a_killed_rank_and_a_killed_torchrun(tmp_path: Path) -> None:
    """R18 R24. Rank 0 is killed: it is the one that could have saved. Then torchrun itself, with SIGKILL."""
    build(tmp_path / "model", "tiny", seed=0)
    settings: dict[str, Any] = {
        "max_steps": 100_000,
        "effective_batch_size": 2,
        "save_minutes": 0.01,
        "save_total_limit": 2,
    }
    config = hf_config(tmp_path / "model", tmp_path / "files", **settings)
    run_dir = Path(config.training.output_dir)
    write_resolved(config, tmp_path)
    argv = ["-m", "deploy.torchrun", "--nproc", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [sys.executable, *argv, "--", "-m", "learner", "--config", str(tmp_path / "config.yaml")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: any(run_dir.glob("checkpoint-*/manifest.json")), process)
        killed = rank_pid(process.pid, 0)
        os.kill(killed, signal.SIGKILL)
        assert wait_gone([killed], 30) == []
        before = len(steps(run_dir))
        wait_until(lambda: len(events(run_dir, "plan")) == 2 and len(steps(run_dir)) > before + 1, process)
        said = steps(run_dir)
        resumed = said[before] - 1  # a step that was begun again, or the next one
        assert 1 <= resumed <= before, said
        assert said[:before] == list(range(1, before + 1))
        assert said[before:] == list(range(resumed + 1, resumed + 1 + len(said) - before))
        ranks = descendants(process.pid)
        process.kill()
        assert wait_gone(ranks, 30) == []
        last = max(int(path.parent.name.split("-")[1]) for path in run_dir.glob("checkpoint-*/manifest.json"))
        assert last >= steps(run_dir)[-1] - 1, "ranks without torchrun save and stop"
    finally:
        left = descendants(process.pid)
        stop(process)
        for pid in left:
            if wait_gone([pid], 0):
                os.kill(pid, signal.SIGKILL)
