"""deploy/slurm/run.sh: checked by bash and shellcheck, and run with stand-ins for Slurm's commands and both programs.

The stand-ins run every step on this machine; servers serve until SIGTERM, the learner ends as it is told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.deploy.manifests import DEPLOY, learner_config, server_config, server_urls

SCRIPT = DEPLOY / "slurm" / "run.sh"
SHELL_SCRIPTS = sorted(DEPLOY.rglob("*.sh"))
DEADLINE_S = 60.0

SCONTROL = 'echo "$3" | tr , "\\n"'
# Options first, then the command, which runs in srun's place: a signal to srun is one to the step.
SRUN = """
echo "srun $*" >> "$STEPS"
while [ "${1#-}" != "$1" ]; do
  case "$1" in --output=*) exec > "${1#--output=}" ;; esac
  shift
done
exec "$@"
"""
PROGRAM = """
case "$*" in
  *--check*) echo "check $*" >> "$STEPS"; exit "${CHECK_CODE:-0}" ;;
  *rollout_server*)
    [ -n "$ROLLOUT_SERVER_TOKEN" ] || exit 9
    [ "${SERVER:-}" != dies ] || exit 3
    if [[ "${SERVER:-}" == leaves && "$*" == *a1* ]]; then
      echo "id $ROLLOUT_SERVER_ID" >> "$STEPS"
      echo "started $*" >> "$STEPS"
      until grep -q "started.*distributed.run" "$STEPS"; do sleep 0.05; done
      exit 4
    fi ;;
  *wait_ready*)
    until [ "$(grep -c "started.*rollout_server" "$STEPS")" = 2 ]; do sleep 0.05; done
    exit "${READY:-0}" ;;
  *"-m learner"*)
    if [ "${LEARNER:-}" = "outlives the restarts" ]; then
      echo "started $*" >> "$STEPS"
      until [ "$(grep -c "^id " "$STEPS")" = 2 ]; do sleep 0.05; done
      sleep 0.5
      exit 0
    fi
    [ "${LEARNER:-}" = serves ] || exit "${LEARNER:-0}" ;;
