"""Every number that follows from a configuration and the number of ranks, by its name.

`resolve` is pure and cheap; `--check` prints its result, the learner's start-up logs it (R15).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from learner.config.rules import overlaps, sync_mode, uses_servers
from learner.config.schema import RunConfig, ServerEntry
from learner.config.topology import derived_gas, tensor_parallel_size, topology_rules
from shared.config_errors import ConfigErrors

NUM_CHANNELS_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run does with its configuration. None: does not apply to this run."""

    trainer_variant: str
    world_size: int  # learner ranks
    per_device_train_batch_size: int  # samples per micro-step and rank
    gradient_accumulation_steps: int  # micro-steps per optimizer step
    m_steps: int  # optimizer steps that learn one accumulation window; 1: no rollout is used again
    effective_batch_size: int  # samples per optimizer step, all ranks
    packed_rows_per_step: int | None  # effective batch in packed-row units, diagnostic (R19)
    rollouts_per_step: int  # all ranks; 0 under sft
    local_rollouts_per_step: tuple[int, ...]  # per rank
    rollout_backend: str
    vllm_mode: str | None
    decode_batch_size: int  # sequences per rollout GPU and generation call
    decode_mode: str
    tensor_parallel_size: int | None  # colocate: devices per engine
    servers: tuple[ServerEntry, ...]
    sync_mode: str | None
    timeout_s: float
    infer_timeout_s: float | None  # None: no limit
    packing_length: int  # tokens
    overlap: bool  # Channel-B learns while the step's other rollouts run (R32)
    async_actor_learner: bool
    b_ratio: float | None
    channels: tuple[str, ...]  # of the first steps, as scheduled

    def to_json(self) -> dict[str, Any]:
        """Plain values under the names above."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            **values,
            "servers": [entry.model_dump() for entry in self.servers],
            "local_rollouts_per_step": list(self.local_rollouts_per_step),
            "channels": list(self.channels),
        }


def resolve(config: RunConfig, world_size: int) -> Plan:
    """The plan for `world_size` learner ranks. Raises ConfigErrors where the two do not fit."""
    mistakes = [mistake for rule in topology_rules(world_size) for mistake in rule(config)]
    if mistakes:
        raise ConfigErrors(f"the configuration does not fit {world_size} rank(s)", mistakes=mistakes)
    training, rollout, variant = config.training, config.rollout_matching, config.custom.trainer_variant
    gas = derived_gas(config, world_size)
    batch = training.per_device_train_batch_size * world_size * gas
    rollouts = 0 if variant == "sft" else batch
    vllm = rollout.vllm if rollout.rollout_backend == "vllm" else None
    server = rollout.vllm.server
    colocated = vllm is not None and vllm.mode == "colocate"
    carries = variant == "rollout_matching_sft" and training.packing
    return Plan(
        trainer_variant=variant,
        world_size=world_size,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=gas,
        m_steps=_m_steps(config),
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
        infer_timeout_s=_limit(server.infer_timeout_s),
        packing_length=config.global_max_length,
        overlap=overlaps(config),
        async_actor_learner=bool(config.stage2_ab and config.stage2_ab.async_actor_learner.enabled),
        b_ratio=config.stage2_ab.schedule.b_ratio if config.stage2_ab else None,
        channels=_channels(config),
    )


def _limit(seconds: float | None) -> float | None:
    """R05: null and anything up to 0 mean no limit."""
    return seconds if seconds is not None and seconds > 0 else None


def _m_steps(config: RunConfig) -> int:
    """R18: 1 where the buffer is off."""
    buffer = config.rollout_matching.rollout_buffer
    return buffer.m_steps if buffer is not None and buffer.enabled else 1


def _channels(config: RunConfig) -> tuple[str, ...]:
    if config.stage2_ab is None:
        channel = "A" if config.custom.trainer_variant == "sft" else "B"
        return (channel,) * NUM_CHANNELS_SHOWN
    from learner.schedule import scheduled_channel  # here, so that plans without a schedule load nothing more

    ratio = config.stage2_ab.schedule.b_ratio
    return tuple(scheduled_channel(step, ratio) for step in range(NUM_CHANNELS_SHOWN))
