"""The records of a run for the report: `read.py` makes them from the run's files, and the other modules show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from learner.records import Activity, DetectionObject, StepResult, SyncReceipt
from learner.report.sheet import Sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The model's answer to a sample of an evaluation, and the sample's labels. Objects have coordinates in bins: 0 to
    999 over their image. `width` and `height`: pixels of the drawing, which is the image, or the `sheet` of several."""

    scene_id: str
    images: tuple[str, ...]
    width: int
    height: int
    truth: tuple[DetectionObject, ...]  # the labels
    ignored: tuple[DetectionObject, ...]  # ignore regions: predictions inside them count neither as right nor as wrong
    predictions: tuple[DetectionObject, ...]
    num_dropped: int  # number of objects in the answer that could not be read
    truncated: bool  # the answer was cut off at the max number of tokens
    sheet: Sheet | None = None  # where each of several images is drawn; None: the sample has one image

    def drawn(self, obj: DetectionObject) -> DetectionObject:
        """Return the object with coordinates in bins of the drawing instead of its image."""
        return obj if self.sheet is None else self.sheet.placed(obj)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredScene:
    """One answer of a `grpo` group. `advantage`: mean over the answer's tokens. `by_object`: each prediction's
    advantage; empty if all tokens of the answer have the same advantage."""

    scene: Scene
    reward: float
    advantage: float
    by_object: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStep:
    """A step's rewards, one per rollout of rank 0, and the answers of one group; () if the run recorded none."""

    global_step: int
    rewards: tuple[float, ...]
    answers: tuple[ScoredScene, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """The begin and end of a step (Unix seconds), and the activities that ended during it."""

    global_step: int
    begin_s: float
    end_s: float
    activities: tuple[Activity, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPoint:
    """One evaluation. `metrics` or `scenes` is empty if it was not found on disk."""

    global_step: int
    metrics: Mapping[str, float]
    scenes: tuple[Scene, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoint:
    """One weight sync. `metrics`: all numbers of its event."""

    receipt: SyncReceipt
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCounts:
    """The numbers of samples that a run read. `bad_records`: split -> kind of mistake -> action (drop or clip) ->
    number."""

    num_train: int
    num_evaluation: int
    bad_records: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeSample:
    """A sample that was learned in a step with a spike. `row_loss`: loss of the sample's packed row, in nats per token.
    `scene`: the sample's labels, without predictions; None: the run did not write them."""

    sample_id: str
    row_loss: float
    scene: Scene | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikePoint:
    """A spike: the loss or gradient norm (`metric`) leapt in this step to `value`, from about `usual`."""

    global_step: int
    metric: str
    value: float
    usual: float
    samples: tuple[SpikeSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The progress of a run."""

    total_steps: int  # 0: not known
    ended: str  # `finished`, `stopped` or `failed`; empty while the run continues, or if its process was killed
    because: str  # reason of the end; may be empty
    seconds_per_step: float  # mean over the last steps, evaluations between them included; NaN: not known
    time_up_s: float  # Unix time at which `training.max_minutes` end the run; NaN: the run ends by its last step


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Everything that a run measured. All sequences are in the order of time."""

    name: str
    path: Path
    config: Mapping[str, object]
    steps: tuple[StepResult, ...]
    syncs: tuple[SyncPoint, ...]
    evals: tuple[EvalPoint, ...]
    test: EvalPoint | None  # the score of `data.test` at the run's end; None if that set was not scored separately
    timelines: tuple[StepTimeline, ...]
    groups: tuple[GroupStep, ...]
    spikes: tuple[SpikePoint, ...]
    status: Status
    data: DataCounts | None
    wall_s: float  # seconds from the first to the last event
    last_event_s: float | None  # Unix time of the last event; None without events
    notes: tuple[str, ...]  # sentences for the user: warnings of the run, and which files are missing or damaged

    def setting(self, *keys: str) -> object:
        """Return the configuration's value at `keys`, which lead from section to key; None if there is no such key."""
        value: object = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSet:
    """The runs of one report, the main one first. `recipe`: content of the folder's `recipe.json`; empty without it."""

    title: str
    runs: tuple[RunRecord, ...]
    recipe: Mapping[str, object]
