"""Makes the configurations of the recipe's stages, as mappings to be written as YAML.

In: the user's configuration, resolved. Out: the same configuration with another trainer variant. The keys about model,
data, task, servers and memory do not change. A stage ends when its time is over or its validation score no longer
rises. So its number of steps is not known in advance, and the learning rate is constant after the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.labels import CompleteConfig
from learner.config.sections.loss import RECOMMENDED, LossConfig
from learner.extensions import task_class
from learner.tasks.detection.task import DetectionTask
from shared.config.model import ConfigErrors, Mistake, shown

SFT, GRPO, MATCHING = "sft", "grpo", "rollout_matching_sft"
EVAL_STEPS = 8  # steps between two evaluations, unless the user's configuration sets them.
# A stage ends after PATIENCE evaluations in a row without a better score. In 38 of 39 measured runs of sft, a patience
# of 2 chooses the same step as a patience of 3, in the other run a better step (bench/README.md). Stages that learn
# rollouts have noisier scores.
PATIENCE: Mapping[str, int] = {SFT: 2, GRPO: 3, MATCHING: 3}
SAVE_MINUTES = 5.0  # minutes between two checkpoints, unless the user's configuration sets a cadence
BY_IOU: Mapping[str, float] = {"soft_iou": 1.0}  # reward weights of a `grpo` stage that improves the fit of boxes.
# On digits `grpo` improved F1 with a learning rate of 3e-5, but not with 1e-4.
RATE_OF_GRPO = 0.3  # grpo's learning rate / sft's learning rate (docs/concepts/which-method.md)
MOST_STEPS = 100_000  # max steps of a stage, which no stage reaches: its time or its patience ends it earlier.
# `max_minutes` of a stage whose time is over. The key must be above 0.
LEAST_MINUTES = 0.01
NO_VALIDATION = Mistake(
    path="data.val",
    found="null",
    wanted="validation annotations: they decide when a stage ends and which weights are the best",
    remedy="name them",
)


def check_recipe(config: RunConfig) -> None:
    """Raises ConfigErrors if no recipe can be run with this configuration: another task than detection, no validation
    annotations, or a checkpoint to resume from."""
    mistakes = []
    if not issubclass(task_class(config.task), DetectionTask):
        wanted = "task.type: detection, whose answers have places and names"
        remedy = "make a short run of each method instead, and compare them: rollout-learner report RUN --compare RUN2"
        mistakes.append(Mistake(path="task.type", found=config.task.type, wanted=wanted, remedy=remedy))
    if config.data.val is None:
        mistakes.append(NO_VALIDATION)
    if config.training.resume_from_checkpoint is not None:
        found, wanted = config.training.resume_from_checkpoint, "null: a recipe goes on by itself"
        remedy = "remove it, and give the same command again"
        mistakes.append(Mistake(path="training.resume_from_checkpoint", found=found, wanted=wanted, remedy=remedy))
    if mistakes:
        raise ConfigErrors("recipe: the configuration does not suit it", mistakes=mistakes)


def sft_stage(config: RunConfig, *, world_size: int, minutes: float) -> dict[str, Any]:
    """Return the configuration of the stage `sft`. The training labels are completed if `labels.complete` estimates
    that this is safe."""
    values = _stage(config, SFT, minutes)
    values["labels"]["complete"] = values["labels"]["complete"] or CompleteConfig().model_dump(mode="json")
    _as_supervised(values, config, world_size)
    return values


def matching_stage(config: RunConfig, *, world_size: int, minutes: float) -> dict[str, Any]:
    """Return the configuration of the stage that learns by rollout matching, on the annotated labels. Predictions
    without a label are kept. The stage starts from the model that the user's configuration names."""
    # Rollout matching does not start from sft's weights, which have learned to leave out objects without a label. On
    # digits with noise, F1 was 0.529 from sft's weights, and 0.610 from the user's model.
    values = _stage(config, MATCHING, minutes)
    _as_supervised(values, config, world_size)
    values["labels"]["complete"] = None
    values["loss"] = {**LossConfig().model_dump(mode="json"), **RECOMMENDED}
    _without_augment(values, config)
    return values


