"""`rollout-learner recipe` with real processes, rollouts and the shipped checkpoint: killed, then ended by two
ranks; with an engine in the process, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import forked
from bench.models import CHECKPOINT
from deploy.demo.build_data import Build, build
from learner.recipe.record import Record, read_record
from learner.run.best import kept
from tests.ranks import launch
from tests.runs import events

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
HF = {"rollout_backend": "hf"}
COLOCATED = {"vllm": {"mode": "colocate", "tensor_parallel_size": 1, "enforce_eager": True, "max_model_len": 1024}}


def write_config(folder: Path, engine: dict[str, Any], **training: Any) -> Path:
    """The checkpoint of the demo stops early, so sampling has headroom; at this learning rate `sft` changes nothing."""
    build(Build(train=12, val=2, test=0, seed=3), folder / "data")
    decoding = {"max_new_tokens": 120}
    config = {
        "model": {"path": str(CHECKPOINT), "dtype": "float32"},
        "data": {split: str(folder / "data" / f"{split}.jsonl") for split in ("train", "val")},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1,
            "learning_rate": 1e-9,
            "effective_batch_size": 4,
            "eval_steps": 1,
            "early_stop_patience": 1,
            **training,
        },
        "logging": {"trackers": []},
        "custom": {
            "trainer_variant": "sft",
            "extra": {"rollout_matching": {"decode_batch_size": 64, "decoding": decoding, **engine}},
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def ended(folder: Path) -> Record:
    """Both stages were run, and the start, which nothing was better than, is what it gives."""
    found = read_record(folder / "run")
    assert found is not None
    assert [stage.name for stage in found.stages] == ["sft", "grpo"], found.ended
    assert found.ended
    assert all(stage.score == stage.score_before for stage in found.stages)
    assert kept(folder / "run") == CHECKPOINT.resolve()
    assert len(events(folder / "run" / "grpo", "step")) == 1
    assert (folder / "run" / "report.html").is_file()
    return found


def _error(text: str) -> str:
    """Return what a program said of its error, before libraries report leaks."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("nanobind", " -")))[-3000:]


def test_a_killed_recipe_is_ended_by_two_ranks(tmp_path: Path) -> None:
    """R24: by SIGKILL within `sft`; ranks agree on what is next, which rank 0 knows."""
    config = write_config(tmp_path, HF, save_steps=1, early_stop_patience=3, per_device_train_batch_size=2)
    command = ["recipe", "--config", str(config), "--minutes", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "learner", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
    )
    sft, deadline = tmp_path / "run" / "sft", time.monotonic() + TIMEOUT_S
    while not any(sft.glob("checkpoint-*/manifest.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    command += ["training.early_stop_patience=1", "training.per_device_train_batch_size=1"]
    for one in launch("learner", 2, *command, timeout_s=TIMEOUT_S):
        assert one.returncode == 0, _error(one.stderr)
    found = ended(tmp_path)
    starts = [event["world_size"] for event in events(sft, "plan")]
    assert starts == [1, 2], "the second command went on with the stage of the first"
    assert found.headroom["headroom_places"].low > 0.03


def test_each_stage_with_an_engine_has_a_process(tmp_path: Path) -> None:
    """R04: each stage has an engine of its own, with its own weights. On CUDA a process can have one in its life."""
    config = write_config(tmp_path, COLOCATED)
    (one,) = launch(
        "learner",
        1,
        *("recipe", "--config", str(config), "--minutes", "60"),
        timeout_s=2 * TIMEOUT_S,
        loaded=forked.COLOCATED,
    )
    assert one.returncode == 0, _error(one.stderr)
    ended(tmp_path)
