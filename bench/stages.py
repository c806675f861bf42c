"""Parse + match + target of crowded rollouts on one core, in rollouts per second.

In: the number of rollouts and objects. Out: a `Figure` per container and spelling of coordinates. No model, no server:
scenes are random boxes. An answer is the truth with KEPT of its boxes moved by a few bins and the others placed at
random: it has matches, misses and false positives. No scene repeats, not even in the warm-up, so caches work as they
would in a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.figures import Figure, sampled
from bench.tiny import build_tokenizer
from deploy.demo.scenes import DIGIT_WORDS
from learner.config.sections.task import TaskConfig
from learner.extensions import Tokenizer
from learner.records import DetectionObject, Rollout, Sample
from learner.tasks.detection.bins import canonical_order
from learner.tasks.detection.target import build_target
from learner.tasks.detection.task import DetectionTask

WANTED_PER_S = 1500.0
KEPT = 0.8  # share of the true objects that an answer finds
JITTER = 5  # bins


def measure(folder: Path, *, num_rollouts: int = 100, num_objects: int = 50, passes: int = 8) -> list[Figure]:
    """Return per container and spelling the median over passes, each pass all rollouts once. Writes nothing into
    `folder`."""
    formats = [(container, spelling) for spelling in ("tokens", "digits") for container in ("index_map", "array")]
    return [_figure(container, spelling, num_rollouts, num_objects, passes) for container, spelling in formats]


def _figure(container: str, spelling: str, num_rollouts: int, num_objects: int, passes: int) -> Figure:
    tokenizer = build_tokenizer()
    task = DetectionTask(TaskConfig.model_validate({"container": container, "coordinates": spelling}), tokenizer)
    rng = np.random.default_rng(0)
    rates: list[float] = []
    for _ in range(1 + passes):
        rollouts = [_rollout(rng, task, tokenizer, num_objects) for _ in range(num_rollouts)]
        rates.append(num_rollouts / _run_pass(rollouts, task, tokenizer))
    del rates[0]  # fills token tables and caches, like the first step of a run
    name = f"parse + match + target, {num_objects} objects, {container}, coordinates as {spelling}"
    return sampled(name, rates, "rollouts/s", at_least=WANTED_PER_S)


def _run_pass(rollouts: Sequence[Rollout], task: DetectionTask, tokenizer: Tokenizer) -> float:
    """Return the CPU seconds of one core for all rollouts once. Other programs on the machine do not count."""
    begin = time.process_time()
    for rollout in rollouts:
        build_target(task.match(task.parse(rollout)), task, tokenizer)
    return time.process_time() - begin


def _rollout(rng: np.random.Generator, task: DetectionTask, tokenizer: Tokenizer, num_objects: int) -> Rollout:
    truth = canonical_order(_random_object(rng) for _ in range(num_objects))
    said = [_moved(rng, obj) if rng.random() < KEPT else _random_object(rng) for obj in truth]
    text = task.serialize(canonical_order(said), after=None).text
    sample = Sample(sample_id="s", messages=(), images=(), objects=truth, width=1000, height=1000)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return Rollout(sample=sample, prompt_token_ids=(1,), response_token_ids=ids, finish_reason="stop", ver=1, seed=None)


def _random_object(rng: np.random.Generator) -> DetectionObject:
    x1, y1 = rng.integers(0, 850, size=2)
    width, height = rng.integers(40, 140, size=2)
    return _box(str(rng.choice(DIGIT_WORDS)), (x1, y1, x1 + width, y1 + height))


def _moved(rng: np.random.Generator, obj: DetectionObject) -> DetectionObject:
    return _box(obj.desc, np.array(obj.bins) + rng.integers(-JITTER, JITTER + 1, size=4))


def _box(desc: str, bins: Sequence[int] | np.ndarray) -> DetectionObject:
    x1, y1, x2, y2 = np.clip(bins, 0, 999).tolist()
    return DetectionObject(desc=desc, kind="bbox_2d", bins=(x1, y1, x2, y2))
