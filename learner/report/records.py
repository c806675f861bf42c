"""The records of a run's directory: `read.py` makes them from its files, and the other modules show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.records import DetectionObject, StepResult, SyncReceipt
from learner.report.sheet import Sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The model's answer to a test sample. Objects are in bins 0..999 of their image. `width` and `height` are the
    pixels of the drawing: of the image, or of the `sheet` of several images."""

    scene_id: str
    images: tuple[str, ...]
    width: int
    height: int
    truth: tuple[DetectionObject, ...]
    ignored: tuple[DetectionObject, ...]  # ignore regions: predictions inside them count neither as right nor as wrong
    predictions: tuple[DetectionObject, ...]
    num_dropped: int
    truncated: bool
    sheet: Sheet | None = None

    def drawn(self, obj: DetectionObject) -> DetectionObject:
        """Return the object in bins of the drawing."""
        return obj if self.sheet is None else self.sheet.placed(obj)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredScene:
    """One answer of a group. `advantage` is the mean over its tokens. `by_object` has each prediction's advantage;
    empty if predictions have none of their own."""

    scene: Scene
    reward: float
    advantage: float
    by_object: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStep:
    """A step's rewards, one per rollout of rank 0, and the answers of one group if the run recorded it."""

    global_step: int
    rewards: tuple[float, ...]
    answers: tuple[ScoredScene, ...]


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that ran on a lane (`rank 0`, `rank 0 rollouts`, a server's URL), in Unix seconds."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """The begin and end of a step, and the activities that ended during it."""

    global_step: int
    begin_s: float
    end_s: float
    activities: tuple[Activity, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPoint:
    """One evaluation. `metrics` is empty if only its scenes are on disk, `scenes` if only its metrics are."""

    global_step: int
    metrics: Mapping[str, float]
    scenes: tuple[Scene, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """One weight sync. `metrics` are all numbers of its event. `before` names the event that came next: a `step`, whose
    line on the console shows the sync, or an `eval`, whose line does not; empty if the run ended after the sync."""

    receipt: SyncReceipt
    metrics: Mapping[str, float]
    before: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCounts:
    """The number of samples that a run read, and of bad records by split, kind and action (drop or clip)."""

    num_train: int
    num_evaluation: int
    bad_records: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeSample:
    """A sample of a step with a spike. `row_loss` is the loss of its packed row, in nats per token. `scene` has its
    labels and no predictions; None: the run did not write it."""

    sample_id: str
    row_loss: float
    scene: Scene | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikePoint:
    """A spike: a step whose loss or gradient norm (`metric`) leapt from about `usual` to `value`."""

    global_step: int
    metric: str
    value: float
    usual: float
    samples: tuple[SpikeSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The progress of a run. `total_steps` is 0 if it is not known. `ended` is `finished`, `stopped` or `failed`, and
    `because` says why; both are empty while the run goes on, or if its process was killed. `seconds_per_step` is the
    mean of the last steps with everything between them, NaN if unknown. `time_up_s` is the Unix time at which
    `training.max_minutes` end the run, NaN if its steps end it first."""

    total_steps: int
    ended: str
    because: str
    seconds_per_step: float
    time_up_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a run measured. `evals`, `steps` and `timelines` are in the order of `global_step`, `syncs` in
    the order of time."""

    name: str
    path: Path
    config: Mapping[str, object]
    steps: tuple[StepResult, ...]
    syncs: tuple[SyncPoint, ...]
    evals: tuple[EvalPoint, ...]
    test: EvalPoint | None  # the score of `data.test` at the run's end; None if `evals` score that set
    timelines: tuple[StepTimeline, ...]
    groups: tuple[GroupStep, ...]
    spikes: tuple[SpikePoint, ...]
    status: Status
    data: DataCounts | None
    wall_s: float  # seconds from the first to the last event
    last_event_s: float | None  # Unix time
    notes: tuple[str, ...]

    def setting(self, *keys: str) -> object:
        """Return a value of the configuration by its path of keys, or None."""
        value: object = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSet:
    """The runs of one report, the main one first. `summary` and `recipe` are the directory's `summary.json` and
    `recipe.json`, empty if it has none."""

    title: str
    runs: tuple[RunRecord, ...]
    summary: Mapping[str, object]
    recipe: Mapping[str, object]
