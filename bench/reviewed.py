"""Measure what a person's review of suggestions is worth: `python -m bench.reviewed --out FILE --work DIR`.

Digits, and with `--bccd` photographs of blood cells, with 40% of the training labels missing. The shipped checkpoint's
answers suggest what is missing (`find-missing suggest`). A simulated reviewer looks at the first N suggestions: the
published labels are the truth, a suggestion is accepted if it overlaps a missing object (IoU of at least 0.5), with
that object's name. The labels are written (`find-missing write`), then `sft` learns them. Beside it, without review:
`sft` on the labels as they are, labels completed by votes, `keep_unmatched`, `grpo`. All runs have equal steps and
scenes a step (`grpo` on photographs: half as many), and are scored at their last one on test scenes: digits have all
their labels there, cells those that were published.

The suggestions alone: how many of the first N are missing objects, how many of the missing objects these are, and how
many have the name too, by agreement, by score, and by both, which is how `find-missing` orders them. `--ranks` stops
there.

Out: a JSON file, and tables on stdout. What is in the file is not done again, so the same command goes on after
`--seconds`. Transformers' `generate` makes all answers: several runs side by side on each GPU, one on a CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import torch
import typer

from bench.experiment.arms import FIRST_SEED, KEPT, Arm, file_name, run_config
from bench.experiment.runner import Slot, run_all
from bench.figures import circumstances, markdown_table
from bench.forgetting import Device
from bench.models import CHECKPOINT
from bench.runs import LearnerRun, exit_code_of, last_words, read_events, say, start_learner, visible
from bench.study import BCCD, MODELS
from deploy.bccd.photographs import read_photographs, without_labels, write_jsonl
from deploy.demo.build_data import Build, build
from deploy.launch import Processes
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector.inputs import Anything
from learner.missing.review import write_reviewed
from learner.missing.suggest import DECISIONS, SUGGESTIONS, read_folder
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.geometry import iou_matrix
from learner.tasks.detection.metrics import COLUMNS, CountTable, bootstrap_interval

BUDGETS = (50, 100, 200, 400)
MISSING = 0.4  # share of the training labels
BATCH, RATE, GRPO_RATE = 16, 5e-5, 3e-5
ANSWERS = 4
RIGHT_IOU = 0.5
ROW_TOKENS = 4608
DECODE_BATCH = 64

SFT = Arm(variant="sft")
WITHOUT_REVIEW: Mapping[str, Arm] = {
    "sft": SFT,
    "completed by votes, sft": Arm(variant="sft", complete={"rollouts": ANSWERS}),
    "rollout matching, keep_unmatched": Arm(loss=KEPT),
    "grpo, object credit": Arm(variant="grpo", grpo={"credit": "object"}),
}
RANKINGS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "agreement": lambda one: one["agreement"],
    "score": lambda one: one["score"],
    "agreement x score": lambda one: one["agreement"] * one["score"],
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Folders with `train.jsonl`: with all labels, and with gaps and `test.jsonl`. The rest is what runs differ in."""

    name: str
    work: Path
    model: Path
    steps: int
    max_new_tokens: int
    row_tokens: int  # a batch of scenes with their labels
    grpo_scenes: int = BATCH  # a step

    @property
    def whole(self) -> Path:
        return self.work / "whole"

    @property
    def gaps(self) -> Path:
        return self.work / "gaps"

    @property
    def suggestions(self) -> Path:
        return self.work / "suggestions"


@dataclass(frozen=True, kw_only=True)
class ReviewedRun:
    """One training run. `budget`: how many suggestions were reviewed before it; None: there was no review."""

    data: Data
    name: str
    arm: Arm
    seed: int
    budget: int | None = None

    @property
    def folder(self) -> str:
        return file_name(f"{self.data.name}-{self.name}-{self.seed}")


