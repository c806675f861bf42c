"""Finds the best evaluation of a run, and decides when the run stops early (D17).

In: the metrics of each evaluation, by step. Out: whether an evaluation is the best so far, so that the trainer saves a
checkpoint, and whether `patience` evaluations in a row were not better. Rank 0 decides, and every rank gets the same
answer: `add` and `restore` are collective.

The file `best.json` in the run directory has the metric's value at every evaluated step. `best` is a link to the
checkpoint of the best step, which `CheckpointStore` never removes. A resumed run drops the values after the step that
it resumes from, and measures them again. The evaluation before the first step may be the best, but no checkpoint is
saved for it: its weights are the weights of the model with which the run began.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from learner.config.schema import RunConfig
from learner.config.sections.training import ESTIMATED, TrainingConfig, kept_metric
from learner.run.files import write_atomically, writing
from shared.config.model import ConfigErrors, show
from shared.errors import ConfigError

if TYPE_CHECKING:
    from learner.policy.parallel import Ranks

BEST_LINK, BEST_FILE = "best", "best.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The consequences of one evaluation. `is_best`: the evaluation is better than all earlier evaluations. `gives_up`:
    the run should stop early, because none of the last `patience` evaluations was better than the best one before
    them."""

    is_best: bool = False
    gives_up: bool = False


@dataclass
class BestEvaluation:
    """The values of `metric` so far, by step. `metric` None: no best checkpoint is kept, and the run never stops early.
    `estimated`: the name of the metric for incomplete labels (D22). `estimated` replaces `metric` if the first
    evaluation has it; None: `metric` is always used."""

    root: Path
    ranks: Ranks
    metric: str | None
    patience: int | None = None
    estimated: str | None = None
    values: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, metric: str | None, training: TrainingConfig, ranks: Ranks) -> BestEvaluation:
        root = Path(training.output_dir)
        estimated = ESTIMATED if training.keep_best == "auto" else None
        return cls(root=root, ranks=ranks, metric=metric, patience=training.early_stop_patience, estimated=estimated)

    @property
    def best_step(self) -> int | None:
        """The step with the largest value, the first one if several have it; None before the first evaluation."""
        return max(self.values, key=lambda step: (self.values[step], -step), default=None)

    @property
    def gives_up(self) -> bool:
        """True if there were at least `patience` evaluations after the best one."""
        if self.patience is None or self.best_step is None:
            return False
        return sum(step > self.best_step for step in self.values) >= self.patience

    def add(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Record one evaluation, and return the verdict. Collective. Raises ConfigError if `metrics` lacks the metric
        to compare."""
        if self.metric is None:
            return Verdict()
        if not self.values and self.estimated is not None and self.estimated in metrics:
            self.metric = self.estimated
        if self.metric not in metrics:
            raise ConfigError(
                "training.keep_best: an evaluation has no such metric",
                found=self.metric,
                wanted=f"one of {', '.join(sorted(metrics))}",
                remedy="name one of these, or set training.keep_best: null",
            )
        value = float(metrics[self.metric])
        # Comparisons with NaN are false, so a NaN would always stay the best value.
        self.values[step] = value if math.isfinite(value) else -math.inf
        verdict = self.ranks.broadcast_object(Verdict(is_best=self.best_step == step, gives_up=self.gives_up))
        self._write()
        return verdict

    def link(self, checkpoint: Path) -> None:
        """Make the link `best` point to a checkpoint of this run."""
        if self.ranks.is_main:
            point_best(self.root, Path(checkpoint.name))

    def restore(self, step: int) -> None:
        """Load the values of the evaluations up to `step` from `best.json`. If the file cannot be read, there are no
        values. Collective."""
        if self.metric is None:
            return
        found: dict[int, float] = {}
        if self.ranks.is_main:
            try:
                stored = json.loads((self.root / BEST_FILE).read_text())
                # Values of another metric cannot be compared with this run's values.
                if stored["metric"] in (self.metric, self.estimated):
                    self.metric = stored["metric"]
                    found = {int(at): float(value) for at, value in stored["values"].items()}
            except FileNotFoundError:  # the run had no evaluation yet
                pass
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                log.warning("%s cannot be read, so evaluations are compared from here on: %s", BEST_FILE, error)
        self.metric, values = self.ranks.broadcast_object((self.metric, found))
        self.values = {at: value for at, value in values.items() if at <= step}

    def _write(self) -> None:
        if self.ranks.is_main:
            values = {str(step): value for step, value in self.values.items() if math.isfinite(value)}
            stored = {"metric": self.metric, "best_step": self.best_step, "values": values}
            write_atomically(self.root / BEST_FILE, json.dumps(stored, indent=2) + "\n")


def point_best(root: Path, target: Path) -> None:
    """Make `root/best` a link to the checkpoint `target`, a path that is absolute or relative to `root`. Raises
    OutputError if the link cannot be made."""
    with writing(root):
        # A link cannot be overwritten. The rename replaces the old link at once, so `best` always exists.
        link, work = root / BEST_LINK, root / f".{BEST_LINK}.partial"
        work.unlink(missing_ok=True)
        work.symlink_to(target)
        work.replace(link)


def only_worse(root: Path) -> str | None:
    """If no evaluation was better than the evaluation before the first step (so there is no best checkpoint), return a
    text that says so. Return None if a later evaluation was better, or if the evaluations are not known."""
    if kept(root) is not None:
        return None
    try:
        stored = json.loads((root / BEST_FILE).read_text())
        best, metric, value = stored["best_step"], stored["metric"], float(stored["values"]["0"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return f"no step was better than the start ({metric} {value:.3f})" if best == 0 else None


def kept(root: Path) -> Path | None:
    """Return the checkpoint that the link `best` of a run points to; None if there is no such link or checkpoint."""
    link = root / BEST_LINK
    return link.resolve() if link.is_dir() else None


def check_kept_metric(config: RunConfig) -> None:
    """Raises ConfigErrors if evaluations of this task do not have the metric that `training.keep_best` names. A user's
    task is not checked, because its metrics are not known before the first evaluation."""
    metric = kept_metric(config)
    if metric is None or config.training.keep_best == "auto":
        return
    from learner.tasks import key_value  # imported here, because the import takes a second
    from learner.tasks.detection import task as detection

    of_tasks = {"detection": detection.EVALUATED, "key_value": key_value.EVALUATED}
    if config.task.type not in of_tasks:
        return
    known = [*of_tasks[config.task.type], *_rewards_of(config)]
    if metric in known:
        return
    near = get_close_matches(metric, known, n=1)
    raise ConfigErrors.one(
        "training.keep_best",
        found=f"{show(metric)}, which no evaluation of {config.task.type} has",
        wanted=f"one of {', '.join(known)}",
        remedy=f"did you mean {near[0]}?" if near else "name one of these, or set training.keep_best: null",
    )


def _rewards_of(config: RunConfig) -> list[str]:
    """Return the names of the metrics that the run's rewards add to an evaluation; [] without rewards."""
    reward = config.reward
    names = dict.fromkeys([*(path.rpartition(":")[2] for path in reward.functions), *reward.weights])
    if not names and config.custom.trainer_variant == "grpo":
        names = {"f1": None}
    return ["reward", *(f"reward/{name}" for name in names)] if names else []
