"""Rollout GPUs + learner GPUs on one node, 20 steps in each mode: `python -m bench.topologies --topology 3+1`.

A Qwen3-VL of half a billion parameters with random weights on the digit scenes. Its rollouts are noise up to the token
limit, so all steps roll out and learn the same amount. One server per rollout GPU, one torchrun rank per
learner GPU. Modes: `rollout_matching_sft`, and `stage2_ab_training` in step and ahead of it. Reported per mode: steps
per second, where a step's time goes, how busy each GPU is, the syncs.

It also shows that weights move in memory only. When all programs have loaded, the model's weights file is moved away
until the run has ended. No large file appears anywhere they could write. All bytes given to write calls are counted and
compared with the bytes that the syncs sent.

In `--out`: `topologies.json`, `topologies.md`, and per mode the run's `metrics.jsonl` and its report with the timeline.
Each mode has a time limit, and what has ended is always reported. Without a GPU: `--size tiny`, all on the CPU. With
too few GPUs: `--shared`. Such a run shows that the parts work together; its seconds mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances, markdown_table
from bench.models import VisionSize, vision_model
from bench.runs import (
    Events,
    Server,
    learner_config,
    read_events,
    say,
    served_by,
    small_server,
    start_learner,
    start_server,
    steps_of,
)
from bench.watch import Watched, watch
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data
from deploy.launch import Processes, supervised
from learner.report.page import write_report
from learner.run.files import write_atomically
from shared.errors import ProjectError

WARM_UP_STEPS = 3
MODES: Mapping[str, dict[str, Any] | None] = {
    "rollout_matching_sft": None,
    "stage2_ab_training, in step": {"schedule": {"b_ratio": 0.75}},
    "stage2_ab_training, ahead": {"schedule": {"b_ratio": 0.75}, "async_actor_learner": {"enabled": True}},
}
PER_DEVICE = 32
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
_PHASES = ("rollout_s", "learn_s", "sync_s", "wait_s", "data_s", "target_s", "pack_s", "other_s")


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

    def devices(self, num_gpus: int) -> tuple[list[list[int]], list[int]]:
        """Return the devices of each server and of the learner; none on the CPU. Where there are too few, one rank of
        the learner has the last one, and the servers share the others, or that one."""
        if not num_gpus:
            return [[] for _ in range(self.rollout_gpus)], []
        last = self.rollout_gpus + self.learner_gpus
        if last <= num_gpus:
            return [[i] for i in range(self.rollout_gpus)], list(range(self.rollout_gpus, last))
        others = max(1, num_gpus - 1)
        return [[i % others] for i in range(self.rollout_gpus)], [num_gpus - 1]

    def fits(self, num_gpus: int, *, shared: bool) -> bool:
        """True if the machine has a GPU for everyone, is a CPU, or GPUs may be `shared`: by one rank only."""
        enough = self.rollout_gpus + self.learner_gpus <= num_gpus
        return not num_gpus or enough or (shared and self.learner_gpus == 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The parts that are the same for all topologies and modes, here and in `bench.photographs`."""

    model: Path
    data: Path
    folder: Path
    steps: int
    samples_per_step: int
    max_new_tokens: int
    num_gpus: int  # this machine's; 0: all on the CPU
    limit_s: float
    modes: tuple[str, ...]
    row_tokens: int | None = None  # longest packed row; None: a micro-batch of full-length samples
    shared: bool = False  # GPUs

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    topology: Annotated[list[str] | None, typer.Option(help="ROLLOUT+LEARNER GPUs; again for each.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of: {'; '.join(MODES)}; again for each.")
    ] = None,
    size: Annotated[VisionSize, typer.Option(help="Of the model.")] = "0.5B",
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 1, help="Optimizer steps.")] = 20,
    samples: Annotated[
        int, typer.Option(min=1, help="Per step, over all ranks: a multiple of 32 x ranks, or fewer.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of a rollout.")] = 192,
    row_tokens: Annotated[
        int | None, typer.Option(help="Longest packed row; default: a micro-batch of full-length samples.")
    ] = None,
    ending: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the vocabulary that ends an answer; 0: none does.")
    ] = 0.0,
    shared: Annotated[
        bool, typer.Option(help="Several servers, and a learner of one rank, on a GPU, where there are too few.")
    ] = False,
    limit_s: Annotated[float, typer.Option(help="Time for a mode.")] = 150.0,
    scratch: Annotated[Path, typer.Option(help="For the model: large and fast.")] = Path("/dev/shm"),
) -> None:
    """Run every mode in every topology that this machine has the GPUs for; print a table."""
    wanted = [Topology.read(text) for text in topology or ["3+1", "2+2"]]
    if unknown := set(mode or ()) - MODES.keys():
        raise typer.BadParameter(f"found {sorted(unknown)}, wanted some of {list(MODES)}", param_hint="--mode")
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="topologies-", dir=scratch))
    rows: list[dict[str, Any]] = []
    try:
        model = vision_model(folder, size)
        if ending:
            answers_end(model, ending)
        work = Workload(
            model=model,
            data=folder / "data",
            folder=folder,
            steps=steps,
            samples_per_step=samples,
            max_new_tokens=max_new_tokens,
            row_tokens=row_tokens,
            num_gpus=torch.cuda.device_count(),
            shared=shared,
            limit_s=limit_s,
            modes=tuple(mode or MODES),
        )
        build_data(
            Build(train=(steps + 4) * samples, val=0, test=0, style="hard"), work.data, workers=os.cpu_count() or 1
        )
        what: dict[str, Any] = {"size": size, "samples": samples, "max_new_tokens": max_new_tokens, "ending": ending}
        what |= {"row_tokens": row_tokens, "shared": shared}
        for row in _rows(wanted, work, out):
            rows.append(row)
            found = {**circumstances(), "what": what, "runs": rows}
            write_atomically(out / "topologies.json", json.dumps(found, indent=1) + "\n")
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = markdown(rows)
    write_atomically(out / "topologies.md", text)
    print(text, flush=True)
    sys.exit(not rows or any("error" in row for row in rows))


