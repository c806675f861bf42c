"""Makes the parts that give each step its rows, from a configuration: samples, micro-batches, segments, the step
source."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from learner.config.modes import learns_rollouts
from learner.config.plan import Plan, steps_per_epoch
from learner.config.retained import retained_configs
from learner.config.schema import RunConfig
from learner.config.split import as_read_for
from learner.data import prompt
from learner.data.augment import Augmented, augmented
from learner.data.batches import Batches, ShareReader, WindowRepeater, encoder_pool, fewest_micro_batches
from learner.data.lengths import RowLimit, carry_overflow, fewest_tokens
from learner.data.sampler import sampler_of
from learner.data.splits import Split, load_split
from learner.extensions import Task, make_task, reader_of
from learner.journal.journal import Journal
from learner.records import Sample
from learner.rollout.backend import RolloutBackend
from learner.steps.ahead import Stage2Ahead
from learner.steps.basis import Basis, Retained, RunData
from learner.steps.buffered import BufferedSteps
from learner.steps.groups import GroupSource
from learner.steps.in_step import Overlap, Stage2InStep
from learner.steps.packing import CarriedRows, CompleteRows, RowMaker, SingleRows
from learner.steps.segments import RolloutSource, SegmentSource
from learner.steps.shares import Bounds
from learner.steps.source import FreshSteps, StepSource
from learner.steps.stage2 import Stage2Parts
from learner.wiring.connect import Backend
from shared.errors import ConfigError


def load_data(config: RunConfig, task: Task, encoder: prompt.PromptEncoder) -> RunData:
    """Return the samples to train on, to evaluate on (`data.val`, or `data.test` without it), and to score at the end
    (D17). Raises DataError with file and line."""
    data, training = config.data, config.training
    train = _load(config, "train", task, too_long=row_limit(config, task, encoder))
    bad = {"train": train.bad.summary()}
    evaluation: list[Sample] = []
    test: list[Sample] = []
    if training.eval_on_start or training.eval_on_end or training.eval_steps:
        assert data.val is not None or data.test is not None, "refused by learner/config/sections/training.py"
        held_out = _load(config, "test" if data.val is None else "val", task)
        bad["evaluation"], evaluation = held_out.bad.summary(), held_out.samples[: training.eval_samples]
    if data.val is not None and data.test is not None and training.eval_on_end:
        scored = _load(config, "test", task)
        bad["test"], test = scored.bad.summary(), scored.samples
    retained = []
    for name, own in retained_configs(config).items():
        own_task = make_task(own.task, encoder.tokenizer)
        found = load_split(own.data, own.data.train, own_task, geometry=own.task.geometry, reader=reader_of(own))
        bad[f"retain {name}"] = found.bad.summary()
        retained.append(Retained(name=name, task=own_task, samples=found.samples))
    return RunData(
        train=train.samples,
        evaluation=evaluation,
        test=test,
        retained=retained,
        bad_records={part: found for part, found in bad.items() if found},
    )


def _load(config: RunConfig, split: str, task: Task, *, too_long: RowLimit | None = None) -> Split:
    """Load a split that the configuration names. Raises DataError."""
    path, geometry = config.data.path_of(split), config.task.geometry
    assert path is not None
    data, reader = as_read_for(config.data, split), reader_of(config, split)
    return load_split(data, path, task, geometry=geometry, reader=reader, too_long=too_long)


def row_limit(config: RunConfig, task: Task, encoder: prompt.PromptEncoder) -> RowLimit:
    """Return the check for training samples that do not fit into a packed row at every step."""
    return RowLimit(
        encoder=encoder,
        task=task,
        max_tokens=config.global_max_length,
        max_new_tokens=config.rollout_matching.decoding.max_new_tokens if learns_rollouts(config) else 0,
    )


def step_plan(plan: Plan) -> Plan:
    """Return `plan` for a dataloader whose batch is the rank's part of a whole step, not of a micro-step (R31)."""
    share = plan.effective_batch_size // plan.world_size
    return replace(plan, per_device_train_batch_size=share, gradient_accumulation_steps=1)


