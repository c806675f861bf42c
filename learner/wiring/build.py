"""The way from a configuration to a run: this module makes every part, passes them to the `Trainer`, and closes them
again.

Only this module and `connect.py` import all parts. They read no environment but the mapping that is passed in.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from learner.config.inference import INFERENCE_NAME, settings_of
from learner.config.load import write_resolved
from learner.config.modes import colocates, learns_rollouts, needs_rollouts
from learner.config.plan import Plan, resolve, shards, steps_per_epoch
from learner.config.retained import retained_configs
from learner.config.schema import RunConfig
from learner.config.sections.training import chosen_by_test, kept_metric
from learner.config.split import as_read_for
from learner.data import prompt
from learner.data.augment import Augmented, augmented
from learner.data.batches import Batches, ShareReader, WindowRepeater, encoder_pool, fewest_micro_batches
from learner.data.lengths import RowLimit, carry_overflow, fewest_tokens
from learner.data.sampler import sampler_of
from learner.data.splits import Split, load_split
from learner.extensions import Task, loss_function, make_task, reader_of, reward_functions
from learner.journal.answers import AnswersLog
from learner.journal.console import Console
from learner.journal.groups_log import GroupsLog
from learner.journal.journal import Journal
from learner.journal.log import MetricsLog, PhaseClock, Timeline, log_to_file, point_latest
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks, init_ranks
from learner.records import RolloutCallLog, Sample
from learner.report.page import write_report
from learner.rollout.backend import RolloutBackend
from learner.rollout.hf import HfBackend
from learner.run.additions import run_annotations
from learner.run.checkpoint import CheckpointStore
from learner.run.environment import collect_as_usual
from learner.run.files import writing
from learner.run.output_dir import GAPS, claim_output_dir, torchrun_agent
from learner.run.stopping import Stopped, StopRequest, told_before_the_first_step
from learner.steps.ahead import Stage2Ahead
from learner.steps.buffered import BufferedSteps
from learner.steps.completing import LabelCompletion
from learner.steps.evaluation import GapMetrics, Retained
from learner.steps.groups import GroupSource
from learner.steps.in_step import Overlap, Stage2InStep
from learner.steps.packing import CarriedRows, CompleteRows, RowMaker, SingleRows
from learner.steps.segments import GroundTruthSource, RolloutSource, SegmentSource
from learner.steps.shares import Bounds
from learner.steps.source import FreshSteps, StepSource
from learner.steps.stage2 import Stage2Parts
from learner.sync.sync import Sync
from learner.tasks.detection.audit import require_verdicts
from learner.tasks.detection.prefix import without_label
from learner.tasks.detection.task import DetectionTask
from learner.tasks.rewards import Rewards
from learner.trainer import Trainer
from learner.wiring.before_start import check_parts
from learner.wiring.connect import Backend, connect_backend, connect_sync
from shared.config.model import shown
from shared.errors import ConfigError, DeadlineError, OutputError
from shared.families import check_folder
from shared.tokens import read_token


def step_plan(plan: Plan) -> Plan:
    """Return the plan that the data follows: a dataloader batch is the rank's share of a whole step (R31)."""
    share = plan.effective_batch_size // plan.world_size
    return replace(plan, per_device_train_batch_size=share, gradient_accumulation_steps=1)


def train(config: RunConfig, *, environment: Mapping[str, str]) -> int:
    """Run the training that `config` describes, as one of torchrun's processes or alone. Returns the exit code."""
    plan = resolve(config, int(environment.get("WORLD_SIZE", 1)))
    with joined_ranks(config, environment) as ranks:
        return train_on(config, plan, ranks, environment)


