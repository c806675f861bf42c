"""A short real run, server and learner as processes of their own: sync seconds, idle share, peak memory.

In: a model folder and scenes. Out: figures from the run's `metrics.jsonl` and from `/proc`. What is measured is the
training loop itself: `rollout_matching_sft` with the demo's settings, a checked full sync before every step. Idle is
what a step spends neither on rollouts nor on computing: its phases `data`, `sync` and `other` (targets, packing and
learning are computing); the sync's share is told apart, for it is the product's work and the rest is waste. The first
steps warm up and do not count. Called by `run.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Figure, median
from bench.runs import serve, start_learner
from deploy.launch import supervised
from shared.addresses import free_ports

WANTED_SYNC_S = 0.5
WANTED_IDLE = 0.05
WARM_UP_STEPS = 3
_SAMPLE_EVERY_S = 0.25
_BUSY = ("rollout_s", "target_s", "pack_s", "learn_s")


def measure(model: Path, data: Path, folder: Path, *, num_steps: int = 15, batch_size: int = 16) -> list[Figure]:
    """Figures of one run of `num_steps` steps after the warm-up; its files go into `folder`."""
    http_port, group_port = free_ports(2)
    server_config = {"model": str(model), "port": http_port, "allowed_image_roots": [str(data)]}
    steps = WARM_UP_STEPS + num_steps
    config = learner_config(model, data, folder, http_port, group_port, steps=steps, batch_size=batch_size)
    with supervised() as processes:
        server = serve(processes, server_config, folder, "server")
        learner = start_learner(processes, config, folder, "run")
        with _PeakMemory({"server": server.popen.pid, "learner": learner.pid}) as memory:
            events = learner.events()
    return [*figures(events), *memory.figures()]


def figures(events: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Of a run's events, after the warm-up."""
    steps = [event["metrics"] | event for event in events if event["event"] == "step"][WARM_UP_STEPS:]
    syncs = [event["seconds"] for event in events if event["event"] == "sync"][WARM_UP_STEPS:]
    seconds = [_seconds_of(step) for step in steps]
    idle = [(s["step_s"] - sum(s.get(name, 0.0) for name in (*_BUSY, "sync_s"))) / s["step_s"] for s in seconds]
    sync_share = [s.get("sync_s", 0.0) / s["step_s"] for s in seconds]
    phases = [name for name in seconds[0] if name not in ("step_s",)]
    return [
        Figure(
            name="sync, all checks included",
            value=median(syncs),
            unit="s",
            wanted=WANTED_SYNC_S,
            at_least=False,
            samples=syncs,
        ),
        Figure(
            name="idle share of a step (not rollout, not computing, not sync)",
            value=median(idle),
            unit="of a step",
            wanted=WANTED_IDLE,
            at_least=False,
            samples=idle,
        ),
        Figure(name="sync's share of a step", value=median(sync_share), unit="of a step", samples=sync_share),
        *(
            Figure(name=f"step: {name.removesuffix('_s')}", value=median([s.get(name, 0.0) for s in seconds]), unit="s")
            for name in phases
        ),
        Figure(name="step", value=median([s["step_s"] for s in seconds]), unit="s"),
    ]


def _seconds_of(step: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in step.items() if name.endswith("_s") and not name.endswith("_per_s")}


class _PeakMemory:
    """The most that each process and all its children held at once (resident set), while used as a context."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = roots
        self._peaks = dict.fromkeys(roots, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def figures(self) -> list[Figure]:
        return [
            Figure(name=f"peak memory of the {name}, children included", value=peak / 2**20, unit="MiB")
            for name, peak in self._peaks.items()
        ]

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            for name, pid in self._roots.items():
                self._peaks[name] = max(self._peaks[name], resident_bytes(pid))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, shared pages counted once where the kernel tells (PSS)."""
    total = 0
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total = 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        lists = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile
        return total
    return total + sum(resident_bytes(int(child)) for children in lists for child in children)


def learner_config(
    model: Path, data: Path, folder: Path, http_port: int, group_port: int, *, steps: int, batch_size: int
) -> dict[str, Any]:
    servers = [{"base_url": f"http://127.0.0.1:{http_port}", "group_port": group_port}]
    matching = {
        "rollout_backend": "vllm",
        "decode_batch_size": 64,
        "decoding": {"temperature": 0.0, "max_new_tokens": 128},
        "vllm": {"mode": "server", "server": {"servers": servers}, "sync": {"mode": "full"}},
    }
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(data / "train.jsonl")},
        "task": {"container": "index_map", "coordinates": "tokens", "iou_threshold": 0.3},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": steps,
            "effective_batch_size": batch_size,
            "per_device_train_batch_size": batch_size,
            "learning_rate": 3.0e-4,
            "bf16": True,
            "eval_on_start": False,
            "eval_on_end": False,
        },
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": matching}},
        "global_max_length": 9216,
    }
