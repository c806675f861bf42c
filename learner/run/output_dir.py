"""Checks that a run may use `training.output_dir`, and removes an old run there with `training.overwrite`.

In: the configuration. Out: a folder that a new run can use, or a ConfigError. A folder has a run if it has a
checkpoint, an evaluation, or a step's event in `metrics.jsonl`. So a run that failed before its first step does not
matter. Files are removed only with `training.overwrite: true`, and only files that a learner writes. This module
imports neither torch nor transformers, because `rollout-learner check` uses it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from learner.config.load import RESOLVED_NAME
from learner.config.schema import RunConfig
from learner.run.best import BEST_FILE, BEST_LINK
from learner.run.files import why_unwritable, write_atomically, writing
from learner.run.lock import LOCK, locked
from shared.errors import ConfigError, ProjectError

if TYPE_CHECKING:
    from learner.policy.parallel import Ranks

JOB_VARIABLE = "ROLLOUT_JOB"  # environment variable with the id of a learner's job; a restart with the same id resumes
KEY = "training.output_dir"
RESUME_KEY = "training.resume_from_checkpoint"
LABELS = "labels"  # folder of completed labels, in the run directory
GAPS = "eval/gaps.json"  # file in which the first evaluation notes whether labels are missing (gaps)

# The file JOB says which run has claimed the folder. JOB has one line for each node's torchrun process, as
# `torchrun_agent` returns it, or one line for a scheduler's job.
JOB = ".torchrun_job"
# The names of all files that a learner and its report write into a run directory.
OWN = (
    RESOLVED_NAME,
    JOB,
    "metrics.jsonl",
    "answers.json",
    "groups.jsonl",
    "report.html",
    "learner_rank*.log",
    "tensorboard",
    "trackers.json",
    "trackers",
    "eval/step_*.jsonl",
    f"{LABELS}/step_*.json",
    "eval/test.jsonl",
    GAPS,
    "checkpoint-*",
    BEST_LINK,
    BEST_FILE,
    ".unfinished-*",
)


def traces_of_run(run_dir: Path) -> str:
    """Return in words what an earlier run has left in the folder ("3 optimizer steps, 1 checkpoint"); "" if there was
    no run."""
    checkpoints = [path for path in run_dir.glob("checkpoint-*") if path.is_dir()]
    steps, evaluations = _steps(run_dir / "metrics.jsonl"), list(run_dir.glob("eval/step_*.jsonl"))
    counts = ((steps, "optimizer step"), (len(evaluations), "evaluation"), (len(checkpoints), "checkpoint"))
    return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for number, name in counts if number)


def _steps(metrics: Path) -> int:
    if not metrics.is_file():
        return 0
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        return sum('"event": "step"' in line for line in lines)


def torchrun_agent(environment: Mapping[str, str]) -> str | None:
    """Return a name for the torchrun process that started this rank; None without torchrun. If torchrun restarts its
    ranks, the name is the same. Each new torchrun process has another name.

    A scheduler that may start a whole job again sets ROLLOUT_JOB to the job's id. All starts of one job get the same
    name, and are one run.

    The name has torchrun's run id, and its process's id and start.
    """
    if (job := job_of(environment)) is not None:
        return job
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    # The run id alone is not unique: `--rdzv-id` may give the same id to every run. torchrun's restart count stays 0 if
    # a rank of another node failed.
    pid, boot_id = os.getppid(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The process's name stands in parentheses, and may contain spaces and parentheses itself.
    ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    # The start is in ticks since boot, so a change of the clock does not matter.
    return f"{run_id} {boot_id} {pid} {ticks}"


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return the line that the file JOB has for the scheduler's job, whose id is in the variable ROLLOUT_JOB. Return
    None if the variable is not set."""
    job = " ".join(environment.get(JOB_VARIABLE, "").split())
    return f"job {job}" if job else None


def claim_output_dir(
    config: RunConfig,
    ranks: Ranks,
    agent: str | None = None,
    *,
    stack: ExitStack | None = None,
    goes_on: bool = False,
) -> RunConfig:
    """Take the folder for this run, before any rank writes. Rank 0 checks the folder, and with `training.overwrite`
    removes an old run. If rank 0 fails, all ranks raise its error. Collective. Returns the configuration that the run
    must use. No other run can take the folder until `stack` is closed.

    `agent`: the name of this rank's torchrun (`torchrun_agent`). If a rank's torchrun has taken the folder before, it
    has restarted its ranks after a failure. In this case the run continues from its newest checkpoint, or from the
    beginning if it has none. `goes_on`: True if the run continues in this way in any case.
    """
    run_dir = Path(config.training.output_dir)
    agents = set(ranks.all_gather_object(agent)) if agent is not None else set()
    outcome: tuple[RunConfig, list[str], ProjectError | None] = (config, [], None)
    if ranks.is_main:
        try:
            check_writable(config)
            if stack is not None:
                with writing(run_dir):
                    # The folder is checked under the lock, so that no other run can begin between the check and the
                    # claim.
                    stack.enter_context(locked(run_dir))
            if goes_on or _claimed_by(agents, run_dir):
                config = _restarted(config)
            check_output_dir(config)
            check_annotations(config)
            with writing(run_dir):
                outcome = (config, clear_output_dir(config), None)
            if agents:
                write_atomically(run_dir / JOB, "\n".join(sorted(agents)))
        except ProjectError as error:
            outcome = (config, [], error)
    config, removed, failure = ranks.broadcast_object(outcome)
    if failure is not None:
        raise failure
    if removed and ranks.is_main:
        print(f"training.overwrite: removed from {config.training.output_dir}: {', '.join(removed)}", flush=True)
    return config


