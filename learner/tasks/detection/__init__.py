"""Detection as a library: parse, match, target, pack and evaluate, without a server and without a GPU.

    from learner.tasks.detection import load_task, rollout_of, sample_of

    task = load_task("Qwen/Qwen3-VL-2B-Instruct", coordinates="digits", container="array")
    sample = sample_of([("cat", (12, 40, 310, 277))], width=640, height=480)
    assignment = task.match(task.parse(rollout_of(sample, answer, task)))
    task.evaluate([assignment])["f1@0.5"]

`DetectionTask` has the stages as methods, `LossConfig` the weights of a target. `library.py` makes records from what a
program has at hand: a folder of a model, boxes in pixels, an answer's text. `docs/notebooks/library.ipynb` shows all of
it at work. Everything is pure, and the names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learner.config.schema import LossConfig, TaskConfig
    from learner.records import Assignment, DetectionObject, PackedRow, ParsedRollout, Rollout, Sample, Segment, Target
    from learner.tasks.detection.bins import canonical_order, to_bins
    from learner.tasks.detection.library import load_task, pack, rollout_of, sample_of, segment_of
    from learner.tasks.detection.metrics import bootstrap_difference, bootstrap_interval
    from learner.tasks.detection.task import DetectionTask

__all__ = [
    "Assignment",
    "DetectionObject",
    "DetectionTask",
    "LossConfig",
    "PackedRow",
    "ParsedRollout",
    "Rollout",
    "Sample",
    "Segment",
    "Target",
    "TaskConfig",
    "bootstrap_difference",
    "bootstrap_interval",
    "canonical_order",
    "load_task",
    "pack",
    "rollout_of",
    "sample_of",
    "segment_of",
    "to_bins",
]

_NAMES_IN = {
    "learner.config.schema": "LossConfig TaskConfig",
    "learner.records": "Assignment DetectionObject PackedRow ParsedRollout Rollout Sample Segment Target",
    "learner.tasks.detection.bins": "canonical_order to_bins",
    "learner.tasks.detection.library": "load_task pack rollout_of sample_of segment_of",
    "learner.tasks.detection.metrics": "bootstrap_difference bootstrap_interval",
    "learner.tasks.detection.task": "DetectionTask",
}
_HOME_OF = {name: home for home, names in _NAMES_IN.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
