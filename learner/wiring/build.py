"""Makes every part of a run from its configuration, passes the parts to the `Trainer`, and closes them again.

`connect.py` makes backend and sync, `steps.py` samples and rows. Only these three modules import all parts. All three
read environment variables only from the mapping that is passed in.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from learner.config.inference import INFERENCE_NAME, settings_of
from learner.config.load import write_resolved
from learner.config.modes import colocates, learns_rollouts, needs_rollouts
from learner.config.plan import Plan, resolve, shards
from learner.config.schema import RunConfig
from learner.config.sections.training import chosen_by_test, kept_metric
from learner.extensions import loss_function, make_task
from learner.journal.answers import AnswersLog
from learner.journal.console import Console
from learner.journal.groups_log import GroupsLog
from learner.journal.journal import Journal
from learner.journal.log import MetricsLog, PhaseClock, Timeline, log_to_file, point_latest
from learner.policy.load import load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks, init_ranks
from learner.records import RolloutCallLog
from learner.report.page import write_report
from learner.rollout.hf import HfBackend
from learner.rollout.server_backend import ServerBackend
from learner.run.additions import run_annotations
from learner.run.checkpoint import CheckpointStore
from learner.run.environment import collect_as_usual
from learner.run.files import writing
from learner.run.output_dir import GAPS, claim_output_dir, torchrun_agent
from learner.run.stopping import Stopped, StopRequest, told_before_the_first_step
from learner.steps.basis import Basis
from learner.steps.completing import LabelCompletion
from learner.steps.evaluation import GapMetrics
from learner.steps.source import StepSource
from learner.sync.sync import Sync
from learner.tasks.detection.audit import require_verdicts
from learner.tasks.detection.prefix import without_label
from learner.tasks.detection.task import DetectionTask
from learner.trainer import Trainer
from learner.wiring.before_start import check_parts
from learner.wiring.connect import Backend, connect_backend, connect_sync
from learner.wiring.steps import check_packing_buffer, load_data, make_batches, row_limit, step_source
from shared.config.model import shown
from shared.errors import DeadlineError, OutputError
from shared.families import check_folder
from shared.tokens import read_token


def train(config: RunConfig, *, environment: Mapping[str, str]) -> int:
    """Run the training that `config` describes, as one of torchrun's processes or alone. Returns the exit code."""
    plan = resolve(config, int(environment.get("WORLD_SIZE", 1)))
    with joined_ranks(config, environment) as ranks:
        return train_on(config, plan, ranks, environment)