class ReviewedResults:
    """The JSON file: by data set, the ranks, and by run and seed F1@0.5 with its interval."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = json.loads(path.read_text()) if path.is_file() else {**circumstances(), "data": {}}

    def of(self, data: Data) -> dict[str, Any]:
        found: dict[str, Any] = self.content["data"].setdefault(data.name, {"runs": {}})
        return found

    def has(self, run: ReviewedRun) -> bool:
        return str(run.seed) in self.of(run.data)["runs"].get(run.name, {})

    def keep(self, run: ReviewedRun, found: Mapping[str, Any]) -> None:
        self.of(run.data)["runs"].setdefault(run.name, {})[str(run.seed)] = found
        self.save()

    def save(self) -> None:
        write_atomically(self._path, json.dumps(self.content, indent=1) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    work: Annotated[Path, typer.Option(help="Scratch.")],
    bccd: Annotated[Path | None, typer.Option(help="A clone of github.com/Shenggan/BCCD_Dataset: cells too.")] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="Only the suggestions' ranks; no run.")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="Only these runs without review.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Only these budgets.")] = None,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    device: Annotated[Device, typer.Option(help="auto: GPUs if there are any.")] = Device.auto,
    slots: Annotated[int, typer.Option(min=1, help="Runs at a time on each GPU.")] = 8,
    seconds: Annotated[float, typer.Option(help="Everything has ended then; what is not whole is stopped.")] = 1e5,
    steps: Annotated[int | None, typer.Option(help="Of each run, for a trial.")] = None,
    scenes: Annotated[int, typer.Option(help="Digits to train; for a trial.")] = 256,
) -> None:
    """Do what is not in the file yet."""
    deadline = time.monotonic() + seconds
    if device == Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no GPU here; wanted a GPU, or --device cpu")
    if unknown := set(arm or ()) - set(WITHOUT_REVIEW):
        raise typer.BadParameter(f"no such arm: {', '.join(sorted(unknown))}; there are: {'; '.join(WITHOUT_REVIEW)}")
    gpus = torch.cuda.device_count() if device != Device.cpu else 0
    # Programs see all GPUs unless they are told which, and each would take all cores for itself.
    os.environ |= {"OMP_NUM_THREADS": "2"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    results = ReviewedResults(out)

    def compare(processes: Processes) -> None:
        sets = [digits(work, scenes), *([cells(work, bccd)] if bccd is not None else [])]
        sets = [replace(data, steps=steps or data.steps) for data in sets]
        make_suggestions(processes, sets, gpus, deadline)
        for data in sets:
            if "ranks" not in results.of(data):
                results.of(data)["ranks"] = ranks_of(data)
                results.save()
        if not ranks:
            chosen = runs_of(sets, arm, budget, seeds)
            run_them(processes, [run for run in chosen if not results.has(run)], results, _slots(gpus, slots), deadline)

    sys.exit(exit_code_of(compare, lambda: print(tables(results.content["data"]))))


def runs_of(
    sets: Sequence[Data], arm: Sequence[str] | None, budget: Sequence[int] | None, seeds: int
) -> list[ReviewedRun]:
    """Return the runs, a seed after the other, the longest first."""
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name in reversed(list(WITHOUT_REVIEW)):
            if arm is None or name in arm:
                found += [
                    ReviewedRun(data=data, name=name, arm=WITHOUT_REVIEW[name], seed=seed) for data in reversed(sets)
                ]
        for number in budget if budget is not None else BUDGETS:
            name = f"{number} reviewed, sft"
            found += [ReviewedRun(data=data, name=name, arm=SFT, seed=seed, budget=number) for data in reversed(sets)]
    return found


def digits(work: Path, scenes: int) -> Data:
    """Return some of the demo's scenes, and 200 test scenes."""
    data = Data(
        name="digits", work=work / "digits", model=CHECKPOINT, steps=24, max_new_tokens=160, row_tokens=ROW_TOKENS
    )
    for folder, missing in ((data.whole, 0.0), (data.gaps, MISSING)):
        build(Build(train=scenes, val=0, test=200, annotation_dropout=missing, seed=3), folder)
    return data


def cells(work: Path, bccd: Path) -> Data:
    """Return 205 photographs, and 72 test photographs."""
    data = Data(
        name="blood cells",
        work=work / "cells",
        model=MODELS[BCCD],
        steps=16,
        max_new_tokens=512,
        row_tokens=2 * ROW_TOKENS,
        grpo_scenes=BATCH // 2,
    )
    train, test = (read_photographs(bccd, split) for split in ("train", "test"))
    for folder, labelled in ((data.whole, train), (data.gaps, without_labels(train, MISSING))):
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(labelled, folder / "train.jsonl")
    write_jsonl(test, data.gaps / "test.jsonl")
    return data


# ---- suggestions and their reviewer ----------------------------------------------------------------------------------


