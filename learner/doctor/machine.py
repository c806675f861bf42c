"""Checks of this machine: versions, limits, memory, disk, devices, ports, and a broadcast. `CHECKS` lists them."""

from __future__ import annotations

import resource
import secrets
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import httpx
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from learner.config.memory import FILLED, engine_share, needed_bytes, of_run
from learner.config.modes import uses_servers
from learner.doctor.finding import Check, Finding, Situation, fail, ok, skipped, warn
from shared.addresses import free_port, is_free, is_loopback
from shared.errors import ProjectError
from shared.sync.calls import Operation
from shared.sync.group import start_join

DISTRIBUTION = "rollout-matching"
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = 1 << 30
# Size of a checkpoint / size of its weights. A checkpoint also has two float32 moments per weight, and each takes twice
# the bytes of a 16-bit weight.
CHECKPOINT_FACTOR = 1 + 2 * 2
BROADCAST_BYTES = 1 << 20
BROADCAST_TIMEOUT_S = 10.0


def python_version(situation: Situation) -> Finding:
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    found = ".".join(map(str, sys.version_info[:3]))
    if SpecifierSet(wanted).contains(found):
        return ok(f"Python {found}")
    return fail(f"Python {found}, wanted {wanted}", "make setup with a Python of that range")


def library_versions(situation: Situation) -> Finding:
    """Compare installed distributions with the ranges in pyproject.toml. Extras may be missing."""
    installed: dict[str, str] = {
        canonicalize_name(dist.name): dist.version for dist in metadata.distributions() if dist.name
    }
    return compare_libraries([Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()], installed)


def compare_libraries(requirements: list[Requirement], installed: Mapping[str, str]) -> Finding:
    wrong = []
    for requirement in requirements:
        found = installed.get(canonicalize_name(requirement.name))
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if found is None:
            if not is_extra:
                wrong.append(f"{requirement.name} is not installed")
        # A CPU build of torch has a version such as 2.13.0+cpu.
        elif not requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} {found}, wanted {requirement.specifier}")
    if wrong:
        return fail("; ".join(wrong), "make setup installs versions that fit")
    return ok(f"torch {installed.get('torch', '?')}, transformers {installed.get('transformers', '?')}: in range")


def open_files(situation: Situation) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return ok(f"up to {soft} open files")
    return warn(f"up to {soft} open files, wanted {MIN_OPEN_FILES}", f"ulimit -n {MIN_OPEN_FILES} (at most {hard})")


def shared_memory(situation: Situation, folder: Path = Path("/dev/shm")) -> Finding:
    """Check the size of shared memory, through which DataLoader workers, NCCL and vLLM exchange data."""
    if not folder.is_dir():
        return skipped(f"no {folder} on this system")
    free = shutil.disk_usage(folder).free
    if free >= MIN_SHARED_MEMORY_BYTES:
        return ok(f"{_size(free)} free in {folder}")
    return warn(f"{_size(free)} free in {folder}, wanted {_size(MIN_SHARED_MEMORY_BYTES)}", "docker run --shm-size=8g")


def disk_space(situation: Situation) -> Finding:
    """Check the space for the checkpoints that the run keeps, estimated from the size of the model's own files."""
    training = situation.config.training
    model = Path(situation.config.model.path)
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    output_dir = Path(training.output_dir).absolute()
    # The folder of the run may not exist yet.
    folder = next(path for path in [output_dir, *output_dir.parents] if path.exists())
    free = shutil.disk_usage(folder).free
    if not num_bytes:
        return skipped(f"{_size(free)} free at {folder}; no *.safetensors in model.path {model} to estimate from")
    # one checkpoint more than the limit, because a new one is written before the oldest is deleted
    kept = (training.save_total_limit or 1) + 1
    need = num_bytes * CHECKPOINT_FACTOR * kept
    text = f"{_size(free)} free at {folder}, {kept} checkpoints need about {_size(need)}"
    remedy = "free space, change training.output_dir, or lower training.save_total_limit"
    return ok(text) if free >= need else fail(text, remedy)


