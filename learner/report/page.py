"""The page: headline, evaluation, training, gallery, details. One file, no script, no network.

In: a `RunSet`. Out: HTML text. Called by `__main__.py` and by whoever wants a report after a run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from learner.report import headline, training
from learner.report.gallery import PER_GROUP, Panel, choose_scenes, gallery
from learner.report.markup import Html, el
from learner.report.notes import notes
from learner.report.pictures import Picture, load_picture
from learner.report.read import EvalPoint, Run, RunSet
from learner.report.scenes import Scene
from learner.report.standings import Standing, standings
from learner.report.style import style_sheet
from learner.report.tables import comparison_table, metrics_table


def render(runs: RunSet) -> str:
    """The whole page of one run, or of several side by side."""
    ranked = standings(runs.runs)
    several = len(runs.runs) > 1
    body = el(
        "main",
        headline.header(runs),
        headline.verdict(ranked),
        headline.cards(ranked),
        notes(ranked),
        _evaluation(ranked),
        *(training.training_section(r, heading=f"Training: {r.name}" if several else "Training") for r in runs.runs),
        _gallery(ranked),
        _details(runs),
        _footer(),
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width,initial-scale=1"),
        el(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none';img-src data:;style-src 'unsafe-inline'",
        ),
        el("title", f"{runs.title} · run report"),
        el("style", Html(style_sheet())),
    )
    return f"<!doctype html>\n{el('html', head, el('body', body), lang='en')}\n"


def _evaluation(ranked: Sequence[Standing]) -> Html | None:
    charts = headline.evaluation_charts(ranked)
    if charts is None:
        return None
    metrics = metrics_table(ranked)
    return el(
        "section",
        el("h2", "Evaluation"),
        charts,
        comparison_table(ranked),
        el("details", el("summary", "All metrics"), metrics, style="margin-top:22px") if metrics else None,
    )


def _gallery(ranked: Sequence[Standing]) -> Html | None:
    main = ranked[0]
    before, after = _by_id(main.before), _by_id(main.after)
    count = PER_GROUP if len(ranked) == 1 else PER_GROUP - 1
    chosen = choose_scenes(before, after or None, count=count) if before else []
    if not chosen:
        return None
    panels = [Panel(name="Before" if after else f"Step {_step(main.before)}", scenes=before)]
    for standing in ranked:
        if scenes := _by_id(standing.after):
            panels.append(Panel(name="After" if len(ranked) == 1 else f"After {standing.run.name}", scenes=scenes))
    roots = _image_roots(main.run)

    def load(scene: Scene) -> Picture | None:
        return load_picture(scene.images[0], roots) if scene.images else None

    when = "before and after training" if after else f"at step {_step(main.before)}"
    lead = f"Scenes of the test set as the model answered them, greedily, {when}."
    return el("section", el("h2", "Test scenes"), el("p", lead, cls="lead"), gallery(chosen, panels, load))


def _by_id(point: EvalPoint | None) -> dict[str, Scene]:
    return {scene.scene_id: scene for scene in point.scenes} if point else {}


def _step(point: EvalPoint | None) -> int:
    return point.global_step if point else 0


def _image_roots(run: Run) -> list[Path]:
    """Where a relative image path may start: the configured root, the annotations' folder, here, the run's folder."""
    configured = run.setting("data", "image_root")
    annotations = [run.setting("data", split) for split in ("test", "val", "train")]
    roots = [Path(configured)] if isinstance(configured, str) else []
    return [*roots, *(Path(a).parent for a in annotations if isinstance(a, str)), Path(), run.path]


def _details(runs: RunSet) -> Html:
    parts: list[Html] = []
    for run in runs.runs:
        name = f"{run.name}: " if len(runs.runs) > 1 else ""
        if run.steps:
            parts.append(el("details", el("summary", f"{name}Steps"), training.steps_table(run)))
        if run.syncs:
            parts.append(el("details", el("summary", f"{name}Weight syncs"), training.sync_table(run)))
        if run.config:
            text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            parts.append(el("details", el("summary", f"{name}Configuration"), el("pre", text)))
    if runs.summary:
        text = json.dumps(runs.summary, indent=2, ensure_ascii=False)
        parts.append(el("details", el("summary", "Summary"), el("pre", text)))
    return el("div", *parts, cls="details")


def _footer() -> Html:
    return el(
        "footer",
        "F1@0.5: a prediction counts when it is matched one to one at IoU ≥ 0.5 and says the same description; sums "
        "over all scenes. Intervals: 95%, percentile bootstrap over scenes, 2,000 draws; a gain draws the same scenes "
        "from both evaluations. Canary gap: mean difference between the learner's and the served log-probabilities.",
    )
