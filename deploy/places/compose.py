"""Docker Compose: one machine, a container for each server and one for the learner.

Containers run as a user without rights, on a read-only root file system. Containers reach only each other: no port is
published. Of this machine, containers see only the files and folders that the configurations name. The run ends when
the learner ends; a server that fails is started again.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.places.objects import dump
from deploy.places.plan import Plan, image_mistakes
from learner.run.output_dir import JOB_VARIABLE
from shared.config.model import Mistake

HTTP_PORT = 8000
USER = 10001  # user id in the containers, as in deploy/docker/Dockerfile
FOLDER = "/etc/rollout-matching"
WORKDIR = "/app"
ASK_READY = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{HTTP_PORT}/ready/', timeout=5)"
DOCKERFILE = "deploy/docker/Dockerfile"
# Base images. vLLM's has no default, because the user has to choose its version.
NO_BASE = "vllm-image-is-not-set"
PYTHON_BASE = "python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b"
SHARED_MEMORY = "shm"

SCRIPT = """\
#!/usr/bin/env bash
{header}# The whole run: it builds the images, starts servers and learner, and shows what they say. It ends with the
# learner, and returns the learner's exit code. Ctrl-C: the learner saves a checkpoint first. With ROLLOUT_JOB=NAME
# the next start with this name goes on from there. A rootless engine needs RUN_AS=0:0.
set -euo pipefail
cd "$(dirname "$0")"
{base}export ROLLOUT_SERVER_TOKEN=${{ROLLOUT_SERVER_TOKEN:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')}}
[ "$(id -u)" = 0 ] || RUN_AS=${{RUN_AS:-$(id -u):$(id -g)}}
export RUN_AS=${{RUN_AS:-{user}:{user}}}
# prepare FOLDER: the containers write there.
prepare() {{
  [ -d "$1" ] || mkdir -p "$1"
  [ "$(id -u)" != 0 ] || chown "$RUN_AS" "$1"
}}
{folders}
trap 'docker compose down --timeout 60' EXIT
docker compose up{build} --attach-dependencies --exit-code-from learner learner || status=$?
if [ "${{status:-0}}" != 0 ] && [ -z "$(docker compose ps --all --quiet --status exited learner)" ]; then
  echo "The learner did not start. If a server was downloading its model, run this again: what is there stays." >&2
fi
exit "${{status:-0}}"
"""


def mistakes(plan: Plan, out: Path) -> Iterator[Mistake]:
    cluster, learner = plan.cluster, plan.launch.learner
    if learner.nodes > 1:
        remedy = "set it to 1, or choose another place"
        yield Mistake(path="learner.nodes", found=str(learner.nodes), wanted="1: one machine", remedy=remedy)
    for i, server in enumerate(plan.servers):
        if server.count > 1:
            remedy = "make an entry for each, with devices of its own"
            yield Mistake(path=f"servers[{i}].count", found=str(server.count), wanted="1", remedy=remedy)
    for named in plan.paths:
        if not named.written and not is_movable(named.path) and not Path(named.path).exists():
            yield named.mistake("a file or folder of this machine, which containers then see", "correct the path")
    if not builds(plan):
        yield from image_mistakes(cluster)
    elif not Path(DOCKERFILE).is_file():
        wanted = f"images by digest, or a clone's root as working directory, which has {DOCKERFILE}"
        remedy = "name both images, or call this there"
        yield Mistake(path="cluster.server_image", found="no image", wanted=wanted, remedy=remedy)


def builds(plan: Plan) -> bool:
    """Return True if the container images are built on this machine, because the launch file names none."""
    fields = plan.cluster.model_fields
    return all(getattr(plan.cluster, name) == fields[name].default for name in ("server_image", "learner_image"))


def is_movable(path: PurePosixPath) -> bool:
    """Return True for a path below `data` or `runs`: the variables DATA_DIR and RUNS_DIR can name other folders."""
    return path.parts[:1] in {("data",), ("runs",)}


def files(plan: Plan, out: Path) -> dict[str, str]:
    header = plan.header("compose")
    services = {f"server-{i}": server_service(plan, out, i) for i in range(len(plan.servers))}
    services["learner"] = learner_service(plan, out)
    memory = {"type": "tmpfs", "device": "tmpfs", "o": "size=16g,mode=1777"}
    compose = {
        "name": plan.cluster.name,
        "services": services,
        # Configurations are files, because Compose cannot write inline content into a container with a read-only root.
        "configs": {name: {"file": f"./{name}.yaml"} for name in services},
        "volumes": {"models": None, SHARED_MEMORY: {"driver": "local", "driver_opts": memory}},
    }
    found = {"compose.yaml": dump(header, [compose]), "run.sh": script(plan, out)}
    found |= {
        f"server-{i}.yaml": header + server.file(f"server-{i}", HTTP_PORT) for i, server in enumerate(plan.servers)
    }
    return found | {"learner.yaml": header + plan.learner_file([f"http://{name}:{HTTP_PORT}" for name in names(plan)])}


def script(plan: Plan, out: Path) -> str:
    needs_base = builds(plan) and plan.cluster.gpu
    named = "${VLLM_IMAGE:?name the image of vLLM by its digest: export VLLM_IMAGE=vllm/vllm-openai@sha256:...}"
    written = [
        volume["source"] for volume in volumes(plan, out) if volume["type"] == "bind" and "read_only" not in volume
    ]
    return SCRIPT.format(
        header=plan.header("compose"),
        base=f': "{named}"\n' if needs_base else "",
        folders="\n".join(f'prepare "{folder}"' for folder in written),
        user=USER,
        build=" --build" if builds(plan) else "",
    )


def submit(plan: Plan, out: Path) -> str:
    base = "  export VLLM_IMAGE=vllm/vllm-openai@sha256:...   # the base of both images, by digest\n"
    return f"Start it:\n{base if builds(plan) and plan.cluster.gpu else ''}  bash {out}/run.sh"


def names(plan: Plan) -> list[str]:
    return [f"server-{i}" for i in range(len(plan.servers))]


def server_service(plan: Plan, out: Path, index: int) -> dict[str, Any]:
    server, name = plan.servers[index], f"server-{index}"
    return {
        **service(plan, out, name, server.devices, variables=plan.secrets),
        "command": ["rollout_server", "--config", f"{FOLDER}/{name}.yaml"],
        "restart": f"on-failure:{server.max_restarts}" if server.max_restarts else "no",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", ASK_READY],
            "interval": "5s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{plan.launch.ready_timeout_s:.0f}s",
        },
        # The engine stops after `shutdown_timeout_s`, so this time is longer.
        "stop_grace_period": "45s",
    }


def learner_service(plan: Plan, out: Path) -> dict[str, Any]:
    learner = plan.launch.learner
    return {
        **service(plan, out, "learner", tuple(learner.devices), variables=(*plan.secrets, JOB_VARIABLE)),
        "command": learner.torchrun(f"{FOLDER}/learner.yaml"),
        "restart": "no",  # torchrun restarts the ranks, up to its limit; after that the user has to resume the run
        "depends_on": {name: {"condition": "service_healthy"} for name in names(plan)},
        "stop_grace_period": "60s",  # SIGTERM makes the learner save a checkpoint first
    }


def service(
    plan: Plan, out: Path, name: str, devices: tuple[int, ...], *, variables: tuple[str, ...]
) -> dict[str, Any]:
    """Return the settings that all containers share. `variables`: names of the environment variables that a container
    gets from the user's environment."""
    gpu = {
        # NCCL pins host memory, so the memory that may be pinned is not limited. Rootless engines refuse this setting.
        "ulimits": {"memlock": -1},
        "deploy": {"resources": {"reservations": {"devices": [gpus(devices)]}}},
    }
    return {
        **image(plan, out, name.partition("-")[0]),
        # With a host name of its own NCCL takes each container for another machine. Otherwise NCCL would share GPU
        # memory through a socket that the other container cannot reach.
        "hostname": name,
        "user": f"${{RUN_AS:-{USER}:{USER}}}",
        "read_only": True,
        "tmpfs": ["/tmp:exec,mode=1777"],  # exec: compiled kernels are loaded from /tmp
        "init": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        # Environment variables are listed without values. Compose takes the values from its environment, and `down`
        # works without the token.
        "environment": {"HOME": "/tmp", "XDG_CACHE_HOME": "/cache", **dict.fromkeys(variables)},
        "configs": [{"source": name, "target": f"{FOLDER}/{name}.yaml"}],
        "volumes": volumes(plan, out),
        **(gpu if plan.cluster.gpu else {}),
    }


def image(plan: Plan, out: Path, side: str) -> dict[str, Any]:
    if not builds(plan):
        return {"image": getattr(plan.cluster, f"{side}_image")}
    gpu = {"BASE": f"${{VLLM_IMAGE:-{NO_BASE}}}"}
    args = gpu if plan.cluster.gpu else {"DEVICE": "cpu", "BASE": f"${{PYTHON_IMAGE:-{PYTHON_BASE}}}"}
    build = {"context": os.path.relpath(".", out), "dockerfile": DOCKERFILE, "target": side, "args": args}
    return {"build": build}


def volumes(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Return the volumes. Servers and learner mount them at the same path, because requests name images by path. For a
    path in the working directory, its top folder (such as `data`) is mounted. For any other path, the folder itself is
    mounted, or the folder of the file."""
    folders: dict[PurePosixPath, bool] = {}  # folder -> whether the run writes into it
    for named in plan.paths:
        folder = named.path
        if ".." not in folder.parts and not folder.is_absolute() and not named.is_model:
            folder = PurePosixPath(folder.parts[0])
        elif Path(folder).is_file():
            folder = folder.parent
        folders[folder] = folders.get(folder, False) or named.written
    return [
        *(bind(plan, out, folder, written=written) for folder, written in sorted(folders.items())),
        {"type": "volume", "source": "models", "target": "/cache"},
        # vLLM's processes and NCCL exchange data through /dev/shm, and Docker's default of 64 MB is too small. A volume
        # stays when a server is started again.
        {"type": "volume", "source": SHARED_MEMORY, "target": "/dev/shm"},
    ]


def bind(plan: Plan, out: Path, folder: PurePosixPath, *, written: bool) -> dict[str, Any]:
    source = str(folder) if folder.is_absolute() else os.path.relpath(Path(plan.cluster.storage or ".", folder), out)
    if is_movable(folder):
        source = f"${{{folder.name.upper()}_DIR:-{source}}}"
    found = {"type": "bind", "bind": {"create_host_path": False}, "source": source}
    found["target"] = posixpath.normpath(f"{WORKDIR}/{folder}") if not folder.is_absolute() else str(folder)
    return found | ({} if written else {"read_only": True})


def gpus(devices: tuple[int, ...]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"device_ids": [str(device) for device in devices]} if devices else {"count": "all"}
    return {"driver": "nvidia", **chosen, "capabilities": ["gpu"]}
