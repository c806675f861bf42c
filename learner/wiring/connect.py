"""Makes the rollout backend and its weight sync from a configuration. Backend and sync are returned only after they
have reached the servers or started the colocated engine. So their errors are raised before the first step. The caller
closes backend and sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from learner.config.memory import of_run
from learner.config.modes import sync_mode
from learner.config.plan import tensor_parallel_size
from learner.config.schema import RunConfig
from learner.config.sections.loss import LossConfig
from learner.data.views import with_small_images
from learner.extensions import Task
from learner.policy.canary_scores import CanaryScorer
from learner.policy.load import Policy
from learner.policy.lora import AdapterWeights, base_model_path
from learner.policy.offload import make_offload
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.records import RolloutCallLog, Sample
from learner.rollout.colocate import ColocateBackend
from learner.rollout.colocated_engine import ColocatedEngine
from learner.rollout.control import Discovery, ServerControl
from learner.rollout.hf import HfBackend
from learner.rollout.server_backend import ServerBackend
from learner.sync.canary import CANARY_SAMPLES, CANARY_SIDE, CANARY_TOKENS, Canary, CanaryItem
from learner.sync.colocated import EngineDelivery
from learner.sync.fitness import check_servers, server_check
from learner.sync.server_delivery import ServerDelivery
from learner.sync.source import AdapterSource, ShardedAdapter, ShardedRanks, ShardedSource, SyncRanks, WeightSource
from learner.sync.sync import Delivery, Sync
from shared.checkpoint import signature

Backend = ServerBackend | ColocateBackend | HfBackend
ALONE = Ranks()  # the ranks of a run with one process


def connect_backend(
    config: RunConfig,
    policy: Policy,
    *,
    ranks: Ranks = ALONE,
    optimizer: Optimizer | None = None,
    token: str | None = None,
    on_call: Callable[[RolloutCallLog], None] | None = None,
) -> Backend:
    """Return a backend that is ready to generate. `optimizer`: a colocated engine may move its moments off the device
    (`offload`). `on_call` gets the record of each generation. Raises ServerError if a configured server is not ready,
    ConfigError if an engine cannot start."""
    rollouts, seed = config.rollout_matching, config.training.seed
    if rollouts.rollout_backend == "hf":
        return HfBackend(rollouts, policy, run_seed=seed, on_call=on_call)
    if rollouts.vllm.mode == "colocate":
        return _colocate(config, policy, ranks, optimizer, on_call)
    backend = ServerBackend(
        rollouts,
        run_seed=seed,
        rank=ranks.rank,
        num_ranks=ranks.world_size,
        token=token,
        vocab_size=policy.model.config.get_text_config().vocab_size,
        logprobs=config.custom.trainer_variant == "grpo",
        pixel_share=config.data.pixel_share,
        images=policy.encoder.images,
        on_call=on_call,
    )
    backend.connect()
    return backend


def connect_sync(
    config: RunConfig,
    policy: Policy,
    backend: Backend,
    task: Task,
    samples: Sequence[Sample],
    *,
    ranks: Ranks = ALONE,
) -> Sync:
    """Return the sync into the colocated engine, or to every server. The returned sync has joined the servers, after
    checks that they serve the same model and render the same prompts. A sync is checked with the first of `samples`.
    Adapters are synced if the configuration says so. Raises ServerError or SyncError. A `HfBackend` needs no sync,
    because it generates with the trained model itself."""
    assert not isinstance(backend, HfBackend), "the trained model itself generates"
    vllm = config.rollout_matching.vllm
    items = [_canary_item(sample, policy, task) for sample in samples[:CANARY_SAMPLES]]
    canary = _canary(config, policy, backend, items, ranks)
    weights: WeightSource = policy
    adapter: AdapterSource | None = _synced_adapter(config, policy)
    delivery: Delivery
    if isinstance(backend, ColocateBackend):
        delivery = EngineDelivery(backend.engine, policy.encoder, canary=canary, ranks=ranks)
    else:
        # The answer is the shortest one, because only prompts are compared.
        stop, encode = (policy.tokenizer.eos_token_id,), policy.encoder.encode
        prompts = [CanaryItem(sample=one, prompt=encode(one), response_token_ids=stop) for one in extremes(samples)]
        check = server_check(
            backend,
            architecture=signature(policy.model.config.to_dict()),
            prompts=[items[0], *prompts],
            image_processing=policy.encoder.image_processing,
        )
        # Servers are checked before the first sync, which would overwrite the weights of a wrong server.
        check_servers(backend, check, ranks=ranks)
        sync_ranks: SyncRanks = ranks
        # Gathering the weights for rank 0 is collective, so all ranks of a sharded model take part in a sync.
        if policy.is_sharded:
            sync_ranks = sharded = ShardedRanks(ranks, bucket_bytes=vllm.sync.bucket_bytes)
            weights = ShardedSource(policy, sharded)
            adapter = ShardedAdapter(adapter, sharded) if adapter else None
            canary = replace(canary, scorer=sharded.shared(canary.scorer))
        discovery = Discovery(listed) if (listed := vllm.server.discovery) else None
        delivery = ServerDelivery(
            backend,
            vllm,
            canary=canary,
            ranks=sync_ranks,
            device=ranks.device,
            check=check,
            control=ServerControl(Path(config.training.output_dir), discovery) if ranks.is_main else None,
        )
    sync = Sync(delivery, weights, adapter=adapter, fallback_to_full=vllm.sync.fallback_to_full)
    sync.connect()
    return sync


def _colocate(
    config: RunConfig,
    policy: Policy,
    ranks: Ranks,
    optimizer: Optimizer | None,
    on_call: Callable[[RolloutCallLog], None] | None,
) -> ColocateBackend:
    rollouts = config.rollout_matching
    adapter = _synced_adapter(config, policy)
    memory = of_run(config, ranks.world_size)
    engine = ColocatedEngine(
        rollouts,
        model=base_model_path(config.model) or config.model.path,
        dtype=computes_in(policy),
        ranks=ranks,
        tensor_parallel_size=tensor_parallel_size(config, ranks.world_size),
        offload=make_offload(rollouts.offload, policy, optimizer),
        lora_rank=adapter.rank if adapter is not None and not adapter.obstacle else 0,
        learning_bytes=memory.total - memory.weights if memory is not None else None,
    )
    return ColocateBackend(
        rollouts,
        engine,
        policy.encoder,
        run_seed=config.training.seed,
        ranks=ranks,
        logprobs=config.custom.trainer_variant == "grpo",
        pixel_share=config.data.pixel_share,
        on_call=on_call,
    )


def computes_in(policy: Policy) -> torch.dtype:
    """Return the floating-point type in which training and scoring compute."""
    return torch.bfloat16 if policy.bf16 else policy.model.dtype


def _synced_adapter(config: RunConfig, policy: Policy) -> AdapterWeights | None:
    return policy.adapter_weights() if sync_mode(config) == "adapter" else None


def extremes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the fewest and the most pixels. If learner and server have different limits
    (`min_pixels`, `max_pixels`), and the limits change any sample's prompt, they change the prompt of one of these two
    samples."""
    pictured = [sample for sample in samples if sample.images]
    if not pictured:
        return []
    return [choose(pictured, key=lambda sample: sample.width * sample.height) for choose in (min, max)]


