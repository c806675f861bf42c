"""Colocated vLLM on CUDA: checked syncs on the device, and what it gives back while training has it (R04, R09, R20)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from bench.demo_model import build
from bench.engines import colocate_sync, colocated_engine
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import OffloadConfig, RolloutMatchingConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.offload import Offload, make_offload
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.policy.weights import as_sent
from learner.records import Rollout
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.sync.canary import CanaryItem
from learner.sync.sync import Sync
from shared.errors import RolloutError
from tests.unit.learner.policy.rows import image, sample

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)
RANKS = Ranks(device=CUDA)
GIB = 2**30
CONFIG = RolloutMatchingConfig.model_validate(
    {
        "decode_batch_size": 4,
        "decoding": {"max_new_tokens": 16, "repetition_penalty": 1.2},
        "vllm": {"gpu_memory_utilization": 0.2, "max_model_len": 512, "enforce_eager": True, "sleep": "always"},
    }
)


@dataclass(frozen=True)
class World:
    policy: Policy
    engine: ColocatedEngine

    def expected(self) -> list[float]:
        """Return the canary's scores under the weights that are sent now."""
        with as_sent(self.policy.model, self.engine.dtype, merged=True):
            return self.policy.logprobs([(self.item.prompt, self.item.response_token_ids)])[0]

    @property
    def item(self) -> CanaryItem:
        scene = sample([image(128, 128, seed=0)])
        prompt = self.policy.encoder.encode(scene)
        return CanaryItem(sample=scene, prompt=prompt, response_token_ids=tuple(range(20, 40)))

    def make_sync(self) -> Sync:
        return colocate_sync(self.engine, self.policy, self.item, CONFIG, RANKS)

    def sync(self) -> float:
        """Sync the engine; return the canary's gap."""
        return self.make_sync().sync().canary_gap

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter += 0.05 * parameter.abs().mean() * torch.randn_like(parameter)

    def check_served(self) -> None:
        """Every layer of the decoder is the learner's, to the bit."""
        own = dict(self.policy.model.named_parameters())
        served = {name: value for name, value in self.engine.model.named_parameters() if "_proj.weight" in name}
        layers = [name for name in served if name.startswith("language_model.model.layers.")]
        assert layers
        for name in layers:
            parts = [own[f"{part}.weight"] for part in parts_of(name.removesuffix(".weight"))]
            assert torch.equal(served[name].cpu(), torch.cat(parts).to(served[name].dtype).cpu()), name

    def generate(self) -> list[Rollout]:
        samples = [sample([image(128, 128, seed=i)]) for i in range(5)]
        backend = ColocateBackend(CONFIG, self.engine, self.policy.encoder, run_seed=3, ranks=RANKS)
        return backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)


def parts_of(served: str) -> list[str]:
    """Return the checkpoint's layers of a served one."""
    name = served.replace("language_model.model.", "model.language_model.")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    head, _, last = name.rpartition(".")
    return [f"{head}.{part}" for part in fused.get(last, (last,))]


class Switched(Offload):
    """An offload that can be turned off: a process can have only one engine that sleeps."""

    def __init__(self, offload: Offload) -> None:
        self.offload, self.on = offload, True

    @property
    def moves(self) -> bool:
        return self.on and self.offload.moves

    @contextmanager
    def away(self) -> Iterator[None]:
        with self.offload.away() if self.on else nullcontext():
            yield


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Switched]]:
    """The engine starts while training's state is away."""
    path = tmp_path_factory.mktemp("models") / "demo"
    build(path, "demo", seed=0)
    policy = load_policy(ModelConfig(path=str(path)), device=CUDA)
    optimizer = Optimizer(policy.trainable, TrainingConfig(output_dir="run", max_steps=1), total_steps=1)
    away = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)
    offload = Switched(make_offload(away, policy, optimizer))
    with closing(colocated_engine(CONFIG, path, offload, RANKS)) as engine:
        yield World(policy, engine), offload


@pytest.fixture(params=[False, True], ids=["stays", "offloaded"])
def world(request: pytest.FixtureRequest, started: tuple[World, Switched]) -> World:
    world, offload = started
    offload.on = request.param
    return world