def _claimed_by(agents: Set[str], run_dir: Path) -> bool:
    path = run_dir / JOB
    return path.is_file() and not agents.isdisjoint(path.read_text().splitlines())


def _restarted(config: RunConfig) -> RunConfig:
    """Return the configuration of a run that is restarted after a failure. The run resumes from the newest checkpoint
    in its folder, even if it was first resumed from another checkpoint. Without a checkpoint the run begins again."""
    has_checkpoint = any(Path(config.training.output_dir).glob("checkpoint-*/manifest.json"))
    # Without a checkpoint the folder is overwritten, because its files are from an earlier start of this same run.
    change = {"resume_from_checkpoint": "latest"} if has_checkpoint else {"overwrite": True}
    return config.model_copy(update={"training": config.training.model_copy(update=change)})


def is_same_job(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Return True if an earlier start of the same scheduler's job has taken the folder, so that its run will
    continue."""
    job = job_of(environment)
    return job is not None and _claimed_by({job}, Path(config.training.output_dir))


def check_claimable(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError or OutputError if `claim_output_dir` would refuse the folder. Changes nothing, so it can be
    called before a learner is started."""
    run_dir = Path(config.training.output_dir)
    check_writable(config)
    if (run_dir / LOCK).is_file():
        with writing(run_dir), locked(run_dir):
            pass
    if not is_same_job(config, environment):
        check_output_dir(config)


def check_output_dir(config: RunConfig) -> None:
    """Raises ConfigError if the folder has another run, which this run neither resumes nor may overwrite."""
    training, run_dir = config.training, Path(config.training.output_dir)
    if training.overwrite or _resumes(config):
        return
    if traces := traces_of_run(run_dir):
        raise ConfigError(
            f"{KEY}: another run is there",
            found=f"{run_dir} with {traces}",
            wanted="a folder without a run",
            remedy="name another folder, go on with that run (training.resume_from_checkpoint: latest), or have its "
            "files removed (training.overwrite: true)",
        )


def check_annotations(config: RunConfig) -> None:
    """Raises OutputError if there is a file at `labels.complete.write` that the run did not write, or if the run cannot
    write there, DataError if annotations of this format cannot be written."""
    from learner.run.additions import run_annotations  # imported here: a check of keys needs no reader of annotations

    annotations = run_annotations(config)
    if annotations is not None:
        annotations.check()


def check_writable(config: RunConfig) -> None:
    """Raises ConfigError if the folder cannot be made or written."""
    if (found := why_unwritable(Path(config.training.output_dir))) is not None:
        remedy = "name another folder, or change its permissions"
        raise ConfigError(f"{KEY}: no run can be written there", found=found, wanted="a folder", remedy=remedy)


def check_resume(config: RunConfig) -> None:
    """Raises ConfigError if `training.resume_from_checkpoint` is set and there is no complete checkpoint."""
    training, run_dir = config.training, Path(config.training.output_dir)
    where = training.resume_from_checkpoint
    at = run_dir if where == "latest" else Path(where or "")
    if where is not None and not any(at.glob("checkpoint-*/manifest.json" if where == "latest" else "manifest.json")):
        raise ConfigError(
            f"{RESUME_KEY}: there is no checkpoint to resume from",
            found=f"{where}: none at {at}",
            wanted="a complete checkpoint",
            remedy="unset training.resume_from_checkpoint to start at the beginning, or name a checkpoint's folder",
        )


def clear_output_dir(config: RunConfig) -> list[str]:
    """With `training.overwrite`, remove the files of an old run, and return their names. Without `training.overwrite`,
    or if the run resumes, nothing is removed."""
    run_dir = Path(config.training.output_dir)
    if not config.training.overwrite or _resumes(config) or not traces_of_run(run_dir):
        return []
    removed = sorted(path for pattern in OWN for path in run_dir.glob(pattern))
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [str(path.relative_to(run_dir)) for path in removed]


def _resumes(config: RunConfig) -> bool:
    """Return True if the run resumes from a checkpoint in its own folder, not from another run's checkpoint."""
    where = config.training.resume_from_checkpoint
    if where is None:
        return False
    return where == "latest" or Path(where).resolve().parent == Path(config.training.output_dir).resolve()
