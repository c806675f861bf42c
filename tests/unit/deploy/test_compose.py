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

[COMPOSE] = documents(DEPLOY / "compose" / "compose.yaml")
SERVER, LEARNER = COMPOSE["services"]["server-0"], COMPOSE["services"]["learner"]
DEVICES = ("deploy", "resources", "reservations", "devices", 0)


def validate(compose: dict[str, Any]) -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    jsonschema.validators.validator_for(schema)(schema).validate(compose)


def test_it_follows_the_compose_specification() -> None:
    validate(COMPOSE)


def test_compose_itself_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    file = DEPLOY / "compose" / "compose.yaml"
    for name in re.findall(r"\$\{(\w+):\?", file.read_text()):
        monkeypatch.setenv(name, f"of/{name.lower()}@sha256:{'1' * 64}")
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
        (("configs", "server-0"), "contents", "model: x"),
    ],
)
def test_the_schema_refuses_what_compose_would(path: tuple[Any, ...], key: str, value: object) -> None:
    mutated = copy.deepcopy(COMPOSE)
    at(mutated, *path)[key] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(mutated)


def test_the_learner_starts_when_the_server_answers_ready(workdir: Path) -> None:
    """The health check asks `/ready/` at the port of the server's configuration."""
    config = server_config(COMPOSE["configs"]["server-0"]["content"], workdir)
    asked = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+/)", " ".join(SERVER["healthcheck"]["test"]))
    assert asked == [(str(config.port), "/ready/")]
    assert probe("/ready/") == 200
    assert LEARNER["depends_on"] == {"server-0": {"condition": "service_healthy"}}


def test_both_configurations_fit_each_other_and_the_devices(workdir: Path) -> None:
    """R17: what `--check` would say inside the containers; one replica per device, one rank per device."""
    nproc = int(LEARNER["command"][LEARNER["command"].index("--nproc") + 1])
    server = server_config(COMPOSE["configs"]["server-0"]["content"], workdir)
    learner = learner_config(COMPOSE["configs"]["learner"]["content"], workdir, world_size=nproc)
    [url] = server_urls(learner)
    assert (url.host, url.port) == (server.group_host, server.port) == ("server-0", 8000)
    assert learner.model.path == server.model
    of_server, of_learner = (at(service, *DEVICES)["device_ids"] for service in (SERVER, LEARNER))
    assert (len(of_server), len(of_learner)) == (server.world_size, nproc)
    assert not set(of_server) & set(of_learner)
    assert group_ports(learner).isdisjoint({server.port})


def test_each_service_reads_the_configuration_that_is_mounted() -> None:
    for service in (SERVER, LEARNER):
        [mounted] = service["configs"]
        assert mounted["source"] in COMPOSE["configs"]
        assert service["command"][service["command"].index("--config") + 1] == mounted["target"]


def test_both_see_the_data_at_the_same_place() -> None:
    """R13: images cross the wire as paths."""
    assert SERVER["volumes"] == LEARNER["volumes"]
    assert {volume["target"]: volume["source"] for volume in SERVER["volumes"]} == {
        f"{WORKDIR}/data": "${DATA_DIR:-../../data}",
        f"{WORKDIR}/runs": "${RUNS_DIR:-../../runs}",
        "/cache": "models",
    }


def test_shared_memory_is_shared_and_large() -> None:
    assert (SERVER["ipc"], SERVER["shm_size"], LEARNER["ipc"]) == ("shareable", "16gb", "service:server-0")


def test_a_server_is_started_again_and_the_learner_is_what_ends_the_run() -> None:
    """R40: `up` with --abort-on-container-exit stops at the first end of a container that it names."""
    assert SERVER["restart"] == "on-failure:3"
    assert LEARNER["restart"] == "no"
    assert "--max-restarts" in LEARNER["command"]
    said = submit(read_plan(str(DEPLOY / "qwen3vl_4b" / "launch.yaml")), Path("out"))
    assert "--abort-on-container-exit --exit-code-from learner learner\n" in said


@pytest.mark.parametrize("service", [SERVER, LEARNER], ids=["server", "learner"])
def test_containers_have_no_rights_and_write_only_to_volumes(service: dict[str, Any]) -> None:
    assert service["user"] == "10001:10001"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "exec" in service["tmpfs"][0]  # kernels that were compiled at run time are loaded from there
    assert service["environment"]["HOME"] == "/tmp"
    assert "ports" not in service


def test_the_base_of_images_that_are_built_is_named_by_its_digest() -> None:
    for service in (SERVER, LEARNER):
        assert service["build"]["args"]["BASE"].startswith("${VLLM_IMAGE:?")


def test_nothing_starts_without_a_token() -> None:
    """`:?` ends `docker compose` where the variable is missing or empty."""
    for service in (SERVER, LEARNER):
        assert service["environment"]["ROLLOUT_SERVER_TOKEN"].startswith("${ROLLOUT_SERVER_TOKEN:?")
