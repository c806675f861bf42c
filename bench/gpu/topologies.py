"""Rollout GPUs + learner GPUs on one node, 20 steps in each mode: `python -m bench.gpu.topologies --topology 3+1`.

A Qwen3-VL of half a billion parameters with random weights (its rollouts are noise up to the token limit, so every
step rolls out and learns as much as any other) on the digit scenes; one server per rollout GPU, one torchrun rank per
learner GPU. Modes: `rollout_matching_sft`, and `stage2_ab_training` in step and ahead of it. Told per mode: steps per
second, where a step's time goes, how busy each GPU is, the syncs.

Weights move in memory only, and this shows it: once all programs have loaded, the model's weights file is taken away
until the run has ended; no large file appears anywhere they could write; and all bytes that they gave to write calls
are counted against the bytes that the syncs brought over.

In `--out`: `topologies.json`, `topologies.md`, and per mode the run's `metrics.jsonl` and its report with the timeline.
Each mode has a time limit, and what has ended is told whatever happens. Without a GPU: `--size tiny`, all on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances
from bench.gpu.devices import visible
from bench.gpu.topologies_report import WARM_UP_STEPS, markdown, told, watched
from bench.gpu.watch import Watch
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data
from deploy.demo.model import Size
from deploy.demo.model import build as build_model
from deploy.launch import Process, Processes, learner_argv, start_server, supervised, wait_ready
from learner.report.__main__ import write_report
from learner.run.checkpoint import write_atomically
from shared.addresses import free_ports
from shared.config.parse import write_yaml
from shared.errors import DeadlineError, ProjectError, ServerError

MODES: Mapping[str, dict[str, Any] | None] = {
    "rollout_matching_sft": None,
    "stage2_ab_training, in step": {"schedule": {"b_ratio": 0.75}},
    "stage2_ab_training, ahead": {"schedule": {"b_ratio": 0.75}, "async_actor_learner": {"enabled": True}},
}
PER_DEVICE = 32
KV_CACHE_BYTES = 16 << 30
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    rollout_gpus: int
    learner_gpus: int

    @classmethod
    def read(cls, text: str) -> Topology:
        """ "3+1" is 3 rollout GPUs and 1 learner GPU."""
        parts = text.split("+")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise typer.BadParameter(f"found {text!r}, wanted ROLLOUT+LEARNER such as 3+1")
        return cls(rollout_gpus=int(parts[0]), learner_gpus=int(parts[1]))

    @property
    def name(self) -> str:
        return f"{self.rollout_gpus}+{self.learner_gpus}"

    def devices(self, on_gpu: bool) -> tuple[list[list[int]], list[int]]:
        """Each server's, and the learner's; none on the CPU."""
        if not on_gpu:
            return [[] for _ in range(self.rollout_gpus)], []
        last = self.rollout_gpus + self.learner_gpus
        return [[i] for i in range(self.rollout_gpus)], list(range(self.rollout_gpus, last))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is the same for all topologies and modes."""

    model: Path
    data: Path
    folder: Path
    steps: int
    samples_per_step: int
    max_new_tokens: int
    on_gpu: bool
    limit_s: float
    modes: tuple[str, ...]


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    topology: Annotated[list[str] | None, typer.Option(help="ROLLOUT+LEARNER GPUs; again for each.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of: {'; '.join(MODES)}; again for each.")
    ] = None,
    size: Annotated[Size, typer.Option(help="Of the model.")] = "0.5B",
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 1, help="Optimizer steps.")] = 20,
    samples: Annotated[
        int, typer.Option(min=1, help="Per step, over all ranks: a multiple of 32 x ranks, or fewer.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a rollout.")] = 192,
    limit_s: Annotated[float, typer.Option(help="A mode is given up then.")] = 150.0,
    scratch: Annotated[Path, typer.Option(help="For the model: large and fast.")] = Path("/dev/shm"),
) -> None:
    """Run every mode in every topology that this machine has the GPUs for; print a table."""
    num_gpus = torch.cuda.device_count()
    wanted = [Topology.read(text) for text in topology or ["3+1", "2+2"]]
    if unknown := set(mode or ()) - MODES.keys():
        raise typer.BadParameter(f"found {sorted(unknown)}, wanted some of {list(MODES)}", param_hint="--mode")
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="topologies-", dir=scratch))
    rows: list[dict[str, Any]] = []
    try:
        work = Work(
            model=folder / "model",
            data=folder / "data",
            folder=folder,
            steps=steps,
            samples_per_step=samples,
            max_new_tokens=max_new_tokens,
            on_gpu=num_gpus > 0,
            limit_s=limit_s,
            modes=tuple(mode or MODES),
        )
        build_model(work.model, size)
        build_data(
            Build(train=(steps + 4) * samples, val=0, test=0, style="hard"), work.data, workers=os.cpu_count() or 1
        )
        for one in wanted:
            if work.on_gpu and one.rollout_gpus + one.learner_gpus > num_gpus:
                say(f"{one.name} left out: this machine has {num_gpus} GPUs")
                continue
            for row in _topology(one, work, out):
                rows.append(row)
                write_atomically(
                    out / "topologies.json", json.dumps({**circumstances(), "runs": rows}, indent=1) + "\n"
                )
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = markdown(rows)
    write_atomically(out / "topologies.md", text)
    print(text, flush=True)
    sys.exit(not rows or any("error" in row for row in rows))


