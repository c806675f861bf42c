"""deploy/docker: pinned bases, no root, and every path and module that the images name exists."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from fnmatch import fnmatch

import pytest

from tests.unit.deploy.manifests import DEPLOY, ROOT, WORKDIR, documents

TEXT = (DEPLOY / "docker" / "Dockerfile").read_text()
IGNORED = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
LINES = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


def instructions(name: str) -> list[str]:
    return [rest for instruction, rest in LINES if instruction == name]


def test_the_base_is_one_public_image_with_a_version() -> None:
    """Both programs on the same one, so that NCCL is the same on both ends of a sync (R09)."""
    assert [arg for arg in instructions("ARG") if re.fullmatch(r"VLLM_TAG=v0\.(2[6-9]|3[0-3])\.\d+", arg)]
    assert instructions("FROM") == ["vllm/vllm-openai:${VLLM_TAG} AS base", "base AS server", "base AS learner"]


def test_they_do_not_run_as_root() -> None:
    [user] = instructions("USER")
    assert int(user) > 0
    assert f"useradd --uid {user}" in TEXT
    of_pods = [
        document["spec"]["template"]["spec"]["securityContext"]
        for name in ("server", "learner")
        for document in documents(DEPLOY / "kubernetes" / f"{name}.yaml")
        if "template" in document["spec"]
    ]
    assert [context["runAsUser"] for context in of_pods] == [int(user)] * 2


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert {"pyproject.toml", "shared", "rollout_server", "learner", "deploy"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in IGNORED
    assert "*" in IGNORED
    assert not any(
        fnmatch(name, pattern) for name in (".venv", ".git", "runs") for pattern in IGNORED if "!" in pattern
    )
    assert instructions("WORKDIR") == [WORKDIR]


@pytest.mark.parametrize("command", [json.loads(line) for line in instructions("CMD")])
def test_the_commands_are_modules_of_this_project(command: list[str]) -> None:
    assert [json.loads(line) for line in instructions("ENTRYPOINT")] == [["python3", "-m"]]
    modules = [command[0], *(after for flag, after in itertools.pairwise(command) if flag == "-m")]
    assert all(importlib.util.find_spec(module) for module in modules), modules