def gpu_memory(situation: Situation) -> Finding:
    """Compare the memory that learning takes, as estimated, with the memory of this machine's first GPU."""
    config = situation.config
    learning = of_run(config, situation.plan.world_size)
    if learning is None:
        return skipped("model.path has no config.json on this machine to estimate from")
    if not torch.cuda.is_available():
        return skipped("no GPU on this machine")
    total = torch.cuda.get_device_properties(0).total_memory
    needed = needed_bytes(config, learning, total)
    engine = f", {share:.0%} for vLLM in it or in turn with it" if (share := engine_share(config)) else ""
    text = f"the run takes about {_size(needed)} of {_size(total)}{engine}"
    if needed <= FILLED * total:
        return ok(text)
    remedy = "lower global_max_length, set model.gradient_checkpointing: true, or train with model.lora"
    if engine:
        remedy += "; or lower vllm.gpu_memory_utilization, or set offload (R20)"
    return warn(f"{text}: it may not fit", remedy)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def devices(situation: Situation) -> Finding:
    """Check that this machine has the devices of a launch. `deploy.launch_file` makes the other checks of devices."""
    if situation.devices is None:
        return skipped("the file of a launch names them: rollout-launch --config launch.yaml --check")
    num_gpus = torch.cuda.device_count()
    missing = [str(device) for device in situation.devices if device >= num_gpus]
    # CUDA_VISIBLE_DEVICES renumbers devices, so the file's numbers cannot be compared.
    if missing and "CUDA_VISIBLE_DEVICES" not in situation.environment:
        text = f"launch.yaml names device {', '.join(missing)}, and this machine has {num_gpus} GPUs"
        return warn(text, "correct devices, use the machine that has them, or one GPU for both (vllm.mode: colocate)")
    return ok(f"{len(situation.devices)} devices" if situation.devices else "no devices named: everything on CPU")


def ports(situation: Situation) -> Finding:
    """Check the ports at which servers of this machine will listen. Group ports open when a learner joins. HTTP ports
    are checked for servers that a launch will start."""
    if not uses_servers(situation.config):
        return skipped("the run uses no servers")
    mine = [entry for entry in situation.plan.servers if is_loopback(httpx.URL(entry.base_url).host)]
    if not mine:
        return skipped("all servers are on other machines")
    if situation.devices is not None:
        urls = [entry.base_url for entry in mine if not is_free(httpx.URL(entry.base_url).port or 80)]
        if urls:
            return fail(f"in use: {', '.join(urls)}", "stop the servers that run there, or give these other ports")
    taken = [str(entry.group_port) for entry in mine if not is_free(entry.group_port)]
    if taken:
        remedy = "stop the learner that uses the servers, or change group_port"
        return warn(f"in use: {', '.join(taken)}", remedy)
    return ok(f"free: {', '.join(str(entry.group_port) for entry in mine)}")


def local_broadcast(situation: Situation) -> Finding:
    """Send 1 MB from one thread to another, with the communicator that carries weights on CPU."""
    port, secret = free_port(), secrets.token_bytes(32)
    sent = torch.arange(BROADCAST_BYTES, dtype=torch.int64).to(torch.uint8)
    received = torch.zeros_like(sent)

    def take_part(rank: int, tensor: torch.Tensor) -> None:
        group = start_join("tcp", "127.0.0.1", port, rank, 2, BROADCAST_TIMEOUT_S, secret=secret).result()
        try:
            group.broadcast(tensor, 1)
        finally:
            group.close()

    sides = [
        Operation(partial(take_part, rank, tensor), 3 * BROADCAST_TIMEOUT_S, f"broadcast on rank {rank}")
        for rank, tensor in enumerate((received, sent))
    ]
    try:
        for side in sides:
            side.result()
    except ProjectError as error:
        return fail(str(error), "check whether a firewall blocks 127.0.0.1")
    if not torch.equal(sent, received):
        return fail("1 MB through TCP came with other bytes", "check the memory of this machine")
    return ok("1 MB through TCP, every byte right")


CHECKS: dict[str, Check] = {
    "python": python_version,
    "libraries": library_versions,
    "open files": open_files,
    "shared memory": shared_memory,
    "disk": disk_space,
    "GPU memory": gpu_memory,
    "devices": devices,
    "ports": ports,
    "broadcast": local_broadcast,
}
