"""An arm is a method with its settings. In: an arm, a model, data and sizes. Out: a learner's configuration.

Runs of a comparison have the same data, batch, optimizer and schedule. An arm's own keys override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    """Keys of the configuration by section, and whose labels are learned.

    `learns`: labels with gaps, or all of them. `after`: an arm whose last weights make the labels (`relabels`), answer
    (`finds`), or made the labels that this arm learns. `verdicts`: so many finds of `after` are audited.
    `tiles`: the longer sides, in pixels, of tiles about which `finds` asks too.
    """

    variant: str = "sft"
    loss: Mapping[str, Any] = field(default_factory=dict)
    grpo: Mapping[str, Any] | None = None
    complete: Mapping[str, Any] | None = None  # `labels.complete`
    learns: Literal["gaps", "all"] = "gaps"
    does: Literal["train", "relabels", "finds"] = "train"
    after: str = ""
    verdicts: int = 0
    tiles: tuple[int, ...] = ()

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
    val: Path,
    run_dir: Path,
    steps: int,
    batch_size: int,
    max_new_tokens: int,
    sample_tokens: int,
    on_gpu: bool,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the learner's configuration of a run; the trained model itself makes its rollouts.

    `batch_size`: samples of a step. `sample_tokens`: at least the longest prompt with its answer, so that a whole batch
    fits one row and nothing is carried over. `training`: seed, learning rate and what the driver varies.
    """
    return learner_config(
        model,
        train,
        run_dir,
        steps=steps,
        batch_size=batch_size * arm.group,
        variant=arm.variant,
        matching={
            "rollout_backend": "hf",
            "decode_batch_size": 512,
            "decoding": {"temperature": float(arm.grpo is not None), "max_new_tokens": max_new_tokens},
        },
        model={"dtype": "float32"},
        data={"val": str(val), "num_workers": int(on_gpu)},
        task={"iou_threshold": 0.3},
        loss=arm.loss,
        labels={"complete": dict(arm.complete)} if arm.complete is not None else None,
        grpo={"num_generations": GROUP, **arm.grpo} if arm.grpo is not None else None,
        training={
            "bf16": on_gpu,
            "packing_buffer": max(64, batch_size * arm.group),
            "lr_scheduler_type": "cosine",
            "warmup_steps": steps // 10,
            **training,
        },
        logging={"trackers": []},
        global_max_length=max(4096, sample_tokens * batch_size),
    )
