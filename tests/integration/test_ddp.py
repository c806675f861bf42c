"""The same step on one rank or two, packed or not, is the same step (real processes, gloo)."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.demo_model import build
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import LoraConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks, init_ranks
from learner.records import PolicyTokens, Segment
from learner.run.checkpoint import CheckpointStore, TrainerState
from shared.errors import DeadlineError
from tests.ranks import launch
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, sample, segment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 10


def one_step(model: Path, out: Path, ranks: Ranks, *, packed: bool, reinforced: bool) -> None:
    """Run a rank's share of a step of five segments: an uneven share, so that one rank runs empty rows. `reinforced`:
    all but the third are rollouts with advantages, drawn by other weights."""
    policy = policy_of(model, grpo=GrpoConfig())
    if ranks.rank:  # ranks begin with different weights: the broadcast must make them equal
        for _, p in policy.trainable:
            torch.nn.init.zeros_(p)
    policy.broadcast(ranks)
    settings = TrainingConfig(output_dir=str(out), learning_rate=1e-3)
    optimizer = Optimizer(policy.trainable, settings, total_steps=1)
    prompts = [policy.encoder.encode(sample([image(64, 64, seed=i)] * (i % 3))) for i in range(5)]
    segments = [segment(p, 6 + 5 * i, seed=i) for i, p in enumerate(prompts)]
    if reinforced:
        segments = [s if i == 2 else reinforce(s, i) for i, s in enumerate(segments)]
    mine = segments if ranks.world_size == 1 else (segments[:1], segments[1:])[ranks.rank]
    rows = [row(*mine)] if packed else [row(one) for one in mine]
    rows += [row()] * (int(ranks.all_reduce_max(len(rows))) - len(rows))
    results = [policy.backward(one) for one in rows]
    parts = ranks.all_gather_object((sum(r.loss_sum for r in results), sum(r.weight_sum for r in results)))
    loss, weight = (sum(values) for values in zip(*parts, strict=True))
    policy.reduce_gradients(ranks, weight_sum=weight)
    grads = gradients(policy)
    optimizer.update(0)
    store = CheckpointStore(root=out / f"run-{packed}-{reinforced}", ranks=ranks)
    store.save(policy, optimizer, TrainerState(global_step=1))
    assert store.load("latest", policy, optimizer).global_step == 1
    updated = {f"updated.{name}": p.detach().clone() for name, p in policy.trainable}
    name = f"{ranks.rank}-{packed}-{reinforced}.safetensors"
    save_file({"loss": torch.tensor(loss / weight)} | grads | updated, out / name)


def reinforce(one: Segment, seed: int) -> Segment:
    rng = np.random.default_rng(seed)
    advantages, drawn = rng.normal(size=(2, len(one))).astype(np.float32)
    unknown = np.full(len(one), np.nan, np.float32)
    tokens = PolicyTokens(advantages=advantages, rollout_logprobs=drawn - 7, first_logprobs=unknown)
    return replace(one, policy=tokens)


def one_step_with_a_reference(model: Path, out: Path, ranks: Ranks) -> None:
    """Adapters of which some are frozen, held to their reference (`kl_weight`). Only rank 0 has a reinforced row, so
    only it switches the adapters off and on."""
    policy = policy_of(model, lora=LoraConfig(r=2), grpo=GrpoConfig(kl_weight=0.1), freeze=["model.visual."])
    policy.broadcast(ranks)
    names = [name for name, _ in policy.trainable]
    with torch.no_grad():  # a fresh adapter is its own reference
        for name, p in policy.trainable:
            if "lora_B" in name:
                p.fill_(0.01)
    optimizer = Optimizer(policy.trainable, TrainingConfig(output_dir=str(out), learning_rate=1e-3), total_steps=2)
    prompts = [policy.encoder.encode(sample([image(64, 64, seed=i)])) for i in range(2)]
    taught = segment(prompts[1], 9, seed=1)
    segments = [reinforce(segment(prompts[0], 8, seed=0), 0), taught]
    for step in range(2):  # the second one shows what the first left behind
        mine = segments if ranks.world_size == 1 else [segments[ranks.rank]]
        results = [policy.backward(row(one)) for one in mine]
        weight = sum(ranks.all_gather_object(sum(r.weight_sum for r in results)))
        policy.reduce_gradients(ranks, weight_sum=weight)
        assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == names
        grads = gradients(policy)
        optimizer.update(step)
    updated = {f"updated.{name}": p.detach().clone() for name, p in policy.trainable}
    save_file(grads | updated, out / f"{ranks.rank}-reference.safetensors")


def one_step_of_groups(model: Path, out: Path, ranks: Ranks) -> None:
    """Two groups, reinforced. On two ranks each has one, in a row that holds its prompt and its image once (R47)."""
    policy = policy_of(model, grpo=GrpoConfig())
    policy.broadcast(ranks)
    optimizer = Optimizer(policy.trainable, TrainingConfig(output_dir=str(out), learning_rate=1e-3), total_steps=1)
    groups = []
    for number, lengths in enumerate([(9, 20, 4), (6, 11)]):
        prompt = policy.encoder.encode(sample([image(64, 64, seed=number)]))
        made = [replace(segment(prompt, n, seed=n), sample_id=f"group {number}") for n in lengths]
        groups.append([reinforce(one, len(one)) for one in made])
    if ranks.world_size == 1:
        rows = [row(one) for group in groups for one in group]
    else:
        rows = [replace(row(*groups[ranks.rank]), share_prompts=True)]
    results = [policy.backward(one) for one in rows]
    policy.reduce_gradients(ranks, weight_sum=sum(ranks.all_gather_object(sum(r.weight_sum for r in results))))
    grads = gradients(policy)
    optimizer.update(0)
    updated = {f"updated.{name}": p.detach().clone() for name, p in policy.trainable}
    tokens = torch.tensor(sum(one.num_tokens for one in rows))
    save_file({"tokens": tokens} | grads | updated, out / f"{ranks.rank}-groups.safetensors")


def stay_away(ranks: Ranks) -> None:
    """Rank 1 comes to one collective fewer than rank 0, which must report it."""
    ranks.barrier()
    if ranks.rank == 0:
        with pytest.raises(DeadlineError) as raised:
            ranks.barrier()
        print(raised.value)


def rank_main(model: Path, out: Path) -> None:
    ranks = init_ranks(os.environ, timeout_s=TIMEOUT_S)
    for packed, reinforced in itertools.product((False, True), repeat=2):
        one_step(model, out, ranks, packed=packed, reinforced=reinforced)
    one_step_with_a_reference(model, out, ranks)
    one_step_of_groups(model, out, ranks)
    if ranks.world_size > 1:
        stay_away(ranks)


@dataclass(frozen=True)
class Run:
    world_size: int
    out: Path
    printed: str  # rank 0's output

    def result(self, rank: int, *, packed: bool, reinforced: bool) -> dict[str, torch.Tensor]:
        return load_file(self.out / f"{rank}-{packed}-{reinforced}.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Return a run of one process and one of two, each with all kinds of rows."""
    model = tmp_path_factory.mktemp("models") / "tiny"
    build(model, "tiny", seed=0)
    found = {}
    for world_size in (1, 2):
        out = tmp_path_factory.mktemp(f"ranks-{world_size}")
        done = launch("tests.integration.test_ddp", world_size, str(model), str(out))
        for process in done:
            assert process.returncode == 0, process.stderr[-3000:]
        found[world_size] = Run(world_size, out, done[0].stdout)
    return found


