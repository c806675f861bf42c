"""The training loop: sync, segments, rows, forward/backward, one update; evaluate and save when due.

One optimizer step: `gradient_accumulation_steps` micro-steps, each of which takes one micro-batch, makes segments of
it, packs rows and runs forward/backward; then gradients are reduced over ranks once, clipped, and applied. The step's
loss is the weighted mean over all supervised tokens of the step on all ranks, so packing and the number of ranks do not
change the gradient.

Invariants: rollouts and evaluations only ever run on weights that were synced after the last update (R10). Every rank
runs the same number of forward/backward passes (D5). A sample is trained once per epoch, also across a resume.

Sums of one optimizer step: over its micro-steps, then over ranks, then as a `StepResult`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from learner.config.plan import Plan
from learner.config.schema import RunConfig
from learner.data.batches import Batches, MicroBatch, WindowRepeater
from learner.policy.load import Policy
from learner.policy.loss import RowLoss
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.records import Channel, PackedRow, Sample, StepResult, SyncReceipt
from learner.rollout.backend import RolloutBackend
from learner.run.checkpoint import CheckpointStore, Generators, TrainerState
from learner.run.console import Console
from learner.run.evaluation import evaluate, write_evaluation
from learner.run.log import MetricsLog, PhaseClock, Timeline
from learner.run.stopping import Stopped, StopRequest
from learner.steps.pipeline import Fence
from learner.steps.source import RowSource, empty_rows, in_lockstep
from learner.steps.stage2 import Stage2Driver
from learner.sync.sync import Sync
from learner.tasks.task import Task
from shared.errors import CheckpointError, ProjectError

# The counts that are always there, so that every rank reduces the same vector whatever it saw.
_COUNTS = ("loss", "weight", "supervised", "segments", "rows", "tokens")


@dataclass
class StepTotals:
    """Counts by name; the segments' own statistics (matched, missed, `drop/...`) are added up beside them."""

    counts: dict[str, float] = field(default_factory=dict)

    def add(self, row: PackedRow, loss: RowLoss) -> None:
        """One row that was learned: what it held, and its summed weighted loss."""
        counted = {
            "loss": loss.loss_sum,
            "weight": loss.weight_sum,
            "supervised": loss.num_supervised,
            "segments": len(row.segments),
            "rows": 1 if row.segments else 0,
            "tokens": row.num_tokens,
        }
        for counts in (counted, *(segment.stats for segment in row.segments)):
            self._merge(counts)

    @property
    def weight(self) -> float:
        """The sum of all loss weights: what the step's gradient is divided by."""
        return self.counts.get("weight", 0.0)

    def reduced(self, ranks: Ranks) -> StepTotals:
        """The sums over all ranks. Ranks may have met different statistics, so they travel by name."""
        if ranks.world_size == 1:
            return self
        total = StepTotals()
        for part in ranks.all_gather_object(self.counts):
            total._merge(part)
        return total

    def _merge(self, counts: Mapping[str, float]) -> None:
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value

    def result(
        self,
        *,
        global_step: int,
        channel: Channel,
        grad_norm: float,
        learning_rate: float,
        ver: int,
        seconds: Mapping[str, float],
        capacity: int,
        extra: Mapping[str, float] | None = None,
    ) -> StepResult:
        """The step's record; `extra` are metrics besides those that follow from the counts."""
        counts = dict.fromkeys(_COUNTS, 0.0) | self.counts
        metrics = {**seconds, **(extra or {})}
        metrics["tokens_per_s"] = counts["tokens"] / seconds["step_s"]
        metrics["packing_fill"] = counts["tokens"] / (max(1, counts["rows"]) * capacity)
        metrics.update({name: float(value) for name, value in counts.items() if name not in _COUNTS})
        if "matched" in counts:
            metrics["match_rate"] = counts["matched"] / max(1.0, counts["matched"] + counts["missed"])
        return StepResult(
            global_step=global_step,
            channel=channel,
            loss=counts["loss"] / counts["weight"] if counts["weight"] else 0.0,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_segments=int(counts["segments"]),
            num_rows=int(counts["rows"]),
            num_tokens=int(counts["tokens"]),
            num_supervised=int(counts["supervised"]),
            ver=ver,
            metrics=metrics,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The end of a step: with the weights as they are, all that a checkpoint needs, of every rank."""

    state: TrainerState
    generators: Generators


class Trainer:
    """Owns the loop and its state. Built by `learner.build`; every collaborator does one thing."""

    def __init__(
        self,
        *,
        config: RunConfig,
        plan: Plan,
        total_steps: int,
        ranks: Ranks,
        policy: Policy,
        optimizer: Optimizer,
        batches: Batches | WindowRepeater,
        rows: RowSource,
        task: Task,
        eval_samples: list[Sample],
        backend: RolloutBackend | None,
        sync: Sync | None,
        checkpoints: CheckpointStore,
        stop: StopRequest,
        log: MetricsLog,
        timeline: Timeline,
        console: Console,
        stage2: Stage2Driver | None = None,
    ) -> None:
        self.config, self.plan, self.total_steps, self.ranks = config, plan, total_steps, ranks
        self.run_dir = Path(config.training.output_dir)
        self.policy, self.optimizer = policy, optimizer
        self.batches, self.rows, self.task = batches, rows, task
        self.eval_samples, self.backend, self.sync = eval_samples, backend, sync
        self.stage2 = stage2  # `stage2_ab_training`: chooses each step's channel and makes its rows
        self.checkpoints, self.stop, self.log, self.console = checkpoints, stop, log, console
        self.timeline, self.clock = timeline, PhaseClock(on_phase=timeline.phase)
        self.state = TrainerState()
        self._synced_at: int | None = None  # global_step of the weights that the servers have
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._boundary: Boundary | None = None  # None: the weights are not those at the end of a step

    def run(self) -> None:
        """Train to the last step. Raises ProjectError, and Stopped where it was asked to; the end of the last whole
        step is saved then, and can be resumed."""
        try:
            self.train()
        except CheckpointError:
            raise
        except (ProjectError, Stopped) as error:
            agreed = isinstance(error, Stopped) and error.agreed
            self.save() if agreed else self.rescue()
            raise

    def train(self) -> None:
        """The loop."""
        training = self.config.training
        self.restore()
        self.mark_boundary()
        if training.eval_on_start:
            self.evaluate()
        while self.state.global_step < self.total_steps:
            receipt = self.sync_if_stale() if self.needs_sync() else None
            result = self.step()
            self.report(result, receipt)
            if training.eval_steps and result.global_step % training.eval_steps == 0:
                self.evaluate()
            if training.save_steps and result.global_step % training.save_steps == 0:
                self.save()
        if training.eval_on_end:
            self.evaluate()
        if training.save_on_end:
            self.save()
        self.note_leftovers()

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One accumulation window and one parameter update."""
        totals, channel, ver = StepTotals(), self.rows.channel, self.generator_ver()
        metrics: Mapping[str, float] = {}
        if self.stage2 is not None:
            self.stop.check()
            channel = self.stage2.begin(self.state.global_step).channel
            self.learn_to_completion(self.stage2.rows(self.clock), totals)
            metrics = self.stage2.metrics()
        else:
            self.accumulate(totals)
            metrics = self.rows.metrics()
        with self.clock.phase("learn"):
            totals = totals.reduced(self.ranks)
            self.policy.reduce_gradients(self.ranks, weight_sum=totals.weight)
            self._boundary = None
            learning_rate, grad_norm = self.optimizer.update(self.state.global_step)
        self.state = self.state.after_step()
        self.mark_boundary()
        return totals.result(
            global_step=self.state.global_step,
            channel=channel,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ver=ver,
            seconds=self.clock.read(),
            capacity=self.config.global_max_length,
            extra=metrics,
        )

    def accumulate(self, totals: StepTotals) -> None:
        """The micro-steps of one accumulation window."""
        num_micro_steps = self.plan.gradient_accumulation_steps
        self.stop.check()
        window = self.batches.upcoming(num_micro_steps)
        self.rows.begin_step(window, global_step=self.state.global_step, clock=self.clock)
        for micro_step_idx in range(num_micro_steps):
            self.stop.check()
            with self.clock.phase("data"):
                batch = next(self.batches)
            self.training_step(batch, micro_step_idx, totals)
            if batch.ends_epoch:
                break  # the last window of an epoch may be shorter

    def learn_to_completion(self, rows: Generator[PackedRow], totals: StepTotals) -> None:
        """Learn a step's rows as they come, then empty ones until every rank has run as many passes (D5). Passes of a
        sharded model wait for each other, and so its rows do too."""
        num_rows = 0
        with closing(rows):  # an error here must end the rollouts under way too
            length = self.config.global_max_length
            for row in in_lockstep(rows, self.ranks, length) if self.policy.is_sharded else rows:
                with self.clock.phase("learn"):
                    totals.add(row, self.policy.backward(row))
                num_rows += 1
        with self.clock.phase("learn"):
            for row in empty_rows(num_rows, self.ranks, self.config.global_max_length):
                totals.add(row, self.policy.backward(row))

    def training_step(self, batch: MicroBatch, micro_step_idx: int, totals: StepTotals) -> None:
        """One micro-step: one micro-batch in, gradients accumulated, no update."""
        rows = self.rows.rows(
            batch, global_step=self.state.global_step, micro_step_idx=micro_step_idx, clock=self.clock
        )
        with self.clock.phase("learn"):
            for row in rows:
                totals.add(row, self.policy.backward(row))

    # ---- between steps ---------------------------------------------------------------------------------------------

    def needs_sync(self) -> bool:
        """Whether the coming step's rollouts need the servers at the present weights."""
        if self.stage2 is not None:
            return self.stage2.wants_sync(self.state.global_step)
        return self.rows.needs_rollouts

    def generator_ver(self) -> int:
        """The version of the weights that rollouts are made by: syncs so far. A backend that has the trained weights
        themselves needs no sync; its version is the number of updates."""
        if self.sync is not None:
            return self.sync.ver
        return self.state.global_step if self.backend is not None else 0

    def sync_if_stale(self) -> SyncReceipt | None:
        """Bring the servers to the present weights, unless they have them. Collective; None where nothing was due."""
        if self.sync is None or self._synced_at == self.state.global_step:
            return None
        with self.fence() as fence:
            return self._sync_behind(self.sync, fence)

    @contextmanager
    def fence(self) -> Iterator[Fence]:
        """No rollout that runs ahead is in flight inside. Collective."""
        with ExitStack() as stack:
            fence = Fence()
            if self.stage2 is not None:
                with self.clock.phase("wait"):
                    fence = stack.enter_context(self.stage2.fence())
            yield fence

    def _sync_behind(self, sync: Sync, fence: Fence) -> SyncReceipt:
        with self.clock.phase("sync"):
            receipt = sync.sync()
        fence.synced(receipt.ver)
        self._synced_at = self.state.global_step
        self.log.write("sync", receipt, step=self.state.global_step)
        self.console.sync(receipt)
        return receipt

    def evaluate(self) -> None:
        """Roll out the evaluation samples with the present weights; once per step at most."""
        if self._evaluated_at == self.state.global_step:
            return
        assert self.backend is not None
        self.stop.check()
        step = self.state.global_step
        with self.fence() as fence:  # also around the rollouts: the servers hold no more of them than one call's
            if self.sync is not None and self._synced_at != step:
                self._sync_behind(self.sync, fence)
            with self.clock.phase("eval"):
                evaluation = evaluate(self.backend, self.eval_samples, self.task, self.ranks, global_step=step)
        self._evaluated_at = step
        if self.ranks.is_main:
            write_evaluation(evaluation, self.run_dir / "eval" / f"step_{step:06d}.jsonl")
        self.log.write("eval", {"metrics": evaluation.metrics, **self.clock.read()}, step=step)
        self.console.evaluation(step, evaluation.metrics)

    def mark_boundary(self) -> None:
        """Remember where this end of a step stands in the data; what follows may be given up. Collective."""
        carried = self.ranks.all_gather_object(self.rows.due_on_resume())
        cursor = {"batches": self.batches.state(), "carried": carried}
        if self.stage2 is not None:
            cursor["stage2"] = self.stage2.state()
        self._boundary = Boundary(state=replace(self.state, cursor=cursor), generators=self.checkpoints.generators())

    def save(self) -> None:
        """A checkpoint from which `restore` goes on exactly, on as many ranks; once per step at most."""
        if self._saved_at == self.state.global_step:
            return
        at = self._boundary
        assert at is not None, "saved in the middle of an update"
        with self.clock.phase("save"):
            path = self.checkpoints.save(self.policy, self.optimizer, at.state, at.generators)
        self._saved_at = self.state.global_step
        self.console.note(f"saved {path}")

    def rescue(self) -> None:
        """After an error: save the last whole step without the other ranks, who may be gone. An unfinished one is given
        up; its samples come again after the resume."""
        at = self._boundary
        if at is None or at.state.global_step in (0, self._saved_at):
            return
        try:
            path = self.checkpoints.save_alone(self.policy, self.optimizer, at.state, at.generators)
        except CheckpointError as error:  # the error that stopped the run is the one to tell
            self.console.note(f"step {at.state.global_step} could not be saved: {error}")
            return
        self.console.note(f"saved {path}; training.resume_from_checkpoint: latest goes on from there")

    def restore(self) -> None:
        """Go on from `training.resume_from_checkpoint`, if it is set."""
        where = self.config.training.resume_from_checkpoint
        if where is None:
            return
        self.state = self.checkpoints.load(where, self.policy, self.optimizer)
        self.batches.restore(self.state.cursor["batches"])
        if self.stage2 is not None and "stage2" in self.state.cursor:
            self.stage2.restore(self.state.cursor["stage2"])
        carried = [sample_id for part in self.state.cursor["carried"] for sample_id in part]
        self.rows.restore(carried[self.ranks.rank :: self.ranks.world_size])
        self._saved_at = self.state.global_step
        self.console.note(f"resumed at step {self.state.global_step}; {len(carried)} carried samples come again")

    def report(self, result: StepResult, receipt: SyncReceipt | None) -> None:
        self.log.write("step", result, step=result.global_step)
        self.log.write("timeline", self.timeline.event(self.ranks, result.global_step))
        self.console.step(result, receipt)

    def note_leftovers(self) -> None:
        """Segments that training ended on before they were learned: told, never dropped in silence (R12)."""
        left = [sample_id for part in self.ranks.all_gather_object(self.rows.waiting()) for sample_id in part]
        if left:
            self.log.write("note", {"carried_and_not_learned": left})
            self.console.note(f"{len(left)} samples were still in the packing buffer when training ended (not learned)")
