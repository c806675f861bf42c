"""Run a model over a sample of its data, as `recipe --only-measure` needs it.

In: a run's configuration (`model`, `data`, `task`, decoding). Out: `Measured`, all of it scene by scene, so that
intervals can be drawn over scenes, and what `labels.complete` would know of the labels. The training data are what
training would see, so answers are drawn there. A validation file adds greedy answers and nats, to show overfitting.
Uses a GPU if there is one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from learner.config.schema import RunConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.config.split import as_read_for
from learner.data.splits import load_samples
from learner.extensions import reader_of, task_class
from learner.policy.load import Policy, load_policy
from learner.predict.exposure import KINDS, compare, teacher_forced
from learner.predict.features import Measured, MeasuredSplit
from learner.records import Assignment, Sample
from learner.rollout.hf import HfBackend
from learner.tasks.detection.appearance import crops_of, share_of
from learner.tasks.detection.completion import CompletionEstimate, candidates
from learner.tasks.detection.gaps import estimate_gaps
from learner.tasks.detection.metrics import count_objects
from learner.tasks.detection.task import DetectionTask
from shared.errors import ConfigError, DataError

DECODED_AT_ONCE = 64  # sequences, if the run does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """`num_samples` of each split, and `num_generations` answers to each."""

    num_samples: int = 100
    num_generations: int = 8


def measure(
    config: RunConfig, asked: MeasureSettings, tell: Callable[[str], None] = lambda _: None
) -> tuple[Measured, CompletionEstimate]:
    """Measure the run's model on the run's data, and estimate what the labels lack. `tell` gets a line per part.

    Raises ConfigError, DataError, or RolloutError if memory is too small.
    """
    if not issubclass(task_class(config.task), DetectionTask):
        raise ConfigError(
            "recipe --only-measure compares objects, and this task has none",
            found=f"task.type: {config.task.type}",
            wanted="task.type: detection",
            remedy="make a short run of each method, and compare them: rollout-learner report RUN --compare RUN2",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = config.model.model_copy(update={"compile": False})  # nothing is learned
    policy = load_policy(settings, device=device, bf16=config.training.bf16, image_rules=config.data.image_rules)
    model = _Model(policy, DetectionTask(config.task, policy.tokenizer), config, tell)
    samples = model.samples("train", asked.num_samples)
    greedy = model.answers(samples, drawn=False)
    line = model.answers([sample for sample in samples for _ in range(asked.num_generations)], drawn=True)
    groups = [line[i : i + asked.num_generations] for i in range(0, len(line), asked.num_generations)]
    train, exposure = model.split(greedy)
    held_out = next((split for split in ("val", "test") if config.data.path_of(split) is not None), None)
    validation = None
    if held_out is not None:
        validation, _ = model.split(model.answers(model.samples(held_out, asked.num_samples), drawn=False))
    known, gaps = model.gaps(groups)
    sampled = np.stack([count_objects(group).values for group in groups])
    return Measured(train=train, sampled=sampled, exposure=exposure, validation=validation, gaps=gaps), known


class _Model:
    """The model with its data and task."""

    def __init__(self, policy: Policy, task: DetectionTask, config: RunConfig, tell: Callable[[str], None]) -> None:
        self._policy, self._task, self._config, self._tell = policy, task, config, tell
        self._backend = HfBackend(_drawn_at_temperature_1(config), policy, run_seed=config.training.seed)

    def samples(self, split: str, most: int) -> list[Sample]:
        """Return at most `most` samples, drawn with a fixed seed, in the order of the file."""
        config, path = self._config, self._config.data.path_of(split)
        assert path is not None
        data, reader = as_read_for(config.data, split), reader_of(config, split)
        found = load_samples(data, path, self._task, geometry=config.task.geometry, reader=reader)
        if len(found) < 2:
            raise DataError(
                f"{path}: too few samples for an interval",
                found=str(len(found)),
                wanted="2 or more",
                remedy="name a larger file",
            )
        return [found[i] for i in sorted(random.Random(0).sample(range(len(found)), min(most, len(found))))]

    def answers(self, samples: Sequence[Sample], *, drawn: bool) -> list[Assignment]:
        """Return one answer to each sample: drawn at temperature 1, or greedy."""
        began = time.monotonic()
        rollouts = self._backend.generate(samples, global_step=0, micro_step_idx=0, first_req_idx=0, greedy=not drawn)
        how = "drawn" if drawn else "greedy"
        self._tell(f"{len(samples)} answers, {how}: {time.monotonic() - began:.1f} s")
        return [self._task.match(self._task.parse(rollout)) for rollout in rollouts]

    def gaps(self, groups: Sequence[Sequence[Assignment]]) -> tuple[CompletionEstimate, NDArray[np.float64] | None]:
        """Return what is known of the labels, and of each scene labels, finds without one, and how many of these are
        right; None if that is not known."""
        began = time.monotonic()
        samples = [group[0].parsed.rollout.sample for group in groups]
        answers = [[[p.object for p in one.parsed.objects] for one in group] for group in groups]
        looked = [candidates(sample, own) for sample, own in zip(samples, answers, strict=True)]
        load, share = self._policy.encoder.images.load, share_of(sum(len(sample.objects) for sample in samples))
        crops = [
            crops_of(sample, [c.object for c in own if c.relation == "free"], load, share)
            for sample, own in zip(samples, looked, strict=True)
        ]
        known, found = estimate_gaps(samples, looked, crops, len(groups[0]))
        self._tell(f"labels of {len(samples)} samples, by how finds look: {time.monotonic() - began:.1f} s")
        if known.missing is None:
            return known, None
        free = [[one.probability or 0.0 for one in own if one.relation == "free"] for own in found]
        return known, np.array([(len(s.objects), len(own), sum(own)) for s, own in zip(samples, free, strict=True)])

    def split(self, greedy: Sequence[Assignment]) -> tuple[MeasuredSplit, NDArray[np.float64]]:
        """Counts and nats, and the exposure of each scene; zeros where the two can't be compared."""
        began = time.monotonic()
        nats, exposure = np.zeros((len(greedy), 2)), np.zeros((len(greedy), len(KINDS), 3))
        for i, assignment in enumerate(greedy):
            forced = teacher_forced(self._policy, self._task, assignment.parsed.rollout.sample)
            nats[i] = forced.nats.sum(), len(forced.nats)
            if found := compare(self._policy, self._task, assignment, forced):
                exposure[i] = [found.sums(kind) for kind in KINDS]
        self._tell(f"ground truth of {len(greedy)} samples, teacher-forced: {time.monotonic() - began:.1f} s")
        return MeasuredSplit(greedy=count_objects(greedy).values, nats=nats), exposure


def _drawn_at_temperature_1(config: RunConfig) -> RolloutMatchingConfig:
    section = config.rollout_matching
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "decode_mode": "sample", "num_beams": 1}
    changed: dict[str, object] = {"decoding": section.decoding.model_copy(update=plain)}
    if "decode_batch_size" not in section.model_fields_set:
        changed["decode_batch_size"] = DECODED_AT_ONCE
    return section.model_copy(update=changed)
