"""`recipe.json`: the decisions of a recipe so far, and what each stage gained and lost.

The recipe's process rewrites the whole file at each decision. The file and the stages' folders have all that a second
command needs. A stage that is not listed has not ended. The report of the folder shows the record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

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

SHOWN = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "mean_iou", "f1_any@0.5", "parse_rate", "duplicate_rate")
LEAST_CHANGE = 0.005  # metrics that changed less are not listed as gained or lost
START = "start"
TIME_UP = "its time was up"
HEADROOM = "headroom.json"  # a file in the folder of `grpo`
# Boxes are loose if F1@mIoU is below this share of F1@0.5. On blood cells the share is 0.6, and `grpo` with IoU as
# reward gained 0.02 F1@0.5 after sft. On digits the share is 0.97, and it gained nothing.
LOOSE = 0.8
# If labels were completed, `grpo` begins from the start if the start's score is at least this share of sft's. With 60%
# of labels missing, `grpo` from the start reached 0.83, and from sft 0.80, where sft completed other labels. All
# measured shares are above 0.8.
START_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One stage that has ended. `before` and `after` are the metrics of its first and its best evaluation on
    validation. `score_before` and `score` are their values of `metric`, the metric that decides which weights are
    best."""

    name: str
    why: str  # the reason why the stage was run
    ended: str  # the reason why the stage ended
    labels: str  # a sentence on which labels were completed; empty if `labels.complete` is off
    completed: bool
    seconds: float
    steps: int
    best_step: int
    score_before: float
    score: float
    before: Mapping[str, float]
    after: Mapping[str, float]
    metric: str  # name of the metric that decides which weights are best
    cannot_complete: bool = False  # labels have gaps, and the stage's start could complete none of them

    @property
    def gained(self) -> list[str]:
        return [text for text, change in self._changes() if change > 0]

    @property
    def lost(self) -> list[str]:
        return [text for text, change in self._changes() if change < 0]

    def _changes(self) -> list[tuple[str, float]]:
        """Return each metric of `SHOWN` or of `data.retain` that changed, as a text and its gain; a loss is below 0."""
        names = [*SHOWN, *(name for name in self.after if name.startswith(RETAIN) and name.endswith("/f1@0.5"))]
        found = []
        for name in names:
            change = self.after.get(name, 0.0) - self.before.get(name, 0.0)
            if name in self.before and abs(change) >= LEAST_CHANGE:
                found.append((f"{name} {change:+.3f}", -change if name == "duplicate_rate" else change))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A recipe so far. `metric` decides which weights are best; `auto` until the first stage has ended. `best_of` is
    the stage with the best weights, `START` if no stage is better than the start."""

    digest: str
    minutes: float
    metric: str
    stages: tuple[StageResult, ...] = ()
    headroom: Mapping[str, FeatureEstimate] = field(default_factory=dict)
    grpo: str = ""  # the reason to run `grpo`; empty if it was not decided to run it
    no_grpo: str = ""  # the reason not to run `grpo`; empty if that was not decided
    extended: bool = False  # `sft` is given the minutes of `grpo`, which is not run
    ended: str = ""  # the reason why the recipe has ended
    best_of: str = START
    best_score: float | None = None

    def stage(self, name: str) -> StageResult | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def with_stage(self, stage: StageResult) -> Self:
        """Return the record with `stage` added. If its score is not higher than the best one, the earlier weights stay
        best."""
        best_of, score = self.best_of, stage.score_before if self.best_score is None else self.best_score
        if stage.score > score:
            best_of, score = stage.name, stage.score
        stages = (*self.stages, stage)
        return replace(self, stages=stages, metric=stage.metric, best_of=best_of, best_score=score)

    @property
    def fit(self) -> float:
        """The fit of the boxes of the best weights so far: F1@mIoU / F1@0.5 on validation; 1 if either is unknown.
        Missing labels lower both alike."""
        stage = self.stage(self.best_of)
        metrics = stage.after if stage is not None else self.stages[0].before if self.stages else {}
        f1, strict = metrics.get("f1@0.5", 0.0), metrics.get("f1@miou")
        return 1.0 if strict is None or f1 <= 0.0 else strict / f1

    @property
    def is_loose(self) -> bool:
        return self.fit < LOOSE

    @property
    def on_completed(self) -> bool:
        """True if `grpo` learns completed labels: `sft` completed some, and rollout matching was not run."""
        sft = self.stage(SFT)
        return sft is not None and sft.completed and self.stage(MATCHING) is None

    @property
    def starts_weak(self) -> bool:
        """True if the start scored far below `sft`, so that `sft` completes labels better."""
        sft = self.stage(SFT)
        return sft is not None and sft.score_before < START_SHARE * sft.score

    @property
    def from_start(self) -> bool:
        """True if `grpo` begins with the start, whose answers completed the labels, and not with sft's weights."""
        return self.on_completed and not self.starts_weak

    @property
    def seconds(self) -> float:
        """The seconds that all ended stages took together."""
        return sum(stage.seconds for stage in self.stages)

    def write(self, root: Path) -> None:
        """Write `recipe.json` in `root`. Raises OutputError."""
        stages = [asdict(stage) | {"gained": stage.gained, "lost": stage.lost} for stage in self.stages]
        write_atomically(root / RECIPE, json.dumps(asdict(self) | {"stages": stages}, indent=1) + "\n")


