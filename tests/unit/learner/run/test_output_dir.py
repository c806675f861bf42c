"""A run directory belongs to one run: another one is refused, resumed, or removed on request, and nothing else."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from learner.config.schema import RunConfig
from learner.policy.parallel import Ranks
from learner.run.output_dir import JOB, Job, check_output_dir, claim_output_dir, clear_output_dir, torchrun_job
from shared.errors import ConfigError
from tests.unit.learner.config.examples import changed, config_of, minimal

STEP = '{"event": "step", "time": 1.0, "global_step": 1}\n'
OWN = ("config.yaml", "metrics.jsonl", "learner_rank0.log", "eval/step_000000.jsonl", "checkpoint-1/manifest.json")


def config(run_dir: Path, **training: object) -> RunConfig:
    keys = {"output_dir": str(run_dir), **training}
    return config_of(changed(minimal(), {f"training.{name}": value for name, value in keys.items()}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """With a run of one step, and with files that no learner wrote."""
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
    """From the newest checkpoint; from the beginning if there is none. Ranks of the same torchrun only."""
    run, job = config(tmp_path / "run"), Job(run_id="a", began_at=time.time() - 60)
    assert claim_output_dir(run, Ranks(), job) == run
    (tmp_path / "run/metrics.jsonl").write_text(STEP)
    again = claim_output_dir(run, Ranks(), job)
    assert (again.training.resume_from_checkpoint, files(tmp_path / "run")) == (None, {JOB})
    (tmp_path / "run/checkpoint-1").mkdir()
    (tmp_path / "run/checkpoint-1/manifest.json").write_text("{}")
    assert claim_output_dir(run, Ranks(), job).training.resume_from_checkpoint == "latest"
    for other in (None, Job(run_id="b", began_at=job.began_at), Job(run_id="a", began_at=time.time() + 60)):
        with pytest.raises(ConfigError):
            claim_output_dir(run, Ranks(), other)


def test_a_job_began_before_its_ranks() -> None:
    job = torchrun_job({"TORCHELASTIC_RUN_ID": "x"})
    assert job is not None
    assert 0 <= time.time() - job.began_at < 30 * 24 * 3600
    assert torchrun_job({}) is None
