"""Answers questions about a run's configuration: which backend, channels and syncs it chooses.

The answers do not depend on the number of ranks. A `Rule` is a check between keys, which yields mistakes. A step of
channel A learns ground truth, a step of channel B learns rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shared.config.model import Mistake

if TYPE_CHECKING:
    from learner.config.schema import RunConfig

ROLLOUT = "custom.extra.rollout_matching"
Rule = Callable[["RunConfig"], Iterator[Mistake]]


def sync_mode(config: RunConfig) -> str:
    """Return the mode of weight syncs, `full` or `adapter` (R08). `auto` is `adapter` if `enable_lora` is true."""
    vllm = config.rollout_matching.vllm
    if vllm.sync.mode == "auto":
        return "adapter" if vllm.enable_lora else "full"
    return vllm.sync.mode


def uses_servers(config: RunConfig) -> bool:
    return config.rollout_matching.rollout_backend == "vllm" and config.rollout_matching.vllm.mode == "server"


def colocates(config: RunConfig) -> bool:
    """Return True if the run makes rollouts by vLLM inside the learner's processes."""
    rollout = config.rollout_matching
    return rollout.rollout_backend == "vllm" and rollout.vllm.mode == "colocate" and needs_rollouts(config)


def learns_rollouts(config: RunConfig) -> bool:
    """Return True if some steps learn rollouts. With `sft`, or with a schedule without Channel-B, no step learns
    rollouts."""
    if config.stage2_ab is not None:
        return config.stage2_ab.schedule.b_ratio > 0
    return config.custom.trainer_variant in ("rollout_matching_sft", "grpo")


def learns_ground_truth(config: RunConfig) -> bool:
    """Return True if some steps learn ground truth without a rollout (Channel-A)."""
    if config.stage2_ab is not None:
        return config.stage2_ab.schedule.b_ratio < 1
    return not learns_rollouts(config)


def needs_rollouts(config: RunConfig) -> bool:
    """Return True if the run makes rollouts, whether to learn them, to evaluate, or to complete labels."""
    training = config.training
    evaluates = bool(training.eval_on_start or training.eval_on_end or training.eval_steps)
    return evaluates or learns_rollouts(config) or config.labels.complete is not None


def overlaps(config: RunConfig) -> bool:
    """Return True if Channel-B learns the first rollouts of a step while the step's other rollouts are still generated
    (R32)."""
    stage2 = config.stage2_ab
    return (
        config.custom.trainer_variant in ("stage2_ab_training", "grpo")
        # With `batch` each rollout is compared with all others of the step, so none can be learned before all are made.
        and config.grpo.advantage != "batch"
        and config.training.packing
        and (stage2 is not None and stage2.schedule.b_ratio > 0)
    )
