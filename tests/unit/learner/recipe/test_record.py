"""What a recipe keeps, and the rule by which it begins `grpo`, on what recipes measured (R49)."""

from __future__ import annotations

import pytest

from learner.predict.features import FeatureEstimate
from learner.predict.recommend import Rule, better_places
from learner.recipe.record import Record, StageResult, grpo_pays

RECORD = Record(digest="", minutes=1.0, metric="auto")


def stage(name: str, *, score_before: float, score: float) -> StageResult:
    return StageResult(
        name=name,
        why="",
        ended="",
        labels="",
        completed=True,
        seconds=1.0,
        steps=24,
        best_step=8,
        score_before=score_before,
        score=score,
        before={},
        after={},
        metric="estimated_f1@0.5",
    )


@pytest.mark.parametrize(("score", "best"), [(0.61, "grpo"), (0.6, "sft"), (0.59, "sft")])
def test_scores_decide(score: float, best: str) -> None:
    after_sft = RECORD.with_stage(stage("sft", score_before=0.5, score=0.6))
    found = after_sft.with_stage(stage("grpo", score_before=0.5, score=score))
    assert (found.best_of, found.best_score) == (best, max(score, 0.6))
    assert found.metric == "estimated_f1@0.5", "what the first stage was decided by decides all"


def found(places: tuple[float, float, float], silent: float) -> dict[str, FeatureEstimate]:
    return {
        "headroom_places": FeatureEstimate(*places),
        "no_signal": FeatureEstimate(silent, max(0.0, silent - 0.1), min(1.0, silent + 0.1)),
    }


@pytest.mark.parametrize(
    ("regime", "places", "silent", "pays"),
    [
        ("complete: grpo has 0.827, sft 0.834", (0.017, 0.004, 0.032), 0.25, False),
        ("10% wrong names, nothing completed", (0.019, 0.004, 0.037), 0.22, False),
        ("much is left", (0.040, 0.012, 0.071), 0.11, True),
        ("perhaps nothing is left", (0.040, -0.001, 0.081), 0.11, False),
        ("answers hardly differ", (0.040, 0.012, 0.071), 0.81, False),
    ],
)
def test_with_complete_labels_grpo_begins_where_its_gain_is_likely(
    regime: str, places: tuple[float, float, float], silent: float, pays: bool
) -> None:
    rule = grpo_pays(found(places, silent))
    assert rule.holds is pays, regime
    assert f"{places[0]:.3f}" in rule.reason


def test_a_recommendation_asks_for_more_than_a_recipe() -> None:
    """A recipe only spends the time that it has left, and keeps the better weights."""
    measured = found((0.040, 0.012, 0.071), 0.11)
    asked: list[Rule] = [better_places(measured), grpo_pays(measured)]
    assert [rule.holds for rule in asked] == [False, True]
    sure = found((0.060, 0.031, 0.090), 0.11)
    assert better_places(sure).holds
    assert grpo_pays(sure).holds
