"""`rollout-learner recipe --config run.yaml --minutes N`: runs the stages one after the other, in one folder.

The recipe's process decides which stage to run, and writes `recipe.json`. Each stage runs in a process of its own
(`rollout-learner train`, under torchrun if there are several ranks), because a process can start an engine on the GPU
only once. The recipe's process waits for the stage's process, and reads the results from the stage's folder. This
module does not import torch.

The files on disk decide which stage is run next. If the command is given again, ended stages are not repeated. A killed
stage continues from its newest checkpoint. If the recipe's process ends, the stage's process ends too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, Self

from learner.config.load import load_config
from learner.config.schema import RunConfig
from learner.config.sections.training import ESTIMATED
from learner.recipe.record import (
    HEADROOM,
    START,
    TIME_UP,
    Record,
    StageResult,
    digest_of,
    grpo_pays,
    read_headroom,
    read_record,
    spent_s,
    stage_result,
)
from learner.recipe.stages import (
    BY_IOU,
    GRPO,
    MATCHING,
    PATIENCE,
    SFT,
    check_recipe,
    grpo_stage,
    matching_stage,
    sft_stage,
)
from learner.report.page import write_report
from learner.run.best import BEST_LINK, point_best
from learner.run.files import writing
from learner.run.lock import locked
from learner.run.output_dir import check_output_dir, check_writable
from shared.config.parse import write_yaml
from shared.errors import ConfigError, ProjectError
from shared.private import unlinked
from shared.processes import (
    describe,
    end_with_parent,
    exit_code,
    last_words,
    leave_lost_output,
    stop_signals,
    without_working_directory,
)

# Max fraction of the recipe's minutes for sft, if grpo may follow. Usually sft ends much earlier, because its score
# stops rising. While the score rises, sft learns faster than grpo would: on photographs one step of grpo took 60% of
# five minutes.
SFT_SHARE = 0.8
# If boxes are loose (F1 is much lower at high IoU), rollout matching may take this fraction of the minutes after sft.
# The minutes after rollout matching are for `grpo` with the boxes' IoU as reward.
MATCHING_SHARE = 0.6
# A stage after `sft` begins only if at least this fraction of the recipe's minutes is left.
LEAST_SHARE = 0.1
WHY_GRPO = "labels had gaps and were completed: what is left cannot be counted by them, so validation decides"
FROM_START = ". It begins with the weights of the start, which have not learned the wrong ones among them"
FROM_SFT = ". It begins with the weights of sft, which complete them again: the start was much worse"
WHY_MATCHING = (
    "labels have gaps, and nothing that the start says beside them is sure enough to complete them. So it learns the "
    "labels after its own words, and what it finds beside them is kept"
)
WHY_LOOSE = "boxes are found, but loose: F1@mIoU is {fit:.2f} of F1@0.5"
BY_THEIR_IOU = ". So the reward is the IoU of what is found"
WHY_SFT = "labels teach most in the least time, and its first evaluation measures the start"


RunStage = Callable[[Path], int]  # runs the stage of a configuration file, and returns its exit code


class StageError(ProjectError):
    """The process of a stage ended with an error. `exit_code` is the process's exit code."""


def recipe(
    config: RunConfig,
    minutes: float,
    *,
    nproc: int = 1,
    environment: Mapping[str, str],
    run_stage: RunStage | None = None,
) -> int:
    """Run the recipe to its end, with `nproc` ranks per stage. Returns 0, or the exit code of the signal that stopped
    it. `run_stage`: runs a stage; None: in a process of its own.

    Raises ConfigError, CheckpointError, OutputError, and StageError if a stage's process failed.
    """
    check_recipe(config)
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "recipe: it starts the ranks of its stages itself",
            found=f"WORLD_SIZE {environment['WORLD_SIZE']}: one of torchrun's ranks",
            wanted="one process",
            remedy="leave torchrun out, and give the number of ranks: rollout-learner recipe --nproc N",
        )
    root = Path(config.training.output_dir)
    check_writable(config)
    # An ordinary run in this folder is not overwritten, even with `training.overwrite`.
    check_output_dir(config.model_copy(update={"training": config.training.model_copy(update={"overwrite": False})}))
    with ExitStack() as stack:
        with writing(root):
            stack.enter_context(locked(root))
        record = _begin(config, minutes, root)
        if run_stage is None:
            run_stage = stack.enter_context(StageProcess.listening(nproc, environment)).run
        return Recipe(config, record, nproc, environment, run_stage).follow()


