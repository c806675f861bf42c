"""Tests of what `--to compose` writes, against Compose's schema and what both programs say of themselves (R17, R46)."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema

from deploy.places.compose import submit
from deploy.places.plan import read_plan
from tests.unit.deploy.manifests import (
    DEPLOY,
    WORKDIR,
    at,
    documents,
    group_ports,
    learner_config,
    probe,
    server_config,
    server_urls,
)

FOLDERS = (DEPLOY / "compose", DEPLOY / "compose" / "cpu")
[COMPOSE] = documents(DEPLOY / "compose" / "compose.yaml")
[CPU] = documents(DEPLOY / "compose" / "cpu" / "compose.yaml")
SERVER, LEARNER = COMPOSE["services"]["server-0"], COMPOSE["services"]["learner"]
DEVICES = ("deploy", "resources", "reservations", "devices", 0)


def validate(compose: dict[str, Any]) -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(compose)


def of_service(name: str) -> str:
    """Return the configuration that a service reads."""
    return (DEPLOY / "compose" / COMPOSE["configs"][name]["file"]).read_text()


@pytest.mark.parametrize("compose", [COMPOSE, CPU], ids=["gpu", "cpu"])
def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    validate(compose)


@pytest.mark.parametrize("folder", FOLDERS, ids=["gpu", "cpu"])
def test_compose_itself_reads_it_without_a_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `down` needs none."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    file = folder / "compose.yaml"
    for name in re.findall(r"\$\{(\w+)", file.read_text()):
        monkeypatch.delenv(name, raising=False)
    read = [docker, "compose", "-f", str(file), "config", "--quiet"]
    said = subprocess.run(read, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("services", "server-0"), "shmsize", "16gb"),
        (("services", "server-0"), "shm_size", ["16gb"]),
        (("services", "server-0", "healthcheck"), "retries", {}),
        (("services", "server-0", *DEVICES), "count", []),
        (("services", "learner", "depends_on", "server-0"), "condition", "service_ready"),
        (("configs", "server-0"), "files", "server-0.yaml"),
    ],
)
def test_the_schema_refuses_what_compose_would(path: tuple[Any, ...], key: str, value: object) -> None:
    mutated = copy.deepcopy(COMPOSE)
    at(mutated, *path)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(mutated)


def test_the_learner_starts_when_the_server_answers_ready(workdir: Path) -> None:
    """The health check asks `/ready/` at the port of the server's configuration."""
    config = server_config(of_service("server-0"), workdir)
    asked = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+/)", " ".join(SERVER["healthcheck"]["test"]))
    assert asked == [(str(config.port), "/ready/")]
    assert probe("/ready/") == 200
    assert LEARNER["depends_on"] == {"server-0": {"condition": "service_healthy"}}


def test_both_configurations_fit_each_other_and_the_devices(workdir: Path) -> None:
    """R17: what `--check` would say inside the containers; one replica per device, one rank per device."""
    nproc = int(next(one for one in LEARNER["command"] if one.startswith("--nproc=")).partition("=")[2])
    server = server_config(of_service("server-0"), workdir)
    learner = learner_config(of_service("learner"), workdir, world_size=nproc)
    [url] = server_urls(learner)
    assert (url.host, url.port) == (server.group_host, server.port) == ("server-0", 8000)
    assert learner.model.path == server.model
    of_server, of_learner = (at(service, *DEVICES)["device_ids"] for service in (SERVER, LEARNER))
    assert (len(of_server), len(of_learner)) == (server.world_size, nproc)
    assert not set(of_server) & set(of_learner)
    assert group_ports(learner).isdisjoint({server.port})


@pytest.mark.parametrize("folder", FOLDERS, ids=["gpu", "cpu"])
def test_each_service_reads_a_file_beside_compose_yaml(folder: Path) -> None:
    """Compose cannot write a configuration's `content` into a container whose root is read-only: it does not start."""
    [compose] = documents(folder / "compose.yaml")
    for service in compose["services"].values():
        [mounted] = service["configs"]
        source = compose["configs"][mounted["source"]]
        assert service["read_only"] is True
        assert source.keys() == {"file"}
        assert (folder / source["file"]).is_file()
        assert service["command"][service["command"].index("--config") + 1] == mounted["target"]