def make_batches(basis: Basis, stack: ExitStack) -> tuple[Batches, int]:
    """Return this rank's micro-batches (in `stage2_ab_training`: whole steps), and the length of the run in steps."""
    config = basis.config
    plan = step_plan(basis.plan) if config.stage2_ab else basis.plan
    batches = Batches(
        basis.data.train,
        config=config,
        plan=plan,
        rank=basis.ranks.rank,
        encoder=basis.policy.encoder,
        augmented=_augmented(basis, basis.policy.encoder),
    )
    stack.callback(batches.close)
    if config.training.max_steps:
        return batches, config.training.max_steps
    assert config.training.num_train_epochs is not None, "the schema wants max_steps or num_train_epochs"
    return batches, config.training.num_train_epochs * steps_per_epoch(
        batches.per_epoch, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )


def check_packing_buffer(
    samples: Sequence[Sample], encoder: prompt.PromptEncoder, config: RunConfig, plan: Plan, total_steps: int
) -> None:
    """Raises ConfigError if the segments carried to later rows will exceed `training.packing_buffer` in any case, so
    that the run fails before hours of training (D6)."""
    training = config.training
    # Only `rollout_matching_sft` carries segments to later rows.
    if config.custom.trainer_variant != "rollout_matching_sft" or not training.packing or config.data.augment:
        # The lengths of augmented samples are not known in advance.
        return
    if plan.per_device_train_batch_size == 1:
        # Each row has one segment, so no segment is carried over.
        return
    sampler = sampler_of(len(samples), config=config, plan=plan, rank=0)
    gas, m_steps = plan.gradient_accumulation_steps, plan.m_steps
    fewest = [fewest_tokens(sample, encoder) for sample in samples]
    overflow = carry_overflow(
        fewest,
        sampler,
        row_tokens=config.global_max_length,
        micro_steps=fewest_micro_batches(
            total_steps, sampler.per_epoch, gradient_accumulation_steps=gas, m_steps=m_steps
        ),
        most_carried=training.packing_buffer,
    )
    if overflow is None:
        return
    mean = sum(fewest) / len(fewest)
    raise ConfigError(
        "training.packing_buffer must overflow: more segments arrive than packed rows can take",
        found=f"at least {overflow.carried} segments left over on a rank after {overflow.micro_steps} micro-steps of "
        f"{plan.per_device_train_batch_size} samples, which have {mean:.0f} tokens or more on average",
        wanted=f"at most training.packing_buffer ({training.packing_buffer}); a micro-step learns one row of "
        f"global_max_length ({config.global_max_length}) tokens",
        remedy="lower training.per_device_train_batch_size, or raise global_max_length; a larger packing_buffer only "
        "moves the end",
    )


def _augmented(basis: Basis, encoder: prompt.PromptEncoder, *, rollouts: bool = False) -> Augmented | None:
    too_long = row_limit(basis.config, basis.task, encoder)
    return augmented(basis.config, basis.plan, basis.data.train, too_long=too_long, rollouts=rollouts)


def step_source(
    basis: Basis,
    batches: Batches,
    backend: Backend | None,
    total_steps: int,
    journal: Journal,
) -> StepSource:
    """Return the source of each step's rows."""
    config, plan, clock = basis.config, basis.plan, journal.clock
    source, row_maker = _segment_source(basis, backend, journal), _row_maker(config)
    if config.stage2_ab is not None:
        parts = Stage2Parts(
            b_ratio=config.stage2_ab.schedule.b_ratio,
            places_per_sample=config.grpo.num_generations if _is_grpo(config) else 1,
            packs_per_step=plan.gradient_accumulation_steps,
            ranks=basis.ranks,
            batches=batches,
            ground_truth=basis.ground_truth,
            rollouts=source,
            row_maker=row_maker,
            clock=clock,
        )
        return _stage2(basis, parts, capacity=_places_at_once(config, backend), total_steps=total_steps)
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "ranks": basis.ranks,
        "encoder": basis.policy.encoder,
        "clock": clock,
    }
    if plan.m_steps == 1:
        drains_at = None if config.training.packing_drop_last else total_steps - 1
        return FreshSteps(batches, source, row_maker, drains_at=drains_at, **settings)
    repeater = WindowRepeater(
        batches, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )
    return BufferedSteps(repeater, source, row_maker, **settings)