@contextmanager
def joined_ranks(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """Yield the joined ranks of a run; they part at the end of the block. Raises ConfigError before they join, if the
    user's parts, the trackers or the model's family cannot be used."""
    check_parts(config)
    check_folder(config.model.path, key="model.path", allow_untested=config.model.allow_untested_family)
    with told_before_the_first_step():
        ranks = init_ranks(environment, timeout_s=config.training.collective_timeout_s)
        try:
            yield ranks
        finally:
            ranks.close()


def train_on(
    config: RunConfig,
    plan: Plan,
    ranks: Ranks,
    environment: Mapping[str, str],
    *,
    goes_on: bool = False,
    before: Callable[[Trainer], bool] = lambda _: True,
) -> int:
    """Train with ranks that have already joined, and that may train again afterwards. Collective.

    `goes_on`: a run in the folder is an earlier start of this run. `before` is called when everything is ready; if it
    returns False, nothing is trained.
    """
    with ExitStack() as stack:
        config = claim_output_dir(config, ranks, torchrun_agent(environment), stack=stack, goes_on=goes_on)
        trainer = build(config, plan, ranks, token=read_token(environment), stack=stack)
        collect_as_usual()
        try:
            with trainer.stop.installed():
                if before(trainer):
                    trainer.run()
        except Stopped as stopped:
            trainer.journal.note(str(stopped))
            return stopped.exit_code
    return 0


def build(config: RunConfig, plan: Plan, ranks: Ranks, *, token: str | None, stack: ExitStack) -> Trainer:
    """Make every part of a run, and check them against the servers. Parts that must be closed are put on `stack`."""
    log = _open_run_dir(config, plan, ranks, stack)
    if ranks.is_main:  # there is no console before the number of steps is known, and this takes minutes
        print(f"{Path(config.training.output_dir).name} reading annotations, loading {config.model.path}", flush=True)
    basis = _basis(config, plan, ranks)
    batches, total_steps = _batches(basis, stack)
    check_packing_buffer(basis.data.train, basis.policy.encoder, config, plan, total_steps)
    console = _console(config, ranks, total_steps, stack)
    log.tell = console.note
    _tell_compilation(basis.policy, log, console)
    _tell_bad_records(basis.data, log, console)
    if (warning := chosen_by_test(config)) is not None:
        console.note(f"warning: {warning}")
    timeline = Timeline(ranks.rank)
    after_backend = stack.enter_context(ExitStack())  # parts that wait for a call until the backend closes it
    optimizer = Optimizer(basis.policy.trainable, config.training, total_steps=total_steps)
    if colocates(config):
        console.note("starting vLLM")
    backend, sync = _rollouts(basis, optimizer, token, log, timeline, stack)
    if isinstance(backend, HfBackend):
        backend.tell = console.note
    clock = PhaseClock(on_phase=timeline.phase)
    journal = Journal(
        ranks=ranks,
        log=log,
        timeline=timeline,
        clock=clock,
        console=console,
        answers=_answers(basis),
        groups=_groups(basis, stack),
        samples=basis.data.train,
    )
    labels = _label_completion(basis, backend, console)
    stop = StopRequest(ranks, timeout_s=config.training.stop_timeout_s)
    source = _step_source(basis, batches, backend, total_steps, journal)
    after_backend.push(_closing(source))
    stack.callback(source.stop)
    return Trainer(
        config=config,
        total_steps=total_steps,
        ranks=ranks,
        policy=basis.policy,
        optimizer=optimizer,
        source=source,
        task=basis.task,
        rewards=basis.rewards,
        train_samples=basis.data.train,
        eval_samples=basis.data.evaluation,
        test_samples=basis.data.test,
        retained=basis.data.retained,
        backend=backend,
        sync=sync,
        checkpoints=CheckpointStore(
            root=Path(config.training.output_dir),
            ranks=ranks,
            save_total_limit=config.training.save_total_limit,
            config_digest=_digest(config),
            notes={INFERENCE_NAME: settings_of(config, basis.data.train).to_json()},
            held_off=stop.held_off,
        ),
        stop=stop,
        journal=journal,
        labels=labels,
        gaps=_gap_metrics(basis),
    )


_UNFINISHED = ".unfinished-export"


def export(checkpoint: Path, out: Path, dtype: str, notes: Mapping[str, str]) -> None:
    """Write the merged weights of a checkpoint folder as a model that can be served, with `notes`, texts by the names
    of their files. Raises OutputError if `out` has files or cannot be written. However it ends, the whole model is in
    `out`, or no `config.json`."""
    from learner.config.sections.model import ModelConfig
    from learner.policy.files import export_model

    _check_export_folder(out)
    policy = load_policy(ModelConfig(path=str(checkpoint)), device=torch.device("cpu"))
    work = out / _UNFINISHED
    try:
        with writing(out):
            if work.exists():
                shutil.rmtree(work)
            try:
                export_model(policy, work, dtype=getattr(torch, dtype))
            except Exception as error:  # safetensors raises its own type, the tokenizers library a bare Exception
                if not isinstance(error, SafetensorError) and type(error) is not Exception:
                    raise
                raise OSError(str(error)) from error
            for name, text in notes.items():
                (work / name).write_text(text, encoding="utf-8")
            for path in sorted(work.iterdir(), key=lambda path: path.name == "config.json"):  # without it, no model
                path.rename(out / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_export_folder(out: Path) -> None:
    """Raises OutputError if `out` has files: an earlier export's weights may have more files, which would stay."""
    is_empty = not out.exists() or (out.is_dir() and all(path.name == _UNFINISHED for path in out.iterdir()))
    if not is_empty:
        raise OutputError(
            "--out: the model would be written among other files",
            found=f"{out}, which {'is not empty' if out.is_dir() else 'is a file'}",
            wanted="a folder that is new or empty",
            remedy="name another folder, or empty this one",
        )


# ---- parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The samples of a run. `test` is scored at the end, `retained` at each evaluation. `bad_records`: for each split,
    the numbers of dropped or clipped records, by kind and action."""

    train: list[Sample]
    evaluation: list[Sample]
    test: list[Sample]
    retained: list[Retained]
    bad_records: Mapping[str, Mapping[str, Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The parts from which the others are made."""

    config: RunConfig
    plan: Plan
    ranks: Ranks
    policy: Policy
    task: Task
    data: RunData

    @property
    def ground_truth(self) -> GroundTruthSource:
        return GroundTruthSource(self.task, loss=self.config.loss)

    @cached_property
    def rewards(self) -> Rewards:
        functions, weights = reward_functions(self.config), dict(self.config.reward.weights)
        if self.config.custom.trainer_variant == "grpo" and not functions and not weights:
            weights = {"f1": 1.0}
        return Rewards(tokenizer=self.policy.tokenizer, functions=functions, weights=weights, task=self.task)


def _open_run_dir(config: RunConfig, plan: Plan, ranks: Ranks, stack: ExitStack) -> MetricsLog:
    """Open the run's folder with the resolved configuration, a log file per rank, and metrics that begin with the
    plan."""
    run_dir = Path(config.training.output_dir)
    with writing(run_dir):
        log_to_file(run_dir, ranks.rank)
        if ranks.is_main:
            write_resolved(config, run_dir)
            point_latest(run_dir)
        settings = shown(config)
        log = MetricsLog(run_dir, config.logging, enabled=ranks.is_main, settings=settings, write_report=write_report)
    stack.callback(log.close)
    log.write("plan", plan.to_json())
    return log


def _basis(config: RunConfig, plan: Plan, ranks: Ranks) -> Basis:
    """Return the policy, equal on all ranks, the task and the samples."""
    torch.manual_seed(config.training.seed)
    shard_over = ranks if shards(config, ranks.world_size) else None
    policy = load_policy(
        config.model,
        device=ranks.device,
        bf16=config.training.bf16,
        shard_over=shard_over,
        image_rules=config.data.image_rules,
        loss=loss_function(config),
        grpo=config.grpo if config.custom.trainer_variant == "grpo" else None,
    )
    policy.broadcast(ranks)
    task = make_task(config.task, policy.tokenizer)
    return Basis(
        config=config, plan=plan, ranks=ranks, policy=policy, task=task, data=load_data(config, task, policy.encoder)
    )


def _tell_compilation(policy: Policy, log: MetricsLog, console: Console) -> None:
    """Log whether the model is compiled, and why not. With a GPU, print the reason too."""
    log.write("model", {"compiled": not policy.why_not_compiled, "why_not": policy.why_not_compiled})
    if policy.why_not_compiled and policy.device.type == "cuda":
        console.note(f"not compiled: {policy.why_not_compiled}")


def load_data(config: RunConfig, task: Task, encoder: prompt.PromptEncoder) -> RunData:
    """Return the samples to train on, to evaluate on (`data.val`, or `data.test` without it), and to score at the end
    (D17). Raises DataError with file and line."""
    data, training = config.data, config.training
    train = _load(config, "train", task, too_long=row_limit(config, task, encoder))
    bad = {"train": train.bad.summary()}
    evaluation: list[Sample] = []
    test: list[Sample] = []
    if training.eval_on_start or training.eval_on_end or training.eval_steps:
        if data.val is None and data.test is None:
            raise ConfigError(
                "data.val: nothing to evaluate on",
                found="neither data.val nor data.test",
                wanted="a held-out set, since training.eval_* asks for evaluations",
                remedy="name one, or switch evaluations off",
            )
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
    """Return which training samples fit a packed row at any step."""
    return RowLimit(
        encoder=encoder,
        task=task,
        max_tokens=config.global_max_length,
        max_new_tokens=config.rollout_matching.decoding.max_new_tokens if learns_rollouts(config) else 0,
    )


def _tell_bad_records(data: RunData, log: MetricsLog, console: Console) -> None:
    """Log the numbers of dropped and clipped records, and print a line for each number."""
    log.write(
        "data",
        {
            "train": len(data.train),
            "evaluation": len(data.evaluation),
            "test": len(data.test),
            "bad_records": data.bad_records,
        },
    )
    for part, kinds in data.bad_records.items():
        counts = ", ".join(f"{n} {kind} ({action})" for kind, acts in kinds.items() for action, n in acts.items())
        console.note(f"bad records of the {part} data: {counts}")


def _batches(basis: Basis, stack: ExitStack) -> tuple[Batches, int]:
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
    return batches, config.training.max_steps or _steps_of_epochs(config, plan, batches)


def check_packing_buffer(
    samples: Sequence[Sample], encoder: prompt.PromptEncoder, config: RunConfig, plan: Plan, total_steps: int
) -> None:
    """Raises ConfigError if the carry buffer must overflow during the run, to fail before hours of training (D6)."""
    training = config.training
    if config.custom.trainer_variant != "rollout_matching_sft" or not training.packing or config.data.augment:
        return  # nobody knows yet how long augmented samples are
    if plan.per_device_train_batch_size == 1:
        return  # every row takes at least one segment
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


def _console(config: RunConfig, ranks: Ranks, total_steps: int, stack: ExitStack) -> Console:
    console = Console(
        total_steps=total_steps,
        name=Path(config.training.output_dir).name,
        enabled=ranks.is_main,
        max_minutes=config.training.max_minutes,
        plain=not learns_rollouts(config),
    )
    stack.callback(console.close)
    return console


def _rollouts(
    basis: Basis, optimizer: Optimizer, token: str | None, log: MetricsLog, timeline: Timeline, stack: ExitStack
) -> tuple[Backend | None, Sync | None]:
    """Return the rollout backend, and the sync that brings it weights. Both are None without rollouts. The sync is None
    if the trained model itself generates."""
    config, ranks, policy = basis.config, basis.ranks, basis.policy
    if not needs_rollouts(config):
        return None, None

    def on_call(record: RolloutCallLog) -> None:
        timeline.call(record)
        log.write("rollout_call", record)
        if not ranks.is_main:  # other ranks write no metrics; their seeds and chunks are in their logs (R15)
            logging.getLogger("learner.rollout").info("%s", record)

    backend = connect_backend(config, policy, ranks=ranks, optimizer=optimizer, token=token, on_call=on_call)
    stack.callback(backend.close)
    if isinstance(backend, HfBackend):
        return backend, None
    sync = connect_sync(config, policy, backend, basis.task, basis.data.train, ranks=ranks)
    stack.callback(sync.close)
    return backend, sync


def _step_source(
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
            places_per_sample=config.grpo.num_generations if config.custom.trainer_variant == "grpo" else 1,
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
    """Return the step source of stage 2. `capacity`: how many places of a batch the backend decodes at once for this
    rank."""
    config, plan, deadline_s = basis.config, basis.plan, basis.config.training.collective_timeout_s
    assert config.stage2_ab is not None
    if not plan.async_actor_learner or parts.b_ratio == 0:
        return Stage2InStep(
            parts, overlap=_overlap(config, parts.rollouts) if plan.overlap else None, deadline_s=deadline_s
        )
    settings = config.stage2_ab.async_actor_learner
    return Stage2Ahead(
        parts,
        _share_reader(basis),
        bounds=Bounds.run_ahead(settings, packs_per_step=parts.packs_per_step),
        samples_per_pack=plan.per_device_train_batch_size,
        capacity=capacity,
        total_steps=total_steps,
        max_starved_steps=settings.max_starved_steps,
        deadline_s=deadline_s / 2,  # lets a rank's own error come before the other ranks' timeout
    )


def _places_at_once(config: RunConfig, backend: Backend | None) -> int:
    """Return how many places of a batch the backend decodes at once for this rank, at least one. With `grpo` places are
    rollouts, in whole groups."""
    chunk = backend.chunk if backend else 0
    if config.custom.trainer_variant == "grpo":
        return max(1, chunk // config.grpo.num_generations) * config.grpo.num_generations
    return max(1, chunk)


def _overlap(config: RunConfig, rollouts: SegmentSource) -> Overlap:
    assert isinstance(rollouts, RolloutSource)
    return Overlap(
        rollouts=rollouts,
        capacity=config.global_max_length,
        in_order=config.training.deterministic,
        share_prompts=_shares_prompts(config),
    )


def _shares_prompts(config: RunConfig) -> bool:
    return config.custom.trainer_variant == "grpo"


def _share_reader(basis: Basis) -> ShareReader:
    config, samples = basis.config, basis.data.train
    encoder = copy.deepcopy(basis.policy.encoder)  # the producer's thread shares nothing with the learning thread
    return ShareReader(
        samples,
        sampler_of(len(samples), config=config, plan=step_plan(basis.plan), rank=basis.ranks.rank),
        encoder_pool(config, encoder, samples_per_micro_batch=basis.plan.per_device_train_batch_size),
        augmented=_augmented(basis, encoder, rollouts=True),
    )


def _augmented(basis: Basis, encoder: prompt.PromptEncoder, *, rollouts: bool = False) -> Augmented | None:
    too_long = row_limit(basis.config, basis.task, encoder)
    return augmented(basis.config, basis.plan, basis.data.train, too_long=too_long, rollouts=rollouts)


def _closing(source: StepSource) -> Callable[..., None]:
    """Return an exit callback that closes `source`. A failed close must not hide the error that ended the run."""

    def close(_: object, error: BaseException | None, __: object) -> None:
        try:
            source.close()
        except DeadlineError as late:
            if error is None:
                raise
            logging.getLogger(__name__).warning("%s", late)

    return close


def _answers(basis: Basis) -> AnswersLog | None:
    """Return the log of rank 0's newest answers; None for other ranks, and for other tasks than detection."""
    if not isinstance(basis.task, DetectionTask) or not basis.ranks.is_main or not learns_rollouts(basis.config):
        return None
    run_dir, task = Path(basis.config.training.output_dir), basis.task
    if not basis.config.loss.keep_unmatched:
        return AnswersLog(run_dir, basis.policy.tokenizer)
    return AnswersLog(run_dir, basis.policy.tokenizer, kept=lambda assignment: without_label(assignment, task))


def _groups(basis: Basis, stack: ExitStack) -> GroupsLog | None:
    """Return the log of rank 0's rewards and groups."""
    config = basis.config
    if config.custom.trainer_variant != "grpo" or not basis.ranks.is_main:
        return None
    log = GroupsLog(Path(config.training.output_dir), basis.task)
    stack.callback(log.close)
    return log


def _label_completion(basis: Basis, backend: Backend | None, console: Console) -> LabelCompletion | None:
    """Return the label completion. It changes `basis.data.train`, the list from which all parts read samples."""
    config, task = basis.config, basis.task
    if config.labels.complete is None:
        return None
    assert backend is not None
    assert isinstance(task, DetectionTask)
    return LabelCompletion(
        basis.data.train,
        settings=config.labels.complete,
        backend=backend,
        task=task,
        ranks=basis.ranks,
        run_dir=Path(config.training.output_dir),
        open_image=basis.policy.encoder.images.load,
        too_long=row_limit(config, task, basis.policy.encoder),
        tell=console.note,
        annotations=run_annotations(config) if basis.ranks.is_main else None,
    )


def _gap_metrics(basis: Basis) -> GapMetrics | None:
    """Return the metrics for labels with gaps, if `training.keep_best: auto` may choose by these."""
    config, samples = basis.config, basis.data.evaluation
    if not isinstance(basis.task, DetectionTask) or config.training.keep_best != "auto" or kept_metric(config) is None:
        return None
    complete, file = config.labels.complete, Path(config.training.output_dir) / GAPS
    audit = complete.audit if complete is not None else None
    audited = require_verdicts(Path(audit)) if audit is not None and basis.ranks.is_main else []
    return GapMetrics(samples, basis.policy.encoder.images.load, basis.ranks, file, audited)


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
        return CompleteRows(config.global_max_length, share_prompts=_shares_prompts(config))
    return CarriedRows(config.global_max_length, max_segments=training.packing_buffer)


def _steps_of_epochs(config: RunConfig, plan: Plan, batches: Batches) -> int:
    epochs = config.training.num_train_epochs
    assert epochs is not None, "the schema wants max_steps or num_train_epochs"
    return epochs * steps_per_epoch(
        batches.per_epoch, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(config.model_dump_json(exclude={"training": {"resume_from_checkpoint"}}).encode()).hexdigest()