def grpo_stage(
    config: RunConfig, *, world_size: int, minutes: float, model: Path | None, completes: bool, by_iou: bool = False
) -> dict[str, Any]:
    """Return the configuration of the stage `grpo`. The stage starts from `model`; None: from the model that the user's
    configuration names. `completes`: labels are completed if `labels.complete` finds that safe. `by_iou`: the reward is
    the IoU of boxes, unless the user's configuration sets rewards."""
    values = _stage(config, GRPO, minutes)
    if by_iou and not config.reward.weights and not config.reward.functions:
        values["reward"]["weights"] = dict(BY_IOU)
    complete = values["labels"]["complete"] or CompleteConfig().model_dump(mode="json")
    values["labels"]["complete"] = complete | {"write": None} if completes else None
    values["loss"]["function"] = None  # `grpo` learns from rewards, not from labels
    decoding = values["custom"]["extra"]["rollout_matching"]["decoding"]
    # `grpo` must sample rollouts with the probabilities that it learns.
    decoding |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "decode_mode": None}
    _without_augment(values, config)
    if model is not None:
        values["model"]["path"] = str(model)
        if (model / "adapter_config.json").is_file():
            values["model"]["lora"] = None  # no new adapter: the checkpoint's adapter is trained further
    if not _has(config, GRPO):
        size = config.grpo.num_generations
        groups = max(1, resolve(config, world_size).effective_batch_size // 2 // world_size)  # groups of each rank.
        # With credit `object`, F1 on photographs of cells was 0.603. With one advantage for the whole rollout it was
        # 0.586.
        values["grpo"] |= {"credit": "object"}
        values["training"] |= _batches(groups * size, groups * size * world_size)
        values["training"]["learning_rate"] = config.training.learning_rate * RATE_OF_GRPO
    return values


def _as_supervised(values: dict[str, Any], config: RunConfig, world_size: int) -> None:
    """Replace the settings of `grpo` for a stage that learns labels. If the user's configuration is for `grpo`, also
    change batch sizes and learning rate to values for learning labels."""
    values["grpo"] = GrpoConfig().model_dump(mode="json")
    if _has(config, GRPO):
        size = config.grpo.num_generations
        per_device = config.training.per_device_train_batch_size // size
        batch = resolve(config, world_size).effective_batch_size // size
        values["training"] |= _batches(per_device, batch)
        values["training"]["learning_rate"] = config.training.learning_rate / RATE_OF_GRPO


def _without_augment(values: dict[str, Any], config: RunConfig) -> None:
    """Remove `data.augment` if the user does not want it for rollouts, because all steps of the stage learn
    rollouts."""
    if config.data.augment is not None and not config.data.augment.rollouts:
        values["data"]["augment"] = None


def _has(config: RunConfig, variant: str) -> bool:
    return config.custom.trainer_variant == variant


def _batches(per_device: int, whole: int) -> Mapping[str, int | None]:
    return {
        "per_device_train_batch_size": per_device,
        "effective_batch_size": whole,
        "gradient_accumulation_steps": None,
    }


def _stage(config: RunConfig, variant: str, minutes: float) -> dict[str, Any]:
    training, values = config.training, shown(config)
    values["custom"]["trainer_variant"] = variant
    values["custom"]["extra"]["rollout_matching"]["rollout_buffer"] = None
    values["stage2_ab"] = None
    values["data"]["test"] = None  # no test set: a recipe chooses by validation only
    values["training"] |= {
        "output_dir": str(Path(training.output_dir) / variant),
        "overwrite": False,
        "max_minutes": max(LEAST_MINUTES, round(minutes, 3)),
        "max_steps": MOST_STEPS,
        "num_train_epochs": None,
        "lr_scheduler_type": "constant",
        "eval_on_start": True,
        "eval_on_end": True,
        "eval_steps": training.eval_steps or EVAL_STEPS,
        "keep_best": training.keep_best or "auto",
        "early_stop_patience": training.early_stop_patience or PATIENCE[variant],
        "save_minutes": training.save_minutes if training.save_minutes or training.save_steps else SAVE_MINUTES,
        "save_total_limit": 1,
        "save_on_end": True,
    }
    return values
