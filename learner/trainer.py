"""The training loop: sync, learn, update; evaluate and save when due.

One optimizer step: sync where its rollouts need it, begin, learn each micro-step's rows as they come, reduce gradients
over ranks once, clip, update, count. The rows come from a step source (`learner.steps.source`). The step's loss is the
weighted mean over all supervised tokens of the step on all ranks, so packing and the number of ranks do not change the
gradient. An epoch's last step may have fewer samples than others: its gradient and its learning rate are multiplied by
its share of a whole step's samples.

Invariants: rollouts and evaluations only ever run on weights that were synced after the last update (R10). Every rank
runs the same number of forward/backward passes (D5). A sample is trained once per epoch, also across a resume.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from learner.config.schema import RunConfig
from learner.data.batches import Shortfall
from learner.extensions import Task
from learner.policy.load import Policy
from learner.policy.loss import RowLoss
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.policy.policy_gradient import policy_metrics
from learner.records import Channel, PackedRow, Sample, StepResult, SyncReceipt
from learner.rollout.backend import RolloutBackend, is_out_of_memory
from learner.run.answers import AnswersLog
from learner.run.checkpoint import STATE, Cadence, CheckpointStore, Generators, TrainerState, damaged
from learner.run.console import Console
from learner.run.evaluation import evaluate, write_evaluation
from learner.run.groups import GroupsLog
from learner.run.log import MetricsLog, PhaseClock, Timeline
from learner.run.pictures import draw_scenes
from learner.run.stopping import Stopped, StopRequest
from learner.steps.best_of import best_of_metrics
from learner.steps.groups import TAUGHT
from learner.steps.source import Fence, StepSource, in_lockstep, padded
from learner.sync.sync import Sync
from learner.tasks.rewards import TOTAL, Rewards, mean_rewards
from shared.errors import CheckpointError, OutOfMemoryError

# Counts that are fields of `StepResult`, or part of its figures; all others are metrics under their own names.
_COUNTS = ("loss", "weight", "supervised", "segments", "rows", "tokens")


@dataclass
class StepTotals:
    """Sums of one optimizer step: over its rows, then over ranks, then as a `StepResult`.

    `counts` are by name; the segments' own statistics (matched, missed, `drop/...`) are added up beside them. Rows that
    are filled less than `min_fill` are counted as `underfilled`; None: rows hold one segment each, and nothing is.
    """

    min_fill: float | None = None
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
        if self.min_fill is not None:
            counted["underfilled"] = 1 if row.segments and row.fill < self.min_fill else 0
        for counts in (counted, loss.counts, *(segment.stats for segment in row.segments)):
            self._merge(counts)

    @property
    def weight(self) -> float:
        """The sum of all loss weights: what the step's gradient is divided by."""
        return self.counts.get("weight", 0.0)

    def share_of(self, shortfall: Shortfall | None) -> float:
        """What part of an update the step makes: an epoch's short last step makes as much of one as it has samples, so
        that one sample does not count as much as a batch elsewhere. 1 for every other step."""
        if shortfall is None:
            return 1.0
        return min(1.0, (self.counts.get("segments", 0.0) - self.counts.get(TAUGHT, 0.0)) / shortfall.whole)

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
        metrics.pop(TOTAL, None)
        metrics.update(mean_rewards(counts))
        metrics.update(policy_metrics(counts))
        metrics.update(best_of_metrics(counts))
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
    """The end of a step: all that a checkpoint needs besides the weights and moments, of every rank."""

    state: TrainerState
    generators: Generators


