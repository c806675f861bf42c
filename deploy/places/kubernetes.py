"""Kubernetes: a StatefulSet with a headless service for each entry of `servers`, and an indexed Job for the learner.

Every server has an address of its own, because the learner calls each server and joins its group for weight syncs. Pods
run as a user without rights, on a read-only root file system. Pods write only to the claimed volume (`runs`, the cache)
and to volumes that end with the pod (`/tmp`, `/dev/shm`). A NetworkPolicy lets only the learner's pods reach the
servers.

The StatefulSet restarts servers. torchrun restarts ranks, up to its limit. After the last restart by torchrun, the Job
restarts pods, up to `max_requeues` times, not counting restarts after a machine was drained. A wrong configuration
(exit code 2) ends the Job. All starts of a Job continue one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.places.objects import dump
from deploy.places.plan import (
    GROUP_PORT,
    RENDEZVOUS_PORT,
    SYSTEM_PORTS,
    Plan,
    ServerPlan,
    image_mistakes,
)
from learner.run.output_dir import JOB_VARIABLE
from shared.config.model import Mistake

Object = dict[str, Any]

HTTP_PORT = 8000
USER = 10001  # user id in the containers, as in deploy/docker/Dockerfile
FOLDER = "/etc/rollout-matching"  # folder of the configurations in a pod
WORKDIR = "/app"
# The pods of StatefulSets behind their headless services, for `vllm.server.discovery`.
LIST = (Path(__file__).parents[1] / "kubernetes/servers.sh").read_text(encoding="utf-8")


def mistakes(plan: Plan, out: Path) -> Iterator[Mistake]:
    """Yield a mistake for each path that a pod cannot use. The learner's pods read the claim's `data/` and `runs/`, and
    write to `runs/`; a server's pods read `data/`, and write no files. Also yield a mistake for each wrong image."""
    for named in plan.paths:
        folders = ("runs",) if named.written else ("data",) if named.of_server else ("data", "runs")
        if named.of_server and named.written:
            yield named.mistake("nothing: pods log to their console", "remove it")
        elif named.path.parts[0] not in folders or ".." in named.path.parts:
            wanted = f"a path below {' or '.join(f'{folder}/' for folder in folders)}, which the claim has"
            yield named.mistake(wanted, f"copy it there, or correct the path{' in that file' * named.of_server}")
    yield from image_mistakes(plan.cluster)


def files(plan: Plan, out: Path) -> dict[str, str]:
    header = plan.header("kubernetes")
    groups = [(server_name(plan, i), server) for i, server in enumerate(plan.servers)]
    return {
        "config.yaml": dump(header, [config_map(plan, groups)]),
        **({} if plan.cluster.storage else {"storage.yaml": dump(header, [claim(plan)])}),
        "network.yaml": dump(header, network(plan)),
        "server.yaml": dump(
            header, [part for i, group in enumerate(groups) for part in server_objects(plan, *group, file=i)]
        ),
        "servers.sh": LIST,
        "learner.yaml": dump(header, [headless(learner_name(plan), {"rendezvous": RENDEZVOUS_PORT}), job(plan)]),
    }


def submit(plan: Plan, out: Path) -> str:
    others = "".join(f" --from-literal={name}=..." for name in plan.secrets if name != "ROLLOUT_SERVER_TOKEN")
    token = "--from-literal=ROLLOUT_SERVER_TOKEN=$(openssl rand -hex 32)"
    data = f"kubectl apply -f {out}/storage.yaml   # copy the data into its folder data/ before the rest\n  "
    return (
        "Submit it:\n"
        f"  kubectl create secret generic {plan.cluster.name} {token}{others}\n"
        f"  {data if plan.cluster.storage is None else ''}"
        f"kubectl apply -f {out}/network.yaml -f {out}/config.yaml -f {out}/server.yaml -f {out}/learner.yaml\n"
        f"  kubectl logs -f job/{learner_name(plan)}"
    )


def server_name(plan: Plan, entry: int) -> str:
    return f"{plan.cluster.name}-server" + (str(entry) if len(plan.servers) > 1 else "")


def learner_name(plan: Plan) -> str:
    return f"{plan.cluster.name}-learner"


def labels(plan: Plan, part: str, name: str = "") -> dict[str, str]:
    own = {"app.kubernetes.io/instance": name} if name else {}
    return {"app.kubernetes.io/name": plan.cluster.name, "app.kubernetes.io/component": part, **own}


# ---- storage -------------------------------------------------------------------------------------------------------


def config_map(plan: Plan, groups: list[tuple[str, ServerPlan]]) -> Object:
    """Return the ConfigMap: both configurations, and the script that lists the servers for a running learner."""
    urls = [f"http://{name}-{i}.{name}:{HTTP_PORT}" for name, server in groups for i in range(server.count)]
    discovery = ["bash", f"{FOLDER}/servers.sh", *(name for name, _ in groups)]
    data = {f"server-{i}.yaml": server.file("${POD_IP}", HTTP_PORT) for i, (_, server) in enumerate(groups)}
    data |= {"learner.yaml": plan.learner_file(urls, discovery), "servers.sh": LIST}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": plan.cluster.name}, "data": data}


def claim(plan: Plan) -> Object:
    """Return the claim for one volume with data, runs and downloaded models. Every pod mounts its folders at the same
    path, because requests name images by path and all ranks write into one run directory."""
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": f"{plan.cluster.storage_gib}Gi"}},
    }
    metadata = {"name": plan.cluster.name}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def network(plan: Plan) -> list[Object]:
    """Return the network policies. Only the learner reaches the servers; only learner and servers reach the learner.
    Ports that the system chooses are open too, because weight syncs and ranks listen on such ports."""
    first, last = SYSTEM_PORTS
    chosen = {"protocol": "TCP", "port": first, "endPort": last}
    learner, server = ({"podSelector": {"matchLabels": labels(plan, part)}} for part in ("learner", "server"))
    return [
        policy(plan, "server", [{"from": [learner], "ports": [*tcp(HTTP_PORT, GROUP_PORT), chosen]}]),
        policy(
            plan,
            "learner",
            [
                {"from": [learner], "ports": [*tcp(RENDEZVOUS_PORT), chosen]},
                {"from": [server], "ports": [chosen]},
            ],
        ),
    ]


