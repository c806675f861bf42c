"""Steps whose loss or gradient norm leapt, and the samples that they learned, as they were labelled.

In: a run's `spike` events. Out: marks for its charts, and `SpikingStep` records for `templates/page.html`. A wrong
label is the most frequent cause, and it can be seen in the drawn labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from learner.records import DetectionObject
from learner.report.charts import Chart, number
from learner.report.records import RunRecord, SpikePoint, SpikeSample
from learner.report.scenes import Picture, image_roots, load_picture, shapes_of_labels

MAX_SPIKES = 6
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeCard:
    """One sample of a step with a spike, with its labels drawn."""

    sample: SpikeSample
    picture: Picture | None
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikingStep:
    """One step with a spike. `ident` is the id of its part of the page."""

    ident: str
    heading: str
    cards: Sequence[SpikeCard]


def largest(run: RunRecord) -> dict[int, list[SpikePoint]]:
    """Return the spikes of the MAX_SPIKES steps with the largest spikes, by step."""
    by_step: dict[int, list[SpikePoint]] = {}
    for point in sorted(run.spikes, key=lambda point: -point.value / max(point.usual, 1e-12)):
        if len(by_step) < MAX_SPIKES or point.global_step in by_step:
            by_step.setdefault(point.global_step, []).append(point)
    return {step: by_step[step] for step in sorted(by_step)}


def spikes(run: RunRecord, found: Mapping[int, Sequence[SpikePoint]], *, prefix: str) -> list[SpikingStep]:
    """Return what the page shows of the spikes `found`. Ids in HTML begin with `prefix`."""
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
    """Return the chart with a mark at each spike of `metric`, linked to the spike's samples."""
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
