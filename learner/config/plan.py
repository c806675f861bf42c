"""Computes a run's numbers, such as its batch size, from its configuration and the number of ranks.

`resolve` returns all numbers of a run in a `Plan`, and has no side effects. `--check` prints the plan, and the learner
logs it at its start (R15). `topology_rules` are the checks of keys that depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from learner.config.modes import ROLLOUT, Rule, colocates, needs_rollouts, overlaps, sync_mode, uses_servers
from learner.config.schedule import scheduled_channel
from learner.config.schema import RunConfig
from learner.config.sections.servers import ServerEntry
from shared.config.model import ConfigErrors, Mistake, given
from shared.masking import masked_in


def topology_rules(world_size: int) -> tuple[Rule, ...]:
    """Return the checks of a configuration that depend on the number of learner ranks, for `world_size` ranks."""
    rules = (
        _batch_divides,
        _tensor_parallel_divides,
        _step_fits_queue,
        _sharded_model_is_served,
        _sharded_model_is_eager,
    )
    return tuple(partial(rule, world_size=world_size) for rule in rules)


def shards(config: RunConfig, world_size: int) -> bool:
    """Return True if each rank holds only a part of the model."""
    return config.model.sharding == "fsdp" and world_size > 1


def derived_gas(config: RunConfig, world_size: int) -> int:
    """Return the number of micro-steps per optimizer step. The number is computed from `effective_batch_size` if that
    key is set; otherwise it is `gradient_accumulation_steps`, or 1 (D8)."""
    training = config.training
    if training.effective_batch_size is not None:
        return training.effective_batch_size // (training.per_device_train_batch_size * world_size)
    return training.gradient_accumulation_steps or 1


def tensor_parallel_size(config: RunConfig, world_size: int) -> int:
    """Return the number of devices per colocated engine (R04): the value of the key. If the user has not set the key
    and there is one rank, the size is 1."""
    vllm = config.rollout_matching.vllm
    # The specified default of 4 would be refused with a single rank.
    if world_size == 1 and "tensor_parallel_size" not in vllm.model_fields_set:
        return 1
    return vllm.tensor_parallel_size


def _batch_divides(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R33, D8: a step has a whole number of micro-steps, and `effective_batch_size` and `gradient_accumulation_steps`
    give the same number."""
    training = config.training
    batch, given = training.effective_batch_size, training.gradient_accumulation_steps
    if batch is None:
        return
    unit = training.per_device_train_batch_size * world_size
    terms = f"per_device_train_batch_size ({training.per_device_train_batch_size}) x {world_size} rank(s)"
    if batch % unit:
        lower = max(unit, batch // unit * unit)
        remedy = f"the nearest ones are {lower} and {lower + unit}"
        wanted = f"a multiple of {unit} = {terms}"
        yield Mistake(path="training.effective_batch_size", found=str(batch), wanted=wanted, remedy=remedy)
    elif given is not None and given != batch // unit:
        wanted = f"{batch // unit} = effective_batch_size ({batch}) / ({terms})"
        remedy = f"remove it (it is derived), or set it to {batch // unit}"
        path = "training.gradient_accumulation_steps"
        yield Mistake(path=path, found=str(given), wanted=wanted, remedy=remedy)


def _tensor_parallel_divides(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R04: the size of a colocated engine divides the number of ranks."""
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
    """A sharded model needs servers for its rollouts, because a rank that generates needs all weights."""
    if not shards(config, world_size) or not needs_rollouts(config) or uses_servers(config):
        return
    rollout = config.rollout_matching
    backend = "rollout_backend: hf" if rollout.rollout_backend == "hf" else f"vllm.mode: {rollout.vllm.mode}"
    remedy = f"set {ROLLOUT}.rollout_backend: vllm and vllm.mode: server, or model.sharding: none"
    wanted = "rollouts from servers (vllm.mode: server), because no rank has the whole model"
    yield Mistake(path="model.sharding", found=f"fsdp with {backend}", wanted=wanted, remedy=remedy)


def _sharded_model_is_eager(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """A sharded model is not compiled, because a compiled layer cannot gather and free its weights."""
    if shards(config, world_size) and config.model.compile is True:
        remedy = "set model.compile: auto, or model.sharding: none"
        yield Mistake(
            path="model.compile", found="true with model.sharding: fsdp", wanted="auto or false", remedy=remedy
        )


def _step_fits_queue(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    """R27: a rank's queue can hold the `gradient_accumulation_steps` packs that a Channel-B step of the asynchronous
    actor-learner takes from it."""
    if config.stage2_ab is None or not config.stage2_ab.async_actor_learner.enabled:
        return
    queue, packs = config.stage2_ab.async_actor_learner, derived_gas(config, world_size)
    if packs > queue.queue_limit:
        wanted = f"at least the {packs} packs that a Channel-B step takes from each rank (gradient_accumulation_steps)"
        remedy = "raise it, or raise training.per_device_train_batch_size, the samples of a pack"
        path = "stage2_ab.async_actor_learner.queue_limit"
        yield Mistake(path=path, found=given(queue, "queue_limit"), wanted=wanted, remedy=remedy)
    least = (queue.sync_every + 1) * packs
    if queue.sync_every > 1 and queue.prefetch_target_packs < least:
        yield Mistake(
            path="stage2_ab.async_actor_learner.prefetch_target_packs",
            found=given(queue, "prefetch_target_packs"),
            wanted=f"at least {least} with sync_every: {queue.sync_every}, the packs of {queue.sync_every + 1} steps; "
            "otherwise the producers stand still more often than with a sync each time",
            remedy=f"set it and queue_limit to {least} or more",
        )


NUM_CHANNELS_SHOWN = 10  # number of first steps whose channels are in a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The numbers of a run, derived from its configuration. A number that does not apply to the run is None."""

    trainer_variant: str
    world_size: int  # learner ranks
    per_device_train_batch_size: int  # number of samples per micro-step and rank
    gradient_accumulation_steps: int  # number of micro-steps per optimizer step
    m_steps: int  # number of optimizer steps in which the same rollouts are learned
    effective_batch_size: int  # samples per optimizer step, all ranks together
    packed_rows_per_step: int | None  # packed rows per optimizer step, all ranks together; only reported (R19)
    rollouts_per_step: int  # rollouts per optimizer step, all ranks together; 0 under sft
    local_rollouts_per_step: tuple[int, ...]  # rollouts per optimizer step, one number for each rank
    rollout_backend: str
    vllm_mode: str | None  # `server` or `colocate`
    decode_batch_size: int  # max sequences per rollout GPU and generation call
    decode_mode: str  # `greedy`, `sample` or `beam`
    tensor_parallel_size: int | None  # number of devices (GPUs) per colocated engine
    servers: tuple[ServerEntry, ...]
    sync_mode: str | None  # `full` or `adapter`
    timeout_s: float
    infer_timeout_s: float | None  # seconds; None: the deadline is computed from the server's speed (D16)
    packing_length: int  # max tokens in a packed row
    overlap: bool  # Channel-B learns while the step's other rollouts are generated (R32)
    async_actor_learner: bool  # True: rollouts are made ahead of the steps that learn them
    b_ratio: float | None  # fraction of the steps that run Channel-B
    channels: tuple[str, ...]  # scheduled channels (`A` or `B`) of the first steps

    def to_json(self) -> dict[str, object]:
        """Return the fields by name as JSON values, with secrets masked. `channels` is left out without `stage2_ab`."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "channels"}
        channels = {} if self.b_ratio is None else {"channels": list(self.channels)}
        servers = [entry.model_dump() for entry in self.servers]
        lists = {"servers": servers, "local_rollouts_per_step": list(self.local_rollouts_per_step)}
        shown: dict[str, object] = masked_in({**values, **lists, **channels})
        return shown


def resolve(config: RunConfig, world_size: int) -> Plan:
    """Return the plan for `world_size` learner ranks. Raises ConfigErrors if the configuration does not fit that
    number."""
    mistakes = [mistake for rule in topology_rules(world_size) for mistake in rule(config)]
    if mistakes:
        raise ConfigErrors(f"the configuration does not fit {world_size} rank(s)", mistakes=mistakes)
    training, rollout, variant = config.training, config.rollout_matching, config.custom.trainer_variant
    gas = derived_gas(config, world_size)
    batch = training.per_device_train_batch_size * world_size * gas
    rollouts = 0 if variant == "sft" else batch
    vllm = rollout.vllm if rollout.rollout_backend == "vllm" else None
    server, buffer = rollout.vllm.server, rollout.rollout_buffer
    colocated = vllm is not None and vllm.mode == "colocate"
    carries = variant == "rollout_matching_sft" and training.packing
    return Plan(
        trainer_variant=variant,
        world_size=world_size,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=gas,
        m_steps=buffer.m_steps if buffer is not None and buffer.enabled else 1,
        effective_batch_size=batch,
        packed_rows_per_step=world_size * gas if carries else None,
        rollouts_per_step=rollouts,
        local_rollouts_per_step=(rollouts // world_size,) * world_size,
        rollout_backend=rollout.rollout_backend,
        vllm_mode=vllm.mode if vllm else None,
        decode_batch_size=rollout.decode_batch_size,
        decode_mode=rollout.decoding.mode,
        tensor_parallel_size=tensor_parallel_size(config, world_size) if colocated else None,
        servers=tuple(server.servers or ()) if uses_servers(config) else (),
        sync_mode=sync_mode(config) if vllm else None,
        timeout_s=server.timeout_s,
        infer_timeout_s=server.infer_timeout_s if server.infer_timeout_s and server.infer_timeout_s > 0 else None,
        packing_length=config.global_max_length,
        overlap=overlaps(config),
        async_actor_learner=bool(config.stage2_ab and config.stage2_ab.async_actor_learner.enabled),
        b_ratio=config.stage2_ab.schedule.b_ratio if config.stage2_ab else None,
        channels=_channels(config),
    )


def steps_per_epoch(per_epoch: int, *, gradient_accumulation_steps: int, m_steps: int) -> int:
    """Return the number of optimizer steps in an epoch of `per_epoch` micro-batches. The rollouts of a window of
    `gradient_accumulation_steps` micro-batches are learned in `m_steps` steps. The rollouts of a shorter last window
    are learned in one step."""
    whole_windows, rest = divmod(per_epoch, gradient_accumulation_steps)
    return whole_windows * m_steps + (rest > 0)


def steps_of_epoch(config: RunConfig, plan: Plan, num_samples: int) -> int:
    """Return the number of optimizer steps in an epoch of `num_samples` training samples."""
    if config.stage2_ab is not None:  # a batch of the dataloader has the samples of a whole step (R31)
        return -(-num_samples // plan.effective_batch_size)
    places = num_samples * (config.grpo.num_generations if config.custom.trainer_variant == "grpo" else 1)
    micro_batches = -(-places // (plan.per_device_train_batch_size * plan.world_size))
    return steps_per_epoch(
        micro_batches, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )


def _channels(config: RunConfig) -> tuple[str, ...]:
    if config.stage2_ab is None:
        channel = "A" if config.custom.trainer_variant == "sft" else "B"
        return (channel,) * NUM_CHANNELS_SHOWN
    ratio = config.stage2_ab.schedule.b_ratio
    return tuple(scheduled_channel(step, ratio) for step in range(NUM_CHANNELS_SHOWN))
