"""An arm is a method with its settings. In: an arm, a model, data and sizes. Out: a learner's configuration.

Runs of a comparison have the same data, batch, optimizer and schedule. An arm's own keys override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.runs import learner_config

FIRST_SEED = 17
GROUP = 8  # rollouts of a sample, in `grpo`

# The default loss on Y_train does not correct wrong names in the right place. It also appends missed objects after
# later ones. That contradicts the reading order that the model was taught, so the model continues and does not find the
# end.
TUNED: Mapping[str, Any] = {"matched_desc_weight": 1.0, "prefix_end": "first_miss"}
KEPT: Mapping[str, Any] = {**TUNED, "keep_unmatched": True}  # suits incomplete labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Keys of the configuration by section. A driver's own kind of arm adds what it varies beside them."""

    variant: str = "rollout_matching_sft"
    loss: Mapping[str, Any] = field(default_factory=dict)
    decoding: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    stage2_ab: Mapping[str, Any] | None = None
    grpo: Mapping[str, Any] | None = None
    complete: Mapping[str, Any] | None = None  # `labels.complete`
    augment: Mapping[str, Any] | None = None  # `data.augment`
    reward: Mapping[str, float] | None = None  # `reward.weights`; None: the default

    @property
    def samples(self) -> bool:
        """Rollouts are drawn, not greedy."""
        return self.grpo is not None

    @property
    def group(self) -> int:
        """Rollouts that a batch counts per sample."""
        return GROUP if self.grpo is not None else 1


def file_name(text: str) -> str:
    """Return an arm's name as part of a file's name."""
    return "".join(c if c.isalnum() or c in "._" else "-" for c in text)


def run_config(
    arm: Arm,
    *,
    model: Path,
    train: Path,
    test: Path,
    run_dir: Path,
    steps: int,
    batch_size: int,
    engine: Mapping[str, Any],
    max_new_tokens: int,
    global_max_length: int,
    data_workers: int,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the learner's configuration of a run. `test` is evaluated at the end.

    `engine`: the keys of `rollout_matching` that say what makes rollouts. `global_max_length`: 4096 at least; a whole
    batch should fit one row, so that nothing is carried over. `training`: seed, learning rate and what the driver
    varies.
    """
    matching: dict[str, Any] = {
        **engine,
        "decoding": {"temperature": float(arm.samples), "max_new_tokens": max_new_tokens, **arm.decoding},
    }
    return learner_config(
        model,
        train,
        run_dir,
        steps=steps,
        batch_size=batch_size,
        variant=arm.variant,
        matching=matching,
        model={"dtype": "float32"},
        data={"test": str(test), "num_workers": data_workers}
        | ({"augment": dict(arm.augment)} if arm.augment is not None else {}),
        task={"iou_threshold": 0.3, **arm.task},
        loss=arm.loss,
        labels={"complete": dict(arm.complete)} if arm.complete is not None else None,
        stage2_ab=arm.stage2_ab,
        grpo={"num_generations": GROUP, **arm.grpo} if arm.grpo is not None else None,
        reward={"weights": dict(arm.reward)} if arm.reward is not None else None,
        training={"eval_on_end": True, **training},
        logging={"trackers": [], "progress_bar": False},
        global_max_length=max(4096, global_max_length),
    )


def base_config(
    model: Path,
    train: Path,
    run_dir: Path,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    global_max_length: int,
    data: Mapping[str, Any],
    training: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the configuration of the `sft` run that makes a base model, whose weights are saved."""
    return learner_config(
        model,
        train,
        run_dir,
        steps=steps,
        batch_size=batch_size,
        variant="sft",
        model={"dtype": "float32"},
        data=data,
        training={
            "seed": 1,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": steps // 12,
            "save_on_end": True,
            **(training or {}),
        },
        logging={"trackers": [], "progress_bar": False},
        global_max_length=global_max_length,
        **more,
    )
