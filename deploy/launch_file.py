"""The keys of launch.yaml, which describes the servers and the learner of one run, on this machine or a cluster.

`load_launch_config` reads the file for this machine (`deploy.launch`), `deploy.places` reads it for a cluster. Both
functions check every configuration that launch.yaml names, and raise ConfigErrors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

from pydantic import Field

from learner.config.load import load_config
from rollout_server.config import ServerConfig, load_server_config
from shared.config.checks import mistakes_of
from shared.config.kinds import for_program
from shared.config.model import ConfigErrors, Mistake, Section, key
from shared.config.parse import load_yaml, parse
from shared.tokens import read_token

Device = Annotated[int, Field(ge=0)]
# an sbatch option must be a single line, because a second line would run as code
SbatchOption = Annotated[str, Field(pattern=r"^-[^\x00-\x1f\x7f-\x9f]+$")]
LEARNER_SHARE = 0.1  # min fraction of a device's memory that servers must leave to a learner on the same device
NO_IMAGE = "REPLACE-ME@sha256:REPLACE-ME"
IMAGE = r"^[a-z0-9][a-z0-9._/:-]*@sha256:[0-9a-f]{64}$"


class ServerLaunch(Section):
    """One rollout server."""

    config: str = key("the server's configuration file", min_length=1)
    devices: list[Device] = key("CUDA devices, passed as CUDA_VISIBLE_DEVICES; empty: all of the machine", [])
    max_restarts: int = key(
        "how often it is started again if it ends while the learner runs; ten minutes of service reset the count",
        3,
        req="R40",
        ge=0,
    )
    count: int = key("how many of it; a cluster gives each a machine or a pod of its own", 1, req="R46", ge=1)
    via: list[str] = key("command that runs the server's command elsewhere, such as `[srun, --nodelist=node1]`", [])


class LearnerLaunch(Section):
    """The learner's ranks."""

    config: str = key("the learner's configuration file", min_length=1)
    devices: list[Device] = key("CUDA devices, passed as CUDA_VISIBLE_DEVICES; empty: all of the machine", [])
    nproc: int = key("ranks on each machine, one per device", 1, req="R17", ge=1)
    max_restarts: int = key(
        "how often all ranks are started again after one has failed; they go on from the newest checkpoint", 0, ge=0
    )
    nodes: int = key("machines with `nproc` ranks each", 1, req="R46", ge=1)
    via: list[str] = key("command that runs torchrun elsewhere, once on each machine", [])
    rendezvous: str = key("with several machines: HOST:PORT of the first one, where torchruns meet", "")

    def torchrun(self, config: str, *, endpoint: str = "", run_id: str = "", here: str = "") -> list[str]:
        """Return Python's arguments (after `-m`) that start this machine's ranks with the file `config`:
        `deploy.torchrun` on one machine; on several torch's own torchrun, whose ranks meet at `endpoint`. `here`: this
        machine's address for the other machines; by default the address of its host name."""
        restarts = f"--max-restarts={self.max_restarts}"
        program = ["-m", "learner", "--config", config]
        if self.nodes == 1:
            return ["deploy.torchrun", f"--nproc={self.nproc}", restarts, "--", *program]
        numbers = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.nproc}", restarts]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
        return ["torch.distributed.run", *numbers, *meeting, *([f"--local-addr={here}"] if here else []), *program]


class ClusterLaunch(Section):
    """The keys that a cluster needs, and this machine does not: `rollout-launch --to slurm, kubernetes, skypilot or
    compose`."""

    name: str = key("name of the job, and of what belongs to it", "rollout-matching", pattern=r"^[a-z][a-z0-9-]{0,39}$")
    gpu: str | None = key("kind of GPU; null: no GPUs, a device is a share of a machine", "H200", min_length=1)
    cpus_per_device: int = key("CPU cores for each device", 4, ge=1)
    memory_per_device_gib: int = key("memory for each device", 64, unit="GiB", ge=1)
    server_image: str = key("image of the servers, by digest: `NAME@sha256:...`", NO_IMAGE)
    learner_image: str = key("image of the learner, by digest", NO_IMAGE)
    storage: str | None = key(
        "where `data/` and `runs/` are. Kubernetes: a claim; null: one is made. SkyPilot: a bucket's URL. Compose: a "
        "folder; null: the working directory. Slurm: the working directory",
        None,
        min_length=1,
    )
    storage_gib: int = key("size of a claim that is made", 500, unit="GiB", ge=1)
    time_limit: str = key("longest run of a Slurm job", "24:00:00", pattern=r"^(\d+-)?\d{1,2}:\d\d:\d\d$")
    max_requeues: int = key("how often the job is started again: at its time limit, or after a machine failed", 3, ge=0)
    sbatch: list[SbatchOption] = key("further options of sbatch, such as `--partition=gpu`", [])


class LaunchConfig(Section):
    """Servers and learner of one run: `rollout-launch --config launch.yaml`."""

    servers: list[ServerLaunch] = key("the rollout servers", req="R17", min_length=1)
    learner: LearnerLaunch = key("the learner", req="R17")
    log_dir: str = key("folder of the servers' logs", min_length=1)
    ready_timeout_s: float = key("how long the servers may take to be ready", 600.0, unit="s", gt=0.0)
    cluster: ClusterLaunch = key("for `--to` a cluster", ClusterLaunch(), req="R46")

    @property
    def parts(self) -> dict[str, ServerLaunch | LearnerLaunch]:
        """Return the servers and the learner by their keys in the file."""
        return {**{f"servers[{i}]": server for i, server in enumerate(self.servers)}, "learner": self.learner}