def read_record(root: Path) -> Record | None:
    """Read `recipe.json` in `root`; None if no recipe was begun there. Raises CheckpointError if the file is
    damaged."""
    path = root / RECIPE
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = dict(json_in(path))
        known = StageResult.__dataclass_fields__
        was = {"invents": "cannot_complete"}  # a key of earlier versions: its name now
        every = [{was.get(key, key): value for key, value in stage.items()} for stage in content["stages"]]
        stages = [StageResult(**{key: stage[key] for key in known if key in stage}) for stage in every]
        headroom = {name: FeatureEstimate(**one) for name, one in content["headroom"].items()}
        return Record(**content | {"stages": tuple(stages), "headroom": headroom})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            "the recipe's record can't be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="the file that the recipe wrote",
            remedy="remove it: each stage then goes on from its last checkpoint",
        ) from error


def digest_of(config: RunConfig) -> str:
    """Return a hash of the keys in which two commands must agree to be one recipe: model, data, task and labels."""
    parts = config.model_dump_json(include={"model", "data", "task", "labels"})
    return hashlib.sha256(parts.encode()).hexdigest()


# ---- what a stage left behind ---------------------------------------------------------------------------------------


def stage_result(run_dir: Path, *, why: str, seconds: float, patience: int) -> StageResult:
    """Read the result of a stage after its first evaluation. Raises CheckpointError if its scores cannot be read."""
    try:
        stored = json_in(run_dir / BEST_FILE)
        values = {int(step): float(value) for step, value in stored["values"].items()}
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
    """Return the fields of a stage's result on labels: what its newest completion did, and what its first one
    estimated."""
    files = sorted((run_dir / LABELS).glob("step_*.json"))
    if not files:
        return {"labels": "", "completed": False}
    found = json_in(files[-1])
    completed = found["min_votes"] is not None and bool(found["added"])
    cannot = CompletionEstimate.of_json(json_in(files[0])["estimate"]).cannot_complete
    return {"labels": found["text"], "completed": completed, "cannot_complete": cannot and not completed}


def read_headroom(run_dir: Path) -> dict[str, FeatureEstimate]:
    """Read the headroom that `grpo` measured before its first step. Raises CheckpointError."""
    path = run_dir / HEADROOM
    try:
        return {name: FeatureEstimate(**one) for name, one in json_in(path).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the headroom that was measured can't be read",
            found=f"{path}: {type(error).__name__}: {error}",
            wanted="the file that the stage wrote",
            remedy="remove it, and give the same command again: it is measured anew",
        ) from error


def grpo_pays(found: Mapping[str, FeatureEstimate]) -> Rule:
    """Return the rule that says whether `grpo` is likely to gain: the estimate is above a threshold, its interval is
    above 0, and sampled answers to enough scenes differ in score.

    `recipe --only-measure` asks for the whole interval above the threshold, because its user would spend hours. Here
    the minutes are given already, and the weights that validation prefers are kept. Where `grpo` and `sft` ended equal,
    0.017 was measured.

    Do not call this if labels were completed: objects without a label still hide headroom. `grpo` gains if 60% of the
    labels are missing, where 0.040 [0.012, 0.071] and 0.018 [-0.013, 0.048] were measured, and if 40% are missing in 32
    scenes, where 0.010 [0.000, 0.025] was measured.
    """
    return better_places(found, least_low=0.0)


def spent_s(run_dir: Path) -> float:
    """Return the seconds that earlier starts of a stage took, from the first to the last event of each in
    `metrics.jsonl`."""
    path = run_dir / METRICS
    if not path.is_file():
        return 0.0
    spans: list[list[float]] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json_of(line)
            if event["event"] == "plan":
                spans.append([])
            spans[-1].append(float(event["time"]))
        except (ValueError, KeyError, TypeError, IndexError):
            continue  # a line that a killed process cut short
    return sum(max(times) - min(times) for times in itertools.compress(spans, spans))
