"""FSDP2 on two GPUs, or by two processes on one: gradients are those of whole models, each process holds half, a sync
sends what was gathered (R24).

Every case is two processes of its own with a time limit. `pytest -rP` shows the memory that was measured.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench import models
from deploy.demo import build_data
from learner.config.sections.model import ModelConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks, init_ranks
from learner.policy.sharding import whole
from shared.addresses import free_port
from tests.gpu.devices import FOUND, SERVER_MEMORY, SHARED, needs_gpus, rank_environment
from tests.integration.test_fsdp_sync import sync_twice
from tests.ranks import launch
from tests.runs import events
from tests.servers import running_server
from tests.unit.learner.policy.rows import gradients, image, row, sample, segment

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0  # a collective's
CASE_S = 150.0
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32", "bf16": False},
    "autocast": {"dtype": "float32", "bf16": True},
    "bfloat16": {"dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True},
}
MODES = ("none", "fsdp")
ROW_TOKENS = 2048
GIB = 2**30


# ---- what each rank does -------------------------------------------------------------------------------------------


def make(model: Path, ranks: Ranks, *, sharded: bool, bf16: bool, **settings: Any) -> tuple[Policy, Optimizer]:
    torch.manual_seed(ranks.rank)
    config = ModelConfig(path=str(model), **settings)
    policy = load_policy(config, device=ranks.device, bf16=bf16, shard_over=ranks if sharded else None)
    policy.broadcast(ranks)
    training = TrainingConfig(output_dir="unused", learning_rate=1e-3)
    return policy, Optimizer(policy.trainable, training, total_steps=4)


def compare(model: Path, ranks: Ranks, name: str) -> dict[str, float]:
    """Return cosine and norms of both gradients of one step: two rows here, an empty one and one without images
    there."""
    found = []
    for sharded in (False, True):
        policy, _ = make(model, ranks, sharded=sharded, **SETTINGS[name])
        prompts = [policy.encoder.encode(sample([image(128, 128, seed=i)] * (i % 2))) for i in range(4)]
        segments = [segment(prompt, 20 + 9 * i, seed=i) for i, prompt in enumerate(prompts)]
        rows = ([row(*segments[:2]), row(segments[3])], [row(segments[2]), row()])[ranks.rank]
        results = [policy.backward(one) for one in rows]
        weight = sum(ranks.all_gather_object(sum(result.weight_sum for result in results)))
        policy.reduce_gradients(ranks, weight_sum=weight)
        found.append(torch.cat([whole(grad).flatten().double() for grad in gradients(policy).values()]))
    one, other = found
    cosine = float(one @ other / (one.norm() * other.norm()))
    return {"cosine": cosine, "norm": float(one.norm()), "sharded_norm": float(other.norm())}


def measure(model: Path, ranks: Ranks, mode: str) -> dict[str, float]:
    """Seconds of the last of three steps of long rows, GiB that this rank's tensors take after it and took at most."""
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    settings = SETTINGS["bfloat16"]
    policy, optimizer = make(model, ranks, sharded=mode == "fsdp", **settings)
    prompt = policy.encoder.encode(sample())
    for step in range(3):
        ranks.barrier()
        begin = time.monotonic()
        one = row(segment(prompt, ROW_TOKENS if on_gpu else 64, seed=2 * step + ranks.rank))
        results = [policy.backward(one) for _ in range(2)]
        weight = sum(ranks.all_gather_object(sum(result.weight_sum for result in results)))
        policy.reduce_gradients(ranks, weight_sum=weight)
        optimizer.update(step)  # waits for the device
    seconds = time.monotonic() - begin
    held, peak = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if on_gpu else (0, 0)
    return {"held_gib": held / GIB, "peak_gib": peak / GIB, "step_s": seconds}


def rank_main(case: str, model: Path, out: Path) -> None:
    os.environ.update(rank_environment(int(os.environ["RANK"])))
    ranks = init_ranks(os.environ, timeout_s=TIMEOUT_S)
    if case == "sync":
        sync_twice(model, ranks)
    for name in {"compare": SETTINGS, "measure": MODES, "sync": ()}[case]:
        found = compare(model, ranks, name) if case == "compare" else measure(model, ranks, name)
        (out / f"{name}-{ranks.rank}.json").write_text(json.dumps(found))
    ranks.barrier()
    ranks.close()


# ---- what is asked of it -------------------------------------------------------------------------------------------