def _topology(topology: Topology, work: Work, out: Path) -> Iterator[dict[str, Any]]:
    """A row per mode; servers are started once, and serve one learner after the other."""
    with supervised() as processes:
        try:
            servers = _serve(processes, topology, work)
        except ProjectError as error:
            yield {"topology": topology.name, "mode": "all", "error": str(error)}
            return
        for mode in work.modes:
            kept = out / f"{topology.name}-{mode.replace(', ', '-').replace(' ', '_')}"
            try:
                yield _mode(processes, topology, mode, servers, work, kept)
            except ProjectError as error:
                say(f"{topology.name}, {mode}: {error}")
                yield {"topology": topology.name, "mode": mode, "error": str(error)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    process: Process
    url: str
    group_port: int


def _serve(processes: Processes, topology: Topology, work: Work) -> list[Served]:
    devices, _ = topology.devices(work.on_gpu)
    ports = free_ports(2 * topology.rollout_gpus)
    served = []
    for i, mine in enumerate(devices):
        path = work.folder / f"server-{topology.name}-{i}.yaml"
        write_yaml(path, server_config(work, ports[2 * i]), "bench")
        process, url = start_server(processes, str(path), log=path.with_suffix(".log"), devices=visible(*mine))
        served.append(Served(process=process, url=url, group_port=ports[2 * i + 1]))
    for one in served:
        seconds = wait_ready(one.process, one.url, 2 * work.limit_s)
        say(f"{topology.name}: {one.url} ready after {seconds:.0f} s")
    return served


def server_config(work: Work, port: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": str(work.model),
        "port": port,
        "allowed_image_roots": [str(work.data)],
        "max_model_len": 1024,
        "max_num_seqs": 64,
    }
    if not work.on_gpu:
        return {**config, "enforce_eager": True, "cpu_threads": 1}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64]}
    engine_args = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "compilation_config": graphs}
    return {**config, "gpu_memory_utilization": 0.5, "engine_args": engine_args}