def make_suggestions(processes: Processes, sets: Sequence[Data], gpus: int, deadline: float) -> None:
    """Make what `find-missing suggest` writes: all at once on GPUs, one after the other on a CPU, made once. Raises
    ServerError, DeadlineError."""
    missing = [(i, data) for i, data in enumerate(sets) if not (data.suggestions / SUGGESTIONS).is_file()]
    for together in [missing] if gpus else [[one] for one in missing]:
        began = time.monotonic()
        started = [_suggest(processes, data, (i % gpus,) if gpus else ()) for i, data in together]
        for process in started:
            process.wait(max(1.0, deadline - time.monotonic()))
        say(f"suggestions for {', '.join(data.name for _, data in together)}: {time.monotonic() - began:.0f} s")


def _suggest(processes: Processes, data: Data, devices: Sequence[int]) -> LearnerRun:
    argv = [sys.executable, "-m", "learner", "find-missing", "suggest", str(data.gaps / "train.jsonl")]
    argv += ["--model", str(data.model), "--out", str(data.suggestions), "--backend", "hf", "--samples", str(ANSWERS)]
    log = data.work / "suggestions.log"
    process = processes.start(f"suggestions for {data.name}", argv, devices=visible(*devices), log=log)
    return LearnerRun(process=process, log=log, run_dir=data.suggestions)


def ranks_of(data: Data) -> dict[str, Any]:
    """Return by ranking and number of suggestions the share that are missing objects (precision), with their names too,
    and the share of the missing objects (recall)."""
    suggestions, missing = read_folder(data.suggestions)[1], missing_objects(data)
    total = sum(len(objects) for _, objects in missing.values())
    found: dict[str, Any] = {"missing": total, "suggestions": len(suggestions)}
    for name, key in RANKINGS.items():
        ranked = sorted(suggestions, key=lambda one: -key(one))
        decisions = judge(ranked, missing)
        accepted = np.array([decisions[str(i)]["decision"] == "accept" for i in range(len(ranked))])
        named = accepted & [decisions[str(i)]["name"] == one["name"] for i, one in enumerate(ranked)]
        found[name] = {
            str(n): {
                "precision": round(float(accepted[:n].mean()), 4),
                "precision with the name": round(float(named[:n].mean()), 4),
                "recall": round(float(accepted[:n].sum() / total), 4),
            }
            for n in BUDGETS
        }
    return found


def reviewed(number: int, data: Data) -> tuple[Path, dict[str, Any]]:
    """Return the labels after a review of the first `number` suggestions, and what the review was."""
    suggestions = read_folder(data.suggestions)[1]
    train, decisions = data.gaps / f"train-{number}.jsonl", judge(suggestions[:number], missing_objects(data))
    if not train.is_file():  # another seed's run may read it now
        write_atomically(data.suggestions / DECISIONS, json.dumps(decisions))
        write_reviewed(data.suggestions, train)
    accepted = sum(one["decision"] == "accept" for one in decisions.values())
    return train, {"reviewed": min(number, len(suggestions)), "accepted": accepted, "suggestions": len(suggestions)}


def missing_objects(data: Data) -> dict[str, tuple[Sample, list[DetectionObject]]]:
    """Return by sample id the objects that lost their labels."""
    found = {}
    for full, kept in zip(*(_samples(folder) for folder in (data.whole, data.gaps)), strict=True):
        found[full.sample_id] = (full, [obj for obj in full.objects if obj not in kept.objects])
    return found


def _samples(folder: Path) -> list[Sample]:
    path = str(folder / "train.jsonl")
    return load_samples(DataConfig(train=path), path, Anything())


def judge(
    suggestions: Sequence[Mapping[str, Any]], missing: Mapping[str, tuple[Sample, list[DetectionObject]]]
) -> dict[str, dict[str, str]]:
    """Return the decisions by place. Every missing object is accepted once."""
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


def _slots(gpus: int, number: int) -> list[Slot[ReviewedRun]]:
    """The engine is in the learner's process. Neighbours are on different GPUs."""
    devices = [(i % gpus,) for i in range(gpus * number)] if gpus else [()]
    return [Slot(index=i, has_server=False, learner_devices=own) for i, own in enumerate(devices)]


