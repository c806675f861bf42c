"""Runs one rank of a stage: `rollout-learner train --stage`, which the recipe starts.

In: the stage's configuration, and the recipe's record in the parent folder of the run. Out: an ordinary run. The run
takes over what earlier stages found: completed labels, and, if validation labels are missing, the assumed number of
validation objects (a range from fewest to most). Headroom is how much better the best of K sampled answers to a
training sample is than the greedy answer. The stage `grpo` first measures the headroom, unless the record already says
to run `grpo`. The stage writes the headroom to `headroom.json`, and learns nothing if the headroom is too small.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.predict.exposure import KINDS
from learner.predict.features import FeatureEstimate, Measured, MeasuredSplit, estimates
from learner.recipe.record import HEADROOM, grpo_pays, read_headroom, read_record
from learner.recipe.stages import GRPO, SFT
from learner.records import Assignment, Sample
from learner.rollout.backend import MicroStep
from learner.run.files import write_atomically
from learner.run.output_dir import GAPS
from learner.tasks.detection.metrics import count_objects
from learner.trainer import Trainer
from learner.wiring.build import joined_ranks, train_on
from shared.errors import DataError

SAMPLES, GENERATIONS = 64, 8  # max samples for measuring headroom, and number of sampled answers to each.
# The `micro_step_idx` of the measurement. Training never uses this number, so no seed is used twice.
_MICRO_STEP = -3
MEASURED = ("f1_greedy", "f1_best", "headroom", "headroom_places", "name_errors", "no_signal")  # features to measure


def train_stage(config: RunConfig, *, environment: Mapping[str, str]) -> int:
    """Run a stage on this rank. If the stage has a checkpoint, it continues from the newest one. Returns the exit code,
    as `train` does."""
    plan = resolve(config, int(environment.get("WORLD_SIZE", 1)))
    with joined_ranks(config, environment) as ranks:
        return train_on(config, plan, ranks, environment, goes_on=True, before=prepare)


def prepare(trainer: Trainer) -> bool:
    """Prepare a stage. The stage gets the labels that earlier stages completed, and the number of validation objects
    that `sft` assumed (a range from low to high). Return True if the stage shall learn, False if it is `grpo` and would
    gain too little. Collective. Raises DataError if no validation sample has an object, and CheckpointError if a file
    of the recipe cannot be read."""
    ranks, run_dir = trainer.ranks, Path(trainer.config.training.output_dir)
    # Rank 0 reads for all ranks, so that all ranks make the same decision.
    (record, *_) = ranks.all_succeed(lambda: read_record(run_dir.parent) if ranks.is_main else None)
    assert record is not None, "a stage is begun by its recipe"
    name, sft_dir = trainer.config.custom.trainer_variant, run_dir.parent / SFT
    if not any(sample.objects for sample in trainer.basis.data.evaluation):
        raise DataError(
            "recipe: validation can't decide",
            found=f"{len(trainer.basis.data.evaluation)} samples in data.val, none with an object",
            wanted="samples with labelled objects: every score is 0 without",
            remedy="name other annotations (data.val), or label some",
        )
    if name != SFT and ranks.is_main:
        _take_range(sft_dir, run_dir)
    if name != GRPO:
        return True
    begins = trainer.config.training.resume_from_checkpoint is None  # a resumed run gets its labels from its checkpoint
    if record.from_start and trainer.labels is not None and begins:
        # The stage uses the labels that the start (the user's model) completed. The weights of `sft` would complete
        # fewer labels: they have learned the annotations, and detect objects without a label less often.
        trainer.labels.restore(0, sft_dir)
    if record.grpo:
        return True
    is_known = ranks.is_main and (run_dir / HEADROOM).is_file()
    (known, *_) = ranks.all_succeed(lambda: read_headroom(run_dir) if is_known else None)
    if known is None:
        trainer.journal.note("recipe: measuring what rollouts could still gain")
        known = measure_headroom(trainer)
        if ranks.is_main:
            content = {name: asdict(one) for name, one in known.items()}
            write_atomically(run_dir / HEADROOM, json.dumps(content, indent=1) + "\n")
    return grpo_pays(known).holds


def _take_range(sft_dir: Path, run_dir: Path) -> None:
    """Copy the file with the assumed range of the number of validation objects from the folder of `sft`. All stages
    estimate F1 for the same range, so that their scores can be compared (R49)."""
    known, own = sft_dir / GAPS, run_dir / GAPS
    if known.is_file() and not own.is_file():
        write_atomically(own, known.read_text())


def measure_headroom(trainer: Trainer) -> dict[str, FeatureEstimate]:
    """Return the features MEASURED by name, estimated for the present weights on at most SAMPLES training samples.
    Collective."""
    every = trainer.basis.data.train
    # The fixed seed gives all ranks the same samples.
    chosen = [every[i] for i in sorted(random.Random(0).sample(range(len(every)), min(SAMPLES, len(every))))]
    greedy = trainer.evaluations.score(chosen, "headroom.jsonl", None, step=0).assignments
    groups = _drawn(trainer, chosen)
    measured = Measured(
        train=MeasuredSplit(greedy=count_objects(greedy).values, nats=np.zeros((len(chosen), 2))),
        sampled=np.stack([count_objects(group).values for group in groups]),
        exposure=np.zeros((len(chosen), len(KINDS), 3)),
    )
    found = estimates(measured)
    return {name: found[name] for name in MEASURED}


def _drawn(trainer: Trainer, samples: Sequence[Sample]) -> list[list[Assignment]]:
    """Return GENERATIONS sampled answers to each sample, matched with its labels. Each rank generates for a part of the
    samples. Collective."""
    ranks, task = trainer.ranks, trainer.basis.task
    assert trainer.evaluations.backend is not None
    share = -(-len(samples) // ranks.world_size)
    line = [sample for sample in samples[ranks.rank * share :][:share] for _ in range(GENERATIONS)]
    window = [MicroStep(samples=line, micro_step_idx=_MICRO_STEP, first_req_idx=ranks.rank * share * GENERATIONS)]
    with trainer.source.fence():
        (rollouts,) = trainer.evaluations.backend.generate_window(window, global_step=0, temperature=1.0)
    own = [task.match(task.parse(rollout)) for rollout in rollouts]
    found = [assignment for part in ranks.all_gather_object(own) for assignment in part]
    return [found[i : i + GENERATIONS] for i in range(0, len(found), GENERATIONS)]