def _begin(config: RunConfig, minutes: float, root: Path) -> Record:
    """Return the recipe's record in the folder `root`, or write and return a new one if there is none. If the record
    belongs to another recipe (another model, data, task or labels), it is replaced if that recipe has learned nothing;
    otherwise raises ConfigError."""
    digest = digest_of(config)
    old = read_record(root)
    # A recipe that has learned nothing is replaced, so that a mistake in its configuration can be corrected in place.
    if old is None or (old.digest != digest and not has_learned(old, root)):
        new = Record(digest=digest, minutes=minutes, metric=config.training.keep_best or "auto")
        new.write(root)
        return new
    if old.digest != digest:
        raise ConfigError(
            "training.output_dir: another recipe is there",
            found=f"{root}, begun with another model, data, task or labels",
            wanted="the configuration that it was begun with, or a folder without a run",
            remedy="name another folder (training.output_dir), or remove this one",
        )
    # The same command may give more minutes, to continue a recipe that has used up its time.
    return replace(old, minutes=minutes)


def has_learned(record: Record, root: Path) -> bool:
    """Return True if a stage of the recipe has ended or has saved a checkpoint. A recipe that has learned nothing may
    be replaced by another recipe."""
    return bool(record.stages) or any(root.glob("*/checkpoint-*/manifest.json"))


class StageProcess:
    """Runs stages, each in a process of its own, one at a time. A signal that asks this process to stop is sent on to
    the stage's process."""

    def __init__(self, nproc: int, environment: Mapping[str, str]) -> None:
        self._nproc, self._environment = nproc, environment
        self._signum, self._is_due = 0, False
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def listening(cls, nproc: int, environment: Mapping[str, str]) -> Iterator[Self]:
        """Yield a StageProcess. Until the end of the `with` block the StageProcess handles the stop signals that this
        process gets."""
        made = cls(nproc, environment)
        before = {signum: signal.signal(signum, made._asked) for signum in stop_signals()}
        try:
            yield made
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def run(self, path: Path) -> int:
        """Run the stage with the configuration file `path`, and wait for its end. The stage's stderr is written to a
        log file next to `path`. Returns 0, or the exit code of the stop signal that ended the stage. After a stop
        signal, no stage is started. Raises StageError if the stage fails."""
        argv = ["-m", "learner", "train", "--stage", "--config", str(path)]
        if self._nproc > 1:
            argv = ["-m", "learner.run.torchrun", str(self._nproc), *argv]
        log = path.with_suffix(".log")
        code = exit_code(-self._signum)
        # A signal in the last evaluation of a stage is only recorded, and the next stage must not begin.
        if not self._signum:
            # The stage's process writes to the same stdout.
            sys.stdout.flush()
            with writing(log), FileIO(log, "w", opener=unlinked) as errors:
                # With a session of its own, the stage's process gets Ctrl-C only from `_pass_on`. If the terminal sent
                # it too, the process would take it for a second Ctrl-C, and end without a checkpoint.
                self._process = subprocess.Popen(
                    [sys.executable, *argv],
                    env={**self._environment, **without_working_directory(self._environment)},
                    stderr=errors,
                    start_new_session=True,
                    # The stage ends with this process: if this process is killed, no process passes a stop signal on to
                    # the stage.
                    preexec_fn=partial(end_with_parent, signal.SIGKILL, os.getpid()),
                )
            # A signal that came before the process had begun is passed on now.
            self._pass_on()
            code = exit_code(returncode := self._process.wait())
            self._process = None
            if code not in (0, exit_code(-self._signum)):
                raise _failed(path.stem, returncode, log)
        if code:
            print(f"{signal.Signals(self._signum).name} ended {path.stem}; the same command goes on", flush=True)
        return code

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        # Ctrl-C in `recipe | tee log` ends `tee` too, and then each line that is printed would raise an error.
        leave_lost_output()
        self._signum, self._is_due = signum, True
        self._pass_on()

    def _pass_on(self) -> None:
        if self._process is not None and self._is_due:
            self._is_due = False
            # The signal is sent only once: a second one would end the stage without a checkpoint.
            self._process.send_signal(self._signum)


def _failed(name: str, returncode: int, log: Path) -> StageError:
    error = StageError(
        f"recipe: the stage {name} failed",
        found=f"it {describe(returncode)}; last words: {last_words(log)}",
        wanted="a stage that runs to its end",
        remedy=f"see {log}, and remove the cause: the same command goes on from the stage's newest checkpoint",
    )
    error.exit_code = exit_code(returncode)
    return error


