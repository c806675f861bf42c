"""`rollout-learner recipe --only-measure`: runs a model over a sample of its data, and recommends a method.

In: the configuration of a planned run. Only the run's model, data, task and decoding matter here, not its trainer
variant, servers and length. Out: printed features, a method, and its reasons; with `--json` also a file. The model
answers training scenes. If there is a validation file, its scenes are measured too, to show overfitting. Missing labels
are estimated as `labels.complete` does. A GPU is used if there is one.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from learner.config.load import load_config
from learner.config.schema import RunConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.config.split import as_read_for
from learner.data.splits import load_samples
from learner.extensions import check_extensions, reader_of, task_class
from learner.policy.load import Policy, load_policy
from learner.predict.exposure import KINDS, compare, teacher_forced
from learner.predict.features import MEANINGS, FeatureEstimate, Measured, MeasuredSplit, estimates
from learner.predict.recommend import Recommendation, recommend
from learner.records import Assignment, Sample
from learner.rollout.hf import HfBackend
from learner.run.files import require_writable, write_atomically
from learner.tasks.detection.appearance import share_of
from learner.tasks.detection.completion import CompletionEstimate, candidates
from learner.tasks.detection.gaps import cluster_crops, estimate_gaps
from learner.tasks.detection.metrics import count_objects
from learner.tasks.detection.task import DetectionTask
from shared.errors import ConfigError, DataError

DECODED_AT_ONCE = 64  # sequences decoded at once, unless the configuration sets `decode_batch_size`


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """The amount of measuring: at most `num_samples` samples of each split, and `num_generations` sampled answers to
    each training sample."""

    num_samples: int = 100
    num_generations: int = 8


def predict_gain(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    asked: MeasureSettings,
    json_path: Path | None = None,
) -> int:
    """Measure the model, print the features and the recommendation, and write them to `json_path` if it is given.
    Returns the exit code 0.

    Raises ConfigErrors, ConfigError, DataError, RolloutError, OutputError.
    """
    # Only the results are printed, not the logs of libraries.
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    config = load_config(config_path, overrides=overrides)
    check_extensions(config)
    if json_path is not None:
        require_writable(json_path.parent)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    measured, known = measure(config, asked, tell=console.print)
    found = estimates(measured)
    recommendation = recommend(found, known)
    _report(console, found, recommendation)
    if json_path is not None:
        content = {
            "features": {name: estimate.value for name, estimate in found.items()},
            "intervals": {name: [estimate.low, estimate.high] for name, estimate in found.items()},
            "labels": known.to_json(),
            "recommendation": recommendation.method,
            "rules": [asdict(rule) for rule in recommendation.rules],
            "asked": asdict(asked),
        }
        write_atomically(json_path, json.dumps(content, indent=2) + "\n")
    return 0


def _report(console: Console, found: Mapping[str, FeatureEstimate], recommendation: Recommendation) -> None:
    """Print a table of the features, the recommended method, and every rule with its reason."""
    shown = Table("feature", "value [95% interval]", "meaning", box=None, padding=(0, 2, 0, 0))
    for name, one in found.items():
        shown.add_row(name, f"{one.value:6.3f} [{one.low:.3f}, {one.high:.3f}]", MEANINGS[name])
    console.print(shown)
    console.print(f"\nRecommended: {recommendation.method}")
    for rule in recommendation.rules:
        console.print(f"  {'yes' if rule.holds else 'no ':3}  {rule.method}: {rule.reason}")


def measure(
    config: RunConfig, asked: MeasureSettings, tell: Callable[[str], None] = lambda _: None
) -> tuple[Measured, CompletionEstimate]:
    """Measure the run's model on the run's data. Return the measurement, and the estimate of missing labels. `tell`
    gets a line of text when a part has ended.

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
    # Compiling takes longer than it saves, because nothing is learned here.
    settings = config.model.model_copy(update={"compile": False})
    policy = load_policy(settings, device=device, bf16=config.training.bf16, image_rules=config.data.image_rules)
    model = _Model(policy, DetectionTask(config.task, policy.tokenizer), config, tell)
    # The measured scenes are from the split that training would use.
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
    """The model to measure, with its data and task. `tell` gets a line of text when a part of the measurement ends."""

    def __init__(self, policy: Policy, task: DetectionTask, config: RunConfig, tell: Callable[[str], None]) -> None:
        self._policy, self._task, self._config, self._tell = policy, task, config, tell
        self._backend = HfBackend(_drawn_at_temperature_1(config), policy, run_seed=config.training.seed)

    def samples(self, split: str, most: int) -> list[Sample]:
        """Return at most `most` samples of a split, sampled with a fixed seed, in the order of its file. Raises
        DataError if the split has fewer than 2."""
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
        """Return the model's answer to each sample, matched with the labels. `drawn`: sampled at temperature 1; if
        False, decoded greedily."""
        began = time.monotonic()
        rollouts = self._backend.generate(samples, global_step=0, micro_step_idx=0, first_req_idx=0, greedy=not drawn)
        how = "drawn" if drawn else "greedy"
        self._tell(f"{len(samples)} answers, {how}: {time.monotonic() - began:.1f} s")
        return [self._task.match(self._task.parse(rollout)) for rollout in rollouts]

    def gaps(self, groups: Sequence[Sequence[Assignment]]) -> tuple[CompletionEstimate, NDArray[np.float64] | None]:
        """Return the estimate of missing labels, and `Measured.gaps`. `groups`: each scene's sampled answers."""
        began = time.monotonic()
        samples = [group[0].parsed.rollout.sample for group in groups]
        answers = [[[p.object for p in one.parsed.objects] for one in group] for group in groups]
        looked = [candidates(sample, own) for sample, own in zip(samples, answers, strict=True)]
        load, share = self._policy.encoder.images.load, share_of(sum(len(sample.objects) for sample in samples))
        crops = [cluster_crops(*own, load, share) for own in zip(samples, looked, strict=True)]
        known, found = estimate_gaps(samples, looked, crops, len(groups[0]))
        self._tell(f"labels of {len(samples)} samples, by how finds look: {time.monotonic() - began:.1f} s")
        if known.missing is None:
            return known, None
        free = [[one.probability or 0.0 for one in own if one.relation == "free"] for own in found]
        return known, np.array([(len(s.objects), len(own), sum(own)) for s, own in zip(samples, free, strict=True)])

    def split(self, greedy: Sequence[Assignment]) -> tuple[MeasuredSplit, NDArray[np.float64]]:
        """Measure the scenes with these greedy answers. Return the scenes' counts and losses, and the array
        `Measured.exposure`."""
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
