"""Answers are scored by both sets of labels, and intervals hold what scenes and seeds change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.experiment.gaps import Row
from bench.experiment.results import audit_of, found_of, objects_of, right_of, scored, summarize, table, unlabelled
from learner.records import DetectionObject


def row(*objects: tuple[str, list[float]]) -> Row:
    return {"objects": [{"desc": name, "bbox_2d": box} for name, box in objects], "width": 100, "height": 100}


A, B, C = ("a", [0.0, 0.0, 20.0, 20.0]), ("b", [40.0, 40.0, 60.0, 60.0]), ("a", [70.0, 70.0, 90.0, 90.0])
FAR = ("a", [0.0, 70.0, 20.0, 90.0])


def line(name: str, predictions: Sequence[DetectionObject], truth: Sequence[DetectionObject]) -> Row:
    def told(objects: Sequence[DetectionObject]) -> list[Row]:
        return [{"desc": one.desc, "bbox_2d": list(one.bins), "pixels": [1.0, 2.0, 3.0, 4.0]} for one in objects]

    about = {"id": name, "images": [name], "width": 100, "height": 100}
    return {**about, "truth": told(truth), "predictions": told(predictions)}


def test_one_answer_is_scored_by_both_sets_of_labels(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    said = objects_of(row(A, B, FAR))
    for step, predictions in ((0, said[:1]), (10, said)):
        text = json.dumps(line("x", predictions, objects_of(row(A))))
        (tmp_path / "eval" / f"step_{step:06d}.jsonl").write_text(text + "\n")
    evaluations, answers = scored(tmp_path, {"x": objects_of(row(A, B, C))})
    assert [one["step"] for one in evaluations] == [0, 10]
    assert [one["gaps"]["f1"] for one in evaluations] == [1.0, 0.5], "two boxes have no label"
    assert [one["all"]["f1"] for one in evaluations] == [0.5, 0.6667], "one of them is right"
    assert [one["counts"]["x"] for one in evaluations] == [[1, 1, 3], [2, 3, 3]]
    assert [[box[0] for box in answers[step]["x"]] for step in ("0", "10")] == [["a"], ["a", "b", "a"]]


def test_an_added_label_is_right_where_an_object_has_none() -> None:
    given, truth = {"x": objects_of(row(A))}, {"x": objects_of(row(A, B, C))}
    assert unlabelled(given["x"], truth["x"]) == truth["x"][1:]
    assert right_of({"x": objects_of(row(A, B, FAR))}, given, truth) == (1, 3), "A has a label already"
    assert right_of({"x": objects_of(row(("a", B[1])))}, given, truth) == (0, 1), "another name"


def test_suggestions_count_as_far_as_they_are_precise() -> None:
    objects = [("a", [10.0 * i, 0.0, 10.0 * i + 8, 8.0]) for i in range(10)] + [("a", [0.0, 50.0, 9.0, 60.0])]
    suggestions = [
        {"sample_id": "x", "name": name, "box": box, "width": 100, "height": 100, "votes": 2, "answers": 8}
        for name, box in [*objects[:9], ("a", [50, 80, 60, 90]), ("b", objects[9][1]), objects[9]]
    ]
    found = found_of(suggestions, {"x": []}, {"x": objects_of(row(*objects))})
    assert [right for *_, right in found.pop("finds")] == [True] * 9 + [False, False, True]
    assert found == {
        "missing": 11,
        "suggestions": 12,
        "right": 10,
        "recall": round(10 / 11, 4),
        "first_at_precision_0.9": 9,
        "recall_at_precision_0.9": round(9 / 11, 4),
    }
    twice = found_of([suggestions[0]] * 2, {"x": []}, {"x": objects_of(row(*objects))})
    assert twice["right"] == 1, "an object is found once"


def test_an_audit_sees_rare_votes_too() -> None:
    finds = [[1, 8, 0.2, False]] * 900 + [[8, 8, 0.9, True]] * 100
    rows = audit_of(finds, 80, seed=1)["finds"]
    assert len({row["place"] for row in rows}) == len(rows) == 80
    assert sum(row["votes"] == 8 for row in rows) == pytest.approx(20, abs=8), "by the square root: 30 to 10"
    assert all((row["verdict"] == "right") == (row["votes"] == 8) for row in rows)
    assert audit_of(finds, 80, seed=1)["finds"] == rows
    assert len(audit_of(finds[:5], 60, seed=1)["finds"]) == 5


def result(arm: str, seed: int, hits: Sequence[float], by_gaps: Sequence[float] = (0.1, 0.2)) -> Row:
    """Ten boxes and ten objects in each scene, so F1 is mean(hits) / 10; at the start nothing is right."""
    counts = [{str(i): [factor * hit, 10, 10] for i, hit in enumerate(hits)} for factor in (0, 1)]
    evaluations = [
        {"step": step, "gaps": {"f1": fm, "fm": fm}, "all": {"f1": factor * float(np.mean(hits)) / 10}, "counts": one}
        for step, factor, fm, one in zip((0, 10), (0, 1), by_gaps, counts, strict=True)
    ]
    labels = {"given": 10, "added": 4, "right": 3} if arm == "more" else None
    return {"arm": arm, "seed": seed, "seconds": 1.0, "evaluations": evaluations, "labels": labels}


def test_intervals_hold_what_scenes_and_seeds_change() -> None:
    hits = np.random.default_rng(0).integers(0, 11, size=400).astype(float)
    same = summarize([result("sft", seed, hits.tolist()) for seed in (1, 2, 3)])["arms"]["sft"]["chosen"]
    assert same["value"] == pytest.approx(hits.mean() / 10, abs=1e-3)
    assert same["high"] - same["low"] == pytest.approx(2 * 1.96 * hits.std() / 10 / 20, rel=0.15)
    apart = [result("sft", seed, [level] * 400) for seed, level in ((1, 4.0), (2, 5.0), (3, 6.0))]
    spread = summarize(apart)["arms"]["sft"]["chosen"]
    assert (spread["low"], spread["value"], spread["high"]) == (0.4, 0.5, 0.6)


def test_arms_are_compared_on_the_same_draws_at_the_step_that_labels_with_gaps_choose() -> None:
    """One more hit in every scene is a difference without any spread, however scenes differ."""
    hits = np.random.default_rng(1).integers(0, 10, size=300).astype(float)
    worse = result("misled", 1, hits.tolist(), by_gaps=(0.3, 0.2))
    runs = [result("sft", 1, hits.tolist()), result("more", 1, (hits + 1).tolist()), worse]
    summary = summarize(runs)
    assert summary["arms"]["more"]["minus_sft"] == {"value": 0.1, "low": 0.1, "high": 0.1}
    assert summary["arms"]["more"]["labels"] == {"given": 10, "added": 4, "right": 3}
    assert summary["arms"]["misled"]["chosen_steps"] == [0]
    assert summary["arms"]["misled"]["chosen"]["value"] == 0.0
    assert "minus_sft" not in summary["arms"]["sft"]
    lines = table(summary).splitlines()
    assert lines[2].startswith("| more | 1 | 0.000 / ")
    assert "4, 0.75" in lines[2]
    assert table(summarize([])) == "no run has ended"
