"""deploy/kubernetes against Kubernetes' published schemas, and against what both programs say of themselves."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.unit.deploy.manifests import (
    DEPLOY,
    WORKDIR,
    at,
    documents,
    group_ports,
    learner_config,
    named,
    probe,
    server_config,
    server_urls,
)

OBJECTS = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in documents(path)
}
VERSIONS = ("1.29", kubernetes_validate.latest_version())
SERVERS, LEARNER = OBJECTS["StatefulSet/rollout-server"], OBJECTS["Job/learner"]
SERVER_POD, LEARNER_POD = (
    at(OBJECTS[name], "spec", "template", "spec") for name in ("StatefulSet/rollout-server", "Job/learner")
)
[SERVER], [RANKS] = SERVER_POD["containers"], LEARNER_POD["containers"]
CONFIGS = OBJECTS["ConfigMap/rollout-matching"]["data"]
NNODES, NPROC = (
    int(argument.partition("=")[2]) for argument in RANKS["args"] if re.match("--(nnodes|nproc-per-node)=", argument)
)


def validate(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_every_object_follows_its_published_schema(name: str, version: str) -> None:
    validate(OBJECTS[name], version)


@pytest.mark.parametrize(
    ("name", "path", "key", "value"),
    [
        ("StatefulSet/rollout-server", ("spec", "template", "spec", "containers", 0), "readynessProbe", {}),
        ("StatefulSet/rollout-server", ("spec",), "replicas", "two"),
        ("StatefulSet/rollout-server", ("spec", "template", "spec", "volumes", 0), "configmap", {}),
        ("Job/learner", ("spec",), "completionmode", "Indexed"),
        ("Job/learner", ("spec", "template", "spec", "containers", 0), "args", "one string"),
        ("Service/learner", ("spec", "ports", 0), "port", "29400"),
        ("PersistentVolumeClaim/rollout-matching", ("spec",), "accessModes", "ReadWriteMany"),
    ],
)
def test_the_schemas_refuse_what_a_cluster_would(name: str, path: tuple[Any, ...], key: str, value: object) -> None:
    mutated = copy.deepcopy(OBJECTS[name])
    at(mutated, *path)[key] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(mutated, VERSIONS[-1])


@pytest.fixture
def server(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    return server_config(CONFIGS["server.yaml"], workdir)


def test_probes_ask_paths_and_ports_that_the_server_has(server: Any) -> None:
    """Readiness at `/ready/`, life at `/health/`, neither with a token."""
    paths = {kind: SERVER[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health/", "livenessProbe": "/health/", "readinessProbe": "/ready/"}
    assert {probe(path) for path in paths.values()} == {200}
    assert {SERVER[kind]["httpGet"]["port"] for kind in paths} == {"http"}
    assert named(SERVER["ports"])["http"]["containerPort"] == server.port


def test_a_server_that_is_not_ready_can_still_be_reached() -> None:
    """A poisoned server is not ready, and only the learner's next sync mends it; pods have names for themselves."""
    for workload, service in ((SERVERS["spec"]["serviceName"], SERVER_POD), (LEARNER_POD["subdomain"], LEARNER_POD)):
        found = OBJECTS[f"Service/{workload}"]["spec"]
        assert found["clusterIP"] == "None"
        assert found["publishNotReadyAddresses"] is True
        declared = {port["containerPort"] for port in service["containers"][0]["ports"]}
        assert {port["port"] for port in found["ports"]} == declared


def test_selectors_find_the_pods() -> None:
    for name, workload in (("rollout-server", SERVERS), ("learner", LEARNER)):
        labels = at(workload, "spec", "template", "metadata", "labels")
        assert OBJECTS[f"Service/{name}"]["spec"]["selector"] == labels
    assert SERVERS["spec"]["selector"]["matchLabels"] == at(SERVERS, "spec", "template", "metadata", "labels")


def test_the_learner_names_every_server_pod(server: Any, workdir: Path) -> None:
    """R05, R23: one URL per replica of the StatefulSet, at the ports that the pods open."""
    config = learner_config(CONFIGS["learner.yaml"], workdir, world_size=NNODES * NPROC)
    name, service = SERVERS["metadata"]["name"], SERVERS["spec"]["serviceName"]
    pods = [(f"{name}-{i}.{service}", server.port) for i in range(SERVERS["spec"]["replicas"])]
    assert [(url.host, url.port) for url in server_urls(config)] == pods
    assert group_ports(config) == {named(SERVER["ports"])["weights"]["containerPort"]}
    assert server.group_host == "10.0.0.7"
    assert config.model.path == server.model


def test_ranks_and_replicas_have_a_gpu_each(server: Any) -> None:
    assert int(SERVER["resources"]["limits"]["nvidia.com/gpu"]) == server.world_size
    assert int(RANKS["resources"]["limits"]["nvidia.com/gpu"]) == NPROC
    assert LEARNER["spec"]["completions"] == LEARNER["spec"]["parallelism"] == NNODES


def test_ranks_meet_at_the_first_pod_and_fail_together() -> None:
    """R24: a failed pod is not started again beside ranks that wait for the old one."""
    endpoint = f"--rdzv-endpoint={LEARNER['metadata']['name']}-0.{LEARNER_POD['subdomain']}:29400"
    assert endpoint in RANKS["args"]
    assert named(RANKS["ports"])["rendezvous"]["containerPort"] == 29400
    assert (LEARNER["spec"]["completionMode"], LEARNER["spec"]["backoffLimit"]) == ("Indexed", 0)
    assert LEARNER_POD["restartPolicy"] == "Never"
    assert "--max-restarts=3" in RANKS["args"]


def test_a_server_that_ends_is_started_again() -> None:
    """R40: a StatefulSet's pods are always restarted; one that hangs fails its liveness probe."""
    assert SERVER_POD.get("restartPolicy", "Always") == "Always"
    assert SERVER["livenessProbe"]["httpGet"]["path"] == "/health/"


def test_both_see_the_same_folders_at_the_same_place() -> None:
    """R13: images cross the wire as paths."""
    of_server, of_learner = (
        {mount["mountPath"]: (mount["name"], mount.get("subPath")) for mount in container["volumeMounts"]}
        for container in (SERVER, RANKS)
    )
    assert of_server.items() <= of_learner.items()
    assert of_learner[f"{WORKDIR}/data"] == ("storage", "data")
    assert of_learner[f"{WORKDIR}/runs"] == ("storage", "runs")
    for pod in (SERVER_POD, LEARNER_POD):
        volumes = named(pod["volumes"])
        assert f"ConfigMap/{volumes['config']['configMap']['name']}" in OBJECTS
        assert f"PersistentVolumeClaim/{volumes['storage']['persistentVolumeClaim']['claimName']}" in OBJECTS
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()


def test_each_program_reads_a_file_of_the_config_map() -> None:
    for container in (SERVER, RANKS, *LEARNER_POD["initContainers"]):
        path = Path(container["args"][container["args"].index("--config") + 1])
        assert str(path.parent) == "/etc/rollout-matching"
        assert path.name in CONFIGS


def test_the_token_is_one_secret_that_no_file_holds() -> None:
    """The same for both, and made by the command of the instructions."""
    wanted = {"secretKeyRef": {"name": "rollout-server-token", "key": "token"}}
    for container in (SERVER, RANKS):
        assert named(container["env"])["ROLLOUT_SERVER_TOKEN"]["valueFrom"] == wanted
    assert not any(name.startswith("Secret/") for name in OBJECTS)
    command = "kubectl create secret generic rollout-server-token --from-literal=token="
    assert command in (DEPLOY / "README.md").read_text()