def _rows(topologies: Sequence[Topology], work: Workload, out: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per mode of each topology that this machine has the GPUs for."""
    for one in topologies:
        if one.fits(work.num_gpus, shared=work.shared):
            yield from _topology(one, work, out)
        else:
            say(f"{one.name} left out: this machine has {work.num_gpus} GPUs")


def _topology(topology: Topology, work: Workload, out: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per mode. The servers are started once, and serve one learner after the other."""
    with supervised() as processes:
        try:
            servers = serve_all(processes, topology, server_config(work), work)
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


def serve_all(processes: Processes, topology: Topology, config: Mapping[str, Any], work: Workload) -> list[Server]:
    """Return a topology's servers when all are ready. Raises ServerError, DeadlineError."""
    devices, _ = topology.devices(work.num_gpus)
    servers = [
        start_server(processes, work.folder, f"server-{topology.name}-{i}", config, devices=mine)
        for i, mine in enumerate(devices)
    ]
    for server in servers:
        say(f"{topology.name}: {server.url} ready after {server.wait_ready():.0f} s")
    return servers


def answers_end(model: Path, share: float) -> None:
    """Let this share of the vocabulary end an answer. A random model never ends one by itself, and then all answers of
    a step end together, as no trained model's do."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text())
    vocab_size = json.loads((model / "config.json").read_text())["text_config"]["vocab_size"]
    step = max(1, round(1 / share))
    config["eos_token_id"] = sorted({*config["eos_token_id"], *range(step - 1, vocab_size, step)})
    path.write_text(json.dumps(config))


def server_config(work: Workload) -> dict[str, Any]:
    return small_server(
        work.model,
        work.data,
        on_gpu=work.on_gpu,
        max_num_seqs=64,
        graph_sizes=_GRAPH_SIZES,
        gpu_memory_utilization=0.1 if work.shared else 0.5,
        kv_cache_bytes=(4 if work.shared else 16) << 30,
    )


def run_config(
    topology: Topology, mode: str, servers: Sequence[Server], work: Workload, run_dir: Path
) -> dict[str, Any]:
    per_device = min(PER_DEVICE, work.samples_per_step // topology.learner_gpus)
    rollout_devices, devices = topology.devices(work.num_gpus)
    vllm = served_by(*servers)
    vllm["server"]["allow_shared_gpu"] = any(set(devices) & set(own) for own in rollout_devices)
    matching = {
        "decode_batch_size": 64,
        "decoding": {"temperature": 1.0, "max_new_tokens": work.max_new_tokens},
        "vllm": vllm,
    }
    return learner_config(
        work.model,
        work.data / "train.jsonl",
        run_dir,
        steps=work.steps,
        batch_size=work.samples_per_step,
        per_device=per_device,
        variant=mode.partition(",")[0],
        matching=matching,
        model={"dtype": "bfloat16" if work.on_gpu else "float32"},
        data={"num_workers": 4 if work.on_gpu else 0},
        task={"iou_threshold": 0.3},
        training={"seed": 3, "learning_rate": 1e-5},
        logging={"trackers": []},
        global_max_length=work.row_tokens or 1024 * per_device,
        stage2_ab=MODES[mode],
    )


def _mode(
    processes: Processes, topology: Topology, mode: str, servers: Sequence[Server], work: Workload, kept: Path
) -> dict[str, Any]:
    """Make one run, watched from its first step on. Raises ServerError, DeadlineError."""
    run_dir = work.folder / kept.name
    _, devices = topology.devices(work.num_gpus)
    began = time.monotonic()
    learner = start_learner(
        processes,
        work.folder,
        kept.name,
        run_config(topology, mode, servers, work, run_dir),
        ranks=topology.learner_gpus,
        devices=devices,
    )
    learner.wait(work.limit_s, until=lambda: bool(steps_of(read_events(run_dir))))
    programs = {f"server {i}": server.pid for i, server in enumerate(servers)} | {"learner": learner.pid}
    weights = work.model / "model.safetensors"
    large_bytes = weights.stat().st_size // 20
    # Programs could write files here: their own folders, and those for temporary files.
    folders = [work.folder, Path(tempfile.gettempdir()), Path("/dev/shm")]
    with taken_away(weights), watch(programs, folders, large_bytes) as seen:
        learner.wait(work.limit_s - (time.monotonic() - began))
    seconds = time.monotonic() - began
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(run_dir / "metrics.jsonl", kept / "metrics.jsonl")
    shutil.copy(write_report(run_dir), kept / "report.html")
    row = {
        "topology": topology.name,
        "mode": mode,
        "run_s": round(seconds, 1),
        **summary(read_events(run_dir)),
        **watched(seen),
    }
    say(f"{topology.name}, {mode}: {row['steps_per_s']:.2f} steps/s, wall {row['wall']}")
    return row


@contextmanager
def taken_away(file: Path) -> Iterator[None]:
    """Inside, no program can read the file."""
    away = file.with_name(".taken-away")
    file.rename(away)
    away.chmod(0)
    try:
        yield
    finally:
        away.chmod(0o644)
        away.rename(file)


# ---- the report ----------------------------------------------------------------------------------------------------


def summary(events: Events) -> dict[str, Any]:
    """Return the figures of a run's events, as JSON values. The first steps warm up."""
    steps = steps_of(events)[WARM_UP_STEPS:]
    syncs = [event for event in events if event["event"] == "sync"]
    wall = sum(step["step_s"] for step in steps)
    late = syncs[WARM_UP_STEPS:] or syncs
    rolled_out = [step for step in steps if step["channel"] == "B" and _rollout_s(step)]
    walls = [(s["step_s"] - s.get("sync_s", 0.0)) / (_rollout_s(s) + s.get("learn_s", 0.0)) for s in rolled_out]
    return {
        "steps": len(steps),
        "channels": "".join(step["channel"] for step in steps),
        "steps_per_s": len(steps) / wall,
        "rollout_tokens_per_s": sum(step.get("rollout_tokens", 0.0) for step in steps) / wall,
        "phases_s": {name: round(sum(step.get(name, 0.0) for step in steps) / len(steps), 4) for name in _PHASES},
        "wall": round(median(walls), 3) if walls else None,  # share of the sum of a B step's rollout and learning
        "hidden_rollout_s": round(sum(step.get("stage2_ab/rollout_s", 0.0) for step in steps) / len(steps), 4),
        "syncs": len(syncs),
        "sync_s": median(sync["seconds"] for sync in late),
        "synced_bytes": sum(sync["num_bytes"] for sync in syncs),
        "canary_gap_max": max(sync["canary_gap"] for sync in syncs),
        **_answered(events),
        "timeline": [event for event in events if event["event"] == "timeline"],
    }


def _answered(events: Events) -> dict[str, Any]:
    """Return how many requests each server answered, most first, and how many calls failed."""
    calls = [call for event in events if event["event"] == "rollout_call" for call in event["calls"]]
    answered: Counter[str] = Counter()
    for call in calls:
        if not call["error"]:
            answered[call["base_url"]] += call["num_requests"]
    return {
        "requests_by_server": [number for _, number in answered.most_common()],
        "failed_calls": sum(bool(call["error"]) for call in calls),
    }


def _rollout_s(step: Mapping[str, Any]) -> float:
    """Return the seconds of rollouts: those that the learner waited for, and those beside learning."""
    return float(step.get("rollout_s", 0.0) + step.get("stage2_ab/rollout_s", 0.0))


def watched(seen: Watched) -> dict[str, Any]:
    return {
        "gpus": {str(index): asdict(use) for index, use in seen.gpus.items()},
        "written_bytes": dict(seen.written),
        "new_large_files": dict(seen.new_files),
        "weights_file_taken_away": True,
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per mode."""
    head = ["GPUs", "mode", "steps/s", "rollout, learn, sync, wait s of a step", "busy GPUs", "syncs", "s each"]
    head += ["GB synced", "MB written by all", "large new files"]
    return "\n".join(markdown_table(head, map(_cells, rows))) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["topology"], row["mode"], str(row["error"]).replace("\n", " ")[:200]]
    phases = row["phases_s"]
    rollout_s = phases["rollout_s"] + row["hidden_rollout_s"]
    return [
        row["topology"],
        row["mode"],
        f"{row['steps_per_s']:.2f}",
        f"{rollout_s:.2f}, {phases['learn_s']:.2f}, {phases['sync_s']:.2f}, {phases['wait_s']:.2f}",
        ", ".join(f"{use['busy_mean']:.0%}" for use in row["gpus"].values()),
        str(row["syncs"]),
        f"{row['sync_s']:.3f}",
        f"{row['synced_bytes'] / 1e9:.2f}",
        f"{sum(row['written_bytes'].values()) / 1e6:.1f}",
        ", ".join(row["new_large_files"]) or "none",
    ]


if __name__ == "__main__":
    typer.run(main)
