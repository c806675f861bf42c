"""Slurm: one job, in which `deploy.launch` starts every server and the learner as a step (`via: [srun, ...]`).

Slurm provides the machines, ends all processes at the end, and restarts the job after a machine failed (`--requeue`) or
before the time limit (`--signal`). The launcher restarts servers and ranks, as on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.places.plan import RENDEZVOUS_PORT, Plan
from shared.config.model import Hidden, Mistake
from shared.config.parse import dump_yaml

HTTP_PORT = 8000  # port of the first server; each next server adds 1, so that two can share a machine
WARNING_S = 300  # time before Slurm's time limit at which the learner is told to write a checkpoint and stop
PATIENCE_S = 60  # seconds that the other tasks of a step may still run after the first has ended

SCRIPT = """\
#!/usr/bin/env bash
{header}# The first {num_servers} machine(s) serve, the others learn. Submit it from the folder that has data/,
# runs/ and .venv (PYTHON names another interpreter), on a file system that all machines share:
#   sbatch {out}/run.sh
{options}
set -euo pipefail
cd "${{SLURM_SUBMIT_DIR:?start this with sbatch}}"

# Slurm's names and addresses of the machines, for {out}/*.yaml.
i=0
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  address=$(scontrol show node "$node" --oneliner | grep -o ' NodeAddr=[^ ]*')
  export "NODE_$i=$node" "ADDRESS_$i=${{address#*=}}"
  i=$((i + 1))
done
# A secret of this start. Every step of the job inherits it, and no file has it.
export ROLLOUT_SERVER_TOKEN=${{ROLLOUT_SERVER_TOKEN:-$(openssl rand -hex 32)}}
export ROLLOUT_JOB=slurm-$SLURM_JOB_ID # a requeued job goes on from its newest checkpoint

"${{PYTHON:-.venv/bin/python}}" -m deploy.launch --config {out}/launch.yaml &
launcher=$!
signalled='' limit=''
trap 'signalled=1 && kill -TERM "$launcher"' TERM
# {warning_s} s before the time limit: the learner saves and stops, and the launcher follows. The steps get the signal
# from Slurm, because srun does not forward it: it kills them.
trap 'signalled=1 limit=1 && scancel --signal=TERM "$SLURM_JOB_ID"' USR1
status=0
wait "$launcher" || status=$?
if [ -n "$signalled" ]; then # the signal ended that wait
  status=0
  wait "$launcher" || status=$?
fi
if [ -n "$limit" ] && ((${{SLURM_RESTART_COUNT:-0}} < {max_requeues})); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def mistakes(plan: Plan, out: Path) -> Iterator[Mistake]:
    """Yield a mistake if the launch file names storage: the job uses the folder in which `sbatch` was called, which all
    machines share."""
    if plan.cluster.storage is not None:
        wanted, remedy = "nothing: the folder where sbatch is called", "remove it, and link data/ and runs/ there"
        yield Mistake(path="cluster.storage", found=plan.cluster.storage, wanted=wanted, remedy=remedy)


def files(plan: Plan, out: Path) -> dict[str, str]:
    header = plan.header("slurm")
    urls = [f"http://${{ADDRESS_{i}}}:{HTTP_PORT + i}" for i in range(plan.num_servers)]
    script = SCRIPT.format(
        header=header,
        num_servers=plan.num_servers,
        out=out,
        options="\n".join(f"#SBATCH {option}" for option in options(plan)),
        warning_s=WARNING_S,
        max_requeues=plan.cluster.max_requeues,
    )
    return {
        "run.sh": script,
        "launch.yaml": header + dump_yaml(launch_values(plan, out)),
        "learner.yaml": header + plan.learner_file(urls),
        **{
            f"server-{i}.yaml": header + server.file(f"${{ADDRESS_{i}}}", HTTP_PORT + i)
            for i, server in enumerate(plan.each_server)
        },
    }


def submit(plan: Plan, out: Path) -> str:
    return f"Submit it from this folder, which all machines of the job must see:\n  sbatch {out}/run.sh"


def options(plan: Plan) -> list[str]:
    """Return sbatch's options. A job's machines are equal: each is large enough for the learner or the largest
    server."""
    cluster = plan.cluster
    devices = max(plan.launch.learner.nproc, *(server.num_devices for server in plan.servers))
    found = [
        f"--job-name={cluster.name}",
        f"--nodes={plan.num_servers + plan.launch.learner.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={devices * cluster.cpus_per_device}",
        f"--mem={devices * cluster.memory_per_device_gib}G",
        f"--time={cluster.time_limit}",
        f"--signal=B:USR1@{WARNING_S}",
        "--requeue" if cluster.max_requeues else "--no-requeue",
        "--open-mode=append",
    ]
    return found + ([f"--gpus-per-node={devices}"] if cluster.gpu else []) + cluster.sbatch


def launch_values(plan: Plan, out: Path) -> dict[str, Any]:
    """Return the values of the launch file that the job uses. The file's `via` runs each server and the learner as a
    Slurm step on the machines chosen for it."""
    learner, first = plan.launch.learner, plan.num_servers
    machines = [f"${{NODE_{i}}}" for i in range(first, first + learner.nodes)]
    return {
        "servers": [
            {
                "config": f"{out}/server-{i}.yaml",
                "max_restarts": server.max_restarts,
                "via": step(plan, [f"${{NODE_{i}}}"], server.num_devices),
            }
            for i, server in enumerate(plan.each_server)
        ],
        "learner": {
            "config": f"{out}/learner.yaml",
            "nproc": learner.nproc,
            "nodes": learner.nodes,
            "max_restarts": learner.max_restarts,
            "via": step(plan, machines, learner.nproc),
            "rendezvous": Hidden(f"${{ADDRESS_{first}}}:{RENDEZVOUS_PORT}"),
        },
        "log_dir": plan.launch.log_dir,
        "ready_timeout_s": plan.launch.ready_timeout_s,
    }


def step(plan: Plan, machines: list[str], devices: int) -> list[str]:
    """Return the srun command that runs one task per machine, with all cores and `devices` GPUs of the machine."""
    numbers = [f"--nodes={len(machines)}", f"--ntasks={len(machines)}", "--ntasks-per-node=1"]
    gpus = [f"--gpus-per-node={devices}"] if plan.cluster.gpu else []
    return [
        "srun",
        *numbers,
        *gpus,
        "--cpu-bind=none",
        # Stopping ranks write a checkpoint, so the first torchrun that ends must not end the others.
        "--kill-on-bad-exit=0",
        f"--wait={PATIENCE_S}",
        Hidden(f"--nodelist={','.join(machines)}"),
    ]
