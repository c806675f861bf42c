"""The rewards of a `grpo` run, and some of its groups, for the report.

In: each group as it is scored, on any thread: the answers with their rewards and advantages. Out: `groups.jsonl` in the
run directory, with a line per optimizer step of rank 0: the rewards of all its groups, and at every `every`-th step the
answers of one group too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.data.views import shown_images, shown_sizes
from learner.extensions import Task
from learner.records import Sample
from learner.run.files import AppendedLines

NAME = "groups.jsonl"
DIGITS = 4
EVERY = 10  # steps between two groups that are written with their answers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredAnswer:
    """One answer of a group. `ends` has the position after each object's last token; None if objects share an
    advantage."""

    sample: Sample
    assignment: object
    reward: float
    advantages: NDArray[np.float64]  # [T]
    ends: NDArray[np.int64] | None


class GroupsLog:
    """Writes `groups.jsonl`: the rewards of each step, and every `every` steps a group with its answers."""

    def __init__(self, run_dir: Path, task: Task, every: int = EVERY) -> None:
        """Open the file. Raises OutputError."""
        self._task, self._every = task, every
        self._lines = AppendedLines(run_dir / NAME)
        self._lock = threading.Lock()
        self._rewards: list[list[float]] = []
        self._first: Sequence[ScoredAnswer] = ()

    def add(self, group: Sequence[ScoredAnswer]) -> None:
        """Remember a scored group until the step's line is written."""
        with self._lock:
            self._rewards.append([round(one.reward, DIGITS) for one in group])
            self._first = self._first or group

    def write(self, global_step: int) -> None:
        """Write a step's line, with the rewards of all groups added since the last call; no line if there are none.
        Raises OutputError."""
        with self._lock:
            rewards, self._rewards = self._rewards, []
            group, self._first = self._first, ()
        if not rewards:
            return
        line: dict[str, object] = {"global_step": global_step, "rewards": rewards}
        if (global_step - 1) % self._every == 0:
            line["group"] = self._drawn(group)
        self._lines.append(json.dumps(line))

    def close(self) -> None:
        self._lines.close()

    def _drawn(self, group: Sequence[ScoredAnswer]) -> Mapping[str, object]:
        sample = group[0].sample
        return {
            "id": sample.sample_id,
            "images": shown_images(sample),
            **shown_sizes(sample),
            "answers": [self._answer(one) for one in group],
        }

    def _answer(self, one: ScoredAnswer) -> Mapping[str, object]:
        """Return an answer as the task shows it, with reward and advantages. `advantage` is the mean over tokens,
        `by_object` has the advantage of each object's last token."""
        found = {**self._task.scene(one.assignment), "reward": round(one.reward, DIGITS)}
        found["advantage"] = round(float(one.advantages.mean()), DIGITS) if len(one.advantages) else 0.0
        if one.ends is not None:
            found["by_object"] = [round(float(one.advantages[end - 1]), DIGITS) for end in one.ends]
        return found