@contextmanager
def memory_errors(row: PackedRow) -> Iterator[None]:
    """Around the learning of `row`. Raises OutOfMemoryError, which names the row, if memory runs out."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_images = sum(len(s.vision.image_grid_thw) for s in row.segments if s.vision is not None)
        names = ", ".join(segment.sample_id for segment in row.segments)
        raise OutOfMemoryError(
            "out of memory while learning a row",
            found=f"a row of {row.num_tokens} tokens and {num_images} images (samples {names}): {error}",
            wanted=f"memory for rows of up to global_max_length = {row.capacity} tokens",
            remedy="lower global_max_length, set model.gradient_checkpointing: true, or use smaller images",
        ) from error


class Trainer:
    """Owns the loop and its state."""

    def __init__(
        self,
        *,
        config: RunConfig,
        total_steps: int,
        ranks: Ranks,
        policy: Policy,
        optimizer: Optimizer,
        source: StepSource,
        task: Task,
        rewards: Rewards,
        eval_samples: list[Sample],
        backend: RolloutBackend | None,
        sync: Sync | None,
        checkpoints: CheckpointStore,
        stop: StopRequest,
        log: MetricsLog,
        timeline: Timeline,
        clock: PhaseClock,
        console: Console,
        answers: AnswersLog | None = None,
        groups: GroupsLog | None = None,
    ) -> None:
        self.config, self.total_steps, self.ranks = config, total_steps, ranks
        self.run_dir = Path(config.training.output_dir)
        self.policy, self.optimizer, self.source = policy, optimizer, source
        self.task, self.rewards = task, rewards
        self.eval_samples, self.backend, self.sync = eval_samples, backend, sync
        self.checkpoints, self.stop, self.log, self.console = checkpoints, stop, log, console
        self.timeline, self.clock, self.answers, self.groups = timeline, clock, answers, groups
        training = config.training
        self.cadence = Cadence(ranks, save_steps=training.save_steps, save_minutes=training.save_minutes)
        self.state = TrainerState()
        self._synced_at: int | None = None  # global_step of the weights that the servers have
        self._evaluated_at: int | None = None
        self._saved_at: int | None = None
        self._boundary: Boundary | None = None  # None: the weights are not those at the end of a step

    def run(self) -> None:
        """Train to the last step. Raises ProjectError, Stopped if it was asked to stop, or whatever else ended it; the
        last whole step is saved before, so that it can be resumed."""
        try:
            self.train()
        except CheckpointError:
            raise
        except Exception as error:
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
            receipt = self.sync_if_stale() if self.source.wants_sync(self.state.global_step) else None
            result = self.step()
            self.report(result, receipt)
            self.agree_on_servers()
            if training.eval_steps and result.global_step % training.eval_steps == 0:
                self.evaluate()
            if self.cadence.is_due(result.global_step):
                self.save()
        if training.eval_on_end:
            self.evaluate()
        if training.save_on_end:
            self.save()
        self.note_leftovers()

    # ---- one optimizer step ----------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """One parameter update."""
        self.stop.check()
        training, ver = self.config.training, self.generator_ver()
        totals = StepTotals(min_fill=training.packing_min_fill_ratio if training.packing else None)
        channel = self.source.begin(self.state.global_step)
        shortfall = self.source.shortfall()
        for rows in self.source.micro_steps():
            self.stop.check()
            self.training_step(rows, totals)
        metrics = self.source.metrics()
        with self.clock.phase("learn"):
            totals = totals.reduced(self.ranks)
            share = totals.share_of(shortfall)
            self.policy.reduce_gradients(self.ranks, weight_sum=totals.weight / share if share else 0.0)
            self._boundary = None
            learning_rate, grad_norm = self.optimizer.update(self.state.global_step, share=share)
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
            extra={**metrics, "batch_share": share} if shortfall else metrics,
        )

    def training_step(self, rows: Generator[PackedRow], totals: StepTotals) -> None:
        """One micro-step: its rows learned as they come, and empty ones until every rank has run as many passes (D5);
        gradients accumulated, no update. Passes of a sharded model wait for each other, and so its rows do too."""
        evened = in_lockstep if self.policy.is_sharded else padded
        with closing(rows):  # an error here must end the rollouts under way too
            for row in evened(rows, self.ranks, self.config.global_max_length, self.clock):
                with self.clock.phase("learn"), memory_errors(row):
                    totals.add(row, self.policy.backward(row))

    # ---- between steps ---------------------------------------------------------------------------------------------

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
        with self.source.fence() as fence:
            return self._sync_behind(self.sync, fence)

    def _sync_behind(self, sync: Sync, fence: Fence) -> SyncReceipt:
        with self.clock.phase("sync"):
            receipt = sync.sync()
        fence.synced(receipt.ver, updates=self.state.global_step)
        self._synced_at = self.state.global_step
        self.log.write("sync", receipt, step=self.state.global_step)
        self.console.sync(receipt)
        return receipt

    def agree_on_servers(self) -> None:
        """Which servers go on; what happened to them is told. Collective. Raises ServerError if too few are left."""
        if self.sync is None:
            return
        for change in self.sync.agree():
            self.log.write("server", change, step=self.state.global_step)
            self.timeline.server(change.base_url, serves=change.what == "joined", is_member=change.what != "removed")
            self.console.server(change)

    def evaluate(self) -> None:
        """Roll out the evaluation samples with the present weights; once per step at most."""
        if self._evaluated_at == self.state.global_step:
            return
        assert self.backend is not None
        self.stop.check()
        step = self.state.global_step
        with self.source.fence() as fence:  # also around the rollouts: the servers hold no more of them than one call's
            if self.sync is not None and self._synced_at != step:
                self._sync_behind(self.sync, fence)
            with self.clock.phase("eval"):
                evaluation = evaluate(
                    self.backend, self.eval_samples, self.task, self.ranks, global_step=step, rewards=self.rewards
                )
        self._evaluated_at = step
        if self.ranks.is_main:
            write_evaluation(evaluation, self.run_dir / "eval" / f"step_{step:06d}.jsonl")
        self.log.write("eval", {"metrics": evaluation.metrics, **self.clock.read()}, step=step)
        self.log.pictures(partial(draw_scenes, evaluation, self.config.data.image_rules), step=step)
        self.console.evaluation(step, evaluation.metrics)

    def mark_boundary(self) -> None:
        """Remember what a checkpoint of this end of a step needs; the next step may be given up. Collective."""
        state = replace(self.state, cursor=self.source.state())
        self._boundary = Boundary(state=state, generators=self.checkpoints.generators())

    def save(self) -> None:
        """A checkpoint from which `restore` goes on exactly, on as many ranks; once per step at most."""
        if self._saved_at == self.state.global_step:
            return
        at = self._boundary
        assert at is not None, "saved in the middle of an update"
        with self.clock.phase("save"):
            path = self.checkpoints.save(self.policy, self.optimizer, at.state, at.generators)
        self._saved_at = self.state.global_step
        self.cadence.saved()
        self.console.note(f"saved {path}")

    def rescue(self) -> None:
        """After an error: save the last whole step without the other ranks, which may be gone. An unfinished step is
        given up; its samples come again after the resume."""
        at = self._boundary
        if at is None or at.state.global_step in (0, self._saved_at):
            return
        for _, p in self.policy.trainable:
            p.grad = None  # memory to save with, if that is what ran out
        try:
            path = self.checkpoints.save_alone(self.policy, self.optimizer, at.state, at.generators)
        except Exception as error:  # the error that stopped the run is the one to raise
            self.console.note(f"step {at.state.global_step} could not be saved: {error}")
            return
        self.console.note(f"saved {path}; training.resume_from_checkpoint: latest goes on from there")

    def restore(self) -> None:
        """Go on from `training.resume_from_checkpoint`, if it is set."""
        where = self.config.training.resume_from_checkpoint
        if where is None:
            return
        self.state = self.checkpoints.load(where, self.policy, self.optimizer)
        try:
            self.source.restore(self.state.cursor)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(Path(where), f"{STATE}: the place in the data: {type(error).__name__}: {error}") from error
        self._saved_at = self.state.global_step
        self.console.note(f"resumed at step {self.state.global_step}; {len(self.waiting())} carried samples come again")

    def report(self, result: StepResult, receipt: SyncReceipt | None) -> None:
        self.log.write("step", result, step=result.global_step)
        self.log.write("timeline", self.timeline.event(self.ranks, result.global_step))
        self.console.step(result, receipt)
        if self.answers is not None:
            self.answers.write(result.global_step)
        if self.groups is not None:
            self.groups.write(result.global_step)

    def waiting(self) -> list[str]:
        """Samples that were handed out, on any rank, and are not learned yet. Collective."""
        return [sample_id for part in self.ranks.all_gather_object(self.source.waiting()) for sample_id in part]

    def note_leftovers(self) -> None:
        """Name the samples whose segments still waited for a row when training ended (R12)."""
        left = self.waiting()
        if left:
            self.log.write("note", {"carried_and_not_learned": left})
            self.console.note(f"{len(left)} samples were still in the packing buffer when training ended (not learned)")
