"""What runs of a study say: their answers scored by two sets of labels, and a table with intervals.

In: the evaluation files of a run, whose truth are the labels with gaps, and all labels. Out: a result file per run, a
file of its answers beside it, and per arm its course by both sets of labels, with intervals over scenes and seeds. An
interval's draws take scenes with replacement, the same for all arms, and each arm's seeds with replacement. So it
covers what other photographs and another seed would change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.experiment.gaps import Row
from bench.figures import markdown_table
from learner.records import DetectionObject
from learner.report.read import read_scene
from learner.report.records import Scene
from learner.report.scores import classify
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.match import Overlaps

GAPS, ALL = "gaps", "all"  # by which labels a score is
REFERENCE, BEST = "sft", "sft, all labels"  # arms
_DRAWS = 2000
_SURE = 0.9  # precision up to which a person goes on with a list of suggestions

Counts = NDArray[np.int64]  # [scenes, 3]: right boxes, boxes, objects
Truth = Mapping[str, Sequence[DetectionObject]]  # all objects by scene


def objects_of(row: Row) -> list[DetectionObject]:
    return [
        DetectionObject(one["desc"], "bbox_2d", to_bins(one["bbox_2d"], row["width"], row["height"]))
        for one in row["objects"]
    ]


def scores(counts: Counts) -> dict[str, float]:
    """Return F1, precision and recall at IoU 0.5, and sqrt(precision * recall), over all scenes."""
    f1, precision, recall = (round(float(one), 4) for one in _ratios(counts.sum(axis=0)))
    return {"f1": f1, "precision": precision, "recall": recall, "fm": round((precision * recall) ** 0.5, 4)}


def _ratios(sums: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    right, boxes, objects = (sums[..., i].astype(float) for i in range(3))
    return 2 * right / np.maximum(1, boxes + objects), right / np.maximum(1, boxes), right / np.maximum(1, objects)


def read_evaluations(run_dir: Path) -> dict[int, list[tuple[Row, Scene]]]:
    """Return the lines of a run's evaluations by step, and what is in them."""
    found = {}
    for path in sorted((run_dir / "eval").glob("step_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        scenes = [(line, scene) for line in lines if (scene := read_scene(line)) is not None]
        found[int(path.stem.rpartition("_")[2])] = scenes
    return found


def scored(run_dir: Path, truth: Truth) -> tuple[list[Row], Row]:
    """Return a run's evaluations, by the labels that it was given and by all, and its answers: by step and scene, the
    boxes with their names, in pixels."""
    evaluations, answers = [], {}
    for step, lines in read_evaluations(run_dir).items():
        by_all = {scene.scene_id: replace(scene, truth=tuple(truth[scene.scene_id])) for _, scene in lines}
        counts = {name: _count(scene) for name, scene in by_all.items()}
        given = np.array([_count(scene) for _, scene in lines])
        one = {"step": step, GAPS: scores(given), ALL: scores(np.array(list(counts.values()))), "counts": counts}
        evaluations.append(one)
        answers[str(step)] = {
            line["id"]: [[one["desc"], *one["pixels"]] for one in line["predictions"]] for line, _ in lines
        }
    return evaluations, answers


def _count(scene: Scene) -> list[int]:
    outcome = classify(scene)
    return [len(outcome.found), outcome.num_judged, outcome.num_truth]


# ---- labels ----------------------------------------------------------------------------------------------------------


def right_of(added: Mapping[str, Sequence[DetectionObject]], given: Truth, truth: Truth) -> tuple[int, int]:
    """Return how many added labels are right, and how many there are. Right: one of the objects without a label is
    there, one-to-one, with the same name and IoU >= 0.5."""
    right = sum(len(pairs(objects, unlabelled(given[name], truth[name]))) for name, objects in added.items())
    return right, sum(map(len, added.values()))


def unlabelled(given: Sequence[DetectionObject], truth: Sequence[DetectionObject]) -> list[DetectionObject]:
    """Return the objects without a label."""
    labelled = {j for _, j in pairs(given, truth)}
    return [one for j, one in enumerate(truth) if j not in labelled]


def pairs(a: Sequence[DetectionObject], b: Sequence[DetectionObject]) -> list[tuple[int, int]]:
    return [(i, j) for i, j, _ in Overlaps.of(a, b).match().pairs]


def found_of(suggestions: Sequence[Row], given: Truth, truth: Truth) -> Row:
    """Return what a list of suggestions, the best first, is worth: how many are right, and the largest share of the
    objects without a label that its first ones have at a precision of 0.9 or more. `finds` says of each what an audit
    needs: votes, answers, its probability, and whether it is right."""
    left = {name: unlabelled(given[name], truth[name]) for name in truth}
    missing, right, recall, number, finds = sum(map(len, left.values())), 0, 0.0, 0, []
    for i, one in enumerate(suggestions, 1):
        box = DetectionObject(one["name"], "bbox_2d", to_bins(one["box"], one["width"], one["height"]))
        here = left[one["sample_id"]]
        iou = iou_matrix([box], here)[0] if here else np.zeros(0)
        near = [j for j in np.argsort(-iou) if iou[j] >= 0.5 and here[j].desc == box.desc]
        finds.append([one["votes"], one["answers"], one.get("probability"), bool(near)])
        if near:
            del here[near[0]]
            right += 1
            if right / i >= _SURE:
                recall, number = right / missing, i
    return {
        "missing": missing,
        "suggestions": len(suggestions),
        "right": right,
        "recall": round(right / max(1, missing), 4),
        "first_at_precision_0.9": number,
        "recall_at_precision_0.9": round(recall, 4),
        "finds": finds,
    }


def audit_of(finds: Sequence[Sequence[Any]], number: int, seed: int) -> Row:
    """Return an `audit.json` as a person without mistakes would make it of `number` finds, drawn by the square root of
    how many have as many votes."""
    votes = np.array([one[0] for one in finds])
    weights = 1 / np.sqrt(np.bincount(votes)[votes])
    places = np.random.default_rng(seed).choice(
        len(finds), min(number, len(finds)), replace=False, p=weights / weights.sum()
    )
    rows = []
    for place in places.tolist():
        found, answers, probability, right = finds[place]
        verdict = "right" if right else "nothing there"
        known = {"votes": found, "answers": answers, "probability": probability}
        rows.append({"place": place, **known, "verdict": verdict})
    return {"finds": rows}


# ---- arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arm:
    name: str
    runs: Sequence[Row]

    def course(self, by: str, of: str = "f1") -> list[list[float]]:
        """[seeds, evaluations]"""
        return [[one[by][of] for one in run["evaluations"]] for run in self.runs]

    def chosen(self) -> list[int]:
        """Return per seed the evaluation that the labels with gaps choose: the best `fm`, of equal ones the first."""
        return [int(np.argmax(course)) for course in self.course(GAPS, "fm")]

    def counts(self) -> list[Counts]:
        """Return per seed [scenes, 3] of the chosen evaluation."""
        return [
            np.array(list(run["evaluations"][at]["counts"].values()))
            for run, at in zip(self.runs, self.chosen(), strict=True)
        ]


def read_results(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def summarize(results: Iterable[Row]) -> dict[str, Any]:
    """Return per arm its course by both sets of labels (means over seeds, and the seeds), the chosen evaluation with
    its interval and its difference from `sft`, and what was added to its labels; as JSON values."""
    by_arm: dict[str, list[Row]] = {}
    for one in results:
        by_arm.setdefault(one["arm"], []).append(one)
    arms = [_Arm(name=name, runs=runs) for name, runs in by_arm.items()]
    if not arms:
        return {"arms": {}}
    num_scenes = len(arms[0].counts()[0])
    drawn = {arm.name: _draws(arm, num_scenes) for arm in arms}
    found = {}
    for arm in arms:
        f1 = _ratios(drawn[arm.name])[0]
        one = {
            "seeds": [run["seed"] for run in arm.runs],
            "seconds": round(float(np.median([run["seconds"] for run in arm.runs])), 1),
            "steps": [line["step"] for line in arm.runs[0]["evaluations"]],
            "f1_all": _means(arm.course(ALL)),
            "f1_gaps": _means(arm.course(GAPS)),
            "f1_all_by_seed": arm.course(ALL),
            "f1_gaps_by_seed": arm.course(GAPS),
            "chosen_steps": [arm.runs[i]["evaluations"][at]["step"] for i, at in enumerate(arm.chosen())],
            "chosen": _interval(_whole(arm), f1),
            "labels": _mean_labels(arm.runs),
        }
        reference = next((other for other in arms if other.name == REFERENCE), None)
        if reference is not None and arm is not reference:
            one["minus_sft"] = _interval(_whole(arm) - _whole(reference), f1 - _ratios(drawn[REFERENCE])[0])
        found[arm.name] = one
    return {"scenes": num_scenes, "arms": found}


def _draws(arm: _Arm, num_scenes: int) -> NDArray[np.float64]:
    """[draws, 3] sums. The draws of scenes are the same for all arms."""
    share = np.full(num_scenes, 1 / num_scenes)
    scenes = np.random.default_rng(0).multinomial(num_scenes, share, size=_DRAWS)
    counts = arm.counts()
    rng = np.random.default_rng([0, *arm.name.encode()])
    seeds = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=_DRAWS)
    return np.sum([seeds[:, i, None] * (scenes @ one) for i, one in enumerate(counts)], axis=0)


def _whole(arm: _Arm) -> float:
    return float(_ratios(np.sum([one.sum(axis=0) for one in arm.counts()], axis=0))[0])


def _interval(value: float, draws: NDArray[np.float64]) -> dict[str, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": round(value, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def _means(course: Sequence[Sequence[float]]) -> list[float]:
    return [round(float(one), 4) for one in np.mean(course, axis=0)]


def _mean_labels(runs: Sequence[Row]) -> dict[str, float] | None:
    labels = [run["labels"] for run in runs if run["labels"] is not None]
    if not labels:
        return None
    return {name: round(float(np.mean([one[name] for one in labels])), 3) for name in ("given", "added", "right")}


def table(summary: Mapping[str, Any]) -> str:
    """Return one line per arm, the best last step first: F1@0.5 by all labels and by those with gaps after each
    evaluation."""
    arms = summary["arms"]
    if not arms:
        return "no run has ended"
    best = max(arms[BEST]["f1_all"]) if BEST in arms else None
    head = ["arm", "seeds", "F1@0.5, all labels", "labels with gaps", "best of `sft` on all labels"]
    head += ["chosen by labels with gaps", "minus sft", "labels added, right", "s"]
    rows = []
    for name, arm in sorted(arms.items(), key=lambda item: -item[1]["f1_all"][-1]):
        labels = arm["labels"]
        rows.append(
            [
                name,
                str(len(arm["seeds"])),
                " / ".join(f"{one:.3f}" for one in arm["f1_all"]),
                " / ".join(f"{one:.3f}" for one in arm["f1_gaps"]),
                "" if best is None else f"{max(arm['f1_all']) / max(best, 1e-9):.3f}",
                _shown(arm["chosen"]),
                _shown(arm.get("minus_sft"), sign="+"),
                "" if labels is None else f"{labels['added']:.0f}, {labels['right'] / max(1, labels['added']):.2f}",
                f"{arm['seconds']:.0f}",
            ]
        )
    return "\n".join(markdown_table(head, rows))


def _shown(value: Mapping[str, float] | None, *, sign: str = "") -> str:
    if value is None:
        return ""
    return f"{value['value']:{sign}.3f} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
