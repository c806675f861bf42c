"""What a recipe keeps: the weights with the best score, of equal ones the earlier (R49)."""

from __future__ import annotations

import pytest

from learner.recipe.record import Record, StageResult

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