esac
trap 'echo "stopped $*" >> "$STEPS"; exit 0' TERM
echo "started $*" >> "$STEPS"
while true; do sleep 0.05; done
"""


Submit = Callable[..., "Job"]


@dataclass(frozen=True)
class Job:
    """The script, running as Slurm would run it."""

    folder: Path
    process: subprocess.Popen[str]

    def steps(self, words: str) -> list[str]:
        """What the stand-ins wrote down, where it has these words."""
        return [line for line in (self.folder / "steps").read_text().splitlines() if words in line]

    def end(self) -> tuple[int, str]:
        """Exit code, and what the script said."""
        return self.process.wait(DEADLINE_S), self.process.communicate()[1]

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.steps(words):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def submit(workdir: Path) -> Iterator[Submit]:
    """Starts the script with the words that the stand-ins go by, and kills what is left in the end."""
    jobs: list[Job] = []
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python": PROGRAM}.items():
        path = workdir / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    (workdir / "steps").touch()

    def start(nodes: str = "a1,a2,b1,b2", **words: str) -> Job:
        of_slurm = {"SLURM_SUBMIT_DIR": str(workdir), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}
        configs = {
            f"{name.upper()}_CONFIG": str(DEPLOY / "qwen3vl_4b" / f"{name}.yaml") for name in ("server", "learner")
        }
        path = f"{workdir / 'bin'}:{os.environ['PATH']}"
        own = {
            "PATH": path,
            "PYTHON": str(workdir / "bin" / "python"),
            "STEPS": str(workdir / "steps"),
            "POLL_S": "0.1",
        }
        process = subprocess.Popen(
            ["bash", str(SCRIPT)],
            env={**os.environ, **of_slurm, **configs, **own, **words},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        jobs.append(Job(workdir, process))
        return jobs[-1]

    yield start
    for job in jobs:
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path) -> None:
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    for command in (["bash", "-n"], [shellcheck, "--severity=style"]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_serves_learns_and_ends_with_the_learner(submit: Submit) -> None:
    """R17: servers on the first nodes, torchrun on the others, everything gone at the end."""
    job = submit()
    code, said = job.end()
    assert code == 0, said
    assert len(job.steps("check")) == 3
    starts = job.steps("srun")  # of those beside each other in any order
    [first], [second], [waiting], [learning] = (
        [start for start in starts if words in start]
        for words in ("server-a1.yaml", "server-a2.yaml", "deploy.wait_ready", "torch.distributed.run")
    )
    assert "--nodelist=a1 " in first
    assert "--nodelist=a2 " in second
    assert "--nodelist=b1 " in waiting
    assert "--nodelist=b1,b2 " in learning
    assert "--nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=b1:29400" in learning
    assert len(job.steps("stopped")) == 2


def test_the_configurations_of_the_nodes_fit_each_other(submit: Submit, workdir: Path) -> None:
    """R05: what the script lays over deploy/qwen3vl_4b, read by both programs."""
    changes = {"LEARNER_CONFIG": str(workdir / "own.yaml"), "GPUS_PER_NODE": "4"}
    (workdir / "own.yaml").write_text(f"base: {DEPLOY}/qwen3vl_4b/learner.yaml\n")
    assert submit(**changes).end()[0] == 0
    folder = workdir / "runs" / "slurm-7"
    servers = [server_config((folder / f"server-{node}.yaml").read_text(), workdir) for node in ("a1", "a2")]
    learner = learner_config((folder / "learner.yaml").read_text(), workdir, world_size=8)
    assert [(server.group_host, server.world_size) for server in servers] == [("a1", 4), ("a2", 4)]
    assert [(url.host, url.port) for url in server_urls(learner)] == [("a1", 8000), ("a2", 8000)]
    assert all(server.is_public for server in servers)


def test_the_learners_exit_code_is_the_jobs(submit: Submit) -> None:
    job = submit(LEARNER="7")
    assert job.end()[0] == 7
    assert len(job.steps("stopped")) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ({"SERVER": "dies"}, 1, "ended by itself (exit code 3)"),
        ({"READY": "1"}, 1, ""),
        ({"CHECK_CODE": "2"}, 2, ""),
        ({"nodes": "a1,a2"}, 2, "found 2 node(s) and SERVER_NODES=2"),
    ],
)
def test_the_learner_does_not_start_without_ready_servers(
    submit: Submit, words: dict[str, str], code: int, said: str
) -> None:
    """R16: servers that end or are late, mistakes in a configuration, too few nodes."""
    job = submit(**words)
    found, text = job.end()
    assert found == code, text
    assert said in text
    assert not job.steps("torch.distributed.run")
    assert len(job.steps("stopped")) == (2 if "READY" in words else 0)


def test_a_server_that_ends_while_the_learner_runs_is_started_again(submit: Submit) -> None:
    """R40: as often as MAX_RESTARTS says, each time under another name."""
    job = submit(SERVER="leaves", LEARNER="outlives the restarts", MAX_RESTARTS="1")
    code, said = job.end()
    assert code == 0, said
    assert [line.split()[1] for line in job.steps("id ")] == ["slurm-7-a1-0", "slurm-7-a1-1"]
    assert "ended (exit code 4); restart 1 of 1" in said
    assert "given up after 1 restarts" in said
    [waiting] = [step for step in job.steps("srun") if "deploy.wait_ready" in step]
    assert "--server-ids slurm-7-" in waiting


def test_slurms_warning_stops_the_learner_first(submit: Submit) -> None:
    """SIGTERM to the script (`--signal=B:TERM`): the learner writes its checkpoint while the servers still serve."""
    job = submit(LEARNER="serves")
    job.wait_for("started -m torch.distributed.run")
    job.process.terminate()
    code, said = job.end()
    assert code == 0, said
    assert ["-m learner" in line for line in job.steps("stopped")] == [True, False, False]
