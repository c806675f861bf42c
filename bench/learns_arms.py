"""The subject of `learns.py`: the arms, their seeds, and the configuration of a run.

In: `Settings` (model, data, sizes) and the engine that makes a run's rollouts. Out: a learner's configuration as a
mapping. All arms have the same data, batch, optimizer and schedule. An arm's own keys override them.

Arms with equal optimizer steps come first. Then `wall` arms: they get as many steps as fit the time that REFERENCE
took, so they wait for it. Ablations change one thing of REFERENCE each, and have one seed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.experiment import arms
from bench.experiment.arms import FIRST_SEED, TUNED, file_name
from shared.errors import ConfigError

REFERENCE = "rollout_matching_sft"
KEPT = "what nobody labelled stays"  # REFERENCE for incomplete labels: unlabelled objects that it finds are kept
BASE = "base"
SEEDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    model: Path  # the stage-1 model that all arms begin with
    data: Path
    runs: Path  # run directories, configurations and logs
    steps: int
    batch_size: int
    learning_rate: float
    max_new_tokens: int
    decode_batch_size: int
    eval_scenes: int
    data_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnsArm(arms.Arm):
    name: str
    loss: Mapping[str, Any] = field(default_factory=lambda: TUNED)
    rate: float = 1.0  # factor of the learning rate
    seeds: int = 1
    wall: bool = False  # True: takes as many steps as fit the reference's time


def _ab(b_ratio: float, **ahead: Any) -> dict[str, Any]:
    return {"schedule": {"b_ratio": b_ratio}, "async_actor_learner": ahead}


def _arms() -> Iterator[LearnsArm]:
    ab: dict[str, Any] = {"variant": "stage2_ab_training"}
    sft: dict[str, Any] = {"variant": "sft", "loss": {}}
    yield LearnsArm(name="sft", seeds=SEEDS, **sft)
    yield LearnsArm(name=REFERENCE, seeds=SEEDS)
    yield LearnsArm(name="stage2_ab_training", stage2_ab=_ab(0.5), seeds=SEEDS, **ab)
    yield LearnsArm(name="sft, equal time", seeds=SEEDS, wall=True, **sft)
    yield LearnsArm(name="stage2_ab_training, equal time", stage2_ab=_ab(0.5), seeds=SEEDS, wall=True, **ab)
    yield LearnsArm(name="temperature 1", decoding={"temperature": 1.0})
    yield LearnsArm(name="default loss", loss={})
    yield LearnsArm(name="cut at the last match", loss={**TUNED, "prefix_end": "last_match"})
    yield LearnsArm(name="not cut, closer taught", loss={"matched_desc_weight": 1.0, "overrun_close_weight": 1.0})
    yield LearnsArm(name=KEPT, loss={**TUNED, "keep_unmatched": True}, seeds=SEEDS)
    yield LearnsArm(name="no names taught", loss={**TUNED, "matched_desc_weight": 0.0})
    yield LearnsArm(name="prefix not supervised", loss={"matched_coordinate_weight": 0.0, "prefix_end": "first_miss"})
    yield LearnsArm(name="coordinates of weight 0.25", loss={**TUNED, "matched_coordinate_weight": 0.25})
    yield LearnsArm(name="missed objects in random order", loss={**TUNED, "missed_order": "random"})
    yield LearnsArm(name="IoU threshold 0.5", task={"iou_threshold": 0.5})
    yield LearnsArm(name="b_ratio 0.25", stage2_ab=_ab(0.25), **ab)
    yield LearnsArm(name="b_ratio 0.75", stage2_ab=_ab(0.75), **ab)
    yield LearnsArm(name="sft, rate x 3", rate=3.0, **sft)
    yield LearnsArm(name="rollout_matching_sft, rate x 3", rate=3.0)
    yield LearnsArm(name="sft, rate / 3", rate=1 / 3, **sft)
    yield LearnsArm(name="rollout_matching_sft, rate / 3", rate=1 / 3)


ARMS: Mapping[str, LearnsArm] = {arm.name: arm for arm in _arms()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnsRun:
    arm: LearnsArm
    seed: int

    @property
    def folder(self) -> str:
        return f"{file_name(self.arm.name)}-{self.seed}"

    def result(self, out: Path) -> Path:
        return out / "results" / f"{self.folder}.json"

    @property
    def evaluates_first(self) -> bool:
        """One run evaluates what all begin with."""
        return self.arm.name == "sft" and self.seed == FIRST_SEED


def read_arm(text: str) -> LearnsArm:
    """Read one more arm, given as a JSON object of `LearnsArm`'s fields. Raises ConfigError."""
    try:
        return LearnsArm(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "an arm cannot be read",
            found=f"{text[:200]}: {error}",
            wanted=f"a JSON object with some of {', '.join(f.name for f in fields(LearnsArm))}",
            remedy='such as {"name": "cooler", "decoding": {"temperature": 0.5}}',
        ) from error


def choose(known: Mapping[str, LearnsArm], names: Collection[str], *, labels_are_complete: bool) -> list[LearnsArm]:
    """The arms with these names, else all that fit the labels; and always those that are not in ARMS."""
    chosen = names or [name for name in ARMS if name != KEPT or not labels_are_complete]
    return [arm for name, arm in known.items() if name in chosen or name not in ARMS]


def all_runs(of: Iterable[LearnsArm], most_seeds: int = SEEDS) -> list[LearnsRun]:
    """Return all runs, the most important first: a seed of each main arm, then the next seed; then arms with one
    seed."""
    runs = [LearnsRun(arm=arm, seed=FIRST_SEED + i) for arm in of for i in range(min(arm.seeds, most_seeds))]
    return sorted(runs, key=lambda run: (run.arm.seeds == 1, run.arm.wall, run.seed))


def run_config(run: LearnsRun, settings: Settings, vllm: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the learner's configuration; `vllm` is its section of that name."""
    return arms.run_config(
        run.arm,
        model=settings.model,
        train=settings.data / "train.jsonl",
        test=settings.data / "test.jsonl",
        run_dir=settings.runs / run.folder,
        steps=steps,
        batch_size=settings.batch_size,
        engine={"decode_batch_size": settings.decode_batch_size, "vllm": dict(vllm)},
        max_new_tokens=settings.max_new_tokens,
        global_max_length=800 * settings.batch_size,
        data_workers=settings.data_workers,
        training={
            "seed": run.seed,
            "packing_buffer": max(64, settings.batch_size),
            "learning_rate": settings.learning_rate * run.arm.rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": steps // 10,
            # Packed Channel-B learns while it rolls out. A colocated engine cannot do that.
            "packing": run.arm.stage2_ab is None or vllm["mode"] == "server",
            "eval_on_start": run.evaluates_first,
            "eval_samples": settings.eval_scenes,
        },
    )
