"""A run directory belongs to one run: another one is refused, resumed, or removed on request, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from learner.config.schema import RunConfig
from learner.policy.parallel import Ranks
from learner.run.output_dir import JOB, check_output_dir, claim_output_dir, clear_output_dir, torchrun_agent
from shared.errors import ConfigError, OutputError
from tests.unit.learner.config.examples import changed, config_of, minimal

STEP = '{"event": "step", "time": 1.0, "global_step": 1}\n'
OWN = ("config.yaml", "metrics.jsonl", "learner_rank0.log", "eval/step_000000.jsonl", "checkpoint-1/manifest.json")


def config(run_dir: Path, **training: object) -> RunConfig:
    keys = {"output_dir": str(run_dir), **training}
    return config_of(changed(minimal(), {f"training.{name}": value for name, value in keys.items()}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a folder with a run of one step, and with files that no learner wrote."""
    folder = tmp_path / "run"
    for name in (*OWN, "notes.txt", "checkpoints-of-mine/a", "eval/mine.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(STEP)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_another_run_is_refused_and_nothing_is_removed(run_dir: Path) -> None:
    before = files(run_dir)
    with pytest.raises(ConfigError) as caught:
        check_output_dir(config(run_dir))
    assert caught.value.what.startswith("training.output_dir")
    assert str(run_dir) in caught.value.found
    assert "training.overwrite: true" in caught.value.remedy
    assert "resume_from_checkpoint" in caught.value.remedy
    assert clear_output_dir(config(run_dir)) == []
    assert files(run_dir) == before


def test_overwriting_removes_the_runs_own_files_only(run_dir: Path) -> None:
    run = config(run_dir, overwrite=True)
    check_output_dir(run)
    removed = clear_output_dir(run)
    assert files(run_dir) == {"notes.txt", "checkpoints-of-mine/a", "eval/mine.jsonl"}
    assert set(removed) == {
        "config.yaml",
        "metrics.jsonl",
        "learner_rank0.log",
        "eval/step_000000.jsonl",
        "checkpoint-1",
    }
    check_output_dir(config(run_dir))


@pytest.mark.parametrize("where", ["latest", "checkpoint-1"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_resumes_keeps_everything(run_dir: Path, where: str, overwrite: bool) -> None:
    before = files(run_dir)
    resumed = where if where == "latest" else str(run_dir / where)
    run = config(run_dir, resume_from_checkpoint=resumed, overwrite=overwrite)
    check_output_dir(run)
    assert clear_output_dir(run) == []
    assert files(run_dir) == before


def test_another_runs_checkpoint_is_no_resume(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_output_dir(config(run_dir, resume_from_checkpoint=str(tmp_path / "other/checkpoint-9")))


def test_what_failed_before_its_first_step_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"event": "plan", "time": 1.0}\n')
    check_output_dir(config(tmp_path))
    check_output_dir(config(tmp_path / "nothing-there"))


class RankOf:
    """Rank `rank` of threads in one process; broadcasts what rank 0 has through `box`."""

    def __init__(self, rank: int, box: list[object]) -> None:
        self.is_main, self._box = rank == 0, box

    def broadcast_object(self, value: object) -> object:
        if self.is_main:
            self._box.append(value)
        while not self._box:
            pass
        return self._box[0]


def test_all_ranks_fail_alike_as_rank_0_decides(run_dir: Path) -> None:
    box: list[object] = []

    def outcome(rank: int) -> str:
        try:
            claim_output_dir(config(run_dir), RankOf(rank, box))  # type: ignore[arg-type]
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(outcome, (1, 0), timeout=10))
    assert said[0] == said[1] != ""


def test_ranks_that_torchrun_starts_again_go_on_in_their_own_folder(tmp_path: Path) -> None:
    """They start at the newest checkpoint, or at the beginning if there is none. Ranks of the same torchrun only."""
    run = config(tmp_path / "run")
    assert claim_output_dir(run, Ranks(), "a") == run
    (tmp_path / "run/metrics.jsonl").write_text(STEP)
    again = claim_output_dir(run, Ranks(), "a")
    assert (again.training.resume_from_checkpoint, files(tmp_path / "run")) == (None, {JOB})
    (tmp_path / "run/checkpoint-1").mkdir()
    (tmp_path / "run/checkpoint-1/manifest.json").write_text("{}")
    assert claim_output_dir(run, Ranks(), "a").training.resume_from_checkpoint == "latest"
    for other in (None, "b"):
        with pytest.raises(ConfigError):
            claim_output_dir(run, Ranks(), other)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("changed_at", [0, 2**31])
def test_a_clock_that_was_set_does_not_hide_a_run_from_its_own_ranks(
    tmp_path: Path, overwrite: bool, changed_at: int
) -> None:
    """The clock is this machine's or the file server's: the claim is as old or as new as you like."""
    run, agent = config(tmp_path, overwrite=overwrite), torchrun_agent({"TORCHELASTIC_RUN_ID": "x"})
    claim_output_dir(run, Ranks(), agent)
    (tmp_path / "checkpoint-1").mkdir()
    for name in ("metrics.jsonl", "checkpoint-1/manifest.json"):
        (tmp_path / name).write_text(STEP)
    os.utime(tmp_path / JOB, (changed_at, changed_at))
    assert claim_output_dir(run, Ranks(), agent).training.resume_from_checkpoint == "latest"
    assert (tmp_path / "checkpoint-1/manifest.json").exists()


class Gathered(Ranks):
    """The first of ranks that several torchruns have started, one on each node."""

    def __init__(self, *agents: str) -> None:
        super().__init__()
        object.__setattr__(self, "_agents", list(agents))

    def all_gather_object(self, value: Any) -> Any:
        return self._agents  # type: ignore[attr-defined]


def test_a_run_on_several_nodes_outlives_each_of_them(tmp_path: Path) -> None:
    """Rank 0 may be on another node than before. What a refused run finds is not its own at its next start."""
    run = config(tmp_path)
    claim_output_dir(run, Gathered("a", "b"), "a")
    (tmp_path / "metrics.jsonl").write_text(STEP)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/manifest.json").write_text("{}")
    for agents in (("b", "c"), ("d", "c")):
        assert claim_output_dir(run, Gathered(*agents), agents[0]).training.resume_from_checkpoint == "latest"
    for _ in range(2):
        with pytest.raises(ConfigError):
            claim_output_dir(run, Gathered("a", "b"), "a")


def test_a_claim_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_output_dir(config(tmp_path), Ranks(), "a")
    (tmp_path / "metrics.jsonl").write_text(STEP)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError):
        claim_output_dir(config(tmp_path, resume_from_checkpoint="latest"), Ranks(), "b")
    assert (tmp_path / JOB).read_text() == "a"


@pytest.mark.slow
def test_every_start_of_torchrun_has_a_name_of_its_own() -> None:
    """The ranks that it starts again have the same one, though its id is given and the same each time."""
    rank = f'{sys.executable} -c "from learner.run.output_dir import *; print(torchrun_agent(os.environ))"; '
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "learner", "PYTHONPATH": os.pathsep.join(sys.path)}
    said = [
        subprocess.run(["sh", "-c", rank * 2 + "true"], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (one.stdout.splitlines() for one in said)
    assert first[0] == first[1] != second[0] == second[1]
    assert torchrun_agent({}) is None


def test_a_job_that_its_scheduler_starts_again_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    """R46: a requeued job has another torchrun on other machines. Another job is refused."""
    first, other = ({"ROLLOUT_JOB": job, "TORCHELASTIC_RUN_ID": "x"} for job in ("slurm-7\n", "slurm-8"))
    run = config(tmp_path)
    claim_output_dir(run, Ranks(), torchrun_agent(first))
    (tmp_path / "metrics.jsonl").write_text(STEP)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/manifest.json").write_text("{}")
    again = torchrun_agent({"ROLLOUT_JOB": "slurm-7"})
    assert claim_output_dir(run, Ranks(), again).training.resume_from_checkpoint == "latest"
    with pytest.raises(ConfigError):
        claim_output_dir(run, Ranks(), torchrun_agent(other))
