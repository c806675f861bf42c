"""`rollout-learner recipe` with real processes, rollouts and the shipped checkpoint: killed, stopped, then ended by two
ranks; with an engine in each stage's process."""

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

from bench.models import CHECKPOINT
from deploy.demo.build_data import Build, build
from learner.recipe.record import Record, read_record
from learner.run.best import kept
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


def start(config: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "learner", "recipe", "--config", str(config), "--minutes", "60", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def test_a_killed_recipe_is_ended_by_two_ranks(tmp_path: Path) -> None:
    """R24, R49: by SIGKILL within `sft`, which ends its process too; then by SIGTERM, before which that saves a
    checkpoint. Ranks agree on what is next."""
    config = write_config(tmp_path, HF, save_steps=1, early_stop_patience=9, per_device_train_batch_size=2)
    sft, saved = tmp_path / "run" / "sft", 0
    for signum, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        process, deadline = start(config), time.monotonic() + TIMEOUT_S
        while len(events(sft, "step")) <= saved or not any(sft.glob("checkpoint-*/manifest.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signum)
        assert process.wait(60) == code
        saved = len(events(sft, "step"))
        assert any(sft.glob("checkpoint-*/manifest.json"))
    arguments = ("training.early_stop_patience=1", "training.per_device_train_batch_size=1")
    assert start(config, "--nproc", "2", *arguments).wait(TIMEOUT_S) == 0
    found = ended(tmp_path)
    starts = [event["world_size"] for event in events(sft, "plan")]
    assert starts == [1, 1, 2], "each command went on with the stage of the one before"
    assert found.headroom["headroom_places"].low > 0.03


def test_each_stage_with_an_engine_has_a_process(tmp_path: Path) -> None:
    """R04: each stage has an engine of its own, with its own weights. On CUDA a process can have one in its life."""
    config = write_config(tmp_path, COLOCATED)
    assert start(config).wait(2 * TIMEOUT_S) == 0
    ended(tmp_path)