def run_them(
    processes: Processes,
    runs: list[ReviewedRun],
    results: ReviewedResults,
    slots: Sequence[Slot[ReviewedRun]],
    deadline: float,
) -> None:
    """Run every run, several side by side, as far as the time goes. A result is kept as soon as its run has ended."""
    say(f"{len(runs)} runs, {len(slots)} at a time, {deadline - time.monotonic():.0f} s left")
    told: dict[str, dict[str, Any]] = {}

    def start(run: ReviewedRun, slot: Slot[ReviewedRun]) -> LearnerRun:
        work = run.data.work
        shutil.rmtree(work / run.folder, ignore_errors=True)  # removes what an interrupted run left
        train, told[run.folder] = run.data.gaps / "train.jsonl", {}
        if run.budget is not None:
            train, told[run.folder] = reviewed(run.budget, run.data)
        config = config_of(run, train)
        return start_learner(processes, work, run.folder, config, ranks=None, devices=slot.learner_devices)

    def ended(run: ReviewedRun, code: int | None) -> None:
        run_dir = run.data.work / run.folder
        if code != 0:
            say(f"{run.folder}: exit code {code}: {last_words(run_dir.with_name(f'{run.folder}.log'))}")
            return
        results.keep(run, told[run.folder] | score_of(run, run_dir))
        say(f"{run.folder}: {results.of(run.data)['runs'][run.name][str(run.seed)]}")

    run_all(
        slots,
        next_run=lambda: runs.pop(0) if runs else None,
        start=start,
        ended=ended,
        deadline=deadline,
        run_limit_s=deadline - time.monotonic(),
    )


def config_of(run: ReviewedRun, train: Path) -> dict[str, Any]:
    data, is_grpo = run.data, run.arm.grpo is not None
    return run_config(
        run.arm,
        model=data.model,
        train=train,
        test=data.gaps / "test.jsonl",
        run_dir=data.work / run.folder,
        steps=data.steps,
        batch_size=(data.grpo_scenes if is_grpo else BATCH) * run.arm.group,
        engine={"rollout_backend": "hf", "decode_batch_size": DECODE_BATCH},
        max_new_tokens=data.max_new_tokens,
        global_max_length=ROW_TOKENS if is_grpo else data.row_tokens,
        data_workers=0,
        training={
            "seed": run.seed,
            "learning_rate": GRPO_RATE if is_grpo else RATE,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "keep_best": None,
        },
    )


def score_of(run: ReviewedRun, run_dir: Path) -> dict[str, Any]:
    """Return F1@0.5 on the test scenes, after the last step."""
    events = read_events(run_dir)
    scored = [event for event in events if event["event"] == "eval"][-1]
    interval = bootstrap_interval(_counts(run_dir / "eval" / f"step_{run.data.steps:06d}.jsonl"), "f1@0.5")
    return {
        "f1@0.5": round(interval.estimate, 4),
        "interval": [round(interval.low, 4), round(interval.high, 4)],
        "recall@0.5": round(scored["metrics"]["recall@0.5"], 4),
        "precision@0.5": round(scored["metrics"]["precision@0.5"], 4),
    }


def _counts(path: Path) -> CountTable:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    values = np.array([[row["counts"].get(name, 0.0) for name in COLUMNS] for row in rows])
    return CountTable(sample_ids=tuple(row["id"] for row in rows), values=values)


# ---- the report ------------------------------------------------------------------------------------------------------


def tables(data: Mapping[str, Any]) -> str:
    """Write per data set, in Markdown: the ranks as `find-missing` orders them, and the runs' means over seeds."""
    parts = []
    for name, found in data.items():
        if "ranks" in found:
            ranks = found["ranks"]
            parts.append(f"{name}: {ranks['missing']} missing, {ranks['suggestions']} suggestions, agreement x score")
            rows = [[n, *map(str, one.values())] for n, one in ranks["agreement x score"].items()]
            parts.append("\n".join(markdown_table(["first", "precision", "with the name", "recall"], rows)))
        if found["runs"]:
            runs = [_row(run, seeds) for run, seeds in found["runs"].items()]
            parts.append("\n".join(markdown_table(RUN_COLUMNS, runs)))
    return "\n\n".join(parts)


RUN_COLUMNS = ["run", "accepted", "seeds", "F1@0.5", "each", "recall", "precision"]


def _row(name: str, seeds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    each = list(seeds.values())
    f1, recall, precision = (
        f"{mean(one[key] for one in each):.3f}" for key in ("f1@0.5", "recall@0.5", "precision@0.5")
    )
    shown = ", ".join(f"{one['f1@0.5']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]" for one in each)
    return [name, str(each[0].get("accepted", "")), str(len(each)), f1, shown, recall, precision]


if __name__ == "__main__":
    typer.run(main)
