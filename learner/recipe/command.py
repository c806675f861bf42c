"""`rollout-learner recipe --config run.yaml --minutes N`: the stages one after the other, in one run directory.

Every rank runs it, alone or under torchrun. Rank 0 decides and writes, and all ranks follow. The state on disk decides
what comes next, so a command that is given again goes on: a stage that has ended is not run again, one that was killed
goes on from its newest checkpoint.

vLLM's allocator on CUDA serves one engine in the life of a process. So a stage with a colocated engine is the last of
its process, and `AGAIN` asks for the same command in a new one.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from learner.config.load import load_config
from learner.config.plan import resolve
from learner.config.schema import RunConfig
from learner.config.sections.training import ESTIMATED
from learner.policy.parallel import Ranks
from learner.recipe.headroom import grpo_pays, measure_headroom
from learner.recipe.record import (
    START,
    TIME_UP,
    Record,
    StageResult,
    digest_of,
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
from learner.run.files import write_atomically, writing
from learner.run.lock import locked
from learner.run.output_dir import check_output_dir, check_writable
from learner.run.stopping import Stopped, StopRequest
from learner.steps.evaluation import GAPS
from learner.trainer import Trainer
from learner.wiring.build import joined_ranks, train_on
from shared.config.parse import write_yaml
from shared.errors import ConfigError, DataError

# The largest share of the time, as long as grpo may follow. Patience ends sft long before. While its score rises it
# learns faster than grpo would: on photographs 60% of five minutes were over after one step.
SFT_SHARE = 0.8
# Rollout matching's largest share of what is left then, if boxes are loose: `grpo` on their IoU follows.
MATCHING_SHARE = 0.6
# Boxes are loose if F1@mIoU is below this share of F1@0.5. On blood cells it is 0.6: a reward that counts IoU gained
# 0.02 F1@0.5 after sft there. On digits it is 0.97: there it gained nothing.
LOOSE = 0.8
AGAIN = os.EX_TEMPFAIL  # the exit code of a recipe that goes on in a new process
LEAST_SHARE = 0.1  # share of the time: with less, no second stage is begun
# The least score of the start, as a share of that of sft, with which grpo begins from the start if labels were
# completed. With 60% missing it ended at 0.83 from the start, and at 0.80 from sft, whose completed labels were others
# too. All measured shares are above 0.8.
START_SHARE = 0.75
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


def recipe(config: RunConfig, minutes: float, *, environment: Mapping[str, str]) -> int:
    """Follow the recipe to its end. Returns the exit code, that of a signal if one stopped it; `AGAIN`: the same call
    in a new process goes on.

    Raises ConfigError, DataError, CheckpointError, OutputError, and whatever a stage's run raises.
    """
    check_recipe(config)
    with joined_ranks(config, environment) as ranks, ExitStack() as stack:
        (record, *_) = ranks.all_succeed(lambda: _begin(config, minutes, ranks, stack))
        return Recipe(config, record, ranks, environment).follow()


def _begin(config: RunConfig, minutes: float, ranks: Ranks, stack: ExitStack) -> Record:
    """Rank 0's record, old or new; no other recipe gets the folder before `stack` is closed."""
    digest = digest_of(config)
    new = Record(digest=digest, minutes=minutes, metric=config.training.keep_best or "auto")
    if not ranks.is_main:
        return new
    root = Path(config.training.output_dir)
    check_writable(config)
    check_output_dir(config.model_copy(update={"training": config.training.model_copy(update={"overwrite": False})}))
    with writing(root):
        stack.enter_context(locked(root))
    old = read_record(root)
    if old is None or (old.digest != digest and not has_learned(old, root)):
        new.write(root)
        return new
    if old.digest != digest:
        raise ConfigError(
            "training.output_dir: another recipe is there",
            found=f"{root}, begun with another model, data, task or labels",
            wanted="the configuration that it was begun with, or a folder without a run",
            remedy="name another folder (training.output_dir), or remove this one",
        )
    return replace(old, minutes=minutes)


