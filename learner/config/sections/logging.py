"""The section `logging`: where numbers go."""

from __future__ import annotations

from typing import Literal

from shared.config.model import Section, key


class LoggingConfig(Section):
    """The places where numbers go, besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = key(
        "programs that also get the numbers, besides metrics.jsonl; `tensorboard` writes to `output_dir/tensorboard`",
        ["tensorboard"],
    )
    project: str = key("the trackers' project (MLflow: experiment)", "rollout-matching", min_length=1)
    run_name: str | None = key("the run's name in the trackers; null: the name of `output_dir`", None, min_length=1)
    tracker_dir: str | None = key(
        "where wandb, MLflow and trackio keep their files; null: `output_dir/trackers`", None, min_length=1
    )
    offline: bool = key(
        "wandb and MLflow write to `tracker_dir` and use no network. wandb's files can be sent later (`wandb sync`)",
        False,
    )
    tracker_timeout_s: float = key(
        "longest wait for the trackers at the end of the run; what has not arrived then is counted and given up",
        10.0,
        unit="s",
        gt=0.0,
    )
    progress_bar: bool = key("show a progress bar", True)
