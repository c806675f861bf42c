"""The examples that list servers for `vllm.server.discovery`, run with stand-ins for the cluster's commands (R40)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from learner.rollout.control import read
from shared.errors import ConfigError
from tests.unit.deploy.manifests import DEPLOY

SQUEUE = 'case "$*" in *--me*--name=mine*) printf "a[1-2]\\nb1\\n" ;; esac; exit "${SQUEUE_CODE:-0}"'
SCONTROL = 'case "$3" in "a[1-2]") printf "a1\\na2\\n" ;; *) echo "$3" ;; esac'
GETENT = 'case "$2" in mine-0.mine | mine-2.mine | other-1.other) echo "10.0.0.1 $2" ;; *) exit 2 ;; esac'


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("getent", GETENT)):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def listed(*command: str) -> dict[str, int]:
    script, *arguments = command
    return dict(read([str(DEPLOY / script), *arguments]))


def test_slurm_lists_the_nodes_of_the_jobs() -> None:
    assert listed("slurm/servers.sh", "mine") == {f"http://{node}:8000": 51216 for node in ("a1", "a2", "b1")}
    assert listed("slurm/servers.sh", "others") == {}


def test_slurm_that_does_not_answer_is_no_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_CODE", "1")
    with pytest.raises(ConfigError, match="exit code 1"):
        listed("slurm/servers.sh", "mine")


def test_kubernetes_lists_the_pods_that_have_an_address() -> None:
    assert listed("kubernetes/servers.sh", "mine", "other") == {
        **{f"http://mine-{i}.mine:8000": 51216 for i in (0, 2)},
        "http://other-1.other:8000": 51216,
    }
