"""Evaluation by rollouts: the current policy answers held-out samples greedily, and the task scores the answers.

In: a backend that serves the current weights, samples, a task. Out: metrics over the set, and one record per sample
(kept as JSONL for the report). Every rank rolls out a contiguous share, and all ranks get the whole result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.policy.parallel import Ranks
from learner.records import Assignment, DetectionObject, Sample
from learner.rollout.backend import RolloutBackend
from learner.run.files import write_atomically
from learner.tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`assignments` are in the order of the samples; `counts[i]` is what assignment i adds to the metrics."""

    metrics: Mapping[str, float]
    assignments: tuple[Assignment, ...]
    counts: tuple[Mapping[str, float], ...]


def evaluate(
    backend: RolloutBackend, samples: Sequence[Sample], task: Task, ranks: Ranks, *, global_step: int
) -> Evaluation:
    """Roll out `samples` greedily, one share per rank, and score them together."""
    share = -(-len(samples) // ranks.world_size)
    mine = samples[ranks.rank * share : (ranks.rank + 1) * share]
    rollouts = backend.generate(
        mine, global_step=global_step, micro_step_idx=0, first_req_idx=ranks.rank * share, greedy=True
    )
    scored = [task.match(task.parse(rollout)) for rollout in rollouts]
    assignments = tuple(a for part in ranks.all_gather_object(scored) for a in part)
    return Evaluation(
        metrics=task.evaluate(assignments), assignments=assignments, counts=tuple(task.counts(assignments))
    )


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """One JSON line per sample: image, size, truth, predictions (bins), pairs, drops, version, and its counts."""
    scenes = zip(evaluation.assignments, evaluation.counts, strict=True)
    lines = (json.dumps(_scene(assignment, counts)) for assignment, counts in scenes)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def _scene(assignment: Assignment, counts: Mapping[str, float]) -> dict[str, Any]:
    parsed = assignment.parsed
    sample = parsed.rollout.sample
    return {
        "id": sample.sample_id,
        "images": list(sample.images),
        "width": sample.width,
        "height": sample.height,
        "truth": [_object(o) for o in sample.objects],
        "ignored": [_object(o) for o in sample.ignored],
        "predictions": [_object(p.object) for p in parsed.objects],
        "pairs": [list(pair) for pair in assignment.pairs],
        "drops": dict(parsed.drops),
        "truncated": parsed.truncated,
        "ver": parsed.rollout.ver,
        "counts": dict(counts),
    }


def _object(item: DetectionObject) -> dict[str, Any]:
    return {"desc": item.desc, item.kind: list(item.bins)}
