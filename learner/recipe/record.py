"""`recipe.json`: the decisions of a recipe so far, and what each stage gained and lost.

The recipe's process writes the whole file again at each decision. If the same command is given again, the recipe
continues from `recipe.json` and the stages' folders. Only stages that have ended are in the file. The report of the
recipe's folder shows the file's content.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AliasChoices, Field, TypeAdapter

from learner.config.schema import RunConfig
from learner.journal.retained import RETAIN
from learner.predict.features import FeatureEstimate
from learner.predict.recommend import Rule, better_places
from learner.recipe.stages import MATCHING, SFT
from learner.report.read import METRICS, RECIPE, read_run
from learner.run.best import BEST_FILE
from learner.run.files import write_atomically
from learner.run.output_dir import LABELS
from learner.tasks.detection.completion import CompletionEstimate
from shared.errors import CheckpointError
from shared.reading import json_in, json_of

# The metrics that are listed as gained or lost.
SHOWN = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "mean_iou", "f1_any@0.5", "parse_rate", "duplicate_rate")
LEAST_CHANGE = 0.005  # a metric that changed less is not listed as gained or lost.
# The value in place of a stage's name that stands for the model of the user's configuration.
START = "start"
TIME_UP = "its time was up"
HEADROOM = "headroom.json"  # file in the folder of the stage `grpo`, with its measurements before its first step.
# Boxes are loose if F1@mIoU / F1@0.5 is below this value. On blood cells the ratio is 0.6, and `grpo` with IoU as
# reward gained 0.02 F1@0.5 after sft. On digits the ratio is 0.97, and the same `grpo` gained nothing.
LOOSE = 0.8
# If labels were completed, `grpo` begins with the user's model, if the score of this model is at least this fraction of
# sft's score. With 60% of labels missing, `grpo` reached 0.83 from the user's model, and 0.80 from sft's weights, which
# had completed other labels. All measured fractions are above 0.8.
START_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One stage that has ended."""

    name: str
    why: str  # the reason why the stage was run
    ended: str  # reason why the stage ended
    labels: str  # a sentence on which labels were completed; empty if `labels.complete` is off
    completed: bool  # True: labels were completed
    seconds: float  # seconds that the stage took
    steps: int  # number of optimizer steps until the last evaluation
    best_step: int  # step of the best evaluation
    score_before: float  # value of `metric` in the first evaluation
    score: float  # value of `metric` in the best evaluation
    before: Mapping[str, float]  # metrics of the first evaluation, on validation
    after: Mapping[str, float]  # metrics of the best evaluation, on validation
    metric: str  # name of the metric that decides which weights are best.
    # Labels are missing, and the model with which the stage began could add no labels. Earlier versions of the project
    # wrote the key `invents`.
    cannot_complete: Annotated[bool, Field(validation_alias=AliasChoices("cannot_complete", "invents"))] = False

    @property
    def gained(self) -> list[str]:
        return [text for text, change in self._changes() if change > 0]

    @property
    def lost(self) -> list[str]:
        return [text for text, change in self._changes() if change < 0]

    def _changes(self) -> list[tuple[str, float]]:
        """Return (text, gain) of each metric of `SHOWN` and of `data.retain` that changed by at least LEAST_CHANGE. A
        gain below 0 is a loss."""
        names = [*SHOWN, *(name for name in self.after if name.startswith(RETAIN) and name.endswith("/f1@0.5"))]
        found = []
        for name in names:
            change = self.after.get(name, 0.0) - self.before.get(name, 0.0)
            if name in self.before and abs(change) >= LEAST_CHANGE:
                found.append((f"{name} {change:+.3f}", -change if name == "duplicate_rate" else change))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The state of a recipe: its decisions, and the results of the stages that have ended. "The start" is the model
    that the user's configuration names."""

    digest: str  # see `digest_of`
    minutes: float  # time of all stages together, in minutes
    metric: str  # name of the metric that decides which weights are best; "auto" until the first stage has ended
    stages: tuple[StageResult, ...] = ()  # stages that have ended, in the order in which they ended
    headroom: Mapping[str, FeatureEstimate] = field(default_factory=dict)  # what `grpo` measured before its first step
    grpo: str = ""  # the reason to run `grpo`; empty without this decision
    no_grpo: str = ""  # the reason not to run `grpo`; empty without this decision
    extended: bool = False  # True: `grpo` is not run, and `sft` continues in the minutes kept for `grpo`
    ended: str = ""  # the reason why the recipe has ended; empty until then
    best_of: str = START  # name of the stage with the best weights; START if no stage is better than the start
    best_score: float | None = None  # value of `metric` of the best weights; None before the first stage has ended

    def stage(self, name: str) -> StageResult | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def with_stage(self, stage: StageResult) -> Self:
        """Return the record with `stage` added. The stage's weights become the best weights if its score is higher than
        the best score so far."""
        best_of, score = self.best_of, stage.score_before if self.best_score is None else self.best_score
        if stage.score > score:
            best_of, score = stage.name, stage.score
        stages = (*self.stages, stage)
        return replace(self, stages=stages, metric=stage.metric, best_of=best_of, best_score=score)

    @property
    def fit(self) -> float:
        """The fit of boxes for the best weights so far: F1@mIoU / F1@0.5 on validation; 1 if one of these is not
        known."""
        stage = self.stage(self.best_of)
        metrics = stage.after if stage is not None else self.stages[0].before if self.stages else {}
        f1, strict = metrics.get("f1@0.5", 0.0), metrics.get("f1@miou")
        # Missing labels lower F1@mIoU and F1@0.5 alike, so they do not change the ratio.
        return 1.0 if strict is None or f1 <= 0.0 else strict / f1

    @property
    def is_loose(self) -> bool:
        return self.fit < LOOSE

    @property
    def on_completed(self) -> bool:
        """True if `grpo` learns completed labels: `sft` has completed labels, and rollout matching was not run."""
        sft = self.stage(SFT)
        return sft is not None and sft.completed and self.stage(MATCHING) is None

    @property
    def starts_weak(self) -> bool:
        """True if the start's score is so far below the score of `sft` (START_SHARE) that `sft` completes labels
        better."""
        sft = self.stage(SFT)
        return sft is not None and sft.score_before < START_SHARE * sft.score

    @property
    def from_start(self) -> bool:
        """True if `grpo` begins with the start (the model whose answers completed the labels), and not with the weights
        of `sft`."""
        return self.on_completed and not self.starts_weak

    @property
    def seconds(self) -> float:
        """The seconds that all ended stages took together."""
        return sum(stage.seconds for stage in self.stages)

    def write(self, root: Path) -> None:
        """Write `recipe.json` in the recipe's folder `root`. Raises OutputError if writing fails."""
        stages = [asdict(stage) | {"gained": stage.gained, "lost": stage.lost} for stage in self.stages]
        write_atomically(root / RECIPE, json.dumps(asdict(self) | {"stages": stages}, indent=1) + "\n")


