"""Made-up files of a learner's run: its steps and two evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_run(folder: Path, *, steps: int, step_s: float, hits: Sequence[int]) -> Path:
    (folder / "eval").mkdir(parents=True)
    events = [
        {"event": "step", "loss": 1.0, "metrics": {"step_s": step_s, "learn_s": step_s / 2}, "global_step": i}
        for i in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step, factor in ((0, 0), (steps, 1)):
        lines = [
            {"id": str(i), "counts": {"samples": 1.0, "truth": 10.0, "predictions": 10.0, "tp@0.50": factor * hit}}
            for i, hit in enumerate(hits)
        ]
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
