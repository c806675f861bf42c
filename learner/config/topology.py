"""What must be true between the configuration and the number of ranks: batch arithmetic and device counts.

`topology_rules(world_size)` gives rules as in `rules.py`; `derived_gas` the micro-steps per optimizer step. Called by
`load.py` (with a known number of ranks) and `plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from learner.config.rules import ROLLOUT, Rule, colocates, given, needs_rollouts, uses_servers
from learner.config.schema import RunConfig
from shared.config_errors import Mistake


def topology_rules(world_size: int) -> tuple[Rule, ...]:
    """Rules that hold for `world_size` learner ranks."""

    rules = (
        _batch_divides,
        _tensor_parallel_divides,
        _step_fits_queue,
        _sharded_model_is_served,
        _sharded_model_is_eager,
    )
    return tuple(partial(rule, world_size=world_size) for rule in rules)


def shards(config: RunConfig, world_size: int) -> bool:
    """Whether each rank holds only its part of the model."""
    return config.model.sharding == "fsdp" and world_size > 1


def derived_gas(config: RunConfig, world_size: int) -> int:
    """`gradient_accumulation_steps`, from `effective_batch_size` where that is given (D8)."""
    training = config.training
    if training.effective_batch_size is not None:
        return training.effective_batch_size // (training.per_device_train_batch_size * world_size)
    return training.gradient_accumulation_steps or 1


def tensor_parallel_size(config: RunConfig, world_size: int) -> int:
    """Devices per colocated engine: one where there is one rank (R04)."""
    return 1 if world_size == 1 else config.rollout_matching.vllm.tensor_parallel_size


def _batch_divides(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R33, D8: whole micro-steps, and one answer to how many."""
    training = config.training
    batch, given = training.effective_batch_size, training.gradient_accumulation_steps
    if batch is None:
        return
    unit = training.per_device_train_batch_size * world_size
    terms = f"per_device_train_batch_size ({training.per_device_train_batch_size}) x {world_size} rank(s)"
    if batch % unit:
        lower = max(unit, batch // unit * unit)
        remedy = f"the nearest that are: {lower} and {lower + unit}"
        wanted = f"a multiple of {unit} = {terms}"
        yield Mistake(path="training.effective_batch_size", found=str(batch), wanted=wanted, remedy=remedy)
    elif given is not None and given != batch // unit:
        wanted = f"{batch // unit} = effective_batch_size ({batch}) / ({terms})"
        remedy = f"remove it (it is derived), or set it to {batch // unit}"
        path = "training.gradient_accumulation_steps"
        yield Mistake(path=path, found=str(given), wanted=wanted, remedy=remedy)


def _tensor_parallel_divides(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R04: colocated engines share out the learner's devices."""
    if not colocates(config):
        return
    size = tensor_parallel_size(config, world_size)
    if world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        wanted, remedy = f"a divisor of the {world_size} ranks", f"set it to {' or '.join(fitting[:6])}"
        path = f"{ROLLOUT}.vllm.tensor_parallel_size"
        yield Mistake(
            path=path, found=given(config.rollout_matching.vllm, "tensor_parallel_size"), wanted=wanted, remedy=remedy
        )


def _sharded_model_is_served(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """Ranks generate at their own pace, each from whole weights."""
    if not shards(config, world_size) or not needs_rollouts(config) or uses_servers(config):
        return
    rollout = config.rollout_matching
    backend = "rollout_backend: hf" if rollout.rollout_backend == "hf" else f"vllm.mode: {rollout.vllm.mode}"
    remedy = f"set {ROLLOUT}.rollout_backend: vllm and vllm.mode: server, or model.sharding: none"
    wanted = "rollouts from servers (vllm.mode: server), as no rank has the whole model"
    yield Mistake(path="model.sharding", found=f"fsdp with {backend}", wanted=wanted, remedy=remedy)


def _sharded_model_is_eager(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """Ranks gather and free weights around every layer."""
    if shards(config, world_size) and config.model.compile is True:
        remedy = "set model.compile: auto, or model.sharding: none"
        yield Mistake(
            path="model.compile", found="true with model.sharding: fsdp", wanted="auto or false", remedy=remedy
        )


def _step_fits_queue(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R27: a Channel-B step of the asynchronous actor-learner takes `gradient_accumulation_steps` packs of each rank's
    queue."""
    if config.stage2_ab is None or not config.stage2_ab.async_actor_learner.enabled:
        return
    queue, packs = config.stage2_ab.async_actor_learner, derived_gas(config, world_size)
    if packs > queue.queue_limit:
        wanted = f"at least the {packs} packs that a Channel-B step takes of each rank (gradient_accumulation_steps)"
        remedy = "raise it, or raise training.per_device_train_batch_size, the samples of a pack"
        path = "stage2_ab.async_actor_learner.queue_limit"
        yield Mistake(path=path, found=given(queue, "queue_limit"), wanted=wanted, remedy=remedy)