def tcp(*ports: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def policy(plan: Plan, part: str, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{plan.cluster.name}-{part}"},
        "spec": {
            "podSelector": {"matchLabels": labels(plan, part)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def headless(name: str, ports: dict[str, int]) -> Object:
    """Return a headless service, which gives pods DNS names even if they are not ready. A server is not ready after a
    failed sync, and the learner must reach it. Ranks must find each other before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": name},
            "ports": [{"name": port, "port": number} for port, number in ports.items()],
        },
    }


# ---- pods ----------------------------------------------------------------------------------------------------------


def server_objects(plan: Plan, name: str, server: ServerPlan, file: int) -> list[Object]:
    ports = {"http": HTTP_PORT, "weights": GROUP_PORT}
    chosen = labels(plan, "server", name)
    tries = max(1, -(-int(plan.launch.ready_timeout_s) // 10))
    spec = pod(
        plan,
        {
            "name": "server",
            "image": plan.cluster.server_image,
            "args": ["rollout_server", "--config", f"{FOLDER}/server-{file}.yaml"],
            "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
            # `/ready/` answers 503 while weights change, and after a failed sync. A server whose `/health/` does not
            # answer is restarted.
            "startupProbe": probe("/health/", periodSeconds=10, failureThreshold=tries),
            "livenessProbe": probe("/health/", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
            "readinessProbe": probe("/ready/", periodSeconds=5, timeoutSeconds=5),
        },
        devices=server.num_devices,
        runs=False,
        grace_s=45,  # seconds: shutdown_timeout_s, plus the time until the engine has ended
    )
    return [
        headless(name, ports),
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name},
            "spec": {
                "serviceName": name,
                "replicas": server.count,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": chosen},
                "template": {"metadata": {"labels": chosen}, "spec": spec},
            },
        },
    ]


def job(plan: Plan) -> Object:
    name, learner = learner_name(plan), plan.launch.learner
    spec = pod(
        plan,
        {
            "name": "learner",
            "image": plan.cluster.learner_image,
            "args": learner.torchrun(
                f"{FOLDER}/learner.yaml",
                endpoint=f"{name}-0.{name}:{RENDEZVOUS_PORT}",
                run_id=name,
                here="$(POD_IP)",
            ),
            "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}],
        },
        devices=learner.nproc,
        runs=True,
        grace_s=60,  # seconds for saving a checkpoint after SIGTERM
    )
    wait = ["deploy.wait_ready", "--config", f"{FOLDER}/learner.yaml", f"--timeout-s={plan.launch.ready_timeout_s:g}"]
    waiting = {"name": "wait-for-servers", "image": plan.cluster.learner_image, "args": wait}
    waiting |= {name: spec["containers"][0][name] for name in ("env", "securityContext", "volumeMounts")}
    spec |= {"subdomain": name, "restartPolicy": "Never", "initContainers": [waiting]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": learner.nodes,
            "parallelism": learner.nodes,
            "backoffLimit": plan.cluster.max_requeues * learner.nodes,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "learner", "operator": "In", "values": [2]},
                    },
                ]
            },
            "template": {"metadata": {"labels": labels(plan, "learner", name)}, "spec": spec},
        },
    }


def pod(plan: Plan, container: Object, *, devices: int, runs: bool, grace_s: int) -> Object:
    """Return the specification of a pod with one container. `runs`: the pod can write to the folder `runs`."""
    cluster = plan.cluster
    memory = f"{devices * cluster.memory_per_device_gib}Gi"
    gpus = {"nvidia.com/gpu": str(devices)} if cluster.gpu else {}
    shares = ["data", "runs", "cache"] if runs else ["data", "cache"]
    paths = {"data": f"{WORKDIR}/data", "runs": f"{WORKDIR}/runs", "cache": "/cache"}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            container
            | {
                "env": environment(plan, of_job=runs),
                "resources": {
                    "requests": {"cpu": str(devices * cluster.cpus_per_device), "memory": memory},
                    "limits": {"memory": memory, **gpus},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    {"name": "config", "mountPath": FOLDER, "readOnly": True},
                    *(
                        {"name": "storage", "mountPath": paths[share], "subPath": share, "readOnly": share == "data"}
                        for share in shares
                    ),
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": cluster.name}},
            {"name": "storage", "persistentVolumeClaim": {"claimName": cluster.storage or cluster.name}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "32Gi"}},
            # vLLM's processes and NCCL need more shared memory than the 64 MB of a pod's default /dev/shm.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        ],
    }


def environment(plan: Plan, *, of_job: bool) -> list[Object]:
    """Return a pod's environment variables: its address, the secrets, and writable folders for caches. `of_job`: add
    the Job's id, which makes all starts of a Job one run."""
    uid = "metadata.labels['batch.kubernetes.io/controller-uid']"
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *([{"name": JOB_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": uid}}}] if of_job else []),
        {"name": "HOME", "value": "/tmp"},
        {"name": "XDG_CACHE_HOME", "value": "/cache"},
        # Every start gets a new store, because an old store holds the addresses of ended ranks.
        {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"},
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": plan.cluster.name, "key": name}}}
            for name in plan.secrets
        ),
    ]


def probe(path: str, **numbers: int) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, **numbers}
