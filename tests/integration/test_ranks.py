"""Two ranks under torchrun, of which one is killed or meets an error: both end, soon, and the first cause is told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from bench.demo_model import build
from shared.processes import descendants
from tests import runs
from tests.unit.learner.trainer_world import write_data

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 200.0  # imports take a minute on a busy machine
COLLECTIVE_TIMEOUT_S = 300.0  # far beyond END_TIMEOUT_S: no rank may wait for it
END_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(folder, "tiny", seed=0)
    return folder


class Job:
    """A learner on two ranks, which learns ground truth without end; killed at the end of a test."""

    def __init__(self, folder: Path, model: Path, data: Path, sharding: str = "none") -> None:
        config = {
            "model": {"path": str(model), "sharding": sharding},
            "data": {"train": str(data), "shuffle": False},
            "training": {
                "output_dir": str(folder / "run"),
                "max_steps": 100_000,
                "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
            },
            "logging": {"trackers": []},
            "custom": {"trainer_variant": "sft"},
            "global_max_length": 1024,
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.run_dir = folder / "run"
        learner = ["-m", "learner", "--config", str(folder / "run.yaml")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.torchrun", "--nproc", "2", "--", *learner],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while step not in self.steps():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no step {step}, only {self.steps()}"
            time.sleep(0.05)

    def steps(self) -> list[int]:
        return runs.steps(self.run_dir)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for pid in descendants(self.process.pid):
            environment = dict(
                pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair
            )
            if "RANK" in environment:
                found[int(environment["RANK"])] = pid
        return found

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Exit code, and all that it printed; no process may be left."""
        family = descendants(self.process.pid)
        printed, _ = self.process.communicate(timeout=timeout_s)
        assert not [pid for pid in family if Path(f"/proc/{pid}").exists()], "a rank outlived torchrun"
        return self.process.returncode, printed

    def close(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.close()


def test_a_killed_rank_ends_all(model: Path, jobs: list[Job], tmp_path: Path) -> None:
    """R24: by SIGKILL, as the kernel does it where memory runs out; in the middle of a sharded pass. Without sharding:
    test_restarts.py."""
    job = Job(tmp_path, model, write_data(tmp_path / "train.jsonl", 8), "fsdp")
    jobs.append(job)
    job.wait_for_step(2)
    os.kill(job.ranks()[1], signal.SIGKILL)
    code, printed = job.end(END_TIMEOUT_S)
    assert code not in (0, None), printed
    assert "torchrun: rank 1" in printed, printed
    assert "SIGKILL" in printed, printed
    assert "Traceback" not in printed, printed


def test_an_error_on_one_rank_ends_all_and_is_told(model: Path, jobs: list[Job], tmp_path: Path) -> None:
    """R24: an image that is cut off behind its header, which only rank 1 decodes, in the third step."""
    data = write_data(tmp_path / "train.jsonl", 8)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    whole = io.BytesIO()
    Image.effect_noise((rows[5]["width"], rows[5]["height"]), 64).convert("RGB").save(whole, "PNG")
    (tmp_path / "damaged.png").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    rows[5] |= {"images": ["damaged.png"], "messages": [{"role": "user", "content": "<image>Detect."}]}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(tmp_path, model, data)
    jobs.append(job)
    code, printed = job.end(START_TIMEOUT_S)
    assert code == 2, printed
    assert "error (rank 1): DataError" in printed
    assert "damaged.png" in printed
    assert "torchrun: rank 1" in printed
    assert job.steps() == [1, 2]