def test_syncs_are_checked_and_change_the_answers(world: World) -> None:
    """R09: they do so past the caches that the old weights had filled; the trained weights are as before."""
    assert world.sync() < 0.01
    first = world.generate()
    world.change()
    before = {name: parameter.detach().clone() for name, parameter in world.policy.model.named_parameters()}
    assert [r.response_token_ids for r in world.generate()] == [r.response_token_ids for r in first]
    assert world.sync() < 0.01
    second = world.generate()
    assert [r.response_token_ids for r in second] != [r.response_token_ids for r in first]
    assert [r.prompt_token_ids for r in second] == [world.policy.encoder.encode(r.sample).token_ids for r in second]
    for name, parameter in world.policy.model.named_parameters():
        assert parameter.device == CUDA
        assert torch.equal(parameter, before[name]), name


def test_syncs_one_after_the_other_bring_the_learner_s_weights(world: World) -> None:
    """R09: with the learner's scores by passes and then by a graph; the engine sleeps in between."""
    sync = world.make_sync()
    for _ in range(5):
        receipt = sync.sync()
        assert receipt.canary_gap < 0.01
        assert receipt.num_tensors == len(world.policy.weight_specs())
        with world.engine.awake():
            world.check_served()
        assert world.generate()
        world.change()


@pytest.fixture
def beside(started: tuple[World, Switched], tmp_path: Path) -> Iterator[World]:
    """A policy with a LoRA on every linear layer, and an engine that stays awake."""
    world, offload = started
    engine, offload.on = world.engine, False
    build(tmp_path, "demo", seed=0)
    lora = LoraConfig(r=8, alpha=16, target_modules="all-linear")
    policy = load_policy(ModelConfig(path=str(tmp_path), lora=lora), device=CUDA)
    if engine._asleep:
        engine._wake_up()
    engine._sleeps = False
    try:
        yield World(policy, engine)
    finally:
        engine._sleeps = True
        engine._sleep()


def test_scores_at_the_same_time_are_those_one_after_the_other(beside: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: each of a few adapters, first at the same time and then with the learner's scores first. The weights change
    right after a sync, and its scores are of before."""
    sync = beside.make_sync()
    delivery: Any = sync._delivery
    for _ in range(4):
        assert sync.sync().canary_gap < 0.01
    assert beside.engine.leaves_training
    (way,) = delivery._canary.scorer._sent.values()
    assert way.scorer.is_captured
    for _ in range(10):
        beside.change()
        expected = beside.expected()
        assert sync.sync().canary_gap < 0.01
        together = delivery._learner["full"]
        with monkeypatch.context() as patch:
            patch.setattr(delivery, "_scores_beside", lambda: False)
            assert sync.sync().canary_gap < 0.01
        in_turn = delivery._learner["full"]
        beside.change()
        assert together.logprobs == in_turn.logprobs
        assert together.logprobs[0] == pytest.approx(expected, abs=1e-3)
    assert way.scorer._side._stream is not None


def test_a_failed_sync_leaves_no_pass_that_sees_later_weights(beside: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """R09: the engine fails while the learner's pass runs, and then a step changes what the pass reads."""
    sync = beside.make_sync()
    delivery: Any = sync._delivery
    for _ in range(4):
        sync.sync()

    def fail(*_: object) -> NoReturn:
        raise RolloutError("the engine failed")

    for _ in range(10):
        beside.change()
        expected = beside.expected()
        with monkeypatch.context() as patch:
            patch.setattr(beside.engine, "score", fail)
            with pytest.raises(RolloutError, match="the engine failed"):
                sync.sync()
        beside.change()
        assert delivery._learner["full"].logprobs[0] == pytest.approx(expected, abs=1e-3)
        assert beside.engine.ver is None
        assert sync.sync().canary_gap < 0.01


def test_the_engine_sleeps_while_training_has_the_device(world: World) -> None:
    """R04: its KV cache (most of a fifth of the device) is there during rollouts only."""
    world.sync()
    asleep, total = torch.cuda.mem_get_info()
    with world.engine.awake():
        awake, _ = torch.cuda.mem_get_info()
    assert asleep - awake > 0.1 * total
    assert abs(torch.cuda.mem_get_info()[0] - asleep) < GIB // 2
