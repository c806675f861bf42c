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

from learner.extensions import Task
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample
from learner.rollout.backend import RolloutBackend
from learner.run.checkpoint import write_atomically
from learner.tasks.rewards import Rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`rollouts` and the task's `assignments` are in the order of the samples; `counts[i]` is what assignment i adds to
    the metrics, and `scenes[i]` what the task says of it."""

    metrics: Mapping[str, float]
    rollouts: tuple[Rollout, ...]
    assignments: tuple[Any, ...]
    counts: tuple[Mapping[str, float], ...]
    scenes: tuple[Mapping[str, Any], ...]


def evaluate(
    backend: RolloutBackend,
    samples: Sequence[Sample],
    task: Task,
    ranks: Ranks,
    *,
    global_step: int,
    rewards: Rewards | None = None,
) -> Evaluation:
    """Roll out `samples` greedily, one share per rank, and score them together. Raises RewardError if a reward function
    fails."""
    share = -(-len(samples) // ranks.world_size)
    mine = samples[ranks.rank * share : (ranks.rank + 1) * share]
    rollouts = backend.generate(
        mine, global_step=global_step, micro_step_idx=0, first_req_idx=ranks.rank * share, greedy=True
    )
    scored = [(rollout, task.match(task.parse(rollout))) for rollout in rollouts]
    everything = [pair for part in ranks.all_gather_object(scored) for pair in part]
    answers, assignments = tuple(rollout for rollout, _ in everything), tuple(found for _, found in everything)
    means = rewards.means(answers, assignments) if rewards else {}
    return Evaluation(
        metrics={**task.evaluate(assignments), **means},
        rollouts=answers,
        assignments=assignments,
        counts=tuple(task.counts(assignments)),
        scenes=tuple(task.scene(assignment) for assignment in assignments),
    )


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """One JSON line per sample: image, size, what the task says of the answer, version, and its counts."""
    lines = map(json.dumps, map(_line, evaluation.rollouts, evaluation.scenes, evaluation.counts))
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def _line(rollout: Rollout, scene: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, Any]:
    sample = rollout.sample
    return {
        "id": sample.sample_id,
        "images": list(sample.images),
        "width": sample.width,
        "height": sample.height,
        **scene,
        "ver": rollout.ver,
        "counts": dict(counts),
    }
