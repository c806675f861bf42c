"""From a configuration to a run: makes every part, hands them to the `Trainer`, and takes them down again.

The only module that knows all parts. Called by `__main__`; reads the environment it is given, nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoint import CheckpointStore
from learner.config.load import load_config, write_resolved
from learner.config.plan import Plan, resolve
from learner.config.schema import RunConfig
from learner.console import Console
from learner.data import Batches, load_samples
from learner.data.window import WindowRepeater, steps_per_epoch
from learner.metrics import MetricsLog
from learner.optim import Optimizer
from learner.packing import PackingBuffer
from learner.policy.load import Policy, load_policy
from learner.policy.parallel import Ranks, init_ranks
from learner.records import Sample
from learner.rollout.backend import RolloutBackend
from learner.rollout.call_log import RolloutCallLog
from learner.rollout.hf import HfBackend
from learner.rollout.server import ServerBackend
from learner.rollout_buffer import RolloutBuffer
from learner.row_source import FreshRows, RowSource
from learner.rows import CarriedRows, CompleteRows, RowMaker, SingleRows
from learner.run_files import log_to_file, point_latest
from learner.segments import GroundTruthSource, RolloutSource, SegmentSource
from learner.stage2.driver import Stage2Driver
from learner.stage2.wiring import make_driver, step_plan
from learner.stopping import Stopped, StopRequest
from learner.sync import CanaryItem, WeightSync
from learner.sync.handshake import check_servers
from learner.target import ground_truth_target
from learner.tasks.detection.task import DetectionTask
from learner.tasks.task import Task
from learner.timeline import Timeline
from learner.trainer import Trainer
from shared.architecture import signature
from shared.errors import ConfigError

TOKEN_VARIABLE = "ROLLOUT_SERVER_TOKEN"


def train(config_path: str, *, environment: Mapping[str, str]) -> int:
    """Run the training that `config_path` describes, as one of torchrun's processes or alone. Returns the exit code."""
    world_size = int(environment.get("WORLD_SIZE", 1))
    config = load_config(config_path, world_size=world_size, env=environment)
    plan = resolve(config, world_size)
    _require_built(plan, config)
    with ExitStack() as stack:
        ranks = init_ranks(environment, timeout_s=config.training.collective_timeout_s)
        stack.callback(ranks.close)
        trainer = build(config, plan, ranks, token=environment.get(TOKEN_VARIABLE), stack=stack)
        try:
            with trainer.stop.installed():
                trainer.run()
        except Stopped as stopped:
            trainer.console.note(str(stopped))
            return stopped.exit_code
    return 0


