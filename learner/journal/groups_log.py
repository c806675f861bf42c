"""Writes the rewards of a `grpo` run, and some of its groups of answers, for the report.

In: each group (all answers to one prompt), with rewards and advantages, when it has been scored. Out: `groups.jsonl` in
the run directory. Rank 0 writes a line per optimizer step, with the rewards of all its groups. The lines of every
`every`-th step also have the answers of one group.
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
DIGITS = 4  # number of decimals of written rewards and advantages
EVERY = 10  # in every `EVERY`th step, the answers of one group are written too


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredAnswer:
    """One answer of a group. `assignment`: the answer's objects, matched with the labels, as the task returns them.
    `ends`: for each object the position after its last token; None if all tokens of the answer have one advantage."""

    sample: Sample
    assignment: object
    reward: float
    advantages: NDArray[np.float64]  # [T] advantage of each token of the answer
    ends: NDArray[np.int64] | None


class GroupsLog:
    """Writes `groups.jsonl` (see the module). `add` may be called on any thread."""

    def __init__(self, run_dir: Path, task: Task, every: int = EVERY) -> None:
        """Open the file. Raises OutputError if that fails."""
        self._task, self._every = task, every
        self._lines = AppendedLines(run_dir / NAME)
        self._lock = threading.Lock()
        self._rewards: list[list[float]] = []
        self._first: Sequence[ScoredAnswer] = ()

    def add(self, group: Sequence[ScoredAnswer]) -> None:
        """Keep a scored group for the line of the present step."""
        with self._lock:
            self._rewards.append([round(one.reward, DIGITS) for one in group])
            self._first = self._first or group

    def write(self, global_step: int) -> None:
        """Write the step's line, with the rewards of all groups added since the last call. Without such groups no line
        is written. Raises OutputError."""
        with self._lock:
            rewards, self._rewards = self._rewards, []
            group, self._first = self._first, ()
        if not rewards:
            return
        line: dict[str, object] = {"global_step": global_step, "rewards": rewards}
        # Steps count from 1, so the first one has answers.
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
        """Return an answer as JSON: the task's own fields, `reward`, `advantage` (mean over tokens), and `by_object`
        (for each object the advantage of its last token) if objects have different advantages."""
        found = {**self._task.scene(one.assignment), "reward": round(one.reward, DIGITS)}
        found["advantage"] = round(float(one.advantages.mean()), DIGITS) if len(one.advantages) else 0.0
        if one.ends is not None:
            found["by_object"] = [round(float(one.advantages[end - 1]), DIGITS) for end in one.ends]
        return found