_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
_HEADROOM: TypeAdapter[dict[str, FeatureEstimate]] = TypeAdapter(dict[str, FeatureEstimate])
_ESTIMATE: TypeAdapter[CompletionEstimate] = TypeAdapter(CompletionEstimate)


def read_record(root: Path) -> Record | None:
    """Return the record in `recipe.json` of the folder `root`; None if no recipe was begun there. Raises
    CheckpointError if the file is damaged."""
    path = root / RECIPE
    if not path.is_file():
        return None
    try:
        return _RECORD.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the recipe's record can't be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="the file that the recipe wrote",
            remedy="remove it: each stage then goes on from its last checkpoint",
        ) from error


def digest_of(config: RunConfig) -> str:
    """Return a hash of the sections model, data, task and labels. A command continues a recipe only if its
    configuration has the same hash."""
    parts = config.model_dump_json(include={"model", "data", "task", "labels"})
    return hashlib.sha256(parts.encode()).hexdigest()


# ---- results --------------------------------------------------------------------------------------------------------


def stage_result(run_dir: Path, *, why: str, seconds: float, patience: int) -> StageResult:
    """Return the result of a stage that has ended, from the files in its folder. `patience`: number of evaluations
    without a better score that end it. Raises CheckpointError if the scores cannot be read."""
    try:
        stored = json_in(run_dir / BEST_FILE)
        values = {int(step): float(value) for step, value in stored["values"].items()}
        # If scores are equal, the earlier step is the best.
        best = max(values, key=lambda step: (values[step], -step))
        start, metric = values[0], str(stored["metric"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            "a stage's scores can't be read",
            found=f"{run_dir / BEST_FILE}: {type(error).__name__}: {error}",
            wanted="the scores of all evaluations of the stage, from its start on",
            remedy=f"remove {run_dir}, so that the stage begins anew",
        ) from error
    run = read_run(run_dir)
    metrics = {point.global_step: point.metrics for point in run.evals}
    since = sum(step > best for step in values)
    return StageResult(
        name=run_dir.name,
        why=why,
        ended=f"the score did not rise in {since} evaluations" if since >= patience else TIME_UP,
        **_labels(run_dir),
        seconds=round(seconds, 1),
        steps=max(values),
        best_step=best,
        score_before=start,
        score=values[best],
        metric=metric,
        before=metrics.get(0, {}),
        after=metrics.get(best, {}),
    )


def _labels(run_dir: Path) -> dict[str, Any]:
    """Return the fields `labels`, `completed` and `cannot_complete` of a stage's result. The first two come from the
    last time that labels were completed, the third from the estimate that was made the first time."""
    files = sorted((run_dir / LABELS).glob("step_*.json"))
    if not files:
        return {"labels": "", "completed": False}
    found = json_in(files[-1])
    completed = found["min_votes"] is not None and bool(found["added"])
    # The recipe's rules ask whether the model with which the stage began can complete labels. The model with which the
    # stage began made the first completion.
    cannot = _ESTIMATE.validate_python(json_in(files[0])["estimate"]).cannot_complete
    return {"labels": found["text"], "completed": completed, "cannot_complete": cannot and not completed}


def read_headroom(run_dir: Path) -> dict[str, FeatureEstimate]:
    """Return the measures in `HEADROOM` (the run's file of how much `grpo` could gain), by name. The stage `grpo`
    measured these values before its first step. Raises CheckpointError if the file cannot be read."""
    path = run_dir / HEADROOM
    try:
        return _HEADROOM.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the headroom that was measured can't be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="the file that the stage wrote",
            remedy="remove it, and give the same command again: it is measured anew",
        ) from error


