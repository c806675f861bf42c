"""Counts of what runs of `trainer_world` left behind: learned samples over ranks, and the events of `metrics.jsonl`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.learner.trainer_world import Seen


def events_of(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def all_learned(seen: list[Seen]) -> Counter[str]:
    return Counter(sample_id for one in seen for sample_id in one.learned)


def everyone(count: int, times: int = 1) -> Counter[str]:
    return Counter({f"s{i}": times for i in range(count)})


def carried_at_end(folder: Path) -> list[str]:
    return [sample_id for note in events_of(folder, "note") for sample_id in note["carried_and_not_learned"]]
