"""Makes the page of `evaluate`: curves, a table of classes, and matrices and a gallery as in a run's report.

In: results of `evaluation.py`, and the boxes that reach a detector's threshold. Out: records of `learner.report`, and
the page. No side effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from learner.detector.evaluation import GRID, DetectorResult, Scored, scenes_of
from learner.records import Sample
from learner.report.charts import Chart, Series, Table, line_chart
from learner.report.page import TEMPLATES
from learner.report.results import MAX_CLASSES, matrix_of, short
from learner.report.scenes import gallery_of
from learner.tasks.detection.ap_interval import AP, AP50

_COLORS = ("after", "other", "data", "target", "sync", "pack")
_MOST_LINES = len(_COLORS)


def page_of(
    samples: Sequence[Sample],
    kept: Mapping[str, Sequence[Sequence[Scored]]],
    results: Sequence[DetectorResult],
    **facts: object,
) -> str:
    """Return the page. `kept`: by detector, for each sample the boxes whose score reaches the detector's threshold.
    `facts`: further variables of the template."""
    scenes = {name: scenes_of(line, samples) for name, line in kept.items()}
    page = TEMPLATES.get_template("evaluation.html").render(
        facts=f"{len(samples)} images, {sum(len(sample.objects) for sample in samples)} objects",
        results=results,
        curves=curves(results),
        classes=class_table(results),
        matrices=[matrix for name, own in scenes.items() if (matrix := matrix_of(own, name)) is not None],
        gallery=gallery_of(
            [(name, {scene.scene_id: scene for scene in own}) for name, own in scenes.items()],
            [Path()],
            f"Images with what was found at the threshold. Worst and best are by F1 of {list(scenes)[:2][-1]}.",
        ),
        **facts,
    )
    return page.encode(errors="replace").decode()


def curves(results: Sequence[DetectorResult]) -> list[Chart]:
    """Return charts of precision by recall and of F1 by score. If there is only one detector, add a chart of precision
    by recall for its most frequent classes."""
    shown = results[:_MOST_LINES]
    mean = [(one.name, one.curves.precision) for one in shown]
    charts = [
        _curve("Precision by recall", mean, "recall", "At IoU 0.5, mean over classes: the area is AP50."),
        _curve(
            "F1 by score", [(one.name, one.curves.f1) for one in shown], "score", "Of boxes with this score or more."
        ),
    ]
    if len(results) == 1 and len(results[0].classes) > 1:
        frequent = sorted(results[0].classes, key=lambda name: -results[0].classes[name]["objects"])[:_MOST_LINES]
        own = [(short(name), results[0].curves.precision_by_class.get(name, [])) for name in frequent]
        charts.insert(
            1, _curve("Precision by recall, classes", own, "recall", "Classes with most objects, at IoU 0.5.")
        )
    return [chart for chart in charts if chart is not None]


def _curve(title: str, lines: Sequence[tuple[str, Sequence[float]]], x_label: str, note: str) -> Chart | None:
    series = [
        Series(name, list(zip(GRID, values, strict=False)), color)
        for (name, values), color in zip(lines, _COLORS, strict=False)
    ]
    chart = line_chart(title, series, x_label=x_label, y_max=1.0, note=note)
    if chart is None or chart.plane is None:
        return None
    return replace(chart, value="", plane=replace(chart.plane, counted=False))


def class_table(results: Sequence[DetectorResult]) -> Table:
    """Return a table with one row per class, classes with the most objects first: AP, AP50 and F1 of each detector."""
    objects = {name: own["objects"] for one in results for name, own in one.classes.items()}
    rows = [
        [short(name), f"{objects[name]:.0f}"]
        + [f"{one.classes[name][metric]:.3f}" for one in results for metric in (AP, AP50, "f1@0.5")]
        for name in sorted(objects, key=lambda name: (-objects[name], name))
    ]
    shown = [*rows[:MAX_CLASSES], *([[f"… and {len(rows) - MAX_CLASSES} more"]] if len(rows) > MAX_CLASSES else [])]
    columns = [(metric, one.name) for one in results for metric in ("AP", "AP50", "F1@0.5")]
    return Table(["Class", "Objects", *columns], shown)