def _canary(config: RunConfig, policy: Policy, backend: Backend, items: Sequence[CanaryItem], ranks: Ranks) -> Canary:
    """Return the canary, which checks each sync: learner and generator score the same answers. Only ranks that compute
    the learner's scores get the answers."""
    vllm = config.rollout_matching.vllm
    is_asked = ranks.is_main or policy.is_sharded or isinstance(backend, ColocateBackend)
    answers = [(item.prompt, item.response_token_ids) for item in items] if is_asked else []
    return Canary(
        items=items,
        # A colocated engine gets the tensors themselves, so there are no checksums to compare.
        scorer=CanaryScorer(policy, answers, checksums=not isinstance(backend, ColocateBackend)),
        tolerance=vllm.sync.canary_tolerance,
        dtype=computes_in(policy),
    )


def _canary_item(sample: Sample, policy: Policy, task: Task) -> CanaryItem:
    """Return a training sample with its ground truth as the answer, and with its image, so that the vision tower is
    checked too. The image is small, and a long answer is cut."""
    target = task.ground_truth(sample, LossConfig())
    # The image is small and the answer short, because servers make no rollouts while they score them.
    small = with_small_images(sample, policy.encoder.images, CANARY_SIDE)
    return CanaryItem(
        sample=small,
        prompt=policy.encoder.encode(small),
        response_token_ids=tuple(int(token) for token in target.token_ids[:CANARY_TOKENS]),
    )
