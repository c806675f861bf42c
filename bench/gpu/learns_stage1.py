"""Stage 1 of the comparison: the demo's checkpoint, trained on by plain teacher forcing until it has converged.

In: the scenes' folder and how long. Out: a model folder in bfloat16, and `stage1.json` beside it with the loss by step.
One learner run on all GPUs, by torchrun. Called by `learns.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.devices import visible
from deploy.launch import Processes, learner_argv
from learner.run.checkpoint import write_atomically
from shared.config.parse import write_yaml
from shared.errors import CheckpointError, ServerError

INITIAL = Path("deploy/demo/checkpoint")
_DATA_WORKERS = 8
_EXPORT_S = 60.0
_STOP_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage1:
    scenes: int
    steps: int
    batch_size: int
    learning_rate: float
    limit_s: float


def train_stage1(processes: Processes, first: Stage1, folder: Path, model: Path, num_gpus: int, num_cores: int) -> None:
    """Plain teacher forcing on all GPUs, and the weights as a model in bfloat16."""
    ranks = max(1, num_gpus)
    run_dir, path = folder / "stage1", folder / "stage1.yaml"
    write_yaml(path, stage1_config(first, folder / "stage1_data", run_dir, ranks, num_cores // ranks - 2), "bench")
    began = time.monotonic()
    learner = processes.start(
        "stage 1", learner_argv(str(path), ranks), devices=visible(*range(num_gpus)), log=folder / "stage1.log"
    )
    try:
        learner.popen.wait(first.limit_s)
    except subprocess.TimeoutExpired:
        say(f"stage 1 is stopped after {first.limit_s:g} s")
        learner.stop(_STOP_S)  # it saves what it has
    checkpoints = sorted(run_dir.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    if not checkpoints:
        raise ServerError("stage 1 has failed", found=last_words(folder / "stage1.log"), wanted="a checkpoint")
    _export(checkpoints[-1], model)
    told = _losses(run_dir)
    say(f"stage 1: {checkpoints[-1].name} in {time.monotonic() - began:.0f} s, loss by step {told}")
    write_atomically(
        model.parent / "stage1.json", json.dumps({"checkpoint": checkpoints[-1].name, "loss": told}) + "\n"
    )


def stage1_config(first: Stage1, data: Path, run_dir: Path, ranks: int, workers: int) -> dict[str, Any]:
    return {
        "model": {"path": str(INITIAL), "dtype": "float32"},
        "data": {"train": str(data / "train.jsonl"), "num_workers": max(0, min(_DATA_WORKERS, workers))},
        "training": {
            "output_dir": str(run_dir),
            "seed": 1,
            "max_steps": first.steps,
            "effective_batch_size": first.batch_size,
            "per_device_train_batch_size": first.batch_size // ranks,
            "learning_rate": first.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": first.steps // 12,
            "weight_decay": 0.01,
            "bf16": True,
        },
        "logging": {"tensorboard": False, "progress_bar": False},
        "custom": {"trainer_variant": "sft"},
        "global_max_length": 65536,
    }


def _export(checkpoint: Path, model: Path) -> None:
    unfinished = model.with_name(f"{model.name}.unfinished")  # so that a folder of that name is complete
    argv = [sys.executable, "-m", "learner", "export", "--checkpoint", str(checkpoint), "--out", str(unfinished)]
    try:
        subprocess.run(argv, timeout=_EXPORT_S, capture_output=True, text=True, check=True)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CheckpointError("stage 1 could not be exported", found=str(said)[-500:], wanted=f"{model}") from error
    unfinished.rename(model)


def _losses(run_dir: Path) -> dict[int, float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    chosen = steps[:: max(1, len(steps) // 8)] + steps[-1:]
    return {event["global_step"]: round(event["loss"], 3) for event in chosen}


def last_words(log: Path, num_lines: int = 3) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-num_lines:])


def say(text: str) -> None:
    print(f"[learns] {text}", flush=True)
