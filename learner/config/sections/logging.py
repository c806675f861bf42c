"""The section `logging`: the trackers that get the metrics."""

from __future__ import annotations

from typing import Literal

from shared.config.model import Section, key


class LoggingConfig(Section):
    """The trackers that get the metrics, in addition to metrics.jsonl. In a tracker the run has the name of the folder
    `output_dir`."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = key(
        "programs that also get the numbers, besides metrics.jsonl; `tensorboard` writes to `output_dir/tensorboard`",
        ["tensorboard"],
    )
    project: str = key("the trackers' project (MLflow: experiment)", "rollout-matching", min_length=1)
