"""Writes the report's page: templates turn the records of all sections into one HTML file, which has no scripts and
needs no network."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import jinja2
import yaml

from learner.report import results
from learner.report.charts import number, parted
from learner.report.read import read_runs
from learner.report.recipe import recipe_section
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
    `report.html` in `run_dir`. `compare`: folder of a run, or of runs, to show beside these runs. Raises DataError if
    there is no run, OutputError if the file cannot be written; an earlier report is then left as it was."""
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
