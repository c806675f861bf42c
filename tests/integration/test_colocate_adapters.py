"""Adapter syncs into vLLM inside the learner's process, real, on one rank, prefix cache on (R08, R09, R10).

One engine for the module. Whole runs, and two ranks: test_colocate_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.demo_model import build
from bench.engines import colocate_sync, colocated_engine
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import Sample
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.hf import HfBackend
from learner.sync.canary import CanaryItem
from learner.sync.sync import Sync
from shared.errors import CoverageError, SyncError
from tests.integration.test_adapters import LANGUAGE, NUM_LAYERS, train
from tests.unit.learner.policy.rows import image, sample

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CPU = torch.device("cpu")
RANK = 4
Answers = list[tuple[int, ...]]


def config(*, fallback_to_full: bool = True) -> RolloutMatchingConfig:
    vllm = {"enable_lora": True, "sync": {"mode": "adapter", "fallback_to_full": fallback_to_full}}
    return RolloutMatchingConfig.model_validate(
        {
            "decode_batch_size": 4,
            "decoding": {"max_new_tokens": 12, "repetition_penalty": 1.2},
            "vllm": {**vllm, "enforce_eager": True, "max_model_len": 2048},
        }
    )


@dataclass(frozen=True)
class World:
    folder: Path
    engine: ColocatedEngine
    samples: list[Sample]

    def sync(self, policy: Policy, *, adapter: bool = True, fallback_to_full: bool = True) -> Sync:
        item = CanaryItem(
            sample=self.samples[0],
            prompt=policy.encoder.encode(self.samples[0]),
            response_token_ids=tuple(range(20, 60)),
        )
        return colocate_sync(
            self.engine,
            policy,
            item,
            config(fallback_to_full=fallback_to_full),
            adapter=policy.adapter_weights() if adapter else None,
        )

    def answers(self, policy: Policy) -> Answers:
        backend = ColocateBackend(config(), self.engine, policy.encoder, run_seed=3, ranks=Ranks())
        rollouts = backend.generate(self.samples, global_step=1, micro_step_idx=0, first_req_idx=0)
        return [rollout.response_token_ids for rollout in rollouts]

    def by_hf(self, policy: Policy) -> Answers:
        rollouts = HfBackend(config(), policy, run_seed=3).generate(
            self.samples, global_step=1, micro_step_idx=0, first_req_idx=0
        )
        return [rollout.response_token_ids for rollout in rollouts]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield an engine and prompts of several cache blocks (128 tokens each on CPU), so that a second request finds its
    beginning cached."""
    folder = tmp_path_factory.mktemp("adapters")
    build(folder / "model", "tiny", seed=0)
    text = "Detect every digit. " * 60
    samples = [sample([image(64, 64, seed=i)], text=f"{text}{i}") for i in range(2)]
    with closing(colocated_engine(config(), folder / "model", lora_rank=RANK)) as engine:
        yield World(folder, engine, samples)


@pytest.fixture
def policy_of(world: World) -> Callable[..., Policy]:
    def make(target_modules: str = LANGUAGE, kind: str = "lora") -> Policy:
        lora = LoraConfig(type=kind, r=RANK, alpha=32, target_modules=target_modules)
        return load_policy(ModelConfig(path=str(world.folder / "model"), lora=lora), device=CPU)

    return make


def test_each_adapter_takes_the_last_one_s_place(world: World, policy_of: Callable[..., Policy]) -> None:
    """R08, R09, R10: prompts and images cached in between, answers are those of transformers with the same adapter;
    training alone does not reach the engine."""
    assert world.engine._llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    policy = policy_of()
    sync, seen = world.sync(policy), []
    for seed in range(3):
        train(policy, seed)
        if seen:
            assert world.answers(policy) == seen[-1]
        receipt = sync.sync()
        assert (receipt.mode, receipt.num_tensors, receipt.fallback) == ("adapter", 2 * NUM_LAYERS, "")
        assert receipt.canary_gap < 1e-3
        seen.append(world.answers(policy))
        assert seen[-1] == world.by_hf(policy) == world.answers(policy)
    assert len({tuple(answers) for answers in seen}) == 3
    assert [sync.ver, world.engine.ver] == [3, 3]


def test_merged_weights_take_the_adapter_off_and_the_other_way_round(
    world: World, policy_of: Callable[..., Policy]
) -> None:
    """R08, R09: nothing is adapted twice, and no adapter lies on merged weights: the same answers either way."""
    policy = policy_of()
    train(policy, 5)
    wanted = world.by_hf(policy)
    for adapter in (True, False, True):
        receipt = world.sync(policy, adapter=adapter).sync()
        assert receipt.mode == ("adapter" if adapter else "full")
        assert receipt.canary_gap < 1e-3
        assert world.answers(policy) == wanted


def test_what_can_t_be_adapted_stops_rollouts_where_nothing_else_will_do(
    world: World, policy_of: Callable[..., Policy]
) -> None:
    """R08, R10: an adapter on the vision tower; the next sync that completes repairs it."""
    policy = policy_of("all-linear")
    with pytest.raises(CoverageError, match="does not cover") as caught:
        world.sync(policy, fallback_to_full=False).sync()
    assert "visual" in caught.value.found
    assert "target_modules" in caught.value.wanted
    with pytest.raises(SyncError, match="not known to be right"):
        world.answers(policy)
    mended = policy_of()
    train(mended, 6)
    assert world.sync(mended).sync().mode == "adapter"
    assert world.answers(mended) == world.by_hf(mended)


def test_falling_back_ends_with_merged_weights_and_stays(world: World, policy_of: Callable[..., Policy]) -> None:
    """R08: the same adapter; the first receipt says why, and the second is a full one too."""
    policy = policy_of("all-linear")
    sync, reasons = world.sync(policy), []
    for seed in range(2):
        train(policy, seed)
        receipt = sync.sync()
        assert (receipt.mode, receipt.canary_gap < 1e-3) == ("full", True)
        assert world.answers(policy) == world.by_hf(policy)
        reasons.append(receipt.fallback)
    assert "visual" in reasons[0]
    assert reasons[1] == ""


def test_a_dora_is_served_merged_from_the_start(world: World, policy_of: Callable[..., Policy]) -> None:
    """R08, R09"""
    policy = policy_of(kind="dora")
    train(policy, 2)
    receipt = world.sync(policy).sync()
    assert (receipt.mode, receipt.canary_gap < 1e-3) == ("full", True)
    assert "DoRA" in receipt.fallback
