"""What a run left behind, read back: a run directory and the name of an event in, its lines of `metrics.jsonl` out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """In order; none where the run has logged nothing yet."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == event]


def steps(run_dir: Path) -> list[int]:
    """The optimizer steps that it has logged."""
    return [event["global_step"] for event in events(run_dir, "step")]
