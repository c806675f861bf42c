"""What a topology's run came to: rates, where a step's time went, what was watched around it; and the table of all.

In: a run's events (`metrics.jsonl`) and what `Watch` saw. Out: JSON values, and markdown. Called by `topologies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.gpu.watch import Watch

WARM_UP_STEPS = 3
_PHASES = ("rollout_s", "learn_s", "sync_s", "wait_s", "data_s", "target_s", "pack_s", "other_s")


def told(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run's events come to; the first steps warm up."""
    steps = [event for event in events if event["event"] == "step"][WARM_UP_STEPS:]
    syncs = [event for event in events if event["event"] == "sync"]
    metrics = [step["metrics"] for step in steps]
    wall = sum(m["step_s"] for m in metrics)
    late = syncs[WARM_UP_STEPS:] or syncs
    return {
        "steps": len(steps),
        "channels": "".join(step["channel"] for step in steps),
        "steps_per_s": len(steps) / wall,
        "rollout_tokens_per_s": sum(m.get("rollout_tokens", 0.0) for m in metrics) / wall,
        "phases_s": {name: round(sum(m.get(name, 0.0) for m in metrics) / len(steps), 4) for name in _PHASES},
        "hidden_rollout_s": round(sum(m.get("stage2_ab/rollout_s", 0.0) for m in metrics) / len(steps), 4),
        "syncs": len(syncs),
        "sync_s": median(sync["seconds"] for sync in late),
        "synced_bytes": sum(sync["num_bytes"] for sync in syncs),
        "canary_gap_max": max(sync["canary_gap"] for sync in syncs),
        "timeline": [event for event in events if event["event"] == "timeline"],
    }


def watched(watch: Watch) -> dict[str, Any]:
    return {
        "gpus": {str(index): asdict(use) for index, use in watch.gpus.items()},
        "written_bytes": dict(watch.written),
        "new_large_files": dict(watch.new_files),
        "weights_file_taken_away": True,
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per mode."""
    head = [
        "GPUs",
        "mode",
        "steps/s",
        "rollout, learn, sync, wait s of a step",
        "busy GPUs",
        "syncs",
        "s each",
        "GB synced",
    ]
    head += ["MB written by all", "large new files"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for row in rows:
        if "error" in row:
            cells = [row["topology"], row["mode"], str(row["error"]).replace("\n", " ")[:200]]
            lines.append("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
            continue
        phases = row["phases_s"]
        rollout_s = phases["rollout_s"] + row["hidden_rollout_s"]
        cells = [
            row["topology"],
            row["mode"],
            f"{row['steps_per_s']:.2f}",
            f"{rollout_s:.2f}, {phases['learn_s']:.2f}, {phases['sync_s']:.2f}, {phases['wait_s']:.2f}",
            ", ".join(f"{use['busy_mean']:.0%}" for use in row["gpus"].values()),
            str(row["syncs"]),
            f"{row['sync_s']:.3f}",
            f"{row['synced_bytes'] / 1e9:.2f}",
            f"{sum(row['written_bytes'].values()) / 1e6:.1f}",
            ", ".join(row["new_large_files"]) or "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
