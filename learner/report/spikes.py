"""Shows steps whose loss or gradient norm leapt (spikes), with the labels of the samples that were learned in them.

In: a run's `spike` events. Out: marks for its charts, and `SpikingStep` records for `templates/page.html`. The most
frequent cause is a wrong label, and the user can see it in the drawing of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from learner.records import DetectionObject
from learner.report.charts import Chart, number
from learner.report.records import RunRecord, SpikePoint, SpikeSample
from learner.report.scenes import Picture, image_roots, load_picture, shapes_of_labels

MAX_SPIKES = 6  # max steps that are shown
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}  # metric -> its name on the page


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeCard:
    """A sample of a step with a spike. `shapes`: its labels to draw, as (color, tooltip, object)."""

    sample: SpikeSample
    picture: Picture | None
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikingStep:
    """A step with a spike, as the page shows it. `ident`: HTML id of its part of the page."""

    ident: str
    heading: str
    cards: Sequence[SpikeCard]


def largest(run: RunRecord) -> dict[int, list[SpikePoint]]:
    """Return the spikes of at most MAX_SPIKES steps, by step: the spikes whose values are the largest multiples of the
    usual value."""
    by_step: dict[int, list[SpikePoint]] = {}
    for point in sorted(run.spikes, key=lambda point: -point.value / max(point.usual, 1e-12)):
        if len(by_step) < MAX_SPIKES or point.global_step in by_step:
            by_step.setdefault(point.global_step, []).append(point)
    return {step: by_step[step] for step in sorted(by_step)}


def spikes(run: RunRecord, found: Mapping[int, Sequence[SpikePoint]], *, prefix: str) -> list[SpikingStep]:
    """Return the steps of `found` as the page shows them. `prefix`: beginning of their ids in HTML."""
    roots = image_roots(run)
    return [
        SpikingStep(
            ident=f"{prefix}spike-{step}",
            heading=f"Step {step}: {'; '.join(map(_said, points))}",
            cards=[_card(sample, roots) for sample in points[0].samples],
        )
        for step, points in found.items()
    ]


def marked(chart: Chart | None, metric: str, found: Mapping[int, Sequence[SpikePoint]], *, prefix: str) -> Chart | None:
    """Return the chart with a mark at each spike of `metric` that is in `found`. A mark is a link to the step's
    samples."""
    if chart is None:
        return None
    points = [point for points in found.values() for point in points if point.metric == metric]
    return replace(
        chart,
        marks=[
            (float(p.global_step), f"step {p.global_step}: {_said(p)}", f"{prefix}spike-{p.global_step}")
            for p in points
        ],
    )


def _said(point: SpikePoint) -> str:
    return f"{NAMES.get(point.metric, point.metric)} {number(point.value)}, usually {number(point.usual)}"


def _card(sample: SpikeSample, roots: Sequence[Path]) -> SpikeCard:
    scene = sample.scene
    picture = load_picture(scene.images, roots, scene.sheet) if scene else None
    return SpikeCard(sample=sample, picture=picture, shapes=shapes_of_labels(scene) if scene else [])