def assert_same_step(results: Sequence[dict[str, torch.Tensor]], reference: dict[str, torch.Tensor]) -> None:
    """The ranks agree to the bit, and with the reference in all but the weights after the update."""
    for result in results:
        assert result.keys() == reference.keys()
        for name, tensor in reference.items():
            if not name.startswith("updated."):
                torch.testing.assert_close(result[name], tensor, atol=1e-6, rtol=1e-3)
            assert torch.equal(result[name], results[0][name]), f"ranks differ in {name}"


@pytest.mark.parametrize("reinforced", [False, True])
@pytest.mark.parametrize(("world_size", "packed"), [(1, True), (2, False), (2, True)])
def test_ranks_and_packing_do_not_change_the_step(
    runs: dict[int, Run], world_size: int, packed: bool, reinforced: bool
) -> None:
    """R24, R37, D5: the weighted mean over all supervised tokens of the step, on all ranks."""
    reference = runs[1].result(0, packed=False, reinforced=reinforced)
    results = [runs[world_size].result(rank, packed=packed, reinforced=reinforced) for rank in range(world_size)]
    assert_same_step(results, reference)


def test_a_rank_without_reinforced_rows_reduces_the_same_parameters(runs: dict[int, Run]) -> None:
    """With `kl_weight` and `model.freeze`, peft made frozen adapters trainable on the ranks that had a
    reinforced row. Buckets then had unequal sizes, and both ranks died."""
    alone = load_file(runs[1].out / "0-reference.safetensors")
    assert alone
    assert not any("visual" in name for name in alone)
    both = [load_file(runs[2].out / f"{rank}-reference.safetensors") for rank in range(2)]
    assert_same_step(both, alone)


def test_shared_prompts_on_two_ranks_do_not_change_the_step(runs: dict[int, Run]) -> None:
    """R47: a group's prompt once in a row, each rank with a group of its own."""
    alone = load_file(runs[1].out / "0-groups.safetensors")
    both = [load_file(runs[2].out / f"{rank}-groups.safetensors") for rank in range(2)]
    assert sum(int(found.pop("tokens")) for found in both) < int(alone.pop("tokens"))
    assert_same_step(both, alone)


def test_a_rank_that_stays_away_is_an_error_within_the_deadline(runs: dict[int, Run]) -> None:
    """Every wait has a deadline from the configuration, and names itself when it passes."""
    assert "rank 1 did not come to collective" in runs[2].printed
    assert f"training.collective_timeout_s = {TIMEOUT_S} s" in runs[2].printed


def test_one_process_needs_no_group() -> None:
    ranks = init_ranks({}, timeout_s=1)
    assert ranks == Ranks(device=ranks.device, timeout_s=1)
    ranks.barrier()
    assert ranks.all_reduce_max(1.5) == 1.5
    assert ranks.all_gather_object("x") == ["x"]
    assert ranks.broadcast_object({"a": 1}) == {"a": 1}


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), Path(sys.argv[2]))
