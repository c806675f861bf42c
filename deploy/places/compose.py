"""Docker Compose: one machine, a container for each server and one for the learner.

Containers run as a user without rights, on a root file system that is read-only, and reach each other alone: no port is
published. The run ends when the learner ends; a server that fails is started again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.places.objects import dump
from deploy.places.plan import Plan, image_mistakes
from shared.config.model import Mistake
from shared.wire import TOKEN_VARIABLE

HTTP_PORT = 8000
USER = 10001  # the same as in deploy/docker/Dockerfile
FOLDER = "/etc/rollout-matching"
WORKDIR = "/app"
ASK_READY = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{HTTP_PORT}/ready/', timeout=5)"
NO_TOKEN = "set it to a secret of your own: export ROLLOUT_SERVER_TOKEN=$$(openssl rand -hex 32)"
NO_BASE = "name vLLM's image by digest: vllm/vllm-openai@sha256:..."


def mistakes(plan: Plan, out: Path) -> Iterator[Mistake]:
    cluster, learner = plan.cluster, plan.launch.learner
    if learner.nodes > 1:
        remedy = "set it to 1, or choose another place"
        yield Mistake(path="learner.nodes", found=str(learner.nodes), wanted="1: one machine", remedy=remedy)
    for i, server in enumerate(plan.servers):
        if server.count > 1:
            remedy = "make an entry for each, with devices of its own"
            yield Mistake(path=f"servers[{i}].count", found=str(server.count), wanted="1", remedy=remedy)
    if builds(plan):
        return
    yield from image_mistakes(cluster)


def builds(plan: Plan) -> bool:
    """Return True if images are built here: none is named."""
    fields = plan.cluster.model_fields
    return all(getattr(plan.cluster, name) == fields[name].default for name in ("server_image", "learner_image"))


def files(plan: Plan, out: Path) -> dict[str, str]:
    learner_file = plan.learner_file([f"http://{name}:{HTTP_PORT}" for name in names(plan)])
    configs = {f"server-{i}": server.file(f"server-{i}", HTTP_PORT) for i, server in enumerate(plan.servers)}
    services = {f"server-{i}": server_service(plan, out, i) for i in range(len(plan.servers))}
    compose = {
        "name": plan.cluster.name,
        "services": services | {"learner": learner_service(plan, out)},
        # `$` begins a variable of Compose.
        "configs": {
            name: {"content": text.replace("$", "$$")} for name, text in (configs | {"learner": learner_file}).items()
        },
        "volumes": {"models": None},
    }
    return {"compose.yaml": dump(plan.header("compose"), [compose])}


def submit(plan: Plan, out: Path) -> str:
    base = "  export VLLM_IMAGE=vllm/vllm-openai@sha256:...   # the base of both images, by digest\n"
    return (
        f"Start it; user {USER} must be able to write to runs/:\n"
        "  export ROLLOUT_SERVER_TOKEN=$(openssl rand -hex 32)\n"
        f"{base if builds(plan) else ''}"
        f"  docker compose -f {out}/compose.yaml up --abort-on-container-exit --exit-code-from learner learner\n"
        f"  docker compose -f {out}/compose.yaml down"
    )


def names(plan: Plan) -> list[str]:
    return [f"server-{i}" for i in range(len(plan.servers))]


def server_service(plan: Plan, out: Path, index: int) -> dict[str, Any]:
    server, name = plan.servers[index], f"server-{index}"
    return {
        **service(plan, out, "server", server.devices),
        "command": ["rollout_server", "--config", f"{FOLDER}/{name}.yaml"],
        "configs": [{"source": name, "target": f"{FOLDER}/{name}.yaml"}],
        "restart": f"on-failure:{server.max_restarts}" if server.max_restarts else "no",
        # vLLM's processes and NCCL exchange data through /dev/shm, where Docker's default of 64 MB is too small.
        **({"ipc": "shareable", "shm_size": "16gb"} if index == 0 else {"ipc": "service:server-0"}),
        "healthcheck": {
            "test": ["CMD", "python3", "-c", ASK_READY],
            "interval": "5s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{plan.launch.ready_timeout_s:.0f}s",
        },
        "stop_grace_period": "45s",  # longer than shutdown_timeout_s, because the engine stops after it
    }


def learner_service(plan: Plan, out: Path) -> dict[str, Any]:
    learner = plan.launch.learner
    torchrun = ["--nproc", str(learner.nproc), "--max-restarts", str(learner.max_restarts)]
    return {
        **service(plan, out, "learner", tuple(learner.devices)),
        "command": ["deploy.torchrun", *torchrun, "--", "-m", "learner", "--config", f"{FOLDER}/learner.yaml"],
        "configs": [{"source": "learner", "target": f"{FOLDER}/learner.yaml"}],
        "restart": "no",  # torchrun restarts the ranks; if that is not enough, resume the run yourself
        "ipc": "service:server-0",
        "depends_on": {name: {"condition": "service_healthy"} for name in names(plan)},
        "stop_grace_period": "60s",  # SIGTERM makes the learner save a checkpoint first
    }


def service(plan: Plan, out: Path, side: str, devices: tuple[int, ...]) -> dict[str, Any]:
    """Return what all containers share."""
    secrets = {
        name: f"${{{name}:?{NO_TOKEN}}}" if name == TOKEN_VARIABLE else f"${{{name}:-}}" for name in plan.secrets
    }
    return {
        **image(plan, out, side),
        "user": f"{USER}:{USER}",
        "read_only": True,
        "tmpfs": ["/tmp:exec,mode=1777"],  # compiled kernels are loaded from there
        "init": True,
        "ulimits": {"memlock": -1},  # NCCL pins host memory
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "environment": {"HOME": "/tmp", "XDG_CACHE_HOME": "/cache", **secrets},
        "volumes": volumes(plan, out),
        **({"deploy": {"resources": {"reservations": {"devices": [gpus(devices)]}}}} if plan.cluster.gpu else {}),
    }


def image(plan: Plan, out: Path, side: str) -> dict[str, Any]:
    if not builds(plan):
        return {"image": getattr(plan.cluster, f"{side}_image")}
    build = {"context": os.path.relpath(".", out), "dockerfile": "deploy/docker/Dockerfile", "target": side}
    return {"build": build | {"args": {"BASE": f"${{VLLM_IMAGE:?{NO_BASE}}}"}}}


def volumes(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Return the volumes: both sides mount them at the same place, because requests name images by path."""
    folder = os.path.relpath(plan.cluster.storage or ".", out)
    bind = {"type": "bind", "bind": {"create_host_path": False}}
    return [
        {**bind, "source": f"${{DATA_DIR:-{folder}/data}}", "target": f"{WORKDIR}/data", "read_only": True},
        {**bind, "source": f"${{RUNS_DIR:-{folder}/runs}}", "target": f"{WORKDIR}/runs"},
        {"type": "volume", "source": "models", "target": "/cache"},
    ]


def gpus(devices: tuple[int, ...]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"device_ids": [str(device) for device in devices]} if devices else {"count": "all"}
    return {"driver": "nvidia", **chosen, "capabilities": ["gpu"]}
