"""A run of `stage2_ab_training` on two ranks against one real server: channels, shares, syncs, overlap (R26, R31, R32).

One server and one learner run of a few seconds; every test looks at another side of what it left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo import build_data
from deploy.demo.model import build
from shared.seeds import request_seed
from tests.servers import free_port, running_server

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
SEED = 5
NUM_STEPS = 4
ROLLOUTS_PER_STEP = 8


@dataclass(frozen=True)
class Run:
    folder: Path
    out: str

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]


def config_of(folder: Path, base_url: str) -> dict[str, Any]:
    server = {"servers": [{"base_url": base_url, "group_port": free_port()}], "timeout_s": 60.0}
    rollouts = {
        "decode_batch_size": 8,
        "decoding": {"temperature": 1.0, "max_new_tokens": 24},
        "vllm": {"mode": "server", "server": server},
    }
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "training": {
            "output_dir": str(folder / "run"),
            "seed": SEED,
            "max_steps": NUM_STEPS,
            "effective_batch_size": ROLLOUTS_PER_STEP,
            "learning_rate": 1e-2,
            "collective_timeout_s": 60.0,
        },
        "logging": {"tensorboard": False},
        "custom": {"trainer_variant": "stage2_ab_training", "extra": {"rollout_matching": rollouts}},
        "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        "global_max_length": 512,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stage2")
    build(folder / "model", "tiny", seed=0)
    build_data.build(build_data.Build(train=NUM_STEPS * ROLLOUTS_PER_STEP, val=0, test=1), folder)
    path = folder / "run.yaml"
    with running_server({"model": str(folder / "model"), "allowed_image_roots": [str(folder)]}, folder) as server:
        path.write_text(yaml.safe_dump(config_of(folder, server.base_url)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "-m", "learner", "--config", str(path)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240.0,
        )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return Run(folder / "run", done.stdout)


def test_the_channels_are_those_of_the_schedule(finished: Run) -> None:
    """R26, R31: each step is one update over all of its samples, on both ranks."""
    steps = finished.events("step")
    assert [step["channel"] for step in steps] == ["A", "B", "A", "B"]
    assert [step["num_segments"] for step in steps] == [ROLLOUTS_PER_STEP] * NUM_STEPS
    assert [step["metrics"]["stage2_ab/executed_b_share"] for step in steps] == [0.0, 0.5, pytest.approx(1 / 3), 0.5]
    assert all("matched" not in step["metrics"] for step in steps[::2])
    assert all("matched" in step["metrics"] for step in steps[1::2])


def test_weights_are_synced_before_each_step_with_rollouts_and_only_then(finished: Run) -> None:
    """R10, R24: two syncs, each checked, and the rollouts of a step are of its own version."""
    syncs = finished.events("sync")
    assert [sync["global_step"] for sync in syncs] == [1, 3]
    assert all(sync["canary_gap"] < 0.05 for sync in syncs), syncs
    served = {sync["global_step"]: sync["ver"] for sync in syncs}
    calls = finished.events("rollout_call")
    assert calls
    assert all(call["ver"] == served[call["global_step"]] for call in calls)
    logs = [(finished.folder / f"learner_rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["weights synced" in log for log in logs] == [True, False]


def test_rollouts_come_in_calls_that_overlap_with_learning(finished: Run) -> None:
    """R31, R32, R11: rank 0's half of a step, in four calls, with the seeds of their places in the step."""
    for global_step in (1, 3):
        calls = [call for call in finished.events("rollout_call") if call["global_step"] == global_step]
        assert [(call["first_req_idx"], call["num_requests"]) for call in calls] == [(0, 1), (1, 1), (2, 1), (3, 1)]
        for call in calls:
            place = {"run_seed": SEED, "global_step": global_step, "micro_step_idx": 0}
            assert call["calls"][0]["seed"] == request_seed(**place, req_idx=call["first_req_idx"])
    for step in finished.events("step")[1::2]:
        metrics = step["metrics"]
        assert metrics["stage2_ab/calls"] == 4.0
        assert metrics["stage2_ab/rollout_s"] > 0.0
        assert "wait_s" in metrics
        assert "rollout_s" not in metrics, "the thread that learns waited for a whole call"
