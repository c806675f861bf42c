"""Tests of what `--to kubernetes` writes, against Kubernetes' schemas and what both programs say of themselves
(R46)."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from deploy.launch_file import NO_IMAGE
from deploy.places.kubernetes import submit
from deploy.places.plan import read_plan
from shared.errors import ConfigError
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
NAME = "qwen3vl-4b"
SET, JOB = f"StatefulSet/{NAME}-server", f"Job/{NAME}-learner"
SERVERS, LEARNER = OBJECTS[SET], OBJECTS[JOB]
SERVER_POD, LEARNER_POD = (at(OBJECTS[name], "spec", "template", "spec") for name in (SET, JOB))
[SERVER], [RANKS] = SERVER_POD["containers"], LEARNER_POD["containers"]
CONFIGS = OBJECTS[f"ConfigMap/{NAME}"]["data"]
NNODES, NPROC = (
    int(argument.partition("=")[2]) for argument in RANKS["args"] if re.match("--(nnodes|nproc-per-node)=", argument)
)


def validate(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_every_object_follows_its_published_schema(name: str, version: str) -> None:
    validate(OBJECTS[name], version)


def kubectl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Skips by name where it is not installed."""
    if (found := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    return subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_kubectl_reads_every_object() -> None:
    """No cluster is needed."""
    said = kubectl("label", "--local", "--dry-run=client", "-o", "name", "-f", str(DEPLOY / "kubernetes"), "a=b")
    assert said.returncode == 0, said.stderr
    kinds = {line.partition(".")[0].partition("/")[0] for line in said.stdout.split()}
    assert kinds == {name.partition("/")[0].lower() for name in OBJECTS}
    assert len(said.stdout.split()) == len(OBJECTS)


def test_a_cluster_would_take_every_object() -> None:
    """kubectl asks a cluster which kinds it has, also for a dry run."""
    if kubectl("version", "--request-timeout=3s").returncode != 0:
        pytest.skip("kubectl reaches no cluster")
    said = kubectl("create", "--dry-run=client", "-o", "name", "-f", str(DEPLOY / "kubernetes"))
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    ("name", "path", "key", "value"),
    [
        (SET, ("spec", "template", "spec", "containers", 0), "readynessProbe", {}),
        (SET, ("spec",), "replicas", "two"),
        (SET, ("spec", "template", "spec", "volumes", 0), "configmap", {}),
        (JOB, ("spec",), "completionmode", "Indexed"),
        (JOB, ("spec", "template", "spec", "containers", 0), "args", "one string"),
        (f"Service/{NAME}-learner", ("spec", "ports", 0), "port", "29400"),
        (f"PersistentVolumeClaim/{NAME}", ("spec",), "accessModes", "ReadWriteMany"),
        (f"NetworkPolicy/{NAME}-server", ("spec", "ingress", 0, "ports", 2), "endport", 60999),
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
    return server_config(CONFIGS["server-0.yaml"], workdir)


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
    for name, workload in ((f"{NAME}-server", SERVERS), (f"{NAME}-learner", LEARNER)):
        labels = at(workload, "spec", "template", "metadata", "labels")
        assert OBJECTS[f"Service/{name}"]["spec"]["selector"].items() <= labels.items()
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


def test_ranks_meet_at_the_first_pod() -> None:
    """R24"""
    endpoint = f"--rdzv-endpoint={LEARNER['metadata']['name']}-0.{LEARNER_POD['subdomain']}:29400"
    assert endpoint in RANKS["args"]
    assert named(RANKS["ports"])["rendezvous"]["containerPort"] == 29400
    assert LEARNER["spec"]["completionMode"] == "Indexed"
    assert LEARNER_POD["restartPolicy"] == "Never"
    assert "--max-restarts=3" in RANKS["args"]


def test_a_pod_that_fails_is_replaced_and_goes_on_with_the_jobs_run() -> None:
    """A drained machine does not count; a wrong configuration ends the Job."""
    job = named(RANKS["env"])["ROLLOUT_JOB"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert job == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert LEARNER["spec"]["backoffLimit"] == 3 * NNODES
    drained, wrong = LEARNER["spec"]["podFailurePolicy"]["rules"]
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailJob", [ConfigError("x").exit_code])


def test_only_the_learner_reaches_the_servers() -> None:
    """The HTTP port, the group's, and those that NCCL chooses; who else may, is nobody."""
    policies = {
        name.partition("/")[2]: item["spec"] for name, item in OBJECTS.items() if item["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == {f"{NAME}-server", f"{NAME}-learner"}
    pods = {
        part: at(OBJECTS[name], "spec", "template", "metadata", "labels")
        for part, name in (("server", SET), ("learner", JOB))
    }
    for part, spec in ((part, policies[f"{NAME}-{part}"]) for part in pods):
        assert spec["podSelector"]["matchLabels"].items() <= pods[part].items()
        assert spec["policyTypes"] == ["Ingress"]
    (rule,) = policies[f"{NAME}-server"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= pods["learner"].items()
    assert not peer["podSelector"]["matchLabels"].items() <= pods["server"].items()
    ports = {port["port"] for port in rule["ports"]}
    assert {port["containerPort"] for port in SERVER["ports"]} <= ports
    assert [port for port in rule["ports"] if "endPort" in port] == [
        {"protocol": "TCP", "port": 32768, "endPort": 60999}
    ]


@pytest.mark.parametrize("pod", [SERVER_POD, LEARNER_POD], ids=["server", "learner"])
def test_containers_have_no_rights_and_write_only_to_volumes(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    volumes = named(pod["volumes"])
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", "/cache"} <= mounts.keys()
        assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
        assert mounts[f"{WORKDIR}/data"]["readOnly"] is True
        environment = named(container["env"])
        assert environment["HOME"]["value"] in mounts
        assert environment["XDG_CACHE_HOME"]["value"] in mounts


def test_a_shipped_image_is_a_placeholder_that_no_kubelet_takes() -> None:
    """Names of images have no capitals; `--to kubernetes` refuses it too (`test_places.py`)."""
    for pod in (SERVER_POD, LEARNER_POD):
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["image"] == NO_IMAGE
            assert container["image"] != container["image"].lower()


def test_the_learner_reads_the_list_of_pods(workdir: Path) -> None:
    """R40: `kubectl scale` is enough. The script is in the ConfigMap, and is the one that is shipped."""
    config = learner_config(CONFIGS["learner.yaml"], workdir, world_size=NNODES * NPROC)
    discovery = config.rollout_matching.vllm.server.discovery
    assert discovery == ["bash", "/etc/rollout-matching/servers.sh", SERVERS["metadata"]["name"]]
    assert CONFIGS["servers.sh"] == (DEPLOY / "kubernetes" / "servers.sh").read_text()


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
    """The same for both, and made by the command that `--to kubernetes` prints."""
    wanted = {"secretKeyRef": {"name": NAME, "key": "ROLLOUT_SERVER_TOKEN"}}
    for container in (SERVER, RANKS):
        assert named(container["env"])["ROLLOUT_SERVER_TOKEN"]["valueFrom"] == wanted
    assert not any(name.startswith("Secret/") for name in OBJECTS)
    said = submit(read_plan(str(DEPLOY / "qwen3vl_4b" / "launch-cluster.yaml")), Path("out"))
    assert f"kubectl create secret generic {NAME} --from-literal=ROLLOUT_SERVER_TOKEN=" in said
