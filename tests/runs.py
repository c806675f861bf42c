"""The records that a run left behind, read back: a run directory and the name of an event in, its lines of
`metrics.jsonl` out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.runs import read_events


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Return the run's lines of this event in order; none where the run has logged nothing yet, and not a line that is
    being written."""
    return [line for line in read_events(run_dir) if line["event"] == event]


def steps(run_dir: Path) -> list[int]:
    """The optimizer steps that it has logged."""
    return [event["global_step"] for event in events(run_dir, "step")]