def _stage2(basis: Basis, parts: Stage2Parts, *, capacity: int, total_steps: int) -> StepSource:
    """Return the step source of stage 2. `capacity`: the result of `_places_at_once`."""
    config, plan, deadline_s = basis.config, basis.plan, basis.config.training.collective_timeout_s
    assert config.stage2_ab is not None
    if not plan.async_actor_learner or parts.b_ratio == 0:
        overlap = None
        if plan.overlap:
            assert isinstance(parts.rollouts, RolloutSource)
            overlap = Overlap(
                rollouts=parts.rollouts,
                capacity=config.global_max_length,
                in_order=config.training.deterministic,
                share_prompts=_is_grpo(config),
            )
        return Stage2InStep(parts, overlap=overlap, deadline_s=deadline_s)
    settings = config.stage2_ab.async_actor_learner
    return Stage2Ahead(
        parts,
        _share_reader(basis),
        bounds=Bounds.run_ahead(settings, packs_per_step=parts.packs_per_step),
        samples_per_pack=plan.per_device_train_batch_size,
        capacity=capacity,
        total_steps=total_steps,
        max_starved_steps=settings.max_starved_steps,
        # Half of the deadline lets a rank's own error come before the other ranks' timeout.
        deadline_s=deadline_s / 2,
    )


def _places_at_once(config: RunConfig, backend: Backend | None) -> int:
    """Return the number of a batch's samples whose answers the backend decodes at once for this rank, at least one.
    With `grpo` the result is the number of rollouts, a multiple of the rollouts per prompt."""
    chunk = backend.chunk if backend else 0
    if _is_grpo(config):
        return max(1, chunk // config.grpo.num_generations) * config.grpo.num_generations
    return max(1, chunk)


def _is_grpo(config: RunConfig) -> bool:
    return config.custom.trainer_variant == "grpo"


def _share_reader(basis: Basis) -> ShareReader:
    config, samples = basis.config, basis.data.train
    # The encoder is copied, because the producer's thread must share nothing with the learning thread.
    encoder = copy.deepcopy(basis.policy.encoder)
    return ShareReader(
        samples,
        sampler_of(len(samples), config=config, plan=step_plan(basis.plan), rank=basis.ranks.rank),
        encoder_pool(config, encoder, samples_per_micro_batch=basis.plan.per_device_train_batch_size),
        augmented=_augmented(basis, encoder, rollouts=True),
    )


def _segment_source(basis: Basis, backend: RolloutBackend | None, journal: Journal) -> SegmentSource:
    if not learns_rollouts(basis.config):
        return basis.ground_truth
    assert backend is not None
    config, answers, groups = basis.config, journal.answers, journal.groups
    on_answer = answers.add if answers is not None else None
    if config.custom.trainer_variant != "grpo":
        return RolloutSource(
            backend,
            basis.task,
            basis.rewards,
            loss=config.loss,
            on_answer=on_answer,
            image_processing=basis.policy.encoder.image_processing,
        )
    return GroupSource(
        backend,
        basis.task,
        basis.rewards,
        grpo=config.grpo,
        loss=config.loss,
        ranks=basis.ranks,
        on_answer=on_answer,
        on_group=groups.add if groups is not None else None,
        image_processing=basis.policy.encoder.image_processing,
    )


def _row_maker(config: RunConfig) -> RowMaker:
    training = config.training
    if not training.packing:
        return SingleRows(config.global_max_length)
    if config.custom.trainer_variant != "rollout_matching_sft":
        return CompleteRows(config.global_max_length, share_prompts=_is_grpo(config))
    return CarriedRows(config.global_max_length, max_segments=training.packing_buffer)
