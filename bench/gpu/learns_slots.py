"""Where runs run, several at a time: a slot has a rollout server of its own, which serves one learner after the other.

In: slots and a queue of runs. Out: each run's end, told to a callback: its exit code, or None where its time was up. A
failed run costs its slot nothing; a slot whose server has ended takes no more runs.

Server and learner of a slot are on different GPUs, for weights travel by NCCL, which wants it so; with two GPUs every
other slot has them the other way round. With one GPU there are no servers: a learner's engine is beside its training.
Without a GPU both are on the CPU. Called by `learns.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bench.gpu.devices import visible
from deploy.launch import Process, Processes, start_server, wait_ready
from shared.addresses import free_ports
from shared.config.parse import write_yaml
from shared.errors import ProjectError

MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 2 << 30
_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One slot's devices and addresses."""

    index: int
    server_devices: tuple[int, ...] = ()
    learner_devices: tuple[int, ...] = ()
    server_url: str = ""  # empty: the engine is in the learner's process
    group_port: int = 0
    data_workers: int = 0

    def vllm(self) -> dict[str, Any]:
        """The learner's `vllm` section."""
        if self.server_url:
            servers = [{"base_url": self.server_url, "group_port": self.group_port}]
            return {"mode": "server", "server": {"servers": servers}}
        colocate = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.12, "max_model_len": MAX_MODEL_LEN}
        return {"mode": "colocate", **colocate}


def places(num_gpus: int, slots_per_gpu: int, *, data_workers: int) -> list[Place]:
    """Slots for this machine; their servers' addresses are chosen when they start."""
    if num_gpus == 0:
        return [Place(index=0, server_url="cpu")]
    if num_gpus == 1:
        return [Place(index=i, learner_devices=(0,), data_workers=data_workers) for i in range(slots_per_gpu)]
    return [
        Place(
            index=i,
            server_devices=(i % num_gpus,),
            learner_devices=((i + 1) % num_gpus,),
            server_url="gpu",
            data_workers=data_workers,
        )
        for i in range(slots_per_gpu * num_gpus)
    ]


class Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


@dataclass
class Slot(Generic[R]):
    place: Place
    server: Process | None = None
    learner: Process | None = None
    run: R | None = None
    began: float = field(default=0.0)

    @property
    def lost(self) -> bool:
        return self.server is not None and self.server.popen.poll() is not None


def open_slots(
    processes: Processes, where: Sequence[Place], *, model: Path, image_root: Path, folder: Path, eager: bool
) -> list[Slot[Any]]:
    """Start all servers, and return at once."""
    return [_open(processes, place, model, image_root, folder, eager) for place in where]


def _open(processes: Processes, place: Place, model: Path, image_root: Path, folder: Path, eager: bool) -> Slot[Any]:
    if not place.server_url:
        return Slot(place=place)
    port, group_port = free_ports(2)
    config = server_config(model, image_root, port, on_gpu=bool(place.server_devices), eager=eager)
    path = folder / f"server-{place.index}.yaml"
    write_yaml(path, config, "bench")
    log = folder / f"server-{place.index}.log"
    server, url = start_server(processes, str(path), log=log, devices=visible(*place.server_devices))
    opened = Place(
        index=place.index,
        server_devices=place.server_devices,
        learner_devices=place.learner_devices,
        server_url=url,
        group_port=group_port,
        data_workers=place.data_workers,
    )
    return Slot(place=opened, server=server)


def server_config(model: Path, image_root: Path, port: int, *, on_gpu: bool, eager: bool) -> dict[str, Any]:
    """CUDA graphs of decoding, and no compilation: a small model decodes as fast, and the server starts sooner."""
    config: dict[str, Any] = {
        "model": str(model),
        "port": port,
        "allowed_image_roots": [str(image_root)],
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 256 if on_gpu else 64,
        "enforce_eager": eager or not on_gpu,
    }
    if not on_gpu:
        return {**config, "cpu_threads": 1}
    engine_args: dict[str, Any] = {"kv_cache_memory_bytes": KV_CACHE_BYTES}
    if not eager:
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(_GRAPH_SIZES)}
        engine_args["compilation_config"] = {"mode": 0, **graphs}
    return {**config, "gpu_memory_utilization": 0.08, "engine_args": engine_args}


def wait_open(slots: Sequence[Slot[Any]], timeout_s: float, say: Callable[[str], None]) -> list[Slot[Any]]:
    """The slots whose servers became ready in time; of the others it is said why."""
    deadline = time.monotonic() + timeout_s
    ready = []
    for slot in slots:
        try:
            if slot.server is not None:
                wait_ready(slot.server, slot.place.server_url, max(1.0, deadline - time.monotonic()))
            ready.append(slot)
        except ProjectError as error:
            say(f"slot {slot.place.index} is left out: {error}")
    return ready


def run_all(
    processes: Processes,
    slots: Sequence[Slot[R]],
    *,
    next_run: Callable[[], R | None],  # None: nothing can begin now
    configure: Callable[[R, Place], tuple[Mapping[str, Any], Sequence[str]]],  # -> configuration, command without path
    ended: Callable[[R, int | None], None],
    folder: Path,
    deadline: float,
    run_limit_s: float,
) -> None:
    """Run until nothing is left or `deadline` (monotonic) has passed. What still runs then is stopped, and not told."""
    while time.monotonic() < deadline:
        for slot in slots:
            _look(slot, ended, run_limit_s)
            if slot.run is None and not slot.lost and (run := next_run()) is not None:
                config, command = configure(run, slot.place)
                path = folder / f"{run.name}.yaml"
                write_yaml(path, dict(config), "bench")
                slot.learner = processes.start(
                    run.name,
                    [*command, str(path)],
                    devices=visible(*slot.place.learner_devices),
                    log=folder / f"{run.name}.log",
                )
                slot.run, slot.began = run, time.monotonic()
        if all(slot.run is None for slot in slots):
            return
        time.sleep(_POLL_S)
    for slot in slots:
        if slot.learner is not None and slot.run is not None:
            slot.learner.stop(1.0)


def _look(slot: Slot[R], ended: Callable[[R, int | None], None], run_limit_s: float) -> None:
    """Take note of the slot's run where it has ended, or has to."""
    if slot.run is None or slot.learner is None:
        return
    code: int | None = slot.learner.popen.poll()
    if code is None:
        if time.monotonic() - slot.began < run_limit_s and not slot.lost:
            return
        slot.learner.stop(2.0)
    run, slot.run, slot.learner = slot.run, None, None
    ended(run, code)
