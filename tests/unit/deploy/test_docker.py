"""deploy/docker: pinned bases, no root, and every path and module that the images name exists."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deploy.places import compose, kubernetes
from tests.unit.deploy.manifests import DEPLOY, ROOT, WORKDIR, probe

USER = 10001
TEXT = (DEPLOY / "docker" / "Dockerfile").read_text()
IGNORED = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
LINES = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line.strip() and not line.lstrip().startswith("#")
]


def instructions(name: str) -> list[str]:
    return [rest for instruction, rest in LINES if instruction == name]


def stages() -> dict[str, list[tuple[str, ...]]]:
    """Return the instructions of each stage, with those of the stage that it is built on."""
    found: dict[str, list[tuple[str, ...]]] = {}
    name = ""
    for line in LINES:
        if line[0] == "FROM":
            base, name = line[1].split(" AS ")
            found[name] = list(found.get(base, []))
        elif name:
            found[name].append(line)
    return found


def test_the_base_is_one_image_that_a_build_names_by_digest() -> None:
    """Both programs on the same one, so that NCCL is the same on both ends of a sync (R09). No default: no tag."""
    before = TEXT[: TEXT.index("FROM")]
    assert re.findall(r"^ARG (.*)$", before, re.MULTILINE) == ["BASE", "DEVICE=gpu"]
    bases = dict(reversed(line.split(" AS ")) for line in instructions("FROM"))
    assert (bases["gpu"], bases["cpu"]) == ("${BASE}", "${BASE}")
    assert bases["dependencies"] == "${DEVICE}"
    assert bases["program"] == bases["wheel"] == "dependencies"
    assert bases["server"] == bases["learner"] == "program"
    assert not any("# syntax" in line for line in TEXT.splitlines())  # it would ask a registry for the parser


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(DEPLOY / "docker" / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_source_file_does_not_install_the_dependencies_again() -> None:
    """Only the last stages see sources. Bytecode is compiled where packages are installed: the root is read-only."""
    assert [rest for name, rest in stages()["dependencies"] if name == "COPY"] == [
        "pyproject.toml deploy/constraints-cpu.txt /pins/"
    ]
    installed = [part for rest in instructions("RUN") for part in rest.split("&&") if "pip install --python" in part]
    assert len(installed) == 3
    assert all("--compile-bytecode" in part for part in installed)
    assert "--no-deps" in installed[-1]


def test_awk_keeps_the_pins_of_what_the_base_lacks(tmp_path: Path) -> None:
    """The base's own versions stay; names are compared without regard to case, `_` and `-`."""
    [program] = re.findall(r"awk -F '==' '(.*?)'", TEXT)
    (tmp_path / "base").write_text("torch==2.11.0+cu130\ntyping-extensions==4.1\nPyYAML==6\n")
    (tmp_path / "all").write_text("# pins\ntorch==2.13.0\ntyping_extensions==4.16.0\npyyaml==6.0.3\nPEFT==0.21.2\n")
    done = subprocess.run(
        ["awk", "-F", "==", program, "base", "all"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "peft==0.21.2\n"


@pytest.mark.parametrize("side", ["server", "learner"])
def test_a_final_stage_has_no_root_no_sources_and_no_build_tools(side: str) -> None:
    stage = stages()[side]
    said = " ".join(rest for _, rest in stage)
    assert [rest for name, rest in stage if name == "USER"] == [f"{USER}:{USER}"]
    assert f"useradd --uid {USER}" in said
    assert all(rest.endswith(" /pins/") for name, rest in stage if name == "COPY")  # pins and pyproject.toml alone
    assert not re.search(r"apt-get|build-essential|gcc|uv build", said)  # vLLM compiles C++ on CPU: `cpu` has g++
    assert "g++" in " ".join(rest for _, rest in stages()["cpu"])


def test_pods_and_containers_run_as_the_images_user() -> None:
    assert (kubernetes.USER, compose.USER) == (USER, USER)


def test_what_programs_write_lies_on_volumes() -> None:
    """A read-only root: home, caches and runs are elsewhere, and pods mount these places."""
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(instructions("ENV"))))
    assert (variables["HOME"], variables["XDG_CACHE_HOME"]) == ("/tmp", "/cache")
    assert variables["HF_HOME"].startswith("/cache/")
    assert [json.loads(line) for line in instructions("VOLUME")] == [[f"{WORKDIR}/runs", "/cache"]]


def test_health_is_asked_where_the_server_answers() -> None:
    health, none = instructions("HEALTHCHECK")
    assert "http://127.0.0.1:8000/health/" in health
    assert probe("/health/") == 200
    assert none == "NONE"


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert {"pyproject.toml", "shared", "rollout_server", "learner", "deploy"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source.partition('/')[0]}" in IGNORED
    assert "*" in IGNORED
    assert not any(
        fnmatch(name, pattern) for name in (".venv", ".git", "runs") for pattern in IGNORED if "!" in pattern
    )
    assert instructions("WORKDIR")[-1] == WORKDIR


@pytest.mark.parametrize("command", [json.loads(line) for line in instructions("CMD")])
def test_the_commands_are_modules_of_this_project(command: list[str]) -> None:
    assert [json.loads(line) for line in instructions("ENTRYPOINT")] == [["python3", "-m"]]
    modules = [command[0], *(after for flag, after in itertools.pairwise(command) if flag == "-m")]
    assert all(importlib.util.find_spec(module) for module in modules), modules