class Recipe:
    """Decides which stage comes next, runs it, and writes each decision to `recipe.json`, until the recipe has ended.
    `record`: the decisions and results so far."""

    def __init__(
        self, config: RunConfig, record: Record, nproc: int, environment: Mapping[str, str], run_stage: RunStage
    ) -> None:
        self.config, self.record, self.nproc, self.environment = config, record, nproc, environment
        self._run_stage = run_stage
        self.root = Path(config.training.output_dir)
        self._began_s = time.monotonic()  # begin of the running stage, or of the command before its first stage

    def follow(self) -> int:
        """Run stages until the recipe has ended, then print the results and write the report. Returns 0, or the exit
        code of a stage that was stopped."""
        while not self.record.ended:
            sft = self.record.stage(SFT)
            if code := (self._sft() if sft is None else self._after_sft(sft)):
                return code
        self._tell()
        return 0

    # ---- stages ----------------------------------------------------------------------------------------------------

    def _sft(self) -> int:
        """Run `sft`, and return its exit code. `sft` gets all minutes of the recipe if `grpo` will not be run,
        otherwise at most the fraction SFT_SHARE of them."""
        earlier_s = spent_s(self.root / SFT)
        share_s = 60 * self.record.minutes * (1.0 if self.record.no_grpo else SFT_SHARE)
        # The measurement of the headroom runs in the folder of `grpo`, and its time is counted here.
        left_s = share_s - earlier_s - spent_s(self.root / GRPO)
        return self._run(SFT, sft_stage(self.config, world_size=self.nproc, minutes=left_s / 60), WHY_SFT, earlier_s)

    def _after_sft(self, sft: StageResult) -> int:
        """Decide what follows `sft`, and run it: rollout matching (if labels are missing and the start cannot complete
        them), `grpo`, more of `sft`, or nothing, because the recipe has ended. Returns the exit code of the stage; 0 if
        none was run."""
        matched = self.record.stage(MATCHING)
        name = MATCHING if matched is None and sft.cannot_complete else GRPO
        if matched is not None and not self.record.is_loose and not self.record.grpo:
            self._decide(ended=f"its boxes fit: F1@mIoU is {self.record.fit:.2f} of F1@0.5")
            return 0
        if name == GRPO and (self.root / GRPO / HEADROOM).is_file():
            self._decide_by_headroom()  # for a command stopped between measurement and decision
        earlier_s = spent_s(self.root / name)
        whole_s = 60 * self.record.minutes - self.record.seconds
        left_s = whole_s - earlier_s
        has_time = left_s >= LEAST_SHARE * 60 * self.record.minutes
        if self.record.no_grpo:
            # Sft may continue: in a recipe of 10 minutes it was ended while its score rose, and a third of the time
            # stayed unused.
            if has_time and sft.ended == TIME_UP and not self.record.extended:
                self._go_on_with_sft()
            else:
                self._decide(ended=f"no places are left to gain: {self.record.no_grpo}")
            return 0
        if not has_time and not (self.record.grpo or (name == MATCHING and earlier_s)):
            left = f"{max(0.0, left_s / 60):.1f} of {self.record.minutes:g} minutes"
            self._decide(ended=f"{left} are left: too little for {name}")
            return 0
        if name == MATCHING:
            if self.record.is_loose:
                left_s = MATCHING_SHARE * whole_s - earlier_s
            values = matching_stage(self.config, world_size=self.nproc, minutes=left_s / 60)
            return self._run(MATCHING, values, WHY_MATCHING, earlier_s)
        if not (code := self._grpo(sft, left_s / 60, earlier_s)) and self.record.grpo:
            self._decide(ended="all stages have ended")
        return code

    def _grpo(self, sft: StageResult, minutes: float, earlier_s: float) -> int:
        """Run `grpo`, and return its exit code. If labels were completed or boxes are loose, `grpo` learns in any case.
        In other cases the process of `grpo` first measures the headroom for boxes, and learns only if this headroom is
        large enough. Missing labels would make the measured headroom too small."""
        record = self.record
        # If rollout matching was run, the start cannot complete labels.
        completes = record.stage(MATCHING) is None and (sft.completed or record.starts_weak)
        values = grpo_stage(
            self.config,
            world_size=self.nproc,
            minutes=minutes,
            model=None if record.from_start else self._best(),
            completes=completes,
            by_iou=record.is_loose and not completes,
        )
        if record.on_completed and not record.grpo:
            self._decide(grpo=WHY_GRPO + (FROM_START if record.from_start else FROM_SFT))
        elif record.is_loose and not record.grpo:
            by_iou = values["reward"]["weights"] == BY_IOU  # False if the user set weights, or if labels are completed
            self._decide(grpo=WHY_LOOSE.format(fit=record.fit) + (BY_THEIR_IOU if by_iou else ""))
        return self._run(GRPO, values, self.record.grpo, earlier_s)

    def _go_on_with_sft(self) -> None:
        """Let `sft` continue with the minutes that were kept for `grpo`, because `grpo` is not run. The result of `sft`
        is removed from the record until `sft` has ended again."""
        self.record = replace(self.record, stages=(), extended=True, best_of=START, best_score=None)
        self._decide()

    def _best(self) -> Path | None:
        """Return the checkpoint with the best weights so far; None if the start is the best."""
        best = self.record.stage(self.record.best_of)
        return self.root / best.name / f"checkpoint-{best.best_step}" if best is not None else None

    def _run(self, name: str, values: dict[str, Any], why: str, earlier_s: float) -> int:
        """Run the stage `name` with the configuration `values`, and return its exit code. If the stage has ended,
        add its result to the record and link `best` to the best weights. `why`: the reason to run the stage.
        `earlier_s`: seconds that the stage has run before this command."""
        # All stages choose their best weights by the metric of the first stage. If the first stage chose the estimate,
        # `auto` chooses the estimate again.
        if self.record.metric != ESTIMATED:
            values["training"]["keep_best"] = self.record.metric
        path = self.root / f"{name}.yaml"
        with writing(path):
            write_yaml(path, values, f"A stage of the recipe in {self.root}, an ordinary run. Written by it.")
        # The written file is loaded here, so that a mistake in it is reported before a process is started.
        config = load_config(path, world_size=self.nproc, env=self.environment)
        code = self._run_stage(path)
        # The time of the whole process is counted, because starting and ending a stage also uses up the recipe's
        # minutes.
        seconds = earlier_s + time.monotonic() - self._began_s
        self._began_s = time.monotonic()
        if code:
            return code
        if name == GRPO and not self.record.grpo:
            self._decide_by_headroom()
            if self.record.no_grpo:
                return 0
            why = self.record.grpo
        patience = config.training.early_stop_patience or PATIENCE[name]
        result = stage_result(self.root / name, why=why, seconds=seconds, patience=patience)
        self.record = self.record.with_stage(result)
        self._decide()
        return 0

    # ---- record ----------------------------------------------------------------------------------------------------

    def _decide_by_headroom(self) -> None:
        """Decide by the measured headroom whether to run `grpo`, unless that is decided already. Raises CheckpointError
        if the measurement cannot be read."""
        if not (self.record.grpo or self.record.no_grpo):
            found = read_headroom(self.root / GRPO)
            rule = grpo_pays(found)
            self.record = replace(self.record, headroom=found)
            self._decide(**{"grpo" if rule.holds else "no_grpo": rule.reason})

    def _decide(self, *, grpo: str = "", no_grpo: str = "", ended: str = "") -> None:
        """Add the given decisions (reasons in words; "" decides nothing) to the record and write it. Link `best` to the
        best weights. No link is made if the start is the best and is not a folder on this machine."""
        self.record = record = replace(
            self.record,
            grpo=grpo or self.record.grpo,
            no_grpo=no_grpo or self.record.no_grpo,
            ended=ended or self.record.ended,
        )
        if (best := self._best()) is not None:
            point_best(self.root, best.relative_to(self.root))
        # A model's hub name cannot be linked to.
        elif (start := Path(self.config.model.path)).is_dir():
            point_best(self.root, start.absolute())
        record.write(self.root)

    def _tell(self) -> None:
        """Print the results of the stages, and write the report of the recipe."""
        if self.record.stage(GRPO) is None:  # the folder has only a measurement, or does not exist
            shutil.rmtree(self.root / GRPO, ignore_errors=True)
        print("\n".join(told(self.record)))
        if (self.root / BEST_LINK).is_dir():
            print(f"the best weights: {self.root / BEST_LINK}")
        print(write_report(self.root))


def told(record: Record) -> list[str]:
    """Return the lines that the recipe prints at its end: each stage's score, reason, gains and losses, then why the
    recipe ended and which weights are best."""
    lines = []
    for stage in record.stages:
        score = f"{record.metric} {stage.score_before:.3f} -> {stage.score:.3f} at step {stage.best_step}"
        lines.append(f"{stage.name}: {score} of {stage.steps}, {stage.seconds / 60:.1f} min; {stage.ended}")
        lines.append(f"  why: {stage.why}")
        lines += [f"  labels: {stage.labels}"] if stage.labels else []
        lines += [f"  {name}: {', '.join(texts)}" for name in ("gained", "lost") if (texts := getattr(stage, name))]
    end = f"{record.best_of}, {record.metric} {record.best_score:.3f}" if record.best_score is not None else "start"
    return [*lines, f"ended: {record.ended}", f"best on validation: {end}"]
