"""A sharded model learns and is saved as a whole one (two real processes, gloo)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from bench.demo_model import build
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks, init_ranks
from learner.policy.sharding import whole
from learner.run.checkpoint import CheckpointStore, TrainerState
from shared.errors import CheckpointError, CollectiveError
from tests.ranks import launch
from tests.unit.learner.policy.rows import gradients, image, row, sample, segment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 10.0
STEPS, SAVED_AT = 4, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"freeze": ["model.visual."], "gradient_checkpointing": True},
    "dora": {"lora": LoraConfig(type="dora", r=3, alpha=6), "gradient_checkpointing": True},
}


# ---- what each rank does -------------------------------------------------------------------------------------------


def make(model: Path, ranks: Ranks, *, sharded: bool, **settings: Any) -> tuple[Policy, Optimizer]:
    """Ranks begin with different weights, of which rank 0's must reach all."""
    torch.manual_seed(ranks.rank)
    config = ModelConfig(path=str(model), **settings)
    policy = load_policy(config, device=ranks.device, shard_over=ranks if sharded else None)
    policy.broadcast(ranks)
    training = TrainingConfig(output_dir="unused", learning_rate=1e-2, weight_decay=0.1)
    optimizer = Optimizer(policy.trainable, training, total_steps=STEPS)
    for group in optimizer._adamw.param_groups:
        group["eps"] = 1e-2  # large: else noise decides the direction in which weights without a gradient go
    return policy, optimizer


def learn(policy: Policy, optimizer: Optimizer, ranks: Ranks, step: int) -> dict[str, torch.Tensor]:
    """Learn one step on five segments, unevenly shared: images on one rank only, rows of several, an empty row."""
    images = [[image(64, 64, seed=i)] * (i % 3) for i in range(5)]
    segments = [segment(policy.encoder.encode(sample(i)), 6 + 5 * n, seed=9 * step + n) for n, i in enumerate(images)]
    rows = [row(segments[0]), row(*segments[1:3]), row(segments[3]), row(segments[4])]
    if ranks.world_size > 1:
        rows = (rows[:1], rows[1:])[ranks.rank]
        rows += [row()] * (int(ranks.all_reduce_max(len(rows))) - len(rows))
    results = [policy.backward(one) for one in rows]
    parts = ranks.all_gather_object((sum(r.loss_sum for r in results), sum(r.weight_sum for r in results)))
    loss, weight = (sum(values) for values in zip(*parts, strict=True))
    policy.reduce_gradients(ranks, weight_sum=weight)
    found = {f"grad.{name}": whole(grad) for name, grad in gradients(policy).items()}
    _, norm = optimizer.update(step)
    return found | {"loss": torch.tensor(loss / weight), "norm": torch.tensor(norm)}


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {f"weight.{name}": whole(p).detach().clone() for name, p in policy.trainable}


def num_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that these tensors take on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def run_variant(model: Path, out: Path, ranks: Ranks, variant: str, *, modes: dict[str, bool]) -> None:
    """Train in each mode, save on the way, and go on from what each of the modes has saved."""
    settings = VARIANTS[variant]
    for mode, sharded in modes.items():
        policy, optimizer = make(model, ranks, sharded=sharded, **settings)
        store = CheckpointStore(root=out / f"{variant}-{mode}", ranks=ranks)
        first = learn(policy, optimizer, ranks, 0)
        for step in range(1, STEPS):
            if step == SAVED_AT:
                store.save(policy, optimizer, TrainerState(global_step=step))
            learn(policy, optimizer, ranks, step)
        moments = [t for state in optimizer._adamw.state.values() for t in state.values()]
        held = {"parameters": num_bytes(list(policy.model.parameters())), "moments": num_bytes(moments)}
        save_file(first | trained(policy), out / f"{variant}-{mode}-{ranks.rank}.safetensors")
        (out / f"{variant}-{mode}-{ranks.rank}.json").write_text(json.dumps(held))


def resume(model: Path, out: Path, written: Path, ranks: Ranks, variant: str, *, modes: dict[str, bool]) -> None:
    for mode, sharded in modes.items():
        for writer in ("none", "fsdp"):
            policy, optimizer = make(model, ranks, sharded=sharded, **VARIANTS[variant])
            store = CheckpointStore(root=written / f"{variant}-{writer}", ranks=ranks)
            state = store.load("latest", policy, optimizer)
            assert state.global_step == SAVED_AT
            for step in range(SAVED_AT, STEPS):
                learn(policy, optimizer, ranks, step)
            save_file(trained(policy), out / f"{variant}-{mode}-from-{writer}-{ranks.rank}.safetensors")


