"""What a recipe keeps: by scores, and where labels had gaps by what validation can tell (R49)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.predict.features import FeatureEstimate
from learner.recipe.record import Record, StageResult, score_difference
from shared.errors import CheckpointError

RECORD = Record(digest="", minutes=1.0, metric="fm@0.5")


def stage(name: str, *, score_before: float, score: float, best_step: int = 8) -> StageResult:
    return StageResult(
        name=name,
        why="",
        ended="",
        labels="",
        completed=True,
        seconds=1.0,
        steps=24,
        best_step=best_step,
        score_before=score_before,
        score=score,
        before={},
        after={},
    )


def write_scenes(root: Path, name: str, hits: list[int]) -> None:
    """Write the evaluation of a stage at step 8: of the 4 objects of each scene so many are found."""
    (root / name / "eval").mkdir(parents=True)
    counts = [{"truth": 4.0, "predictions": 4.0, "tp@0.50": float(n)} for n in hits]
    lines = [json.dumps({"id": f"s{i}", "counts": one}) + "\n" for i, one in enumerate(counts)]
    (root / name / "eval" / "step_000008.jsonl").write_text("".join(lines))


SFT = stage("sft", score_before=0.5, score=0.6)
AFTER_SFT = RECORD.with_stage(SFT)


@pytest.mark.parametrize(
    ("score", "interval", "best"),
    [
        (0.59, (-0.03, 0.01), "grpo"),
        (0.59, (-0.03, -0.001), "sft"),
        (0.50, (-0.2, 0.1), "sft"),  # no better than the start
        (0.61, None, "grpo"),  # labels were complete: the scores decide
        (0.59, None, "sft"),
    ],
)
def test_grpo_replaces_sft_unless_it_is_shown_to_be_worse(
    score: float, interval: tuple[float, float] | None, best: str
) -> None:
    versus = None if interval is None else FeatureEstimate(score - 0.6, *interval)
    found = AFTER_SFT.with_stage(stage("grpo", score_before=0.5, score=score), versus)
    assert found.best_of == best
    assert found.best_score == {"grpo": score, "sft": 0.6}[best]


def test_a_grpo_that_gained_nothing_has_no_weights_to_keep() -> None:
    versus = FeatureEstimate(0.0, 0.0, 0.0)
    found = AFTER_SFT.with_stage(stage("grpo", score_before=0.6, score=0.6, best_step=0), versus)
    assert found.best_of == "sft"


def test_the_difference_is_over_the_same_scenes(tmp_path: Path) -> None:
    write_scenes(tmp_path, "sft", [4, 3] * 20)
    write_scenes(tmp_path, "grpo", [2, 1] * 20)
    grpo = stage("grpo", score_before=0.5, score=0.3)
    found = score_difference(tmp_path, "fm@0.5", SFT, grpo)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((-0.5, -0.5, -0.5)), "every scene has 2 hits fewer"
    assert score_difference(tmp_path, "reward", SFT, grpo) is None, "no ratio of counts: its values decide"
    (tmp_path / "grpo" / "eval" / "step_000008.jsonl").unlink()
    with pytest.raises(CheckpointError) as caught:
        score_difference(tmp_path, "fm@0.5", SFT, grpo)
    assert "step_000008" in caught.value.found
    assert f"remove {tmp_path / 'grpo'}," in caught.value.remedy
    (tmp_path / "sft" / "eval" / "step_000008.jsonl").unlink()
    with pytest.raises(CheckpointError) as caught:
        score_difference(tmp_path, "fm@0.5", SFT, grpo)
    assert f"remove {tmp_path}," in caught.value.remedy, "sft has its result already, and is not run again"