def has_learned(record: Record, root: Path) -> bool:
    """Return True if a stage has ended, or saved a checkpoint: what a mistake ended before that is begun anew."""
    return bool(record.stages) or any(root.glob("*/checkpoint-*/manifest.json"))


class Recipe:
    """`record` is the same on all ranks."""

    def __init__(self, config: RunConfig, record: Record, ranks: Ranks, environment: Mapping[str, str]) -> None:
        self.config, self.record, self.ranks, self.environment = config, record, ranks, environment
        self.root = Path(config.training.output_dir)
        self._began_s = time.monotonic()  # the stage that runs, or the command
        self._had_engine = False
        self._stop: StopRequest | None = None  # of the newest stage

    def follow(self) -> int:
        """Run the stages, and write the report."""
        while not self.record.ended:
            sft = self.record.stage(SFT)
            if code := (self._sft() if sft is None else self._after_sft(sft)):
                return code
            if code := self._stopped():
                return code
        self._tell()
        return 0

    def _stopped(self) -> int:
        """Return the exit code of a signal that came after the newest stage's last check; 0: none did. Collective."""
        try:
            if self._stop is not None and not self.record.ended:
                self._stop.check()
        except Stopped as stopped:
            if self.ranks.is_main:
                print(f"{stopped}; the same command goes on with the next stage", flush=True)
            return stopped.exit_code
        return 0

    # ---- the stages ------------------------------------------------------------------------------------------------

    def _sft(self) -> int:
        """It has all of the time if grpo is known to gain nothing."""
        earlier_s = self._earlier_s(SFT)
        share_s = 60 * self.record.minutes * (1.0 if self.record.no_grpo else SFT_SHARE)
        left_s = share_s - earlier_s - self._earlier_s(GRPO)
        values = sft_stage(self.config, world_size=self.ranks.world_size, minutes=left_s / 60)
        return self._run(SFT, values, WHY_SFT, earlier_s)

    def _after_sft(self, sft: StageResult) -> int:
        """Run rollout matching if labels have gaps that the start cannot complete; after it, or else, `grpo`, if that
        pays."""
        matched = self.record.stage(MATCHING)
        name = MATCHING if matched is None and sft.invents else GRPO
        if matched is not None and not self._is_loose() and not self.record.grpo:
            self._decide(ended=f"its boxes fit: F1@mIoU is {self.record.fit:.2f} of F1@0.5")
            return 0
        earlier_s = self._earlier_s(name)
        whole_s = 60 * self.record.minutes - self.record.seconds
        left_s = whole_s - earlier_s
        has_time = left_s >= LEAST_SHARE * 60 * self.record.minutes
        if self.record.no_grpo:
            if has_time and sft.ended == TIME_UP and not self.record.extended:
                self._go_on_with_sft()
            else:
                self._decide(ended=f"no places are left to gain: {self.record.no_grpo}")
            return 0
        if not has_time and not (self.record.grpo or (name == MATCHING and earlier_s)):
            left = f"{max(0.0, left_s / 60):.1f} of {self.record.minutes:g} minutes"
            self._decide(ended=f"{left} are left: too little for {name}")
            return 0
        if name == MATCHING and self._is_loose():
            left_s = MATCHING_SHARE * whole_s - earlier_s
        code = self._run(name, self._values_after_sft(name, sft, left_s / 60), WHY_MATCHING, earlier_s)
        if not code and name == GRPO and self.record.grpo:
            self._decide(ended="all stages have ended")
        return code

    def _values_after_sft(self, name: str, sft: StageResult, minutes: float) -> dict[str, Any]:
        world_size = self.ranks.world_size
        if name == MATCHING:
            return matching_stage(self.config, world_size=world_size, minutes=minutes)
        # rollout matching was run because the start can't complete them
        completes = self.record.stage(MATCHING) is None and (sft.completed or _is_weak(sft))
        return grpo_stage(
            self.config,
            world_size=world_size,
            minutes=minutes,
            model=None if self._from_start(sft) else self._best(),
            completes=completes,
            by_iou=self._is_loose() and not completes,
        )

    def _go_on_with_sft(self) -> None:
        """Its time was cut for a stage that is not run: it has all of it now."""
        self.record = replace(self.record, stages=(), extended=True, best_of=START, best_score=None)
        self._decide()

    def _on_completed(self, sft: StageResult) -> bool:
        """True if `grpo` learns labels that were completed. Rollout matching before it says that they are not good."""
        return sft.completed and self.record.stage(MATCHING) is None

    def _from_start(self, sft: StageResult) -> bool:
        """True if `grpo` begins with the weights that completed the labels, and not with those that learned them."""
        return self._on_completed(sft) and not _is_weak(sft)

    def _is_loose(self) -> bool:
        return self.record.fit < LOOSE

    def _best(self) -> Path | None:
        """Return the best weights so far; None: the start's."""
        best = self.record.stage(self.record.best_of)
        return self.root / best.name / f"checkpoint-{best.best_step}" if best is not None else None

    def _run(self, name: str, values: dict[str, Any], why: str, earlier_s: float) -> int:
        """Run one stage as an ordinary run. Its result goes into the record, and `best` may point to another
        checkpoint."""
        if self._had_engine:
            return AGAIN
        engine = self.config.rollout_matching
        self._had_engine = engine.rollout_backend == "vllm" and engine.vllm.mode == "colocate"
        if self.record.metric != ESTIMATED:
            values["training"]["keep_best"] = self.record.metric
        path = self.root / f"{name}.yaml"
        self.ranks.all_succeed(lambda: self._write_stage(path, values))
        config = load_config(path, world_size=self.ranks.world_size, env=self.environment)
        plan = resolve(config, self.ranks.world_size)
        code = train_on(
            config,
            plan,
            self.ranks,
            self.environment,
            goes_on=True,
            before=partial(self._prepare, name),
        )
        _forget()
        seconds = earlier_s + time.monotonic() - self._began_s
        self._began_s = time.monotonic()
        if code or (name == GRPO and not self.record.grpo):
            return code
        patience = config.training.early_stop_patience or PATIENCE[name]
        run_dir, why = Path(config.training.output_dir), self.record.grpo if name == GRPO else why

        def ended() -> Record:
            if not self.ranks.is_main:
                return self.record
            record = self.record.with_stage(stage_result(run_dir, why=why, seconds=seconds, patience=patience))
            self._keep(record)
            return record

        (self.record, *_) = self.ranks.all_succeed(ended)
        return 0

    def _write_stage(self, path: Path, values: Mapping[str, object]) -> None:
        if self.ranks.is_main:
            with writing(path):
                write_yaml(path, values, f"A stage of the recipe in {self.root}, an ordinary run. Written by it.")

    def _prepare(self, name: str, trainer: Trainer) -> bool:
        self._stop = trainer.stop
        if name != SFT and self.ranks.is_main:
            self._take_range(trainer)
        if not any(sample.objects for sample in trainer.eval_samples):
            raise DataError(
                "recipe: validation can't decide",
                found=f"{len(trainer.eval_samples)} samples in data.val, none with an object",
                wanted="samples with labelled objects: every score is 0 without",
                remedy="name other annotations (data.val), or label some",
            )
        return self._prepare_grpo(trainer) if name == GRPO else True

    def _prepare_grpo(self, trainer: Trainer) -> bool:
        """Give `grpo` the labels that the start completed, if there are any and it begins there. Return True if it is
        to run: labels were completed, or boxes are loose, or it has places left to gain. This is decided once; a stage
        that goes on has the answer.

        Headroom is counted by labels. If these have gaps, also after completion, it does not see what nobody labelled.
        """
        sft = self.record.stage(SFT)
        assert sft is not None
        if self._on_completed(sft):
            if self._from_start(sft):
                self._take_labels(trainer)
            if not self.record.grpo:
                self._decide(grpo=WHY_GRPO + (FROM_START if self._from_start(sft) else FROM_SFT))
        elif self._is_loose() and not self.record.grpo:
            by_iou = trainer.config.reward.weights == BY_IOU  # not if the user has one, or if labels are completed
            self._decide(grpo=WHY_LOOSE.format(fit=self.record.fit) + (BY_THEIR_IOU if by_iou else ""))
        if self.record.grpo:
            return True
        trainer.journal.note("recipe: measuring what rollouts could still gain")
        found = measure_headroom(trainer)
        rule = grpo_pays(found)
        self.record = replace(self.record, headroom=found)
        self._decide(**{"grpo" if rule.holds else "no_grpo": rule.reason})
        return rule.holds

    def _take_labels(self, trainer: Trainer) -> None:
        """Give `grpo` the labels that the start completed, unless it has them since an earlier checkpoint.

        The weights of `sft` would complete fewer, if the start is not much worse: they learned the annotated ones, and
        so find these more often.
        """
        if trainer.labels is not None and trainer.config.training.resume_from_checkpoint is None:
            trainer.labels.restore(0, self.root / SFT)

    def _take_range(self, trainer: Trainer) -> None:
        """Estimate F1 for the objects that `sft` saw, so that scores of all stages are comparable (R49)."""
        known, own = (Path(folder) / GAPS for folder in (self.root / SFT, trainer.config.training.output_dir))
        if known.is_file() and not own.is_file():
            write_atomically(own, known.read_text())

    # ---- the record ------------------------------------------------------------------------------------------------

    def _earlier_s(self, name: str) -> float:
        """Return what earlier starts of the stage took. Rank 0 knows."""
        return self.ranks.broadcast_object(spent_s(self.root / name) if self.ranks.is_main else 0.0)

    def _decide(self, *, grpo: str = "", no_grpo: str = "", ended: str = "") -> None:
        record = self.record
        self.record = replace(
            record, grpo=grpo or record.grpo, no_grpo=no_grpo or record.no_grpo, ended=ended or record.ended
        )
        self.ranks.all_succeed(lambda: self._keep(self.record))

    def _keep(self, record: Record) -> None:
        """Rank 0 writes the record, and points `best` to the best weights. A start that has no folder has no link."""
        if not self.ranks.is_main:
            return
        best = record.stage(record.best_of)
        if best is not None:
            point_best(self.root, Path(best.name, f"checkpoint-{best.best_step}"))
        elif (start := Path(self.config.model.path)).is_dir():
            point_best(self.root, start.absolute())
        record.write(self.root)

    def _tell(self) -> None:
        """Print what was done and why, and write the report."""
        if not self.ranks.is_main:
            return
        if self.record.stage(GRPO) is None:  # its folder has labels and answers that nothing was learned from
            shutil.rmtree(self.root / GRPO, ignore_errors=True)
        print("\n".join(told(self.record)))
        if (self.root / BEST_LINK).is_dir():
            print(f"the best weights: {self.root / BEST_LINK}")
        print(write_report(self.root))


def told(record: Record) -> list[str]:
    """Return the recipe in lines."""
    lines = []
    for stage in record.stages:
        score = f"{record.metric} {stage.score_before:.3f} -> {stage.score:.3f} at step {stage.best_step}"
        lines.append(f"{stage.name}: {score} of {stage.steps}, {stage.seconds / 60:.1f} min; {stage.ended}")
        lines.append(f"  why: {stage.why}")
        lines += [f"  labels: {stage.labels}"] if stage.labels else []
        lines += [f"  {name}: {', '.join(texts)}" for name in ("gained", "lost") if (texts := getattr(stage, name))]
    end = f"{record.best_of}, {record.metric} {record.best_score:.3f}" if record.best_score is not None else "start"
    return [*lines, f"ended: {record.ended}", f"best on validation: {end}"]


def _is_weak(sft: StageResult) -> bool:
    """Return True if the start was much worse than `sft`, so that the latter completes labels better."""
    return sft.score_before < START_SHARE * sft.score


def _forget() -> None:
    """Free a stage's memory before the next one asks for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
