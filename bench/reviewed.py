"""What a person's review of suggestions is worth: `python -m bench.reviewed --out FILE --work DIR`.

Digits with 40% of the training labels missing. The shipped checkpoint's answers suggest what is missing
(`find-missing suggest`). A simulated reviewer looks at the first N suggestions: the published labels are the truth, a
suggestion is accepted if it overlaps a missing object (IoU of at least 0.5), with that object's name. The labels are
written (`find-missing write`), then `sft` learns them. Beside it, without review: `sft` on the labels as they are,
labels completed by votes, `keep_unmatched`, `grpo`. All runs have equal steps and scenes a step, and are scored at
their last one on test scenes with all labels.

Out: a JSON file with F1@0.5 and its interval of every run. A run whose result is in the file is not done again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.experiment.arms import KEPT, Arm, run_config
from bench.figures import circumstances
from bench.models import CHECKPOINT
from bench.runs import exit_code_of, read_events, say, start_learner
from deploy.demo.build_data import Build, build
from deploy.launch import Processes
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.answers import Asked
from learner.detector.inputs import Anything
from learner.detector.model import find_model
from learner.missing.review import write_reviewed
from learner.missing.suggest import DECISIONS, read_folder, suggest
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.metrics import COLUMNS, CountTable, bootstrap_interval

BUDGETS = (50, 100, 200, 400)
SCENES, TEST, MISSING, DATA_SEED = 256, 200, 0.4, 3
STEPS, BATCH, RATE, SEED = 24, 16, 5e-5, 17
ANSWERS = 4
RIGHT_IOU = 0.5
RUN_LIMIT_S = 1500.0

SFT = Arm(variant="sft")
WITHOUT_REVIEW: Mapping[str, Arm] = {
    "sft": SFT,
    "completed by votes, sft": Arm(variant="sft", complete={"rollouts": ANSWERS}),
    "rollout matching, keep_unmatched": Arm(loss=KEPT),
    "grpo, object credit": Arm(variant="grpo", grpo={"credit": "object"}),
}


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    work: Annotated[Path, typer.Option(help="Scratch.")],
    arm: Annotated[list[str] | None, typer.Option(help="Only these runs without review.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Only these budgets.")] = None,
) -> None:
    """Run what is not in the file yet."""
    chosen = {name: WITHOUT_REVIEW[name] for name in arm} if arm is not None else WITHOUT_REVIEW
    budgets = BUDGETS if budget is None else budget
    result = json.loads(out.read_text()) if out.is_file() else {**circumstances(), "runs": {}}

    def compare(processes: Processes) -> None:
        whole, gaps = work / "whole", work / "gaps"
        for folder, missing in ((whole, 0.0), (gaps, MISSING)):
            build(Build(train=SCENES, val=0, test=TEST, annotation_dropout=missing, seed=DATA_SEED), folder)
        runs = {f"{n} reviewed, sft": SFT for n in budgets} | dict(chosen)
        for name, own in runs.items():
            if name in result["runs"]:
                continue
            train, told = gaps / "train.jsonl", dict[str, Any]()
            if name.endswith("reviewed, sft"):
                train, told = reviewed(int(name.partition(" ")[0]), whole, gaps, work)
            result["runs"][name] = told | run(processes, name, own, train, gaps / "test.jsonl", work)
            write_atomically(out, json.dumps(result, indent=1) + "\n")
            say(f"{name}: {result['runs'][name]}")

    sys.exit(exit_code_of(compare, lambda: None))


# ---- the reviewer ----------------------------------------------------------------------------------------------------


def reviewed(number: int, whole: Path, gaps: Path, work: Path) -> tuple[Path, dict[str, Any]]:
    """The labels after a review of the first `number` suggestions, and what the review was."""
    folder = work / "suggestions"
    if not (folder / "suggestions.json").is_file():
        began = time.monotonic()
        data = DataConfig(train=str(gaps / "train.jsonl"))
        suggest(find_model(CHECKPOINT), data, folder, Asked(backend="hf", samples=ANSWERS))
        say(f"suggestions after {time.monotonic() - began:.0f} s")
    _, suggestions = read_folder(folder)
    decisions = judge(suggestions[:number], missing_objects(whole, gaps))
    write_atomically(folder / DECISIONS, json.dumps(decisions))
    train = gaps / f"train-{number}.jsonl"
    train.unlink(missing_ok=True)
    accepted = write_reviewed(folder, train)
    return train, {"reviewed": min(number, len(suggestions)), "accepted": accepted, "suggestions": len(suggestions)}


def missing_objects(whole: Path, gaps: Path) -> dict[str, tuple[Sample, list[DetectionObject]]]:
    """By sample id, the objects that lost their labels."""
    found = {}
    for full, kept in zip(*(_samples(folder) for folder in (whole, gaps)), strict=True):
        found[full.sample_id] = (full, [obj for obj in full.objects if obj not in kept.objects])
    return found


def _samples(folder: Path) -> list[Sample]:
    path = str(folder / "train.jsonl")
    return load_samples(DataConfig(train=path), path, Anything())


def judge(
    suggestions: Sequence[Mapping[str, Any]], missing: Mapping[str, tuple[Sample, list[DetectionObject]]]
) -> dict[str, dict[str, str]]:
    """The decisions by place. Every missing object is accepted once."""
    left = {sample_id: list(objects) for sample_id, (_, objects) in missing.items()}
    decisions = {}
    for place, one in enumerate(suggestions):
        sample, objects = missing[one["sample_id"]][0], left[one["sample_id"]]
        box = DetectionObject(one["name"], "bbox_2d", to_bins(one["box"], sample.width, sample.height))
        overlaps = iou_matrix([box], objects)[0] if objects else np.zeros(1)
        best = int(overlaps.argmax())
        if overlaps[best] >= RIGHT_IOU:
            decisions[str(place)] = {"decision": "accept", "name": objects.pop(best).desc}
        else:
            decisions[str(place)] = {"decision": "reject", "name": one["name"]}
    return decisions


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(processes: Processes, name: str, arm: Arm, train: Path, test: Path, work: Path) -> dict[str, Any]:
    """One run's F1@0.5 on the test scenes, after its last step."""
    folder = "".join(c if c.isalnum() else "-" for c in name)
    config = run_config(
        arm,
        model=CHECKPOINT,
        train=train,
        test=test,
        run_dir=work / folder,
        steps=STEPS,
        batch_size=BATCH * arm.group,
        engine={"rollout_backend": "hf", "decode_batch_size": 64},
        max_new_tokens=160,
        global_max_length=4608,
        data_workers=0,
        training={"seed": SEED, "learning_rate": 3e-5 if arm.grpo is not None else RATE, "lr_scheduler_type": "cosine"}
        | {"warmup_steps": 2, "keep_best": None},
    )
    began = time.monotonic()
    learner = start_learner(processes, work, folder, config, ranks=None)
    learner.wait(RUN_LIMIT_S)
    scored = [event for event in read_events(work / folder) if event["event"] == "eval"][-1]
    interval = bootstrap_interval(_counts(work / folder / "eval" / f"step_{STEPS:06d}.jsonl"), "f1@0.5")
    return {
        "f1@0.5": round(interval.estimate, 4),
        "interval": [round(interval.low, 4), round(interval.high, 4)],
        "recall@0.5": round(scored["metrics"]["recall@0.5"], 4),
        "precision@0.5": round(scored["metrics"]["precision@0.5"], 4),
        "seconds": round(time.monotonic() - began),
    }


def _counts(path: Path) -> CountTable:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    values = np.array([[row["counts"].get(name, 0.0) for name in COLUMNS] for row in rows])
    return CountTable(sample_ids=tuple(row["id"] for row in rows), values=values)


if __name__ == "__main__":
    typer.run(main)
