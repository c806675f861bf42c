"""Whole runs of the learner with vLLM in the same processes: no server, one rank and two (R02, R04).

Each run learns two steps and evaluates. What it learns does not depend on how many ranks there are, nor on how many of
them share an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bench import forked
from bench.demo_model import build
from deploy.demo import build_data
from shared.seeds import request_seed
from tests.integration.test_adapters import LANGUAGE, NUM_LAYERS
from tests.ranks import learner
from tests.runs import events

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SEED = 11
TIMEOUT_S = 200.0
COLOCATED = {"mode": "colocate", "enforce_eager": True, "max_model_len": 1024}


@dataclass(frozen=True)
class Run:
    folder: Path
    exit_code: int
    printed: str

    def events(self, event: str) -> list[dict[str, Any]]:
        return events(self.folder, event)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "checkpoint-2" / "model.safetensors")


def learn(folder: Path, name: str, *, nproc: int, lora: dict[str, Any] | None = None, **vllm: Any) -> Run:
    """Two steps of four samples, over `nproc` ranks."""
    settings = {"seed": SEED, "effective_batch_size": 4, "per_device_train_batch_size": 4 // nproc, "max_steps": 2}
    rollouts = {
        "decode_batch_size": 8,
        "decoding": {"temperature": 1.0, "max_new_tokens": 8},
        "vllm": {**COLOCATED, **vllm},
        "offload": {"enabled": True, "offload_model": True, "offload_optimizer": True},  # nothing moves without a GPU
    }
    config = {
        "model": {"path": str(folder / "model"), "lora": lora},
        "data": {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")},
        "training": {"output_dir": str(folder / name), "learning_rate": 1e-2, "eval_on_end": True, **settings},
        "logging": {"trackers": []},
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
        "global_max_length": 1024,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = learner(path, nproc=nproc, loaded=forked.COLOCATED, timeout_s=TIMEOUT_S)
    return Run(folder / name, done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    build(folder / "model", "tiny", seed=0)
    build_data.build(build_data.Build(train=24, val=0, test=1), folder)  # one of two ranks evaluates nothing
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    run = learn(folder, "alone", nproc=1)
    assert run.exit_code == 0, run.printed[-3000:]
    return run


def test_every_step_learns_from_checked_weights(alone: Run) -> None:
    """R09, R10, R15: a sync before each step and the evaluation, each one higher; calls name seed and version."""
    syncs = alone.events("sync")
    assert [(sync["global_step"], sync["ver"], sync["mode"]) for sync in syncs] == [
        (0, 1, "full"),
        (1, 2, "full"),
        (2, 3, "full"),
    ]
    assert all(0 < sync["canary_gap"] < 1e-4 for sync in syncs), syncs
    assert [step["ver"] for step in alone.events("step")] == [1, 2]
    calls = alone.events("rollout_call")
    assert [(call["ver"], call["num_requests"], call["chunk"]) for call in calls] == [(1, 4, 8), (2, 4, 8), (3, 1, 8)]
    for call in calls[:2]:
        place = {"run_seed": SEED, "global_step": call["global_step"], "micro_step_idx": 0}
        assert [part["seed"] for part in call["calls"]] == [request_seed(**place, req_idx=0)]
    assert alone.events("plan")[0]["tensor_parallel_size"] == 1


def test_the_console_is_the_runs_own(alone: Run) -> None:
    """vLLM's hundreds of lines go to the log file."""
    assert "INFO" not in alone.printed
    assert "vllm" in (alone.folder / "learner_rank0.log").read_text()
    assert len(alone.printed.splitlines()) < 12, alone.printed


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_learn_what_one_would(folder: Path, alone: Run, tensor_parallel_size: int) -> None:
    """R04, R11, R24: with an engine each, and with one engine over both."""
    name = f"two-{tensor_parallel_size}"
    run = learn(folder, name, nproc=2, tensor_parallel_size=tensor_parallel_size)
    assert run.exit_code == 0, run.printed[-3000:]
    assert all(0 < sync["canary_gap"] < 1e-4 for sync in run.events("sync"))
    for mine, wanted in zip(run.events("step"), alone.events("step"), strict=True):
        assert mine["num_tokens"] == wanted["num_tokens"]
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    for tensor_name, tensor in alone.weights.items():
        torch.testing.assert_close(run.weights[tensor_name], tensor, atol=2e-3, rtol=0)
    log = (run.folder / "learner_rank1.log").read_text()
    seeds = [request_seed(run_seed=SEED, global_step=step, micro_step_idx=0, req_idx=2) for step in (0, 1)]
    told = re.findall(r"CallRecord\(.*?seed=(\d+), micro_step_idx=0, first_req_idx=2", log)
    assert [int(seed) for seed in told][:2] == seeds


def test_two_ranks_sync_their_adapter_alone(folder: Path) -> None:
    """R08, R24: `auto`, with an engine each; only adapters from the first sync on."""
    run = learn(
        folder,
        "adapters",
        nproc=2,
        lora={"r": 4, "alpha": 64, "target_modules": LANGUAGE},
        tensor_parallel_size=1,
        enable_lora=True,
        sync={"mode": "auto", "fallback_to_full": False},
    )
    assert run.exit_code == 0, run.printed[-3000:]
    syncs = run.events("sync")
    assert [(sync["ver"], sync["mode"], sync["num_tensors"]) for sync in syncs] == [
        (ver, "adapter", 2 * NUM_LAYERS) for ver in (1, 2, 3)
    ]
    assert all(0 < sync["canary_gap"] < 1e-4 for sync in syncs), syncs
    assert [step["ver"] for step in run.events("step")] == [1, 2]
    assert run.events("plan")[0]["sync_mode"] == "adapter"


def test_an_engine_that_does_not_start_is_a_message(folder: Path) -> None:
    """R16: exit code 2, with the keys that help. (`test_training.py` has torchrun.)"""
    run = learn(folder, "full", nproc=1, cpu_kv_cache_gib=1_000_000)
    assert run.exit_code == 2, run.printed
    assert "Traceback" not in run.printed
    assert "the colocated engine does not start" in run.printed
    assert "cpu_kv_cache_gib" in run.printed
