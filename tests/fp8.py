"""A colocated vLLM engine in FP8, on CPU or CUDA: what a sync must do there, and what its canary must find (R09).

vLLM 0.32 computes FP8 on CPU, slower than bfloat16, and with AVX-512 it keeps its KV cache so. Users are refused both;
tests take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench.engines import colocate_sync, colocated_engine
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks
from learner.records import SyncReceipt
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.sync.canary import FP8_TOLERANCE, CanaryItem
from shared.errors import CanaryError
from shared.sync.fp8 import quantised
from tests.unit.learner.policy.rows import image, sample

LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
RANK = 8
CONFIG = RolloutMatchingConfig.model_validate(
    {
        "decode_batch_size": 4,
        "decoding": {"max_new_tokens": 16},
        "vllm": {
            "quantization": "fp8",
            "enable_lora": True,
            "gpu_memory_utilization": 0.2,
            "max_model_len": 512,
            "enforce_eager": True,
        },
    }
)
Weights = dict[str, torch.Tensor]
Spoil = Callable[[Weights], None]


CACHE_TOO = RolloutMatchingConfig.model_validate(
    {**CONFIG.model_dump(), "vllm": {**CONFIG.vllm.model_dump(), "kv_cache_dtype": "fp8"}}
)


class Spoiled:
    """A policy's weights, other ones than it is scored with."""

    def __init__(self, policy: Policy, spoil: Spoil) -> None:
        self.weight_specs = policy.weight_specs
        self._policy, self._spoil = policy, spoil

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self._policy.named_weights(dtype))
        self._spoil(weights)
        yield from weights.items()


@dataclass(frozen=True)
class World:
    folder: Path
    engine: ColocatedEngine
    ranks: Ranks
    config: RolloutMatchingConfig

    def policy(self, *, lora: bool = False) -> Policy:
        adapter = LoraConfig(r=RANK, alpha=16, target_modules=LANGUAGE) if lora else None
        return load_policy(ModelConfig(path=str(self.folder), lora=adapter), device=self.ranks.device, bf16=True)

    def sync(self, policy: Policy, *, adapter: bool = False, spoil: Spoil | None = None) -> SyncReceipt:
        scene = sample([image(64, 64)])
        item = CanaryItem(sample=scene, prompt=policy.encoder.encode(scene), response_token_ids=tuple(range(20, 80)))
        own = policy.adapter_weights() if adapter else None
        sync = colocate_sync(self.engine, policy, item, self.config, self.ranks, adapter=own)
        if spoil is not None:
            sync._weights = Spoiled(policy, spoil)
        return sync.sync()

    def answers(self, policy: Policy) -> list[tuple[int, ...]]:
        backend = ColocateBackend(self.config, self.engine, policy.encoder, run_seed=3, ranks=self.ranks)
        samples = [sample([image(64, 64, seed=i)]) for i in range(4)]
        rollouts = backend.generate(samples, global_step=1, micro_step_idx=0, first_req_idx=0)
        return [rollout.response_token_ids for rollout in rollouts]

    def served(self) -> Mapping[str, torch.Tensor]:
        """The engine's parameters, LoRA wrappers taken off the names."""
        return {name.replace(".base_layer", ""): value for name, value in self.engine.model.named_parameters()}


@contextmanager
def started(folder: Path, ranks: Ranks, config: RolloutMatchingConfig = CONFIG) -> Iterator[World]:
    with (
        patch("learner.rollout.colocated_engine.check_device"),
        closing(colocated_engine(config, folder, None, ranks, lora_rank=RANK, dtype=torch.bfloat16)) as engine,
    ):
        yield World(folder, engine, ranks, config)


@torch.no_grad()
def change(policy: Policy, seed: int, scale: float = 0.3) -> None:
    """Every trained weight becomes another one."""
    torch.manual_seed(seed)
    for _, parameter in policy.trainable:
        parameter.add_(scale * (parameter.std(correction=0) + 0.02) * torch.randn_like(parameter))


