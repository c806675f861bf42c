"""The section `stage2_ab`: a schedule of two channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from learner.config.modes import ROLLOUT, Rule, overlaps, sync_mode, uses_servers
from learner.config.sections.servers import SERVER
from shared.config.model import Mistake, Section, given, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig


class ScheduleConfig(Section):
    """The choice of the steps that run Channel-B, which learns rollouts. All other steps run Channel-A, which learns
    ground truth."""

    b_ratio: float = key(
        "share of Channel-B steps. With `async_actor_learner` and 1 each of them waits for its rollouts; with less, "
        "one whose rollouts are late runs Channel-A, if the next ones can still learn them and servers stay busy",
        unit="share",
        req="R26 R27",
        ge=0.0,
        le=1.0,
    )


class AsyncActorLearnerConfig(Section):
    """Rollouts made ahead of learning, in packs (the rollouts of a few samples), with bounded staleness. Needs servers
    and full sync."""

    enabled: bool = key("make packs before the step that learns them", False, req="D3 R25")
    # The defaults of the windows and queues are from D3, D12 and D16.
    version_window: int = key(
        "a pack may be learned up to this many syncs after it was made; older ones are dropped. A sync for an "
        "evaluation only does not count",
        1,
        unit="weight versions",
        req="D3 R25",
        ge=0,
    )
    max_update_lag: int = key(
        "largest number of optimizer updates between the weights of a rollout and the step that learns it; older packs "
        "are dropped. Where Channel-B steps are further apart, weights are synced shortly before each of them",
        4,
        unit="optimizer steps",
        req="D12",
        ge=1,
    )
    sync_every: int = key(
        "Channel-B steps that are learned between two syncs. With more of them rollouts and learning wait less for "
        "each other, and rollouts are older: set `max_update_lag` to twice the steps that this takes, or more, and "
        "`prefetch_target_packs` to the packs of one step more than this",
        1,
        unit="Channel-B steps",
        req="D3 R25",
        ge=1,
    )
    max_starved_steps: int = key(
        "Channel-B steps in a row that run Channel-A because their rollouts are late; the last of them ends the run",
        20,
        unit="optimizer steps",
        req="D16",
        ge=1,
    )
    queue_limit: int = key(
        "packs that may wait on each rank; if there are more, the oldest is dropped",
        8,
        unit="packs",
        req="D3 R25",
        ge=1,
    )
    prefetch_target_packs: int = key(
        "packs of `per_device_train_batch_size` samples that each rank keeps ready; at least as many as a step takes "
        "(`gradient_accumulation_steps`). With no more than that, steps wait for late rollouts. A step lays its packs "
        "in as few rows as they need",
        4,
        unit="packs",
        req="D3 R25 R27",
        ge=1,
    )


class Stage2Config(Section):
    """Settings of `stage2_ab_training`. With `grpo` the section is optional; Channel-B then learns from rewards."""

    schedule: ScheduleConfig = key("which steps run Channel-B", req="R26")
    async_actor_learner: AsyncActorLearnerConfig = key(
        "rollouts made ahead of learning", AsyncActorLearnerConfig(), req="D3"
    )


def stage2_section(config: RunConfig) -> Iterator[Mistake]:
    """`stage2_ab_training` needs the section `stage2_ab`. `grpo` may have it. All other variants refuse the section
    (R26)."""
    variant, stage2 = config.custom.trainer_variant, config.stage2_ab
    if variant == "stage2_ab_training" and stage2 is None:
        remedy = "add `stage2_ab: {schedule: {b_ratio: ...}}`"
        wanted = "the share of Channel-B steps, in [0, 1]"
        yield Mistake(path="stage2_ab.schedule.b_ratio", found="nothing", wanted=wanted, remedy=remedy)
    if variant not in ("stage2_ab_training", "grpo") and stage2 is not None:
        remedy = "remove the section, or set custom.trainer_variant: stage2_ab_training"
        found, wanted = f"a section that {variant} does not read", "no such section"
        yield Mistake(path="stage2_ab", found=found, wanted=wanted, remedy=remedy)


def stage2_batch(config: RunConfig) -> Iterator[Mistake]:
    """The section `stage2_ab` needs `training.effective_batch_size`: it is the number of rollouts per step (D8 R31)."""
    variant = config.custom.trainer_variant
    schedules = variant == "stage2_ab_training" or (variant == "grpo" and config.stage2_ab is not None)
    if schedules and config.training.effective_batch_size is None:
        wanted = "the rollouts per optimizer step, over all ranks"
        remedy = "add it (a multiple of per_device_train_batch_size x ranks)"
        yield Mistake(path="training.effective_batch_size", found="nothing", wanted=wanted, remedy=remedy)


def overlap_needs_servers(config: RunConfig) -> Iterator[Mistake]:
    """Packed Channel-B learns while rollouts run, so it needs `vllm.mode: server` (R32)."""
    if overlaps(config) and not uses_servers(config):
        rollout = config.rollout_matching
        backend = "rollout_backend: hf" if rollout.rollout_backend == "hf" else f"vllm.mode: {rollout.vllm.mode}"
        wanted = "rollout_backend: vllm and vllm.mode: server, because packed Channel-B learns while rollouts run"
        remedy = f"set {ROLLOUT}.vllm.mode: server and {SERVER}.servers, or training.packing: false (no overlap)"
        yield Mistake(path=f"{ROLLOUT}.vllm.mode", found=backend, wanted=wanted, remedy=remedy)


def async_needs_servers(config: RunConfig) -> Iterator[Mistake]:
    """`async_actor_learner` needs `vllm.mode: server` and full sync (D3 R25)."""
    if config.stage2_ab is None or not config.stage2_ab.async_actor_learner.enabled:
        return
    path = "stage2_ab.async_actor_learner.enabled"
    if not uses_servers(config):
        remedy = f"set {ROLLOUT}.rollout_backend: vllm and vllm.mode: server, or enabled: false"
        yield Mistake(path=path, found="true without servers", wanted="vllm.mode: server", remedy=remedy)
    elif sync_mode(config) != "full":
        remedy = f"set {ROLLOUT}.vllm.sync.mode: full, or enabled: false"
        yield Mistake(path=path, found="true with adapter sync", wanted="full weight sync", remedy=remedy)


def async_queue(config: RunConfig) -> Iterator[Mistake]:
    """`prefetch_target_packs` is at most `queue_limit` (R25)."""
    if config.stage2_ab is None:
        return
    queue = config.stage2_ab.async_actor_learner
    if queue.prefetch_target_packs > queue.queue_limit:
        path = "stage2_ab.async_actor_learner.prefetch_target_packs"
        wanted, remedy = f"at most queue_limit ({queue.queue_limit})", "lower it, or raise queue_limit"
        yield Mistake(path=path, found=given(queue, "prefetch_target_packs"), wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (
    stage2_section,
    stage2_batch,
    overlap_needs_servers,
    async_needs_servers,
    async_queue,
)