def learner_config(
    topology: Topology, mode: str, servers: Sequence[Served], work: Work, run_dir: Path
) -> dict[str, Any]:
    per_device = min(PER_DEVICE, work.samples_per_step // topology.learner_gpus)
    entries = [{"base_url": one.url, "group_port": one.group_port} for one in servers]
    stage2_ab = MODES[mode]
    config: dict[str, Any] = {
        "model": {"path": str(work.model), "dtype": "bfloat16" if work.on_gpu else "float32"},
        "data": {"train": str(work.data / "train.jsonl"), "num_workers": 4 if work.on_gpu else 0},
        "task": {"iou_threshold": 0.3},
        "training": {
            "output_dir": str(run_dir),
            "seed": 3,
            "max_steps": work.steps,
            "effective_batch_size": work.samples_per_step,
            "per_device_train_batch_size": per_device,
            "learning_rate": 1e-5,
            "bf16": True,
            "save_on_end": False,
        },
        "logging": {"tensorboard": False, "progress_bar": False},
        "custom": {
            "trainer_variant": mode.partition(",")[0],
            "extra": {
                "rollout_matching": {
                    "decode_batch_size": 64,
                    "decoding": {"temperature": 1.0, "max_new_tokens": work.max_new_tokens},
                    "vllm": {"mode": "server", "server": {"servers": entries}},
                }
            },
        },
        "global_max_length": 1024 * per_device,
    }
    if stage2_ab is not None:
        config["stage2_ab"] = stage2_ab
    return config


def _mode(
    processes: Processes, topology: Topology, mode: str, servers: Sequence[Served], work: Work, kept: Path
) -> dict[str, Any]:
    """One run, watched from its first step on. Raises ServerError, DeadlineError."""
    run_dir = work.folder / kept.name
    path, log = run_dir.with_suffix(".yaml"), run_dir.with_suffix(".log")
    write_yaml(path, learner_config(topology, mode, servers, work, run_dir), "bench")
    _, devices = topology.devices(work.on_gpu)
    began = time.monotonic()
    learner = processes.start(
        "learner", learner_argv(str(path), topology.learner_gpus), devices=visible(*devices), log=log
    )
    metrics = run_dir / "metrics.jsonl"
    _wait(
        learner, log, began + work.limit_s, until=lambda: metrics.is_file() and '"event": "step"' in metrics.read_text()
    )
    programs = {f"server {i}": one.process.popen.pid for i, one in enumerate(servers)}
    weights = work.model / "model.safetensors"
    # Where programs could leave a file: what they were given, and where temporary files go.
    folders = [work.folder, Path(tempfile.gettempdir()), Path("/dev/shm")]
    watch = Watch(
        programs={**programs, "learner": learner.popen.pid}, folders=folders, large_bytes=weights.stat().st_size // 20
    )
    with _taken_away(weights), watch:
        code = _wait(learner, log, began + work.limit_s)
    if code != 0:
        raise ServerError("the run failed", found=f"exit code {code}: {_last_words(log)}", wanted="0")
    seconds = time.monotonic() - began
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(metrics, kept / "metrics.jsonl")
    shutil.copy(write_report(run_dir), kept / "report.html")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    row = {"topology": topology.name, "mode": mode, "run_s": round(seconds, 1), **told(events), **watched(watch)}
    say(f"{topology.name}, {mode}: {row['steps_per_s']:.2f} steps/s")
    return row


def _wait(learner: Process, log: Path, deadline: float, until: Any = lambda: False) -> int | None:
    """The exit code, or None where `until` came first. Raises ServerError where it failed before, DeadlineError."""
    while (code := learner.popen.poll()) is None:
        if until():
            return None
        if time.monotonic() > deadline:
            learner.stop(5.0)
            raise DeadlineError("the run did not end in time", found=_last_words(log), wanted="an end within --limit-s")
        time.sleep(_POLL_S)
    return code


@contextmanager
def _taken_away(file: Path) -> Iterator[None]:
    """No program can read the file inside."""
    away = file.with_name(".taken-away")
    file.rename(away)
    away.chmod(0)
    try:
        yield
    finally:
        away.chmod(0o644)
        away.rename(file)


def _last_words(log: Path, num_lines: int = 5) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return " | ".join(lines[-num_lines:])


def say(text: str) -> None:
    print(f"[topologies] {text}", flush=True)


if __name__ == "__main__":
    typer.run(main)