def stay_away(model: Path, ranks: Ranks) -> None:
    """Rank 1 learns one row fewer than rank 0, which must be told so; and rank 0 can't save what rank 1 has."""
    policy, optimizer = make(model, ranks, sharded=True)
    one = row(segment(policy.encoder.encode(sample()), 6))
    policy.backward(one)
    with pytest.raises(CheckpointError, match="can't be saved by one rank"):
        CheckpointStore(root=Path("nowhere"), ranks=ranks).save_alone(policy, optimizer, TrainerState(), [])
    if ranks.rank == 0:
        with pytest.raises(CollectiveError) as raised:
            policy.backward(one)
        print(raised.value)


def rank_main(model: Path, out: Path, written: Path) -> None:
    ranks = init_ranks(os.environ, timeout_s=TIMEOUT_S)
    several = ranks.world_size > 1
    modes = {"none": False, "fsdp": True} if several else {"none": False}
    for variant in VARIANTS:
        run_variant(model, out, ranks, variant, modes=modes)
        resume(model, out, written, ranks, variant, modes=modes)
    if several:
        stay_away(model, ranks)


# ---- what is asked of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    folder: Path
    printed: str  # rank 0's output

    def tensors(self, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}-{rank}.safetensors")

    def held(self, name: str, rank: int) -> dict[str, int]:
        return json.loads((self.folder / f"{name}-{rank}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Return the runs by number of processes. The one process goes on from what the two have saved."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    build(model, "tiny", seed=0)
    found: dict[int, Run] = {}
    for world_size in (2, 1):
        out = tmp_path_factory.mktemp(f"ranks-{world_size}")
        written = found[2].folder if found else out
        done = launch("tests.integration.test_fsdp", world_size, str(model), str(out), str(written), timeout_s=300.0)
        for process in done:
            assert process.returncode == 0, process.stderr[-3000:]
        found[world_size] = Run(out, done[0].stdout)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sharded_step_is_a_whole_one(runs: dict[int, Run], variant: str) -> None:
    """D5, R24: loss, gradients and norm of a step, and the weights after several, on both ranks and on one alone."""
    sharded, whole_ = runs[2].tensors(f"{variant}-fsdp"), runs[2].tensors(f"{variant}-none")
    assert_same(sharded, whole_)
    assert_same(sharded, runs[1].tensors(f"{variant}-none"))
    other = runs[2].tensors(f"{variant}-fsdp", rank=1)
    assert all(torch.equal(other[name], tensor) for name, tensor in sharded.items()), "the ranks differ"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_rank_holds_half(runs: dict[int, Run], variant: str) -> None:
    for rank in range(2):
        part, all_ = (runs[2].held(f"{variant}-{mode}", rank) for mode in ("fsdp", "none"))
        assert part["parameters"] < 0.51 * all_["parameters"]
        assert part["moments"] < 0.6 * all_["moments"]  # one rank has two of three rows


@pytest.mark.parametrize("writer", ["none", "fsdp"])
@pytest.mark.parametrize(("world_size", "mode"), [(2, "none"), (2, "fsdp"), (1, "none")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_is_resumed_by_any(
    runs: dict[int, Run], variant: str, world_size: int, mode: str, writer: str
) -> None:
    """A sharded model, a whole one and another number of ranks do it; its like does so bit for bit."""
    resumed = runs[world_size].tensors(f"{variant}-{mode}-from-{writer}")
    never_stopped = runs[2].tensors(f"{variant}-{mode}" if world_size == 2 else f"{variant}-{writer}")
    never_stopped = {name: tensor for name, tensor in never_stopped.items() if name.startswith("weight.")}
    assert_same(resumed, never_stopped)
    if (world_size, mode) == (2, writer):
        assert all(torch.equal(resumed[name], tensor) for name, tensor in never_stopped.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_do_not_tell_who_wrote_them(runs: dict[int, Run], variant: str) -> None:
    folders = [runs[2].folder / f"{variant}-{mode}" / f"checkpoint-{SAVED_AT}" for mode in ("none", "fsdp")]
    names = [sorted(p.name for p in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            plain, gathered = (load_file(folder / name) for folder in folders)
            assert {n: (t.dtype, t.shape) for n, t in gathered.items()} == {
                n: (t.dtype, t.shape) for n, t in plain.items()
            }


def test_a_rank_that_stays_away_is_an_error_within_the_deadline(runs: dict[int, Run]) -> None:
    """Every wait has a deadline from the configuration, and names it when it passes."""
    assert "a collective of the sharded model did not complete" in runs[2].printed
    assert "training.collective_timeout_s" in runs[2].printed


if __name__ == "__main__":
    rank_main(*map(Path, sys.argv[1:]))