def load_launch_config(path: str, overrides: Sequence[str] = ()) -> LaunchConfig:
    """Return the launcher's file, with KEY=VALUE overrides, for this machine. The configurations that it names are
    checked too. Raises ConfigErrors."""
    document = for_program(load_yaml(path, overrides=overrides), "launcher")
    config = parse(LaunchConfig, document, rules=(rank_devices, one_machine))
    has_token, num_ranks = read_token(os.environ) is not None, config.learner.nodes * config.learner.nproc
    load_learner = partial(load_config, config.learner.config, world_size=num_ranks)
    load_servers = [partial(load_server_config, server.config, has_token=has_token) for server in config.servers]
    # All files are read before the first mistake is raised, so that one file does not hide what is wrong in the others.
    wrong = [*mistakes_of(load_learner), *(mistake for load in load_servers for mistake in mistakes_of(load))]
    if wrong:
        raise ConfigErrors(f"{path} names files that are wrong", mistakes=list(dict.fromkeys(wrong)))
    learner, servers = load_learner(), [load() for load in load_servers]
    if learner.rollout_matching.vllm.server.allow_shared_gpu:
        claims = shares_fit(config, [server.gpu_memory_utilization for server in servers])
    else:
        claims = claimed_once(config)
    if mistakes := list(claims) or list(_server_devices(config, servers)):
        raise ConfigErrors(f"{path} is wrong", mistakes=mistakes)
    return config


def one_machine(config: LaunchConfig) -> Iterator[Mistake]:
    """Yield a mistake for each server or learner that cannot start on this machine: several equal servers, or several
    machines without `via`. Also yield a mistake for `devices` together with `via`."""
    elsewhere = "write it for a cluster (--to slurm, kubernetes or skypilot)"
    for i, server in enumerate(config.servers):
        if server.count > 1:
            remedy = f"{elsewhere}, or make an entry for each, with a port of its own"
            yield Mistake(path=f"servers[{i}].count", found=str(server.count), wanted="1 here", remedy=remedy)
    learner = config.learner
    if learner.nodes > 1 and not (learner.via and learner.rendezvous):
        wanted, remedy = "1 here, or via and rendezvous", f"{elsewhere}, or say how the others are reached"
        yield Mistake(path="learner.nodes", found=str(learner.nodes), wanted=wanted, remedy=remedy)
    for owner, entry in config.parts.items():
        if entry.via and entry.devices:
            wanted, remedy = "none with via, whose command gives them", "remove devices or via"
            yield Mistake(path=f"{owner}.devices", found=f"{entry.devices}", wanted=wanted, remedy=remedy)


def claimed_once(config: LaunchConfig) -> Iterator[Mistake]:
    """Yield a mistake for each device that two processes use."""
    owners: dict[int, str] = {}
    claims = {f"servers[{i}].devices": server.devices for i, server in enumerate(config.servers)}
    for owner, devices in {**claims, "learner.devices": config.learner.devices}.items():
        for device in devices:
            if device in owners:
                wanted = f"each device once ({owners[device]} has it too)"
                remedy = "choose another device, or set vllm.server.allow_shared_gpu: true in the learner's file"
                yield Mistake(path=owner, found=f"device {device}", wanted=wanted, remedy=remedy)
            owners.setdefault(device, owner)


def shares_fit(config: LaunchConfig, shares: Sequence[float]) -> Iterator[Mistake]:
    """Yield a mistake for each device whose servers together take too much of its memory: more than all, or more than
    1 - LEARNER_SHARE if the learner uses the device too. `shares`: the servers' `gpu_memory_utilization`."""
    for device in sorted({device for server in config.servers for device in server.devices}):
        here = [i for i, server in enumerate(config.servers) if device in server.devices]
        taken = sum(shares[i] for i in here)
        most = 1.0 - LEARNER_SHARE if device in config.learner.devices else 1.0
        # Fractions such as 0.3 and 0.6 add up to a little more or less than 0.9 in floating point.
        if taken > most + 1e-9:
            beside = "beside the learner" if most < 1.0 else "together"
            yield Mistake(
                path=f"servers[{here[-1]}].devices",
                found=f"gpu_memory_utilization {taken:.2f} of device {device}, all servers there added up",
                wanted=f"at most {most:.2f} {beside}",
                remedy=f"lower gpu_memory_utilization in the files of servers {here}, or choose another device",
            )


def rank_devices(config: LaunchConfig) -> Iterator[Mistake]:
    """Yield a mistake if the learner's devices are named, but their number is not the number of ranks."""
    devices, nproc = config.learner.devices, config.learner.nproc
    if devices and len(devices) != nproc:
        wanted, remedy = f"one for each of the {nproc} rank(s)", "name as many devices, or change learner.nproc"
        yield Mistake(path="learner.devices", found=f"{len(devices)} device(s)", wanted=wanted, remedy=remedy)


def _server_devices(config: LaunchConfig, servers: Sequence[ServerConfig]) -> Iterator[Mistake]:
    urls: dict[str, int] = {}
    for i, (entry, server) in enumerate(zip(config.servers, servers, strict=True)):
        if entry.devices and len(entry.devices) != server.world_size:
            found, wanted = f"{len(entry.devices)} device(s)", f"{server.world_size}, as {entry.config} asks for"
            remedy = "name as many devices, or change tensor_parallel_size or data_parallel_size there"
            yield Mistake(path=f"servers[{i}].devices", found=found, wanted=wanted, remedy=remedy)
        address = f"{server.host}:{server.port}"
        if address in urls:
            wanted, remedy = f"an address of its own (servers[{urls[address]}] has it too)", "change its port"
            yield Mistake(path=f"servers[{i}].config", found=address, wanted=wanted, remedy=remedy)
        urls.setdefault(address, i)
