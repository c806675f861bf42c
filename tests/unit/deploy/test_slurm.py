"""The job script of `--to slurm`, run with stand-ins for Slurm's commands and the launcher (R46).

`tests/integration/test_slurm.py` runs it in a real Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from deploy.launch import load_launch_config
from tests.unit.deploy.manifests import DEPLOY

SCRIPT = DEPLOY / "slurm" / "run.sh"
SHELL_SCRIPTS = sorted(DEPLOY.rglob("*.sh"))
DEADLINE_S = 60.0

SCONTROL = """
case "$1 $2" in
  "show hostnames") printf '%s\\n' a1 a2 b1 b2 ;;
  "show node") echo "NodeName=$3 Arch=x NodeAddr=10.0.0.${3#?} NodeHostName=$3" ;;
  *) echo "scontrol $*" >> "$NOTES" ;;
esac
"""
# The steps get the signal, and the launcher ends when they have ended.
SCANCEL = 'echo "scancel $*" >> "$NOTES"; kill "$(cat "$NOTES.pid")"'
# The launcher: it says what it was given, and ends as it is told.
PYTHON = """
echo "started $*" >> "$NOTES"
env | grep -E '^(NODE|ADDRESS)_|^ROLLOUT_' | sort >> "$NOTES"
[ "$ENDS" = waits ] || exit "$ENDS"
trap 'echo "stopped" >> "$NOTES"; exit 143' TERM
echo $$ > "$NOTES.pid"
echo "waits" >> "$NOTES"
while true; do sleep 0.05; done
"""

Submit = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes"
    path.touch()
    return path


@pytest.fixture
def submit(tmp_path: Path, notes: Path) -> Iterator[Submit]:
    jobs: list[subprocess.Popen[str]] = []
    for name, text in {"scontrol": SCONTROL, "scancel": SCANCEL, "python": PYTHON}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def start(ends: str = "0", **words: str) -> subprocess.Popen[str]:
        own = {
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-2],b[1-2]",
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "bin" / "python"),
            "NOTES": str(notes),
            "ENDS": ends,
        }
        environment = {**os.environ, **own, **words}
        jobs.append(subprocess.Popen(["bash", str(SCRIPT)], env=environment, text=True, start_new_session=True))
        return jobs[-1]

    yield start
    for job in jobs:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(notes: Path, words: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while words not in notes.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path) -> None:
    check(script)


def test_the_scripts_inside_of_skypilots_task_are_clean(tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "task.yaml").read_text())
    for name in ("setup", "run"):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{task[name]}")
        check(tmp_path / name)


def check(script: Path) -> None:
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    for command in (["bash", "-n"], [shellcheck, "--severity=style"]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("code", ["0", "7"])
def test_the_launchers_exit_code_is_the_jobs(submit: Submit, notes: Path, code: str) -> None:
    """It gets Slurm's names and addresses of the machines, a token of its own, and the job's name."""
    assert submit(code, ROLLOUT_SERVER_TOKEN="").wait(DEADLINE_S) == int(code)
    lines = notes.read_text().splitlines()
    assert lines[0] == "started -m deploy.launch --config deploy/slurm/launch.yaml"
    given = dict(line.split("=", 1) for line in lines[1:])
    assert [given[f"NODE_{i}"] for i in range(4)] == ["a1", "a2", "b1", "b2"]
    assert [given[f"ADDRESS_{i}"] for i in range(4)] == ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    assert given["ROLLOUT_JOB"] == "slurm-7"
    assert len(given["ROLLOUT_SERVER_TOKEN"]) == 64


@pytest.mark.parametrize(
    ("signum", "restarts", "requeued"),
    [
        (signal.SIGUSR1, "0", True),
        (signal.SIGUSR1, "2", True),
        (signal.SIGUSR1, "3", False),
        (signal.SIGTERM, "0", False),
    ],
)
def test_a_warning_before_the_limit_stops_the_run_and_starts_the_job_again(
    submit: Submit, notes: Path, signum: signal.Signals, restarts: str, requeued: bool
) -> None:
    """It starts as often as `max_requeues` (3) says. A job that a person or Slurm ends stays ended."""
    job = submit("waits", SLURM_RESTART_COUNT=restarts)
    wait_for(notes, "waits")
    job.send_signal(signum)
    assert job.wait(DEADLINE_S) == 143
    said = notes.read_text()
    assert "stopped" in said
    assert ("scontrol requeue 7" in said) == requeued
    assert ("scancel --signal=TERM 7" in said) == (signum == signal.SIGUSR1)


def test_the_steps_are_on_their_machines(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R17, R46: the launch file inside the job, as the launcher reads it there."""
    (workdir / "deploy").symlink_to(DEPLOY)
    for i, name in enumerate(("a1", "a2", "b1", "b2")):
        monkeypatch.setenv(f"NODE_{i}", name)
        monkeypatch.setenv(f"ADDRESS_{i}", f"10.0.0.{i}")
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "x")
    launch = load_launch_config("deploy/slurm/launch.yaml")
    assert [server.via[0] for server in launch.servers] == ["srun", "srun"]
    assert ["--nodelist=a1" in launch.servers[0].via, "--nodelist=a2" in launch.servers[1].via] == [True, True]
    assert {"--nodes=2", "--nodelist=b1,b2", "--gpus-per-node=8"} <= set(launch.learner.via)
    assert (launch.learner.nodes, launch.learner.nproc, launch.learner.max_restarts) == (2, 8, 3)
    assert launch.learner.rendezvous == "10.0.0.2:29400"


def test_the_job_asks_for_what_its_parts_need() -> None:
    options = {line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=1", "--requeue", "--open-mode=append"} <= options
    assert {"--signal=B:USR1@300", "--time=24:00:00", "--cpus-per-task=32"} <= options