def build(config: RunConfig, plan: Plan, ranks: Ranks, *, token: str | None, stack: ExitStack) -> Trainer:
    """Every part of a run, checked against the servers before the first step. What must be closed goes on `stack`."""
    run_dir = Path(config.training.output_dir)
    log_to_file(run_dir, ranks.rank)
    if ranks.is_main:
        write_resolved(config, run_dir)
        point_latest(run_dir)
    log = MetricsLog(run_dir, config.logging, enabled=ranks.is_main)
    stack.callback(log.close)
    log.write("plan", plan.to_json())

    torch.manual_seed(config.training.seed)
    policy = load_policy(config.model, device=ranks.device, bf16=config.training.bf16)
    policy.broadcast(ranks)
    task = DetectionTask(config.task, policy.tokenizer)
    data = load_data(config, task)
    data_plan = step_plan(plan) if config.stage2_ab else plan
    batches = Batches(data.train, config=config, plan=data_plan, rank=ranks.rank, encoder=policy.encoder)
    stack.callback(batches.close)
    total_steps = config.training.max_steps or _steps_of_epochs(config, data_plan, batches)

    console = Console(
        total_steps=total_steps,
        name=run_dir.name,
        enabled=ranks.is_main,
        progress_bar=config.logging.progress_bar,
    )
    stack.callback(console.close)
    timeline = Timeline(ranks.rank)
    backend = sync = None
    after_backend = stack.enter_context(ExitStack())  # what waits for a call that only closing the backend ends
    if needs_rollouts(config):
        backend = _connect_backend(config, ranks, policy, token, log, timeline)
        stack.callback(backend.close)
        if not isinstance(backend, HfBackend):  # which has the trained weights themselves
            sync = _connect_sync(config, ranks, policy, backend, task, data.train)
            stack.callback(sync.close)
    optimizer = Optimizer(policy.trainable, config.training, total_steps=total_steps)
    source, row_maker = _segment_source(config, backend, task, policy), _row_maker(config)
    fresh = FreshRows(
        source,
        row_maker,
        ranks=ranks,
        capacity=config.global_max_length,
        samples=data.train,
        encoder=policy.encoder,
    )
    cursor, rows = _with_rollout_buffer(plan, batches, fresh)
    stage2: Stage2Driver | None = None
    if config.stage2_ab is not None:
        stage2 = make_driver(
            config,
            plan,
            ranks=ranks,
            batches=batches,
            samples=data.train,
            encoder=policy.encoder,
            channel_a=_ground_truth(config, task, policy),
            rollouts=source,
            row_maker=row_maker,
            capacity=backend.chunk if backend else 0,
        )
        after_backend.callback(stage2.close)
        stack.callback(stage2.stop)
    return Trainer(
        config=config,
        plan=plan,
        total_steps=total_steps,
        ranks=ranks,
        policy=policy,
        optimizer=optimizer,
        batches=cursor,
        rows=rows,
        task=task,
        eval_samples=data.evaluation,
        backend=backend,
        sync=sync,
        checkpoints=CheckpointStore(
            root=run_dir, ranks=ranks, save_total_limit=config.training.save_total_limit, config_digest=_digest(config)
        ),
        stop=StopRequest(ranks, timeout_s=config.training.stop_timeout_s),
        log=log,
        timeline=timeline,
        console=console,
        stage2=stage2,
    )


def export(checkpoint: str, out: str, dtype: str) -> int:
    """Write the merged weights of a checkpoint folder as a model that can be served. Returns the exit code."""
    from learner.checkpoint import export_model
    from learner.config.schema import ModelConfig

    policy = load_policy(ModelConfig(path=checkpoint), device=torch.device("cpu"))
    export_model(policy, Path(out), dtype=getattr(torch, dtype))
    print(f"wrote {out}")
    return 0


# ---- parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    train: list[Sample]
    evaluation: list[Sample]


def load_data(config: RunConfig, task: Task) -> RunData:
    """Training samples, and those to evaluate on: `data.test`, else `data.val`. Raises DataError with file and line."""
    data, training = config.data, config.training
    train = load_samples(data, data.train, task)
    path = data.test or data.val
    evaluates = training.eval_on_start or training.eval_on_end or training.eval_steps
    if not evaluates:
        return RunData(train=train, evaluation=[])
    if path is None:
        raise ConfigError(
            "data.val: nothing to evaluate on",
            found="neither data.val nor data.test",
            wanted="a held-out set, since training.eval_* asks for evaluations",
            remedy="name one, or switch evaluations off",
        )
    return RunData(train=train, evaluation=load_samples(data, path, task)[: training.eval_samples])


def needs_rollouts(config: RunConfig) -> bool:
    """Whether the run makes rollouts at all: one that only learns ground truth does so only to evaluate."""
    training = config.training
    evaluates = bool(training.eval_on_start or training.eval_on_end or training.eval_steps)
    return evaluates or _learns_rollouts(config)


def _learns_rollouts(config: RunConfig) -> bool:
    if config.stage2_ab is not None:
        return config.stage2_ab.schedule.b_ratio > 0
    return config.custom.trainer_variant == "rollout_matching_sft"


def _connect_backend(
    config: RunConfig, ranks: Ranks, policy: Policy, token: str | None, log: MetricsLog, timeline: Timeline
) -> ServerBackend | HfBackend:
    def on_call(record: RolloutCallLog) -> None:
        timeline.call(record)
        log.write("rollout_call", record)
        if not ranks.is_main:  # whose metrics are not written: seeds and chunks of every rank are on disk (R15)
            logging.getLogger("learner.rollout").info("%s", record)

    rollouts, seed = config.rollout_matching, config.training.seed
    if rollouts.rollout_backend == "hf":
        return HfBackend(rollouts, policy, run_seed=seed, on_call=on_call)
    backend = ServerBackend(
        rollouts,
        run_seed=seed,
        rank=ranks.rank,
        num_ranks=ranks.world_size,
        token=token,
        vocab_size=policy.model.config.get_text_config().vocab_size,
        on_call=on_call,
    )
    backend.connect()
    return backend


