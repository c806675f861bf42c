"""A colocated vLLM engine in this process: started with vLLM's environment, its memory given up at the end.

with closing(colocated_engine(config, folder / "model")) as engine:
    backend = ColocateBackend(config, engine, encoder, run_seed=3, ranks=Ranks())
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest.mock import patch

import torch

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy
from learner.policy.lora import AdapterWeights
from learner.policy.offload import Offload
from learner.policy.parallel import Ranks
from learner.rollout.colocated_engine import ColocatedEngine
from learner.run.environment import prepare_for_vllm
from learner.sync.canary import Canary, CanaryItem
from learner.sync.colocated import EngineDelivery
from learner.sync.sync import Sync
from learner.wiring.connect import computes_in

ONE_RANK = Ranks()  # runs on CPU


def colocated_engine(
    config: RolloutMatchingConfig,
    model: Path,
    offload: Offload | None = None,
    ranks: Ranks = ONE_RANK,
    lora_rank: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    reads_weights: bool = False,
) -> ColocatedEngine:
    """Start an engine on one rank."""
    environment: dict[str, str] = {}
    prepare_for_vllm(environment)
    with patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        return ColocatedEngine(
            config,
            model=str(model),
            dtype=dtype,
            ranks=ranks,
            tensor_parallel_size=1,
            offload=offload or Offload(tuple, ranks.device),
            lora_rank=lora_rank,
            reads_weights=reads_weights,
        )


def colocate_sync(
    engine: ColocatedEngine,
    policy: Policy,
    item: CanaryItem,
    config: RolloutMatchingConfig,
    ranks: Ranks = ONE_RANK,
    adapter: AdapterWeights | None = None,
) -> Sync:
    canary = Canary(
        items=[item],
        scorer=CanaryScorer(policy, [(item.prompt, item.response_token_ids)]),
        tolerance=config.vllm.sync.canary_tolerance,
        dtype=computes_in(policy),
    )
    delivery = EngineDelivery(engine, policy.encoder, canary=canary, ranks=ranks)
    return Sync(delivery, policy, adapter=adapter, fallback_to_full=config.vllm.sync.fallback_to_full)
