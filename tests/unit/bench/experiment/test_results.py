"""Result files come back as they were written, and intervals hold what scenes and seeds change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.experiment.results import Draws, Result, markdown, read_results, summarize, write_result
from learner.tasks.detection.metrics import COLUMNS
from tests.unit.bench.experiment.runs import write_run

REFERENCE = "rollout matching"


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, step_s=2.0, hits=[5, 7])
    (tmp_path / "r").mkdir()
    write_result(folder, "sft", 17, tmp_path / "r" / "a.json")
    write_result(folder, "base", 17, tmp_path / "r" / "b.json", at_start=True)
    after, before = read_results(tmp_path / "r")
    assert (after.steps, after.train_s, after.medians["learn_s"]) == (3, 6.0, 1.0)
    assert after.scenes[:, COLUMNS.index("tp@0.50")].tolist() == [5, 7]
    assert before.scenes[:, COLUMNS.index("tp@0.50")].tolist() == [0, 0]


def made_up(arm: str, seed: int, hits: Sequence[float]) -> Result:
    scenes = np.zeros((len(hits), len(COLUMNS)))
    for name, value in (("samples", 1.0), ("truth", 10.0), ("predictions", 10.0)):
        scenes[:, COLUMNS.index(name)] = value
    scenes[:, COLUMNS.index("tp@0.50")] = hits
    ids = tuple(map(str, range(len(hits))))
    return Result(arm=arm, seed=seed, steps=1, train_s=1.0, medians={}, sample_ids=ids, scenes=scenes)


def test_intervals_hold_what_scenes_and_seeds_change() -> None:
    """F1@0.5 of such scenes is mean(hits) / 10, so both spreads are known."""
    rng = np.random.default_rng(0)
    hits = rng.integers(0, 11, size=400).astype(float)
    same = summarize([made_up("sft", seed, hits) for seed in (1, 2, 3)])["arms"]["sft"]["metrics"]["f1@0.5"]
    assert same["value"] == pytest.approx(hits.mean() / 10, abs=1e-3)
    assert same["high"] - same["low"] == pytest.approx(2 * 1.96 * hits.std() / 10 / 20, rel=0.15)
    apart = [made_up("sft", seed, np.full(400, level)) for seed, level in ((1, 4.0), (2, 5.0), (3, 6.0))]
    spread = summarize(apart)["arms"]["sft"]["metrics"]["f1@0.5"]
    assert (spread["low"], spread["value"], spread["high"]) == (0.4, 0.5, 0.6)


def test_arms_are_compared_on_the_same_draws_of_scenes() -> None:
    """One more hit in every scene is a difference without any spread, however scenes differ."""
    hits = np.random.default_rng(1).integers(0, 10, size=300).astype(float)
    summary = summarize([made_up("sft", 1, hits), made_up(REFERENCE, 1, hits + 1), made_up("base", 1, hits[:7])])
    minus = summary["arms"][REFERENCE]["minus"]["sft"]["f1@0.5"]
    assert minus == {"value": 0.1, "low": 0.1, "high": 0.1}
    assert "base" not in summary["arms"], "runs of other scenes than the first one's can't be compared with it"
    assert f"| {REFERENCE} | 1 |" in markdown(summary, [REFERENCE])
    assert markdown(summarize([]), ["sft"]) == "no run has ended\n"


def test_draws_are_the_same_every_time() -> None:
    runs = [np.random.default_rng(i).random((20, len(COLUMNS))) for i in range(3)]
    first, second = (Draws(20, num_draws=50).sums("sft", runs) for _ in range(2))
    assert (first == second).all()
    assert first.mean(axis=0) == pytest.approx(sum(run.sum(axis=0) for run in runs), rel=0.15)
