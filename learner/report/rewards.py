"""Makes the report's section on rewards, with groups of answers side by side (`grpo`, R37).

In: the metrics of a run, and its `groups.jsonl`. Out: a `RewardSection` for `templates/page.html`: the reward over
steps, the distribution of rewards at the beginning and at the end, and up to MAX_GROUPS groups (all answers to one
prompt) from the first step to the last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.records import DetectionObject
from learner.report.charts import Chart, Column, Plane, Series, Table, line_chart, number, parted, ticks
from learner.report.records import GroupStep, RunRecord, ScoredScene
from learner.report.scenes import LEGEND, Picture, image_roots, load_picture, shapes_of_scene

MAX_GROUPS = 4  # max groups of answers that are shown
NUM_BINS = 12  # number of bars in each part of the histogram
BEGIN, END = ("first quarter", "before"), ("last quarter", "after")  # (name, color) of the two parts of the histogram


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPanel:
    """One answer of a group, as the page shows it. `counts`: short texts with its numbers of right and wrong objects.
    `shapes`: the objects to draw, as (color, tooltip, object)."""

    scored: ScoredScene
    counts: Sequence[str]
    shapes: Sequence[tuple[str, str, DetectionObject]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """One group of answers to a scene, as the page shows it. `panels`: its answers, sorted by reward, the highest
    first."""

    global_step: int
    scene_id: str
    picture: Picture | None
    panels: Sequence[AnswerPanel]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSection:
    heading: str
    charts: Sequence[Chart]
    flat: Table | None
    groups: Sequence[GroupRow]
    legend: Sequence[tuple[str, str]]


def reward_section(run: RunRecord, *, heading: str) -> RewardSection | None:
    """Return the section on a run's rewards; None if the run has no rewards."""
    charts, flat = parted((_curve(run), _histogram(run.groups)))
    groups = _groups(run)
    if not charts and not groups and flat is None:
        return None
    shown = ("truth", "missed", "hit", "class", "spurious")
    return RewardSection(
        heading=heading, charts=charts, flat=flat, groups=groups, legend=[(c, LEGEND[c]) for c in shown]
    )


def _curve(run: RunRecord) -> Chart | None:
    """Return the chart of the mean reward by step, over all ranks. The band around the line is the spread of the
    rewards of rank 0's rollouts."""
    spread = {float(step.global_step): statistics.pstdev(step.rewards) for step in run.groups}
    sampled = [(float(s.global_step), s.metrics["reward"]) for s in run.steps if "reward" in s.metrics]
    greedy = [(float(e.global_step), e.metrics["reward"]) for e in run.evals if "reward" in e.metrics]
    bands = [spread.get(x, 0.0) for x, _ in sampled]
    series = [Series("rollouts of the step", sampled, "after", spread=bands if spread else ())]
    series += [Series("evaluation, greedy", greedy, "other")] if greedy else []
    note = "Band: one standard deviation of the step's rollouts." if spread else ""
    return line_chart("Reward", series, note=note)


def _histogram(groups: Sequence[GroupStep]) -> Chart | None:
    """Return the histogram of rank 0's rewards, with bars for the first and for the last quarter of the steps; None
    without recorded rewards."""
    quarter = math.ceil(len(groups) / 4)
    if not quarter:
        return None
    parts = [[reward for step in some for reward in step.rewards] for some in (groups[:quarter], groups[-quarter:])]
    everything = parts[0] + parts[1]
    low, high = min(everything), max(everything)
    width = (high - low) / NUM_BINS or 1.0
    shares = [_shares(part, low, width) for part in parts]
    top = max(max(one) for one in shares)
    plane = Plane(x_low=low, x_high=low + NUM_BINS * width, y_ticks=ticks(0.0, top), x_label="reward", counted=False)
    stacks = []
    for i in range(NUM_BINS):
        begin = low + i * width
        for (name, color), share, place in zip((BEGIN, END), shares, (0.27, 0.73), strict=True):
            at = begin + place * width
            tip = (
                f"{name}: {share[i]:.0%} of the rollouts have a reward from {number(begin)} to {number(begin + width)}"
            )
            stacks.append(
                (Column(x=at, y=share[i], low=0.0, high=share[i], first=at, last=at), tip, [(color, 0.0, share[i])])
            )
    return Chart(
        title="Rewards of rollouts, share",
        legend=[BEGIN, END] if len(groups) > 1 else [BEGIN],
        plane=plane,
        stacks=stacks,
        stack_width=(plane.x(width) - plane.x(0)) * 0.42,
        note=f"Steps {_steps(groups[:quarter])}, and {_steps(groups[-quarter:])}.",
    )


def _shares(rewards: Sequence[float], low: float, width: float) -> list[float]:
    """Return the fraction of the rewards in each of NUM_BINS bins, which begin at `low` and are `width` wide. A reward
    at the upper edge of the last bin is in that bin."""
    counts = [0] * NUM_BINS
    for reward in rewards:
        counts[min(NUM_BINS - 1, int((reward - low) / width))] += 1
    return [count / len(rewards) for count in counts]


def _steps(groups: Sequence[GroupStep]) -> str:
    first, last = groups[0].global_step, groups[-1].global_step
    return str(first) if first == last else f"{first} to {last}"


def _groups(run: RunRecord) -> list[GroupRow]:
    """Return up to MAX_GROUPS of the recorded groups: the first, the last, and evenly spaced groups between them."""
    recorded = [step for step in run.groups if step.answers]
    count = min(MAX_GROUPS, len(recorded))
    places = sorted({round(i * (len(recorded) - 1) / max(1, count - 1)) for i in range(count)})
    roots = image_roots(run)
    return [_row(recorded[place], roots) for place in places]


def _row(step: GroupStep, roots: Sequence[Path]) -> GroupRow:
    ordered = sorted(step.answers, key=lambda one: -one.reward)
    scene = ordered[0].scene
    return GroupRow(
        global_step=step.global_step,
        scene_id=scene.scene_id,
        picture=load_picture(scene.images, roots, scene.sheet),
        panels=[_panel(one) for one in ordered],
    )


def _panel(scored: ScoredScene) -> AnswerPanel:
    counts, shapes = shapes_of_scene(scored.scene, scored.by_object)
    return AnswerPanel(scored=scored, counts=counts, shapes=shapes)
