"""SkyPilot: one task on several machines. The first machines learn (torchrun), the others serve.

SkyPilot provides the machines, ends all machines when one fails, and restarts a managed job if the cloud takes a
machine back. All starts of a task continue one run. A script on each server's machine restarts a server that has ended.
At its end the learner writes a file into the shared folder of logs, and then the servers end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.places.objects import dump
from deploy.places.plan import RENDEZVOUS_PORT, Plan
from shared.config.model import Mistake

HTTP_PORT = 8000
STORAGE = "/storage"  # folder of the shared storage on every machine

SETUP = f"""\
[ -e data ] || ln -s {STORAGE}/data data
[ -e runs ] || ln -s {STORAGE}/runs runs
deploy/setup.sh
"""
RUN = """\
set -euo pipefail
i=0
for address in $SKYPILOT_NODE_IPS; do
  export "ADDRESS_$i=$address"
  i=$((i + 1))
done
export ROLLOUT_JOB=$SKYPILOT_TASK_ID # a recovered task goes on from its newest checkpoint
mkdir -p -- {log_dir}
ended={log_dir}/ended-$SKYPILOT_TASK_ID

if ((SKYPILOT_NODE_RANK < {nodes})); then # a learner
  .venv/bin/python -m deploy.wait_ready --config {out}/learner.yaml --timeout-s {timeout_s:g}
  {torchrun}
  touch -- "$ended"
  exit
fi

i=$((SKYPILOT_NODE_RANK - {nodes}))
restarts=({restarts})
for ((start = 0; start <= restarts[i]; start++)); do
  .venv/bin/python -m rollout_server --config "{out}/server-$i.yaml" &
  server=$!
  while kill -0 "$server" 2> /dev/null && [ ! -e "$ended" ]; do sleep 5; done
  if [ -e "$ended" ]; then
    kill "$server" 2> /dev/null || true
    wait "$server" || true
    exit 0
  fi
  sleep $((1 << start))
done
until [ -e "$ended" ]; do sleep 5; done # given up: the learner goes on with the others
"""


def mistakes(plan: Plan, out: Path) -> Iterator[Mistake]:
    storage = plan.cluster.storage
    if storage is None or "://" not in storage:
        wanted, remedy = "a bucket's URL, with data/ in it", "make one, and copy the data there"
        yield Mistake(path="cluster.storage", found=str(storage), wanted=wanted, remedy=remedy)
    if out.is_absolute() or ".." in out.parts:
        wanted, remedy = "a folder below the working directory, which SkyPilot copies", "name another one"
        yield Mistake(path="--out", found=str(out), wanted=wanted, remedy=remedy)


def files(plan: Plan, out: Path) -> dict[str, str]:
    nodes, header = plan.launch.learner.nodes, plan.header("skypilot")
    addresses = [f"${{ADDRESS_{nodes + i}}}" for i in range(plan.num_servers)]
    urls = [f"http://{address}:{HTTP_PORT}" for address in addresses]
    return {
        "task.yaml": dump(header, [task(plan, out)]),
        "learner.yaml": header + plan.learner_file(urls),
        **{
            f"server-{i}.yaml": header + server.file(addresses[i], HTTP_PORT)
            for i, server in enumerate(plan.each_server)
        },
    }


def submit(plan: Plan, out: Path) -> str:
    secrets = " ".join(f"--secret {name}" for name in plan.secrets)
    return (
        "Submit it from the clone's root, which SkyPilot copies to every machine:\n"
        "  export ROLLOUT_SERVER_TOKEN=$(openssl rand -hex 32)\n"
        f"  sky jobs launch {secrets} {out}/task.yaml"
    )


def task(plan: Plan, out: Path) -> dict[str, Any]:
    """Return SkyPilot's task. A task's machines are equal: each is large enough for the learner or the largest
    server."""
    cluster, learner = plan.cluster, plan.launch.learner
    devices = max(learner.nproc, *(server.num_devices for server in plan.servers))
    resources: dict[str, Any] = {
        "cpus": f"{devices * cluster.cpus_per_device}+",
        "memory": f"{devices * cluster.memory_per_device_gib}+",
    }
    if cluster.gpu:
        resources["accelerators"] = f"{cluster.gpu}:{devices}"
    return {
        "name": cluster.name,
        "num_nodes": plan.num_servers + learner.nodes,
        "workdir": ".",
        "resources": resources | {"job_recovery": {"max_restarts_on_errors": cluster.max_requeues}},
        "secrets": dict.fromkeys(plan.secrets),
        "file_mounts": {STORAGE: {"source": cluster.storage or "REPLACE-ME", "mode": "MOUNT"}},
        "setup": SETUP,
        "run": RUN.format(
            log_dir=shlex.quote(plan.launch.log_dir),
            nodes=learner.nodes,
            out=out,
            timeout_s=plan.launch.ready_timeout_s,
            torchrun=torchrun(plan, out),
            restarts=" ".join(str(server.max_restarts) for server in plan.each_server),
        ),
    }


def torchrun(plan: Plan, out: Path) -> str:
    learner = plan.launch.learner
    meeting = {"endpoint": f'"$ADDRESS_0:{RENDEZVOUS_PORT}"', "run_id": '"$SKYPILOT_TASK_ID"'}
    start = f".venv/bin/python -m {' '.join(learner.torchrun(f'{out}/learner.yaml', **meeting))}"
    if learner.nodes == 1:
        return start
    return f"export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # a new store for every start\n  {start}"
