"""From a configuration to the rollout backend and its weight sync.

Both have reached the servers, or started the colocated engine, before they are returned. So what is wrong there is
reported before the first step. Whoever calls closes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from learner.config.plan import tensor_parallel_size
from learner.config.rules import sync_mode
from learner.config.schema import LossConfig, RunConfig
from learner.extensions import Task
from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy
from learner.policy.lora import AdapterWeights, base_model_path
from learner.policy.offload import make_offload
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.records import Sample
from learner.rollout.backend import RolloutCallLog
from learner.rollout.colocate import ColocateBackend, ColocatedEngine
from learner.rollout.control import ServerControl
from learner.rollout.discovery import Discovery
from learner.rollout.hf import HfBackend
from learner.rollout.servers import ServerBackend
from learner.run.log import MetricsLog, Timeline
from learner.sync.canary import Canary, CanaryItem
from learner.sync.colocated import EngineDelivery
from learner.sync.servers import ServerDelivery, check_servers, server_check
from learner.sync.source import AdapterSource, ShardedAdapter, ShardedRanks, ShardedSource, SyncRanks, WeightSource
from learner.sync.sync import Delivery, Sync
from shared.checkpoint import signature

Backend = ServerBackend | ColocateBackend | HfBackend


def connect_backend(
    config: RunConfig,
    ranks: Ranks,
    policy: Policy,
    optimizer: Optimizer,
    token: str | None,
    log: MetricsLog,
    timeline: Timeline,
) -> Backend:
    """A backend that is ready to generate. Raises ServerError if a configured server is not ready, ConfigError if an
    engine cannot start."""

    def on_call(record: RolloutCallLog) -> None:
        timeline.call(record)
        log.write("rollout_call", record)
        if not ranks.is_main:  # other ranks write no metrics; their seeds and chunks are in their logs (R15)
            logging.getLogger("learner.rollout").info("%s", record)

    rollouts, seed = config.rollout_matching, config.training.seed
    if rollouts.rollout_backend == "hf":
        return HfBackend(rollouts, policy, run_seed=seed, on_call=on_call)
    if rollouts.vllm.mode == "colocate":
        return _colocate(config, ranks, policy, optimizer, on_call)
    backend = ServerBackend(
        rollouts,
        run_seed=seed,
        rank=ranks.rank,
        num_ranks=ranks.world_size,
        token=token,
        vocab_size=policy.model.config.get_text_config().vocab_size,
        logprobs=config.custom.trainer_variant == "grpo",
        on_call=on_call,
    )
    backend.connect()
    return backend


def connect_sync(
    config: RunConfig,
    ranks: Ranks,
    policy: Policy,
    backend: ServerBackend | ColocateBackend,
    task: Task,
    samples: list[Sample],
) -> Sync:
    """Into the colocated engine, or to every server. Servers are joined, and were found to serve the same model and to
    render the same prompts. Adapters are synced if the configuration says so. Raises ServerError or SyncError."""
    vllm = config.rollout_matching.vllm
    items = [_canary_item(sample, policy, task) for sample in samples[: vllm.sync.canary_samples]]
    is_asked = ranks.is_main or policy.is_sharded or isinstance(backend, ColocateBackend)
    answers = [(item.prompt, item.response_token_ids) for item in items] if is_asked else []
    canary = Canary(
        items=items,
        scorer=CanaryScorer(policy, answers),
        tolerance=vllm.sync.canary_tolerance,
        dtype=computes_in(policy),
    )
    weights: WeightSource = policy
    adapter: AdapterSource | None = _synced_adapter(config, policy)
    delivery: Delivery
    if isinstance(backend, ColocateBackend):
        delivery = EngineDelivery(backend.engine, policy.encoder, canary=canary, ranks=ranks)
    else:
        prompts = [items[0], *(_probe(sample, policy) for sample in extremes(samples))]
        check = server_check(backend, architecture=signature(policy.model.config.to_dict()), prompts=prompts)
        check_servers(backend, check, ranks=ranks)
        sync_ranks: SyncRanks = ranks
        if policy.is_sharded:  # all ranks do what rank 0 needs of the weights
            sync_ranks = sharded = ShardedRanks(ranks, bucket_bytes=vllm.sync.bucket_bytes)
            weights = ShardedSource(policy, sharded)
            adapter = ShardedAdapter(adapter, sharded) if adapter else None
            canary = replace(canary, scorer=sharded.shared(canary.scorer))
        delivery = ServerDelivery(
            backend,
            vllm,
            canary=canary,
            ranks=sync_ranks,
            device=ranks.device,
            check=check,
            control=ServerControl(Path(config.training.output_dir)) if ranks.is_main else None,
            discovery=Discovery(vllm.server.discovery) if vllm.server.discovery and ranks.is_main else None,
        )
    sync = Sync(delivery, weights, adapter=adapter, fallback_to_full=vllm.sync.fallback_to_full)
    sync.connect()
    return sync


def _colocate(
    config: RunConfig, ranks: Ranks, policy: Policy, optimizer: Optimizer, on_call: Callable[[RolloutCallLog], None]
) -> ColocateBackend:
    rollouts = config.rollout_matching
    adapter = _synced_adapter(config, policy)
    engine = ColocatedEngine(
        rollouts,
        model=base_model_path(config.model) or config.model.path,
        dtype=computes_in(policy),
        ranks=ranks,
        tensor_parallel_size=tensor_parallel_size(config, ranks.world_size),
        offload=make_offload(rollouts.offload, policy, optimizer),
        lora_rank=adapter.rank if adapter is not None and not adapter.obstacle else 0,
    )
    return ColocateBackend(
        rollouts,
        engine,
        policy.encoder,
        run_seed=config.training.seed,
        ranks=ranks,
        logprobs=config.custom.trainer_variant == "grpo",
        on_call=on_call,
    )


def computes_in(policy: Policy) -> torch.dtype:
    """The type of training's and scoring's computations."""
    return torch.bfloat16 if policy.bf16 else policy.model.dtype


def _synced_adapter(config: RunConfig, policy: Policy) -> AdapterWeights | None:
    return policy.adapter_weights() if sync_mode(config) == "adapter" else None


def extremes(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the fewest and the most pixels. Their prompts differ if the two sides have other limits
    (`min_pixels`, `max_pixels`) that any sample meets."""
    pictured = [sample for sample in samples if sample.images]
    if not pictured:
        return []
    return [choose(pictured, key=lambda sample: sample.width * sample.height) for choose in (min, max)]


def _probe(sample: Sample, policy: Policy) -> CanaryItem:
    """A sample's prompt, with the shortest answer."""
    return CanaryItem(
        sample=sample, prompt=policy.encoder.encode(sample), response_token_ids=(policy.tokenizer.eos_token_id,)
    )


def _canary_item(sample: Sample, policy: Policy, task: Task) -> CanaryItem:
    """The ground truth of a training sample: fixed, and with its image, so that the vision tower is checked too."""
    target = task.ground_truth(sample, LossConfig())
    return CanaryItem(
        sample=sample,
        prompt=policy.encoder.encode(sample),
        response_token_ids=tuple(int(token) for token in target.token_ids),
    )
