"""The training loop: sync, learn, update; evaluate and save at the configured steps.

One optimizer step: sync if the step's rollouts need newer weights, learn each micro-step's rows as they come, reduce
gradients over ranks once, clip, update, count the step. Rows come from the step source (`learner.steps.source`). If the
source allows it, a sync that must wait for rollouts in flight runs between two rows. The step's loss is the weighted
mean over all supervised tokens of the step on all ranks, so packing and the number of ranks do not change the gradient.
An epoch's last step may have fewer samples than other steps. The gradient and the learning rate of a short step are
multiplied by (its number of samples / a whole step's number).

Invariants: rollouts and evaluations run on weights that were synced after the last update (R10). Rollouts that run
ahead of learning use the weights of the last sync instead. Every rank runs the same number of forward/backward passes
(D5). A sample is trained once per epoch, also across a resume.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from learner.config.inference import CALIBRATION_NAME
from learner.config.sections.training import kept_metric
from learner.journal.journal import Ending, Journal
from learner.policy.loss import is_out_of_memory
from learner.policy.optim import Optimizer
from learner.records import LearnedRow, PackedRow, StepResult
from learner.rollout.backend import RolloutBackend
from learner.run.best import BestEvaluation, only_worse
from learner.run.callbacks import Callbacks
from learner.run.checkpoint import STATE, Cadence, CheckpointStore, Generators, TrainerState, damaged
from learner.run.files import write_atomically
from learner.run.stopping import Stopped, StopRequest, TimeLimit
from learner.steps.basis import Basis
from learner.steps.completing import LabelCompletion
from learner.steps.evaluation import Evaluations, GapMetrics
from learner.steps.source import StepSource, in_lockstep, padded
from learner.steps.syncs import StepSyncs
from learner.steps.totals import StepTotals
from learner.sync.sync import Sync
from shared.errors import CallbackError, CheckpointError, OutOfMemoryError

MAX_REASON = 400  # max characters of an error in the log


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The state of all ranks at the end of a step, which a checkpoint needs besides weights and moments."""

    state: TrainerState
    generators: Generators


@contextmanager
def start_set_aside() -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step. The function's first call exempts all objects that exist then from
    garbage collection, until the context ends. Cycles of such objects are freed only after the context's end."""
    set_aside = False

    def after_step() -> None:
        nonlocal set_aside
        if not set_aside:
            # Modules, model and compiled programs are about 800,000 objects. A collection that walks them takes 0.5 s
            # of a step on a CPU.
            # Garbage is freed first, because objects that are exempt from collection stay.
            gc.collect()
            gc.freeze()
            set_aside = True

    try:
        yield after_step
    finally:
        if set_aside:
            gc.unfreeze()


@contextmanager
def memory_errors(row: PackedRow) -> Iterator[None]:
    """Guard the learning of `row`. Raises OutOfMemoryError, which names the row, if memory runs out."""
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
            remedy="lower global_max_length, set model.gradient_checkpointing: true, use smaller images, or with "
            "colocated vLLM set vllm.sleep: always",
        ) from error


