"""What the page can't show, or should warn of: files absent or damaged, evaluations missing, syncs that fell back.

In: the runs and their standings. Out: a list for the top of the page, or None when all is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from learner.report.markup import Html, el
from learner.report.read import Run
from learner.report.scores import F1
from learner.report.standings import Standing


def notes(all_standings: Sequence[Standing]) -> Html | None:
    """One line per thing, named by its run where there are several."""
    several = len(all_standings) > 1
    found = [
        f"{standing.run.name}: {text}" if several else text
        for standing in all_standings
        for text in (*standing.run.notes, *_missing(standing, all_standings[0].run), *_disagreement(standing))
    ]
    return el("ul", *(el("li", text) for text in found), cls="notes") if found else None


def _missing(standing: Standing, main: Run) -> list[str]:
    run, said = standing.run, []
    if not run.steps:
        said.append("No optimizer step is recorded yet.")
    if not run.evals:
        said.append("No evaluation is recorded yet, so there is no F1 and no gallery.")
    elif standing.after is None:
        said.append(f"Only one evaluation, at step {run.evals[0].global_step}: nothing to compare it with yet.")
    if any(not point.scenes for point in run.evals):
        said.append("The scenes of an evaluation were not kept; its F1 has no interval.")
    if standing.borrowed:
        said.append(f"“Before” is {main.name}'s evaluation at step 0: both began from the same model.")
    said += [
        f"From ver {s.ver} on all weights were synced, not the adapter: {s.fallback}" for s in run.syncs if s.fallback
    ]
    return said


def _disagreement(standing: Standing) -> list[str]:
    """Both come from the same answers by the same definition: a difference means that files of two runs got mixed."""
    return [
        f"At step {point.global_step} the recorded F1@0.5 is {point.metrics[F1]:.3f}, "
        f"the scenes give {computed.value:.3f}."
        for point, computed in standing.curve
        if F1 in point.metrics and abs(point.metrics[F1] - computed.value) > 5e-4
    ]
