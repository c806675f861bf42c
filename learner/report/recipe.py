"""Makes the report's section on a recipe: what each stage gained and lost, and why it was run.

In: the content of `recipe.json`. Out: a sentence, a table of the stages, and texts about each stage, for
`templates/page.html`. A damaged file gives no section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learner.report.charts import Table


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
