"""The section `logging`: where numbers go."""

from __future__ import annotations

from typing import Literal

from shared.config.model import Section, key


class LoggingConfig(Section):
    """The places where numbers go, besides metrics.jsonl. The run's name there is the name of the folder
    `output_dir`."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = key(
        "programs that also get the numbers, besides metrics.jsonl; `tensorboard` writes to `output_dir/tensorboard`",
        ["tensorboard"],
    )
    project: str = key("the trackers' project (MLflow: experiment)", "rollout-matching", min_length=1)