def grpo_pays(found: Mapping[str, FeatureEstimate]) -> Rule:
    """Return the rule that says whether `grpo` is likely to gain. The rule holds if the headroom for boxes is above
    `recommend.HEADROOM`, its interval is above 0, and sampled answers to enough scenes differ in score.

    In a comparison in which `grpo` and `sft` were equally good, the headroom was 0.017.

    Do not call this if labels were completed: because of objects that still have no label, the measured headroom is too
    low. `grpo` gained F1 although measured headrooms were 0.040 [0.012, 0.071] and 0.018 [-0.013, 0.048] with 60% of
    the labels missing, and 0.010 [0.000, 0.025] with 40% missing in 32 scenes.
    """
    # In a recipe it is enough if the interval is above 0, because the recipe's minutes are spent anyway, and validation
    # keeps the best weights. The rule for --only-measure demands more, because a user may spend hours after it.
    return better_places(found, least_low=0.0)


def spent_s(run_dir: Path) -> float:
    """Return how many seconds a stage has run so far. The time of each start is from its first to its last event in
    `metrics.jsonl`. 0 if the stage has not run yet."""
    path = run_dir / METRICS
    if not path.is_file():
        return 0.0
    spans: list[list[float]] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json_of(line)
            # Each start of the stage writes a `plan` event first, which opens a new span. So the pause before a stage's
            # restart is not counted.
            if event["event"] == "plan":
                spans.append([])
            spans[-1].append(float(event["time"]))
        except (ValueError, KeyError, TypeError, IndexError):
            continue  # the last line of a killed process may be incomplete
    return sum(max(times) - min(times) for times in itertools.compress(spans, spans))