def on_two(case: str, model: Path, out: Path) -> Callable[[str], list[dict[str, float]]]:
    """Run `case` on two ranks, and assert that neither fails. Return what gives, for a name, the values that each rank
    found."""
    for process in launch("tests.gpu.test_fsdp_cuda", 2, case, str(model), str(out), timeout_s=CASE_S):
        assert process.returncode == 0, process.stderr[-3000:]
    return lambda name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def test_gradients_are_those_of_whole_models(model: Path, tmp_path: Path) -> None:
    """D5: images on one rank only, an empty row on the other."""
    found = on_two("compare", model, tmp_path)
    for name in SETTINGS:
        print(name, found(name)[0])
    for name in SETTINGS:
        for rank in found(name):
            assert rank["cosine"] > (1 - 1e-6 if name == "float32" else 0.999)
            assert rank["sharded_norm"] == pytest.approx(rank["norm"], rel=1e-4 if name == "float32" else 2e-2)


def test_each_gpu_holds_half(tmp_path: Path) -> None:
    """Weights and moments of 0.6B parameters in bfloat16: 3.6 GB whole."""
    models.build(tmp_path / "model", "0.6B", device=torch.device("cuda"))
    found = on_two("measure", tmp_path / "model", tmp_path)
    print(f"{'per GPU':8}{'held GiB':>10}{'peak GiB':>10}{'step s':>8}")
    for mode in MODES:
        for rank in found(mode):
            print(f"{mode:8}{rank['held_gib']:10.2f}{rank['peak_gib']:10.2f}{rank['step_s']:8.3f}")
    for part, all_ in zip(found("fsdp"), found("none"), strict=True):
        assert part["held_gib"] < 0.6 * all_["held_gib"]
        assert part["peak_gib"] < all_["peak_gib"]


def test_a_sync_sends_what_was_gathered(model: Path, tmp_path: Path) -> None:
    """R09: bit for bit, after one that failed on the way. The ranks assert it (`sync_twice`); the server's half is in
    rank 0's process."""
    on_two("sync", model, tmp_path)


def test_a_run_against_a_server(model: Path, tmp_path: Path) -> None:
    """R10, R24: two learner ranks with half a model each, and a real server, gathers and broadcasts at once. On three
    GPUs, or on one."""
    is_shared = FOUND < 3
    build_data.build(build_data.Build(train=16, val=0, test=4), tmp_path)
    served = {"model": str(model), "dtype": "bfloat16", "allowed_image_roots": [str(tmp_path)], **SERVER_MEMORY}
    with running_server(served, tmp_path, env={"CUDA_VISIBLE_DEVICES": "0" if is_shared else "2"}) as server:
        entry = {"base_url": server.base_url, "group_port": free_port()}
        place = {"servers": [entry], "timeout_s": 60.0, "allow_shared_gpu": is_shared}
        vllm = {"mode": "server", "server": place, "sync": {"bucket_bytes": 1 << 20}}
        config = {
            "model": {"path": str(model), "sharding": "fsdp"},
            "data": {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl")},
            "training": {
                "output_dir": str(tmp_path / "run"),
                "max_steps": 3,
                "effective_batch_size": 8,
                "per_device_train_batch_size": 4,
                "bf16": True,
                "collective_timeout_s": TIMEOUT_S,
            },
            "logging": {"trackers": []},
            "custom": {
                "trainer_variant": "rollout_matching_sft",
                "extra": {
                    "rollout_matching": {
                        "decode_batch_size": 8,
                        "decoding": {"temperature": 1.0, "max_new_tokens": 24},
                        "vllm": vllm,
                    }
                },
            },
            "global_max_length": 1024,
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "deploy.torchrun", "--nproc", "2", "--"]
        done = subprocess.run(
            [*command, "-m", "tests.gpu.devices" if SHARED else "learner", "--config", str(tmp_path / "run.yaml")],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0" if SHARED else "0,1"},
            capture_output=True,
            text=True,
            timeout=CASE_S,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    syncs = events(tmp_path / "run", "sync")
    print([(sync["ver"], round(sync["seconds"], 3), round(sync["canary_gap"], 4)) for sync in syncs])
    assert [sync["global_step"] for sync in syncs] == [0, 1, 2]
    assert all(sync["canary_gap"] < 0.1 for sync in syncs)


if __name__ == "__main__":
    rank_main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
