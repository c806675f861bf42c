"""The records of a run's directory: what `read.py` reads, and every part of the report shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.records import DetectionObject, StepResult, SyncReceipt
from learner.report.sheet import Sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The model's answer to a test sample. Objects are in bins 0..999 of their image. `width` and `height` are pixels
    of what is drawn: the image, or the `sheet` of several."""

    scene_id: str
    images: tuple[str, ...]
    width: int
    height: int
    truth: tuple[DetectionObject, ...]
    ignored: tuple[DetectionObject, ...]  # ignore regions: predictions there count neither as hit nor as false
    predictions: tuple[DetectionObject, ...]
    num_dropped: int
    truncated: bool
    sheet: Sheet | None = None

    def drawn(self, obj: DetectionObject) -> DetectionObject:
        """Return the object in bins of what is drawn."""
        return obj if self.sheet is None else self.sheet.placed(obj)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredScene:
    """One answer of a group. `advantage` is the mean over its tokens; `by_object` that of each prediction, if objects
    have advantages of their own."""

    scene: Scene
    reward: float
    advantage: float
    by_object: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStep:
    """Rewards of a step's rollouts on rank 0, at least one, and the answers of one group, if it was recorded."""

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
    """The begin and end of a step, and the activities that ended in it."""

    global_step: int
    begin_s: float
    end_s: float
    activities: tuple[Activity, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPoint:
    """One evaluation. `metrics` is empty if only the scenes were kept, `scenes` if only the metrics were."""

    global_step: int
    metrics: Mapping[str, float]
    scenes: tuple[Scene, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """One weight sync. `metrics` are all numbers of its event. `before` is what came next: a `step`, whose line on the
    console names the sync, or an `eval`, which has no such line; empty if the run ended there."""

    receipt: SyncReceipt
    metrics: Mapping[str, float]
    before: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCounts:
    """The samples that a run read, and what was wrong with others: counts by split, kind and action (drop or clip)."""

    num_train: int
    num_evaluation: int
    bad_records: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeSample:
    """A sample of a spiking step. `row_loss` is that of its packed row, nats per token. `scene` has no predictions;
    None: the run did not write it."""

    sample_id: str
    row_loss: float
    scene: Scene | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikePoint:
    """A step whose loss or gradient norm (`metric`) leapt from about `usual` to `value`."""

    global_step: int
    metric: str
    value: float
    usual: float
    samples: tuple[SpikeSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The progress of a run. `total_steps` 0: unknown. `ended` is `finished`, `stopped` or `failed`, and `because` says
    why; empty while it goes on, or if its process was killed. `seconds_per_step` is of its last steps, with what came
    between them; NaN if unknown. `time_up_s`: the clock's time at which `training.max_minutes` end the run; NaN if its
    steps end it first."""

    total_steps: int
    ended: str
    because: str
    seconds_per_step: float
    time_up_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The measurements of one run. `evals`, `steps` and `timelines` are in the order of `global_step`, `syncs` as they
    happened."""

    name: str
    path: Path
    config: Mapping[str, object]
    steps: tuple[StepResult, ...]
    syncs: tuple[SyncPoint, ...]
    evals: tuple[EvalPoint, ...]
    test: EvalPoint | None  # `data.test`, scored once, if it is not what `evals` are of
    timelines: tuple[StepTimeline, ...]
    groups: tuple[GroupStep, ...]
    spikes: tuple[SpikePoint, ...]
    status: Status
    data: DataCounts | None
    wall_s: float  # lies between the first and the last event
    last_event_s: float | None  # Unix seconds
    notes: tuple[str, ...]

    def setting(self, *keys: str) -> object:
        """Return a value of the configuration by its path of keys, or None."""
        value: object = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSet:
    """The runs that one report shows, the main one first, and the `summary.json` and `recipe.json` of the directory, if
    any."""

    title: str
    runs: tuple[RunRecord, ...]
    summary: Mapping[str, object]
    recipe: Mapping[str, object]
