"""Writes the report's page: templates turn the records of all sections into one HTML file, which has no scripts and
needs no network. The section on a recipe is made here, from the content of `recipe.json`: what each stage gained and
lost, and why it was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml

from learner.report import results
from learner.report.charts import Table, number, parted
from learner.report.read import read_runs
from learner.report.records import RunSet
from learner.report.rewards import reward_section
from learner.report.scenes import gallery, place_tags
from learner.report.scores import progress_of
from learner.report.training import training
from learner.run.files import write_atomically


def _written(value: object) -> object:
    """Return a value as it is written by templates: a float with at most two decimals, None as an empty text."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return "" if value is None else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("learner.report"),
    # Texts come from annotations and models, so each is escaped.
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_written,
)
TEMPLATES.filters["number"] = number
TEMPLATES.filters["tags"] = place_tags


def write_report(run_dir: Path, *, out: Path | None = None, compare: Path | None = None) -> Path:
    """Write the report of the run or runs in `run_dir`, and return the file's path. `out`: that path; None:
    `report.html` in `run_dir`. `compare`: folder of a run, or of runs, to show next to these runs. Raises DataError if
    there is no run, OutputError if the file cannot be written; an earlier report then stays unchanged."""
    runs = read_runs(run_dir)
    if compare is not None:
        others = read_runs(compare)
        runs = replace(runs, runs=(*runs.runs, *others.runs))
    target = out or run_dir / "report.html"
    # A scene's text may have a lone surrogate, which UTF-8 cannot hold.
    page = render(runs).encode(errors="replace").decode()
    write_atomically(target, page)
    return target


def render(runs: RunSet) -> str:
    """Return the HTML of the whole page, for one run or for several side by side."""
    progress = progress_of(runs.runs)
    several = len(runs.runs) > 1
    rewards = [reward_section(r, heading=f"Rewards: {r.name}" if several else "Rewards") for r in runs.runs]
    sections = [
        training(r, heading=f"Training: {r.name}" if several else "Training", prefix=f"run-{i}-")
        for i, r in enumerate(runs.runs)
    ]
    evaluation, flat_evaluation = parted([*results.f1_charts(progress), *results.iou_charts(progress)])
    page = TEMPLATES.get_template("page.html")
    return page.render(
        title=runs.title,
        kicker=f"Report of {len(runs.runs)} runs" if several else "Run report",
        facts=results.facts(runs),
        verdict=results.verdict(progress),
        cards=results.cards(progress),
        notes=results.notes(progress),
        recipe=recipe_section(runs.recipe),
        evaluation_charts=evaluation,
        flat_evaluation=flat_evaluation,
        main_metrics=results.metrics_table(progress, only=results.SHOWN),
        comparison=results.comparison_table(progress),
        retained=[table for one in progress if (table := results.retained_table(one, named=several))],
        classes=results.class_table(progress),
        classes_of=results.last_evaluation(progress[0]),
        confusion=results.confusion_matrix(progress[0]),
        metrics=results.metrics_table(progress),
        rewards=[section for section in rewards if section],
        trainings=[section for section in sections if section],
        gallery=gallery(progress),
        runs=[(f"{run.name}: " if several else "", run) for run in runs.runs],
        to_yaml=partial(yaml.safe_dump, sort_keys=False, allow_unicode=True),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSection:
    """The section on a recipe. `result`: a text that says which weights are best, and why the recipe ended. `told`: for
    each stage its name, and its texts by heading (`Why`, `Labels`, `Gained`, `Lost`, `Ended`)."""

    result: str
    stages: Table
    told: list[tuple[str, Mapping[str, str]]]


def recipe_section(recipe: Mapping[str, Any]) -> RecipeSection | None:
    """Return the recipe's section; None if there is no recipe, or no stage of it has ended."""
    try:
        rows = [_row(stage) for stage in recipe["stages"]]
        told = [(str(stage["name"]), _told(stage)) for stage in recipe["stages"]]
        steps = {stage["name"]: f" at step {stage['best_step']}" for stage in recipe["stages"]}
        best = f"{recipe['best_of']}{steps.get(recipe['best_of'], '')}"
        best = f"{best}, {recipe['metric']} {float(recipe['best_score']):.3f}"
        ended = recipe["ended"] or "not yet"
    except (KeyError, TypeError, ValueError):
        return None
    stages = Table(["Stage", f"{recipe['metric']}", "Best step", "Minutes"], rows)
    result = f"Best on validation: {best}. Ended: {ended}. {_OF_BEST}"
    return RecipeSection(result=result, stages=stages, told=told)


_OF_BEST = (
    "Scores, gains and losses here are those of each stage's best step, the rest of this page shows its last one."
)


def _row(stage: Mapping[str, Any]) -> list[str]:
    return [
        str(stage["name"]),
        f"{float(stage['score_before']):.3f} to {float(stage['score']):.3f}",
        f"{stage['best_step']} of {stage['steps']}",
        f"{float(stage['seconds']) / 60:.1f}",
    ]


def _told(stage: Mapping[str, Any]) -> Mapping[str, str]:
    return {
        "Why": str(stage["why"]),
        "Labels": str(stage["labels"] or "as annotated"),
        "Gained": ", ".join(stage["gained"]) or "nothing",
        "Lost": ", ".join(stage["lost"]) or "nothing",
        "Ended": str(stage["ended"]),
    }
