"""The section `logging`: where numbers go."""

from __future__ import annotations

from typing import Literal

from shared.config.model import Section, key


class LoggingConfig(Section):
    """The places where numbers go, besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = key(
        "programs that also get the numbers, besides metrics.jsonl; `tensorboard` writes to `output_dir/tensorboard`",
        ["tensorboard"],
    )
    project: str = key("the trackers' project (MLflow: experiment)", "rollout-matching", min_length=1)
    run_name: str | None = key("the run's name in the trackers; null: the name of `output_dir`", None, min_length=1)
    progress_bar: bool = key("show a progress bar", True)