def _connect_sync(
    config: RunConfig, ranks: Ranks, policy: Policy, backend: ServerBackend, task: Task, samples: list[Sample]
) -> WeightSync:
    num_canaries = config.rollout_matching.vllm.sync.canary_samples
    canary = [_canary_item(sample, policy, task) for sample in samples[:num_canaries]]
    check_servers(backend, architecture=signature(policy.model.config.to_dict()), canary=canary[0], ranks=ranks)

    def learner_logprobs(item: CanaryItem) -> list[float]:
        return policy.logprobs(item.prompt, item.response_token_ids)

    sync = WeightSync(
        backend,
        policy,
        config=config.rollout_matching.vllm,
        canary=canary,
        learner_logprobs=learner_logprobs,
        fence=ranks,
        device=ranks.device,
    )
    sync.connect()
    return sync


def _canary_item(sample: Sample, policy: Policy, task: Task) -> CanaryItem:
    """The ground truth of a training sample: fixed, and with its image, so that the vision tower is checked too."""
    target = ground_truth_target(sample, task, policy.tokenizer, policy.tokenizer.eos_token_id, 1.0)
    return CanaryItem(
        sample=sample,
        prompt=policy.encoder.encode(sample),
        response_token_ids=tuple(int(token) for token in target.token_ids),
    )


def _segment_source(config: RunConfig, backend: RolloutBackend | None, task: Task, policy: Policy) -> SegmentSource:
    if not _learns_rollouts(config):
        return _ground_truth(config, task, policy)
    assert backend is not None
    return RolloutSource(backend, task, policy.tokenizer, desc_weight=config.loss.desc_weight)


def _ground_truth(config: RunConfig, task: Task, policy: Policy) -> GroundTruthSource:
    return GroundTruthSource(task, policy.tokenizer, desc_weight=config.loss.desc_weight)


def _row_maker(config: RunConfig) -> RowMaker:
    training = config.training
    if not training.packing:
        return SingleRows(config.global_max_length)
    if config.custom.trainer_variant != "rollout_matching_sft":
        return CompleteRows(config.global_max_length)
    buffer = PackingBuffer(
        capacity=config.global_max_length,
        max_segments=training.packing_buffer,
        min_fill_ratio=training.packing_min_fill_ratio,
    )
    return CarriedRows(buffer)


def _with_rollout_buffer(plan: Plan, batches: Batches, fresh: FreshRows) -> tuple[Batches | WindowRepeater, RowSource]:
    """What the trainer reads and learns: windows `m_steps` times over, on kept rows, or both as they are (R18)."""
    if plan.m_steps == 1:
        return batches, fresh
    repeater = WindowRepeater(
        batches, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )
    return repeater, RolloutBuffer(fresh, repeater)


def _steps_of_epochs(config: RunConfig, plan: Plan, batches: Batches) -> int:
    epochs = config.training.num_train_epochs
    assert epochs is not None, "the schema wants max_steps or num_train_epochs"
    return epochs * steps_per_epoch(
        batches.per_epoch, gradient_accumulation_steps=plan.gradient_accumulation_steps, m_steps=plan.m_steps
    )


def _require_built(plan: Plan, config: RunConfig) -> None:
    """What the specification has and this version does not: said before anything is loaded."""
    if not needs_rollouts(config):
        return
    if plan.vllm_mode == "colocate":
        raise _not_built("custom.extra.rollout_matching.vllm.mode", plan.vllm_mode, "server, or rollout_backend: hf")


def _not_built(key: str, found: str, wanted: str) -> ConfigError:
    return ConfigError(f"{key}: this version does not run it yet", found=found, wanted=wanted, remedy="change the key")


def _digest(config: RunConfig) -> str:
    return hashlib.sha256(config.model_dump_json(exclude={"training": {"resume_from_checkpoint"}}).encode()).hexdigest()
