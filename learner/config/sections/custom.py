"""The section `custom`: how the model is trained (the trainer variant), and how rollouts are made."""

from __future__ import annotations

from typing import Literal

from learner.config.sections.rollout_matching import RolloutMatchingConfig
from shared.config.model import Section, key


class ExtraConfig(Section):
    """Extensions."""

    rollout_matching: RolloutMatchingConfig = key("rollouts", RolloutMatchingConfig(), req="R02")


class CustomConfig(Section):
    """How the model is trained, and how rollouts are made. A plain supervised training has no such keys."""

    trainer_variant: Literal["sft", "rollout_matching_sft", "stage2_ab_training", "grpo"] = key(
        "`sft`: teacher forcing on ground truth; `rollout_matching_sft`: learning from matched rollouts; "
        "`stage2_ab_training`: a schedule of both, channel A and channel B; `grpo`: policy gradients on rewards of "
        "rollouts",
        req="R01",
    )
    extra: ExtraConfig = key("extensions", ExtraConfig())
