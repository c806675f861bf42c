"""Reports steps whose loss or gradient norm leaps, with their samples: often one of these samples has a wrong label.

In: the result of each optimizer step, combined from all ranks. Out: a `Spike` if a value is far above the WINDOW values
before it. "Far" means: above the median of these values by more than DISTANCE times their median distance from that
median. Medians are used, because earlier spikes hardly change them. A step is compared with steps of its own channel (A
or B). The loss of a policy gradient is about 0 and says nothing, so `grpo` steps are compared by their gradient norm
only. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from learner.data.views import shown_images, shown_sizes
from learner.records import DetectionObject, LearnedRow, Sample, StepResult
from learner.tasks.detection.task import object_json

# The constants below were tested in a run of 40 steps, one with a wrongly labelled sample: only this step was reported.
# Max and min number of earlier steps with which a step is compared. With fewer earlier steps there are no spikes.
WINDOW, FEWEST = 40, 8
DISTANCE = 8.0  # min distance of a spike from the median, in median distances (8 are 5.4 sigma of a Gaussian)
FACTOR = 1.5  # a spike is also above the median times this factor
MAX_SAMPLES = 8  # max samples that are written for a spike
METRICS = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A leap of `metric` to `value`. `usual`: the metric's median in the steps before."""

    metric: str
    value: float
    usual: float


@dataclass
class SpikeWatch:
    """Finds spikes. The last WINDOW values of each metric and channel are kept."""

    _last: dict[tuple[str, str], deque[float]] = field(default_factory=dict)

    def after(self, step: StepResult) -> list[Spike]:
        """Return this step's spikes, at most one per metric; [] if no metric leapt."""
        return [spike for metric in METRICS if (spike := self._spike(metric, step))]

    def _spike(self, metric: str, step: StepResult) -> Spike | None:
        value = float(getattr(step, metric))
        if not math.isfinite(value) or (metric == "loss" and "grpo/groups" in step.metrics):
            return None
        last = self._last.setdefault((metric, step.channel), deque(maxlen=WINDOW))
        usual = statistics.median(last) if len(last) >= FEWEST else math.inf
        distance = statistics.median(abs(v - usual) for v in last) if last else 0.0
        leaps = usual > 0 and value > max(usual + DISTANCE * distance, FACTOR * usual)
        last.append(value)
        return Spike(metric=metric, value=value, usual=usual) if leaps else None


def spiking_samples(rows: Sequence[LearnedRow], samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Return at most MAX_SAMPLES samples of the step's `rows` as JSON, beginning with the rows of the highest loss. A
    sample that is in `samples` has its images and labels too."""
    ordered = sorted(rows, key=lambda row: -row.loss)
    # If a sample is in several rows, the last entry wins, which has the highest loss.
    losses = {sample_id: row.loss for row in reversed(ordered) for sample_id in row.sample_ids}
    chosen = dict.fromkeys(sample_id for row in ordered for sample_id in row.sample_ids)
    ids = list(chosen)[:MAX_SAMPLES]
    wanted, known = set(ids), dict[str, Sample]()
    for sample in samples:
        if sample.sample_id in wanted:
            known[sample.sample_id] = sample
    return [{"id": i, "row_loss": losses[i], **(_labels(known[i]) if i in known else {})} for i in ids]


def _labels(sample: Sample) -> Mapping[str, object]:
    """Return a sample's images and labels, with the same keys as in the file of an evaluation. Labels of other tasks
    than detection are left out."""
    drawn = [obj for obj in sample.objects if isinstance(obj, DetectionObject)]
    return {
        "images": shown_images(sample),
        **shown_sizes(sample),
        "truth": [object_json(obj) for obj in drawn],
        "ignored": [object_json(obj) for obj in sample.ignored],
    }