def test_both_see_the_data_at_the_same_place() -> None:
    """R13: images cross the wire as paths."""
    assert SERVER["volumes"] == LEARNER["volumes"]
    assert {volume["target"]: volume["source"] for volume in SERVER["volumes"]} == {
        f"{WORKDIR}/data": "${DATA_DIR:-../../data}",
        f"{WORKDIR}/runs": "${RUNS_DIR:-../../runs}",
        "/cache": "models",
        "/dev/shm": "shm",
    }


def test_shared_memory_outlives_a_server_and_is_large() -> None:
    """A namespace of the first server's would end with it: no other service could start while it is down."""
    assert not {"ipc", "shm_size"} & (SERVER.keys() | LEARNER.keys())
    options = COMPOSE["volumes"]["shm"]["driver_opts"]
    assert (options["type"], options["o"]) == ("tmpfs", "size=16g,mode=1777")


def test_containers_are_machines_of_their_own_to_nccl() -> None:
    """It compares names. With one name it would pass GPU memory by sockets that end at a container's network."""
    names = [service["hostname"] for service in COMPOSE["services"].values()]
    assert names == ["server-0", "learner"]
    assert not any("NCCL_HOSTID" in service["environment"] for service in COMPOSE["services"].values())


def test_only_gpus_need_locked_memory() -> None:
    """Rootless engines refuse it, and containers on CPU do not start."""
    assert SERVER["ulimits"] == LEARNER["ulimits"] == {"memlock": -1}
    assert not any({"ulimits", "deploy"} & service.keys() for service in CPU["services"].values())


def test_a_server_is_started_again_and_the_learner_is_what_ends_the_run() -> None:
    """R40: what `run.sh` does is shown by `tests/integration/try_compose.sh`."""
    assert SERVER["restart"] == "on-failure:3"
    assert LEARNER["restart"] == "no"
    assert any(one.startswith("--max-restarts=") for one in LEARNER["command"])
    assert "bash out/run.sh" in submit(read_plan(str(DEPLOY / "qwen3vl_4b" / "launch.yaml")), Path("out"))


@pytest.mark.parametrize("service", [SERVER, LEARNER], ids=["server", "learner"])
def test_containers_have_no_rights_and_write_only_to_volumes(service: dict[str, Any]) -> None:
    assert service["user"] == "${RUN_AS:-10001:10001}"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "exec" in service["tmpfs"][0]  # kernels that were compiled at run time are loaded from there
    assert service["environment"]["HOME"] == "/tmp"
    assert "ports" not in service


def test_the_base_of_images_that_are_built_is_named_by_its_digest() -> None:
    """vLLM's has no default: a tag may be another image tomorrow."""
    for service in (SERVER, LEARNER):
        assert service["build"]["args"] == {"BASE": "${VLLM_IMAGE:-vllm-image-is-not-set}"}
    for service in CPU["services"].values():
        args = service["build"]["args"]
        assert args["DEVICE"] == "cpu"
        assert re.fullmatch(r"\$\{PYTHON_IMAGE:-python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}\}", args["BASE"])


def test_run_sh_asks_for_the_base_and_makes_a_token(tmp_path: Path) -> None:
    """Each variable comes from the environment, by name: a server without a token says so itself."""
    for service in (SERVER, LEARNER):
        assert service["environment"]["ROLLOUT_SERVER_TOKEN"] is None
    told = tmp_path / "docker"
    told.write_text(
        '#!/bin/sh\necho "$@ token=${#ROLLOUT_SERVER_TOKEN} as=$RUN_AS" >> "$SAID"\n[ "$2" != up ] || exit 3\n'
    )
    told.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SAID": str(tmp_path / "said"), "RUNS_DIR": str(tmp_path / "runs")}
    script = ["bash", str(DEPLOY / "compose" / "run.sh")]
    refused = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "VLLM_IMAGE" in refused.stderr
    assert not (tmp_path / "said").exists()
    done = subprocess.run(script, env=env | {"VLLM_IMAGE": "x"}, capture_output=True, timeout=60, check=False)
    said = (tmp_path / "said").read_text().splitlines()
    assert done.returncode == 3
    assert said[0].startswith("compose up --build --attach-dependencies --exit-code-from learner learner token=64 as=")
    assert said[-1].startswith("compose down")
