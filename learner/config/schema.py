"""The learner's whole configuration: `RunConfig`, and `RULES`, the checks between its keys.

Each section of the YAML has one file under `sections/`, with a frozen pydantic model and the section's rules. The model
refuses unknown keys, and checks the type and range of each key. A rule takes a `RunConfig` and yields a `Mistake` for
each mistake in it. Rules that need the number of ranks are in `plan.py`. `load.py` reads YAML into a `RunConfig`. `make
docs` writes CONFIG.md and config.schema.json from the models and from the rules' docstrings.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

from learner.config.modes import Rule
from learner.config.sections import (
    augment,
    data,
    decoding,
    grpo,
    labels,
    loss,
    model,
    reward,
    rollout_matching,
    rollouts,
    servers,
    stage2_ab,
    task,
    training,
    vllm,
)
from learner.config.sections.data import DataConfig
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.labels import LabelsConfig
from learner.config.sections.logging import LoggingConfig
from learner.config.sections.loss import LossConfig
from learner.config.sections.model import ModelConfig
from learner.config.sections.reward import RewardConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.config.sections.rollouts import MEANING, ShortName
from learner.config.sections.stage2_ab import Stage2Config
from learner.config.sections.task import TaskConfig
from learner.config.sections.training import TrainingConfig
from shared.config.model import Section, key


class ExtraConfig(Section):
    """Extensions."""

    rollout_matching: RolloutMatchingConfig = key("rollouts", RolloutMatchingConfig(), req="R02")


class CustomConfig(Section):
    """How the model is trained, and how rollouts are made."""

    trainer_variant: Literal["sft", "rollout_matching_sft", "stage2_ab_training", "grpo"] = key(
        "`sft`: teacher forcing on ground truth; `rollout_matching_sft`: learning from matched rollouts; "
        "`stage2_ab_training`: a schedule of both, channel A and channel B; `grpo`: policy gradients on rewards of "
        "rollouts",
        req="R01",
    )
    extra: ExtraConfig = key("extensions", ExtraConfig())


class RunConfig(Section):
    """A run of the learner."""

    model: ModelConfig = key("trained model")
    data: DataConfig = key("annotations")
    labels: LabelsConfig = key("labels with gaps", LabelsConfig(), req="R48")
    task: TaskConfig = key("form of answers, and matching", TaskConfig())
    reward: RewardConfig = key("scores of rollouts", RewardConfig(), req="R38")
    loss: LossConfig = key("loss", LossConfig())
    training: TrainingConfig = key("training loop")
    logging: LoggingConfig = key("logging", LoggingConfig())
    custom: CustomConfig = key("trainer variant and rollouts", req="R01")
    rollouts: dict[ShortName, Any] = key(MEANING, {}, req="R02 R05")
    grpo: GrpoConfig = key("policy gradients; only with `trainer_variant: grpo`", GrpoConfig(), req="R37")
    stage2_ab: Stage2Config | None = key(
        "settings of `stage2_ab_training`, which requires them, and of `grpo`; refused elsewhere", None, req="R26"
    )
    global_max_length: int = key("longest packed row and longest segment", 4096, unit="tokens", req="R36", ge=8)

    @property
    def rollout_matching(self) -> RolloutMatchingConfig:
        return self.custom.extra.rollout_matching


# The rules are in the order of the sections in a configuration file.
_CHECKED: tuple[ModuleType, ...] = (model, data, augment, labels, task, reward, loss, training)
_CHECKED += (decoding, servers, vllm, rollout_matching, rollouts, grpo, stage2_ab)
RULES: tuple[Rule, ...] = tuple(rule for section in _CHECKED for rule in section.RULES)