def check_served(world: World, sent: Weights) -> None:
    served = world.served()
    layers = [name for name in served if name.endswith("weight_scale")]
    assert layers
    assert not [name for name in layers if "visual" in name]
    for scale_name in layers:
        name = scale_name.removesuffix("_scale")
        parts = [sent[f"{part}.weight"] for part in parts_of(name.removesuffix(".weight"))]
        values, scale = quantised(torch.cat(parts))
        assert torch.equal(served[name].t().contiguous().view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(served[scale_name], scale), name


def parts_of(served: str) -> list[str]:
    """The checkpoint's layers of a served one."""
    name = served.replace("language_model.model.", "model.language_model.")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    head, _, last = name.rpartition(".")
    return [f"{head}.{part}" for part in fused.get(last, (last,))]


def one_is_stale(weights: Weights) -> None:
    """A whole layer has weights of another time."""
    torch.manual_seed(0)
    for name in weights:
        if ".language_model.layers.1." in name and name.endswith("_proj.weight"):
            weights[name] = weights[name].std() * torch.randn_like(weights[name])


def two_are_swapped(weights: Weights) -> None:
    for name in list(weights):
        if ".language_model.layers.0." in name and name.endswith("_proj.weight"):
            other = name.replace("layers.0.", "layers.1.")
            weights[name], weights[other] = weights[other], weights[name]


def check_cache(world: World) -> None:
    """Keys and values take one byte each, and no sync has given them another scale than 1."""
    config = world.engine._llm.llm_engine.vllm_config
    assert config.cache_config.cache_dtype == "fp8"
    layers = [one for one in config.compilation_config.static_forward_context.values() if hasattr(one, "_k_scale")]
    assert layers
    for layer in layers:
        assert [float(layer._k_scale), float(layer._v_scale)] == [1.0, 1.0]
        assert layer.kv_cache_torch_dtype.itemsize == 1


SPOILS: list[Spoil] = [one_is_stale, two_are_swapped]


class QuantisedSyncs:
    """Tests of every engine in FP8. A test module subclasses it, and has a fixture `world`."""

    def test_syncs_are_quantised_on_the_way_and_change_the_answers(self, world: World) -> None:
        """Sync after sync, the engine holds to the bit what the rule makes of what was sent, and answers by it."""
        policy, said = world.policy(), list[list[tuple[int, ...]]]()
        copies = world.engine._copies
        copies.rows = None
        for seed in range(4):
            receipt = world.sync(policy)
            assert receipt.num_tensors == len(policy.weight_specs())
            assert receipt.canary_gap < FP8_TOLERANCE
            assert receipt.merge_gap > 0  # quantising changes something
            assert copies.rows is not None, "the reload did not give what the rows would get"
            with world.engine.awake():
                check_served(world, dict(policy.named_weights(torch.bfloat16)))
            said.append(world.answers(policy))
            change(policy, seed)
        assert len({tuple(answers) for answers in said}) == 4

    @pytest.mark.parametrize("spoil", SPOILS)
    def test_a_wrong_layer_is_found(self, world: World, spoil: Spoil) -> None:
        """A wrong layer is found, and the next sync repairs it."""
        policy = world.policy()
        change(policy, 7, scale=1.0)
        world.sync(policy)
        with pytest.raises(CanaryError, match="mean gap"):
            world.sync(policy, spoil=spoil)
        assert world.sync(policy).canary_gap < FP8_TOLERANCE


class QuantisedAdapters:
    """The test of adapters on such an engine."""

    def test_an_adapter_lies_on_weights_in_fp8(self, world: World) -> None:
        """R08: the adapter alone lies on weights in FP8. Merged ones are quantised with it."""
        policy = world.policy(lora=True)
        for adapter in (True, True, False, True):
            change(policy, 1)
            receipt = world.sync(policy, adapter=adapter)
            assert receipt.mode == ("adapter" if adapter else "full")
            assert receipt.fallback == ""