def _named(error: Exception | Stopped) -> str:
    """Describe in one line the error or stop that ended a run."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Stopped) else f"{type(error).__name__}: {text}"[:MAX_REASON]


class Trainer:
    """Runs the training loop, and holds its state."""

    def __init__(
        self,
        basis: Basis,
        *,
        total_steps: int,
        optimizer: Optimizer,
        source: StepSource,
        backend: RolloutBackend | None,
        sync: Sync | None,
        checkpoints: CheckpointStore,
        stop: StopRequest,
        journal: Journal,
        labels: LabelCompletion | None = None,
        gaps: GapMetrics | None = None,
    ) -> None:
        self.basis, self.config, self.ranks, self.policy = basis, basis.config, basis.ranks, basis.policy
        self.total_steps = total_steps
        self.optimizer, self.source, self.checkpoints, self.stop = optimizer, source, checkpoints, stop
        self.journal, self.clock, self.labels = journal, journal.clock, labels
        self.syncs = StepSyncs(sync, source, journal, rolls_out=backend is not None, is_sharded=self.policy.is_sharded)
        self.evaluations = Evaluations(basis, backend, source, self.syncs, stop, journal, gaps)
        training, ranks = self.config.training, self.ranks
        self.cadence = Cadence(ranks, save_steps=training.save_steps, save_minutes=training.save_minutes)
        self.best = BestEvaluation.of(kept_metric(self.config), training, ranks)
        self.time_limit = TimeLimit(ranks, training.max_minutes, ends_by_evaluating=training.eval_on_end)
        self.callbacks = Callbacks(self.config, ranks)
        self.state = TrainerState()
        self._saved_at: int | None = None
        self._best_alone: Path | None = None  # the best checkpoint, if it was saved only for being the best
        self._boundary: Boundary | None = None  # state after the last whole step; None: the weights are being updated

    def run(self) -> None:
        """Train to the last step. Raises Stopped if the run was asked to stop, ProjectError, or any other error that
        ended it. Before `run` raises, it saves the last whole step, so that the run can be resumed."""
        self.callbacks.make()
        try:
            self.train()
        # `Stopped` is named here, because it is not an `Exception`: code that reports errors must not catch it.
        except (Exception, Stopped) as error:
            try:
                # The end is written also if this save fails.
                self.save_after(error)
            finally:
                how: Ending = "stopped" if isinstance(error, Stopped) else "failed"
                self.journal.end(how, _named(error), step=self.state.global_step)
            raise
        self.journal.end("finished", self.why_early(), step=self.state.global_step)

    def save_after(self, error: Exception | Stopped) -> None:
        """Save the last whole step of a run that `error` ends: with all ranks if `error` ends all of them, else by this
        rank alone. After a CheckpointError nothing is saved."""
        if isinstance(error, CheckpointError):
            return
        agreed = isinstance(error, CallbackError) or (isinstance(error, Stopped) and error.agreed)
        # A save with all ranks would wait for ranks that have ended.
        self.save() if agreed else self.rescue()

    def why_early(self) -> str:
        """Return the reason why the run ended before its last step; empty if it reached its last step."""
        if self.callbacks.ended_by:
            return f"{self.callbacks.ended_by} ended it"
        # If patience runs out in the evaluation after the last step, the run did not end early.
        gave_up = self.best.gives_up and self.state.global_step < self.total_steps
        return f"{self.best.metric} did not improve" if gave_up else ""

    def train(self) -> None:
        """Restore the state if the run is resumed, and run the remaining steps, with evaluations and saves between
        them."""
        training = self.config.training
        self.restore()
        self.journal.begin(step=self.state.global_step, total_steps=self.total_steps)
        # The boundary is marked here as after each step. So a checkpoint that is saved before the first step of this
        # process also names the samples that the resumed run had begun and not learned.
        self.mark_boundary()
        if self.evaluates_first():
            self.evaluate()
        with start_set_aside() as after_step:
            while self.state.global_step < self.total_steps and not self.best.gives_up and not self.callbacks.ended_by:
                # The limit is checked between steps, so no step is interrupted.
                if self.time_limit.is_over():
                    self.journal.note(f"training.max_minutes: the time is up after step {self.state.global_step}")
                    break
                self.complete_labels()
                self.syncs.before(self.state.global_step)
                result, rows = self.step()
                self.journal.step(result, self.syncs.receipt, rows)
                # At the end of a step all ranks are at the same point of the program, so they can agree on lost and new
                # servers.
                self.syncs.agree(self.state.global_step)
                self.callbacks.step(result)
                # The first step compiles, and the objects that it makes stay until the end of the run, too.
                after_step()
                # A due checkpoint is saved before the evaluation. A checkpoint that `evaluate` saves is removed as soon
                # as a better one comes.
                if self.cadence.is_due(result.global_step):
                    self.save()
                if training.eval_steps and result.global_step % training.eval_steps == 0:
                    self.evaluate()
        if self.callbacks.ended_by:
            self.journal.note(f"{self.callbacks.ended_by} ended the run after step {self.state.global_step}")
        if training.eval_on_end:
            self.evaluate()
            self.evaluations.test(self.state.global_step)
        if training.save_on_end:
            self.save()
        # If no evaluation was better than the first, the newest checkpoint is worse than the model at the start.
        # Commands with this run's folder as the model would use that checkpoint.
        if self.ranks.is_main and (worse := only_worse(self.best.root)) is not None:
            self.journal.note(f"{worse}, whose weights are those of model.path")
        self.note_leftovers()

    def evaluates_first(self) -> bool:
        """Return True if an evaluation is due before the first step of this process. After a resume an evaluation is
        due only if that step's evaluation was due and did not end, because a second evaluation would count towards
        `patience`."""
        training, step = self.config.training, self.state.global_step
        if training.eval_on_start and not self.best.values:
            return True
        is_due = step > 0 and training.eval_steps is not None and step % training.eval_steps == 0
        return is_due and self.best.metric is not None and step not in self.best.values

    # ---- step ------------------------------------------------------------------------------------------------------

    def step(self) -> tuple[StepResult, Sequence[LearnedRow]]:
        """Make one parameter update. Return its result, and the rows that all ranks learned."""
        self.stop.check()
        training, ver = self.config.training, self.syncs.ver(self.state.global_step)
        totals = StepTotals(min_fill=training.packing_min_fill_ratio if training.packing else None)
        channel = self.source.begin(self.state.global_step)
        shortfall = self.source.shortfall()
        for rows in self.source.micro_steps():
            self.stop.check()
            self.training_step(rows, totals)
        # A postponed sync is made here at the latest, because the update below changes the weights.
        self.syncs.within(self.state.global_step, at_once=True)
        metrics = self.source.metrics()
        with self.clock.phase("learn"):
            totals = totals.reduced(self.ranks)
            share = totals.share_of(shortfall)
            # The gradient of a short last step is multiplied by (its samples / the samples of a whole step).
            self.policy.reduce_gradients(self.ranks, weight_sum=totals.weight / share if share else 0.0)
            # From here on the weights belong to no whole step, so nothing may be saved.
            self._boundary = None
            learning_rate, grad_norm = self.optimizer.update(self.state.global_step, share=share)
        self.state = self.state.after_step()
        self.mark_boundary()
        seconds = self.clock.read()
        # `totals` is reduced over ranks, and the metric is per rank.
        flops = self.policy.flops_per_token * totals.counts.get("tokens", 0.0) / self.ranks.world_size
        metrics = {**metrics, "learn_tflops": flops / seconds["learn_s"] / 1e12}
        if (peak := self.policy.peak_gib()) is not None:
            metrics = {**metrics, "gpu_peak_gib": self.ranks.all_reduce_max(peak)}
        result = totals.result(
            global_step=self.state.global_step,
            channel=channel,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ver=ver,
            seconds=seconds,
            capacity=self.config.global_max_length,
            extra={**metrics, "batch_share": share} if shortfall else metrics,
        )
        return result, totals.rows

    def training_step(self, rows: Generator[PackedRow], totals: StepTotals) -> None:
        """Run one micro-step: learn its rows as they come, then empty rows until all ranks have run equally many passes
        (D5). Gradients are accumulated, without an update. Ranks wait for each other at each row if the model is
        sharded, or if a sync may run between two rows."""
        # Waiting at every row costs time, so it is done only if passes or syncs are collective between rows.
        evened = in_lockstep if self.policy.is_sharded or self.syncs.waits else padded
        # After an error here, closing `rows` also ends the rollouts in flight.
        with closing(rows):
            for row in evened(rows, self.ranks, self.config.global_max_length, self.clock):
                with self.clock.phase("learn"), memory_errors(row):
                    totals.add(row, self.policy.backward(row))
                # Weights change only at the step's end, so a postponed sync can be made here. Without syncs between
                # rows, the learner waited for 0.5 to 3 s in a step.
                self.syncs.within(self.state.global_step)

    # ---- between-steps ---------------------------------------------------------------------------------------------

    def complete_labels(self) -> None:
        """Complete the labels with answers of the present weights, if that is due before this step. Collective."""
        step = self.state.global_step
        if self.labels is None or not self.labels.is_due(step):
            return
        self.stop.check()
        # The fence waits for rollouts in flight, which were made with the old labels.
        with self.source.fence() as fence:
            self.syncs.behind(fence, step)
            with self.clock.phase("labels"):
                completion = self.labels.complete(step, self.syncs.ver(step))
        self.journal.labels(completion.to_json(), str(completion), step=step)

    def evaluate(self) -> None:
        """Evaluate the present weights, once per step at most. The best weights so far are saved."""
        step = self.state.global_step
        if self.evaluations.step == step:
            return
        began_s = time.monotonic()
        own, metrics = self.evaluations.evaluate(step)
        # The time limit reserves time for the last evaluation, which is expected to take as long as the present
        # evaluation.
        self.time_limit.evaluated(time.monotonic() - began_s)
        verdict = self.best.add(step, own)
        # The evaluation before the first step needs no checkpoint: model.path has its weights.
        if verdict.is_best and step > 0:
            self.keep_best(is_due=self._saved_at == step)
        self.save_calibration()
        if verdict.gives_up:
            self.journal.early_stop(self.best.metric, best_step=self.best.best_step, step=step)
        self.callbacks.evaluation(step, metrics)

    def keep_best(self, *, is_due: bool) -> None:
        """Save the present weights as the best weights. The previous best checkpoint is removed if it was saved only
        for being the best. `is_due`: this step has a checkpoint anyway."""
        path, before = self.save(), self._best_alone
        # The link is changed before the old checkpoint is removed, so it never points to a missing folder.
        self.best.link(path)
        self._best_alone = None if is_due else path
        if before is not None:
            self.checkpoints.remove(before)

    def mark_boundary(self) -> None:
        """Remember what a checkpoint of this step needs, in case the next step does not end. Collective."""
        state = replace(self.state, cursor=self.source.state())
        self._boundary = Boundary(state=state, generators=self.checkpoints.generators())

    def save(self) -> Path:
        """Save a checkpoint, at most once per step. `restore` on the same number of ranks continues exactly from it."""
        if self._saved_at == self.state.global_step:
            return self.checkpoints.path_of(self.state)
        at = self._boundary
        assert at is not None, "saved in the middle of an update"
        with self.clock.phase("save"):
            path = self.checkpoints.save(self.policy, self.optimizer, at.state, at.generators)
        self._saved_at = self.state.global_step
        self.cadence.saved()
        self.journal.note(f"saved {path}")
        self.save_calibration()
        self.callbacks.save(self.state.global_step, path)
        return path

    def save_calibration(self) -> None:
        """Save the calibration of scores in the checkpoint of this step. Does nothing until the step was both evaluated
        on `data.val` and saved, in either order."""
        folder, is_saved = self.checkpoints.path_of(self.state), self._saved_at == self.state.global_step
        file = folder / CALIBRATION_NAME
        if not self.ranks.is_main or not is_saved or file.is_file() or not folder.is_dir():
            return
        if (text := self.evaluations.calibration(self.state.global_step)) is not None:
            write_atomically(file, text)
            self.journal.note(f"scores are calibrated on data.val: {file.parent.name}/{file.name}")

    def rescue(self) -> None:
        """Save the last whole step after an error, without the other ranks, which may have ended. The unfinished step
        is dropped; its samples come again after the resume."""
        at = self._boundary
        # At step 0 there is nothing to save: the weights are unchanged.
        if at is None or at.state.global_step in (0, self._saved_at):
            return
        for _, p in self.policy.trainable:
            # The error may be a lack of memory, so memory is freed before the save.
            p.grad = None
        try:
            path = self.checkpoints.save_alone(self.policy, self.optimizer, at.state, at.generators)
        # A failed save is only logged, so that the error that stopped the run is raised.
        except Exception as error:
            self.journal.note(f"step {at.state.global_step} could not be saved: {error}")
            return
        self.journal.note(f"saved {path}; training.resume_from_checkpoint: latest goes on from there")

    def restore(self) -> None:
        """Continue from `training.resume_from_checkpoint`, if it is set."""
        where = self.config.training.resume_from_checkpoint
        if where is None:
            return
        self.state = self.checkpoints.load(where, self.policy, self.optimizer)
        try:
            self.source.restore(self.state.cursor)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(Path(where), f"{STATE}: the place in the data: {type(error).__name__}: {error}") from error
        self._saved_at = self.state.global_step
        if self.labels is not None:
            self.labels.restore(self.state.global_step, self.best.root if where == "latest" else Path(where).parent)
        self.best.restore(self.state.global_step)
        self.journal.note(f"resumed at step {self.state.global_step}; {len(self.waiting())} carried samples come again")

    def waiting(self) -> list[str]:
        """Return the ids of the samples, of all ranks, that were begun and not learned yet. Collective."""
        return [sample_id for part in self.ranks.all_gather_object(self.source.waiting()) for sample_id in part]

    def note_leftovers(self) -> None:
        """Log the ids of samples whose segments still waited for a row when training ended (R12)."""
        left = self.waiting()
        if left:
            self.journal.leftovers(left)