@contextmanager
def joined_ranks(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """Yield the ranks of a run, joined until the end of the `with` block. Raises ConfigError before they join, if the
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
    """Train with ranks that have already joined, and return the exit code. The ranks may train again afterwards.
    Collective.

    `goes_on`: True if a run in the output folder is an earlier start of this run. `before` is called when everything is
    ready; if it returns False, nothing is trained.
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
    # The line is printed directly, because the console begins when the number of steps is known, minutes later.
    if ranks.is_main:
        print(f"{Path(config.training.output_dir).name} reading annotations, loading {config.model.path}", flush=True)
    basis = _basis(config, plan, ranks)
    batches, total_steps = make_batches(basis, stack)
    check_packing_buffer(basis.data.train, basis.policy.encoder, config, plan, total_steps)
    console, timeline = _console(config, ranks, total_steps, stack), Timeline(ranks.rank)
    log.tell = console.note
    _tell_start(basis, log, console)
    # Parts on this stack are closed after the backend, because they may wait for a generation call, which closing the
    # backend ends.
    after_backend = stack.enter_context(ExitStack())
    optimizer = Optimizer(basis.policy.trainable, config.training, total_steps=total_steps)
    if colocates(config):
        console.note("starting vLLM")
    backend, sync = _rollouts(basis, optimizer, token, log, timeline, stack)
    if isinstance(backend, HfBackend | ServerBackend):
        backend.tell = console.note
    journal = _journal(basis, log, timeline, console, stack)
    source = step_source(basis, batches, backend, total_steps, journal)
    after_backend.push(_closing(source))
    stack.callback(source.stop)
    stop = StopRequest(ranks, timeout_s=config.training.stop_timeout_s)
    return Trainer(
        basis,
        total_steps=total_steps,
        optimizer=optimizer,
        source=source,
        backend=backend,
        sync=sync,
        checkpoints=_checkpoints(basis, stop),
        stop=stop,
        journal=journal,
        labels=_label_completion(basis, backend, console),
        gaps=_gap_metrics(basis),
    )


_UNFINISHED = ".unfinished-export"


def export(checkpoint: Path, out: Path, dtype: str, notes: Mapping[str, str]) -> None:
    """Write the merged weights of a checkpoint folder as a model that can be served. `notes`: texts of further files,
    by file name. Raises OutputError if `out` has files or cannot be written. Even if the export is killed, `out` has
    either the whole model or no `config.json`."""
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
            # `config.json` is moved last: a folder without it is no model.
            for path in sorted(work.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(out / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_export_folder(out: Path) -> None:
    """Raises OutputError if `out` has files, because weight files of an earlier export could stay in it."""
    is_empty = not out.exists() or (out.is_dir() and all(path.name == _UNFINISHED for path in out.iterdir()))
    if not is_empty:
        raise OutputError(
            "--out: the model would be written among other files",
            found=f"{out}, which {'is not empty' if out.is_dir() else 'is a file'}",
            wanted="a folder that is new or empty",
            remedy="name another folder, or empty this one",
        )


def _open_run_dir(config: RunConfig, plan: Plan, ranks: Ranks, stack: ExitStack) -> MetricsLog:
    """Create the run's folder with the resolved configuration, a log file per rank, and a metrics file whose first
    record is the plan."""
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
    # The seed is set before the model is made, because a new adapter begins with random numbers.
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


def _tell_start(basis: Basis, log: MetricsLog, console: Console) -> None:
    """Log whether the model is compiled, or why not; with a GPU, print this reason too. Log the numbers of samples.
    Print the numbers of dropped and clipped records, one line per split."""
    policy, data = basis.policy, basis.data
    log.write("model", {"compiled": not policy.why_not_compiled, "why_not": policy.why_not_compiled})
    if policy.why_not_compiled and policy.device.type == "cuda":
        console.note(f"not compiled: {policy.why_not_compiled}")
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
    if (warning := chosen_by_test(basis.config)) is not None:
        console.note(f"warning: {warning}")


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
    """Return the rollout backend, and the sync that brings it weights. Backend and sync are None without rollouts. The
    sync is None if the trained model itself generates."""
    config, ranks, policy = basis.config, basis.ranks, basis.policy
    if not needs_rollouts(config):
        return None, None

    def on_call(record: RolloutCallLog) -> None:
        timeline.call(record)
        log.write("rollout_call", record)
        # Only rank 0 writes metrics, so other ranks write their seeds and chunks to their logs (R15).
        if not ranks.is_main:
            logging.getLogger("learner.rollout").info("%s", record)

    backend = connect_backend(config, policy, ranks=ranks, optimizer=optimizer, token=token, on_call=on_call)
    stack.callback(backend.close)
    if isinstance(backend, HfBackend):
        return backend, None
    sync = connect_sync(config, policy, backend, basis.task, basis.data.train, ranks=ranks)
    stack.callback(sync.close)
    return backend, sync


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


def _journal(basis: Basis, log: MetricsLog, timeline: Timeline, console: Console, stack: ExitStack) -> Journal:
    """Return the journal. With `grpo` rank 0 also logs rewards and groups."""
    config, groups = basis.config, None
    if config.custom.trainer_variant == "grpo" and basis.ranks.is_main:
        groups = GroupsLog(Path(config.training.output_dir), basis.task)
        stack.callback(groups.close)
    return Journal(
        ranks=basis.ranks,
        log=log,
        timeline=timeline,
        clock=PhaseClock(on_phase=timeline.phase),
        console=console,
        answers=_answers(basis),
        groups=groups,
        samples=basis.data.train,
    )


def _label_completion(basis: Basis, backend: Backend | None, console: Console) -> LabelCompletion | None:
    """Return the label completion. The completion changes `basis.data.train`, the list from which all parts read
    samples."""
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
    """Return the metrics for labels with gaps (objects without a label), if `training.keep_best: auto` may choose the
    best checkpoint by them; else None."""
    config, samples = basis.config, basis.data.evaluation
    if not isinstance(basis.task, DetectionTask) or config.training.keep_best != "auto" or kept_metric(config) is None:
        return None
    complete, file = config.labels.complete, Path(config.training.output_dir) / GAPS
    audit = complete.audit if complete is not None else None
    audited = require_verdicts(Path(audit)) if audit is not None and basis.ranks.is_main else []
    return GapMetrics(samples, basis.policy.encoder.images.load, basis.ranks, file, audited)


def _checkpoints(basis: Basis, stop: StopRequest) -> CheckpointStore:
    config = basis.config
    # The key `resume_from_checkpoint` is left out: it differs between a run and its resumption, which does not count as
    # a change of the configuration.
    described = config.model_dump_json(exclude={"training": {"resume_from_checkpoint"}})
    return CheckpointStore(
        root=Path(config.training.output_dir),
        ranks=basis.ranks,
        save_total_limit=config.training.save_total_limit,
        config_digest=hashlib.sha256(described.encode()).hexdigest(),
        notes={INFERENCE_NAME: settings_of(config, basis.data.train).to_json()},
        held_off=stop.held_off,
    )
