"""Tests of what `--to skypilot` writes: a task that SkyPilot takes, whose machines know their parts (R46)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.manifests import DEPLOY, documents

[TASK] = documents(DEPLOY / "skypilot" / "task.yaml")
DEADLINE_S = 60.0

# Says what it was given. A server serves until SIGTERM or ends, as it is told; `sleep` of the script returns at once.
PYTHON = """
echo "$*" >> "$NOTES"
case "$*" in
  *rollout_server*) [ "$SERVER" != dies ] || exit 3; trap 'exit 0' TERM; while true; do command sleep 0.02; done ;;
  *"-m learner"*) exit "$LEARNER" ;;
esac
"""


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    for path, text in {".venv/bin/python": PYTHON, "bin/sleep": "exec /bin/sleep 0.02"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / path).chmod(0o755)
    (tmp_path / "run.sh").write_text(TASK["run"])
    yield tmp_path
    while STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)


def start(folder: Path, rank: int, server: str = "", learner: int = 0) -> subprocess.Popen[bytes]:
    own = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
        "SKYPILOT_TASK_ID": "sky-7",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(folder / "notes"),
        "SERVER": server,
        "LEARNER": str(learner),
    }
    STARTED.append(subprocess.Popen(["bash", "run.sh"], cwd=folder, env={**os.environ, **own}, start_new_session=True))
    return STARTED[-1]


def test_machines_and_secrets() -> None:
    assert (TASK["num_nodes"], TASK["resources"]["accelerators"]) == (4, "H200:8")
    assert TASK["secrets"] == {"ROLLOUT_SERVER_TOKEN": None}
    assert TASK["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    assert TASK["file_mounts"]["/storage"]["mode"] == "MOUNT"


def test_the_first_machines_learn_and_end_the_others(machine: Path) -> None:
    """A server serves until the learner has ended well."""
    server = start(machine, rank=3)
    assert start(machine, rank=0).wait(DEADLINE_S) == 0
    assert server.wait(DEADLINE_S) == 0
    said = (machine / "notes").read_text()
    assert "rollout_server --config deploy/skypilot/server-1.yaml" in said
    assert "deploy.wait_ready --config deploy/skypilot/learner.yaml --timeout-s 1800" in said
    assert "--nnodes=2 --nproc-per-node=8 --max-restarts=3" in said
    assert "--rdzv-endpoint=10.0.0.1:29400 --rdzv-id=sky-7 -m learner --config deploy/skypilot/learner.yaml" in said


def test_a_learner_that_fails_ends_the_task(machine: Path) -> None:
    """SkyPilot ends the other machines then, and starts the task again."""
    assert start(machine, rank=1, learner=7).wait(DEADLINE_S) == 7
    assert not list(machine.glob("runs/**/ended-*"))


def test_a_server_that_ends_is_started_again_and_then_given_up(machine: Path) -> None:
    """R40: three times; the others serve on, until the learner has ended."""
    server = start(machine, rank=2, server="dies")
    notes = machine / "notes"
    while not notes.exists() or len(notes.read_text().splitlines()) < 4:
        assert server.poll() is None
    assert start(machine, rank=0).wait(DEADLINE_S) == 0
    assert server.wait(DEADLINE_S) == 0
    assert notes.read_text().count("rollout_server") == 4


def test_skypilot_takes_it() -> None:
    sky: Any = pytest.importorskip("sky", reason="SkyPilot is not installed")
    storage = {"/storage": {**TASK["file_mounts"]["/storage"], "source": "s3://a-bucket"}}
    task = sky.Task.from_yaml_config({**TASK, "file_mounts": storage}, secrets_overrides={"ROLLOUT_SERVER_TOKEN": "x"})
    assert task.num_nodes == 4
    with pytest.raises(Exception, match="num_nodes"):
        sky.Task.from_yaml_config({**TASK, "numnodes": 4})
