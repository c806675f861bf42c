"""Full size: a Qwen3-VL of 4B parameters learns from photographs, 20 steps in each mode.

    python -m bench.photographs --data DIR --out DIR [--mode MODE] [--topology 3+1] [--size tiny]

In: a folder of photographs with Pascal VOC annotations (BCCD: `images/`, `voc/`, `splits/train.txt`). The model has the
shape of Qwen3-VL-4B and random weights. One rollout GPU and one learner GPU, or other numbers of them. Out:
`photographs.json`, with per mode: seconds and tokens per second of a step, how busy the GPUs and both sides were after
the warm-up, peak memory, every sync's seconds, its pause, its canary gap and its merge gap; and beside it each run's
`metrics.jsonl`. If a mode fails, its error is recorded, and the next one runs. Without a GPU: `--size tiny`.

Random weights find every answer improbable, about -12 nats per token. That is the hardest case for the canary.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer

from bench.demo_model import build as build_small_model
from bench.figures import circumstances
from bench.models import build_photograph_model
from bench.runs import Server, learner_config, read_events, say, served_by, start_learner, start_server, steps_of
from bench.watch import GpuUse, gpu_use
from deploy.launch import Processes, supervised
from shared.errors import ProjectError

Size = Literal["4B", "tiny"]
LORA = {"lora": {"r": 64, "alpha": 128, "target_modules": "all-linear"}}
LANGUAGE_MODEL_ONLY = {"freeze": ["model.visual."]}  # the part that vLLM can adapt
AHEAD = {"model": LORA, "sync": "full", "b_ratio": 0.75}
MODES: Mapping[str, Mapping[str, Any]] = {
    "LoRA, adapter sync": {"model": {**LORA, **LANGUAGE_MODEL_ONLY}, "sync": "adapter"},
    "LoRA, full sync": {"model": LORA, "sync": "full"},
    "whole model": {"model": {}, "sync": "full"},
    "async": AHEAD,
    "async, half the syncs": {**AHEAD, "sync_every": 2, "max_update_lag": 8},
    "async, a quarter of the syncs": {**AHEAD, "sync_every": 4, "max_update_lag": 8},
}
LOSS = {"preset": "recommended"}  # deploy/qwen3vl_4b
PROMPT = '<image>List every cell as JSON: [{"bbox_2d": [x1, y1, x2, y2], "label": "..."}, ...]'
WARM_UP_STEPS = 3  # they compile
KV_CACHE_BYTES = 24 << 30
_ENDS_S = 60.0  # time after the last step


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

    @property
    def num_gpus(self) -> int:
        return self.rollout_gpus + self.learner_gpus

    def devices(self, *, on_gpu: bool) -> tuple[list[list[int]], list[int]]:
        """Return the devices of each server and of the learner; none on the CPU."""
        if not on_gpu:
            return [[] for _ in range(self.rollout_gpus)], []
        return [[i] for i in range(self.rollout_gpus)], list(range(self.rollout_gpus, self.num_gpus))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The parts that are the same for all topologies and modes."""

    model: Path
    data: Path
    folder: Path
    steps: int
    samples_per_step: int
    max_new_tokens: int
    row_tokens: int  # longest packed row
    on_gpu: bool
    limit_s: float
    modes: tuple[str, ...]


def photographs(data: Path) -> dict[str, Any]:
    """Return the learner's `data` section: the training split as published, without the box that has no area."""
    return {
        "train": str(data / "splits" / "train.txt"),
        "format": "voc",
        "annotation_root": str(data / "voc"),
        "image_root": str(data.resolve() / "images"),
        "prompt": PROMPT,
        "on_bad_record": "clip",
    }


def server_config(model: Path, images: Path, *, on_gpu: bool, adapts: bool, compiles: bool) -> dict[str, Any]:
    """Return the server's configuration. `adapts`: it takes adapters. `compiles`: vLLM compiles the model, as by
    default; otherwise only decoding steps are captured as CUDA graphs, and the server starts a minute earlier."""
    config: dict[str, Any] = {
        "model": str(model),
        "allowed_image_roots": [str(images.resolve())],
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "enable_lora": adapts,
        "max_lora_rank": 64,
    }
    if not on_gpu:
        return {**config, "enforce_eager": True, "cpu_threads": 1}
    engine_args: dict[str, Any] = {"kv_cache_memory_bytes": KV_CACHE_BYTES}
    if not compiles:
        sizes = [1, 8, 16, 32, 48, 64]
        engine_args["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    return {**config, "gpu_memory_utilization": 0.8, "engine_args": engine_args}


def run_mode(
    processes: Processes, topology: Topology, name: str, servers: Sequence[Server], work: Workload
) -> dict[str, Any]:
    """Return the figures of one mode. Raises ServerError or DeadlineError if the run failed."""
    run = f"{topology.name}-{name.replace(', ', '-').replace(' ', '_')}"
    config = run_config(MODES[name], topology, servers, work, work.folder / run)
    _, devices = topology.devices(on_gpu=work.on_gpu)
    began, limit_s, steps = time.monotonic(), work.limit_s, work.steps
    learner = start_learner(processes, work.folder, run, config, ranks=topology.learner_gpus, devices=devices)
    num_steps = lambda: len(steps_of(read_events(learner.run_dir)))  # noqa: E731
    gpus: Mapping[int, GpuUse] = {}
    error = {}
    try:
        learner.wait(limit_s, until=lambda: num_steps() >= WARM_UP_STEPS)
        with gpu_use(200) as gpus:
            learner.wait(limit_s - (time.monotonic() - began), until=lambda: num_steps() >= steps)
        learner.wait(_ENDS_S)
    except ProjectError as failure:
        if num_steps() <= WARM_UP_STEPS:
            raise
        error["error"] = str(failure)  # keeps what was measured until then
    events = read_events(learner.run_dir)
    say(f"{topology.name}, {name}: {num_steps()} steps in {time.monotonic() - began:.0f} s")
    for sync in [e for e in events if e["event"] == "sync"][-3:]:
        say(
            f"  sync {sync['ver']}: {sync['seconds']:.2f} s, gap {sync['canary_gap']:.4f}, "
            f"merge gap {sync['merge_gap']:.4f}"
        )
    run_s = round(time.monotonic() - began, 1)
    return {"topology": topology.name, "mode": name, "run_s": run_s, **_told(events, gpus), **error}


def run_config(
    mode: Mapping[str, Any], topology: Topology, servers: Sequence[Server], work: Workload, run_dir: Path
) -> dict[str, Any]:
    per_device, ahead = 8 if work.on_gpu else 2, None
    if "b_ratio" in mode:
        packs = work.samples_per_step // (per_device * topology.learner_gpus)
        ready = (mode.get("sync_every", 1) + 1) * packs
        queue = {"prefetch_target_packs": ready, "queue_limit": ready + packs}
        queue |= {name: mode[name] for name in ("sync_every", "max_update_lag") if name in mode}
        ahead = {"schedule": {"b_ratio": mode["b_ratio"]}, "async_actor_learner": {"enabled": True, **queue}}
    return learner_config(
        work.model,
        work.data,
        run_dir,
        steps=work.steps,
        batch_size=work.samples_per_step,
        per_device=per_device,
        variant="stage2_ab_training" if ahead else "rollout_matching_sft",
        matching={
            "decode_batch_size": 64,
            "decoding": {"temperature": 1.0, "max_new_tokens": work.max_new_tokens},
            "vllm": served_by(
                *servers,
                enable_lora=mode["sync"] == "adapter",
                sync={"mode": mode["sync"], "fallback_to_full": False},
            ),
        },
        loss=LOSS,
        model={"dtype": "bfloat16", "gradient_checkpointing": work.on_gpu, **mode["model"]},
        training={"learning_rate": 1e-4 if "lora" in mode["model"] else 1e-5, "bf16": True, "save_on_end": False},
        task={"container": "array", "coordinates": "digits"},
        logging={"trackers": []},
        stage2_ab=ahead,
        data={**photographs(work.data), "num_workers": 8 if work.on_gpu else 0},
        global_max_length=work.row_tokens,
    )


def _told(events: Sequence[Mapping[str, Any]], gpus: Mapping[int, GpuUse]) -> dict[str, Any]:
    steps = [e["metrics"] | {"loss": e["loss"], "num_tokens": e["num_tokens"]} for e in events if e["event"] == "step"]
    syncs = [e for e in events if e["event"] == "sync"]
    usual = syncs[WARM_UP_STEPS:] or syncs[-1:]
    later = steps[WARM_UP_STEPS:]
    phases = ("step_s", "rollout_s", "learn_s", "sync_s", "wait_s", "data_s", "target_s", "pack_s")
    learn_s = sum(m.get("learn_s", 0.0) for m in later)
    return {
        "steps": len(steps),
        "channels": "".join(e["channel"] for e in events if e["event"] == "step"),
        "first_step_s": round(steps[0]["step_s"], 2),
        "median_s": {name: round(median(m.get(name, 0.0) for m in later), 3) for name in phases},
        "rollout_tokens_per_s": round(sum(m.get("rollout_tokens", 0) for m in later) / sum(m["step_s"] for m in later)),
        "learned_tokens_per_s": round(sum(m.get("num_tokens", 0) for m in later) / learn_s) if learn_s else None,
        "busy": busy_shares(later),
        "losses": [round(m["loss"], 3) for m in steps],
        "sync_s": [round(s["seconds"], 3) for s in syncs],
        "pause_s": [round(s["pause_s"], 3) for s in syncs],
        "sync_parts_s": {
            part: round(median(s["parts"].get(part, 0.0) for s in usual), 4) for part in usual[-1]["parts"]
        },
        "sync_bytes": max(s["num_bytes"] for s in syncs),
        "canary_gap": [round(s["canary_gap"], 4) for s in syncs],
        "merge_gap": [round(s["merge_gap"], 4) for s in syncs],
        "gpus": {str(index): asdict(use) for index, use in gpus.items()},
        "metrics_of_the_last_step": {k: v for k, v in steps[-1].items() if isinstance(v, int | float)},
    }


def busy_shares(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of the steps' time in which the learner learned, and in which rollouts were under way, beside
    learning or not."""
    seconds = sum(m["step_s"] for m in steps)
    rollout_s = sum(m.get("rollout_s", 0.0) + m.get("stage2_ab/rollout_s", 0.0) for m in steps)
    learn_s = sum(m.get("learn_s", 0.0) for m in steps)
    return {"learner": round(learn_s / seconds, 3), "rollouts": round(rollout_s / seconds, 3)}


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Only this one of: {'; '.join(MODES)}; again for each.")
    ] = None,
    topology: Annotated[
        list[str] | None, typer.Option(help="ROLLOUT+LEARNER GPUs; again for each. Default: 1+1.")
    ] = None,
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 1, help="Optimizer steps of a mode.")] = 20,
    samples: Annotated[
        int | None, typer.Option(min=4, help="Of a step, a multiple of 8 on a GPU, of 2 elsewhere. Default: 32 and 4.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a mode is stopped.")] = 420.0,
    compile_engine: Annotated[bool, typer.Option(help="Servers compile the model, as by default.")] = False,
    scratch: Annotated[
        Path, typer.Option(help="For the model: large and fast. It is kept there for a next call.")
    ] = Path("/dev/shm"),
) -> None:
    """Run every mode, and write the results after each."""
    wanted = [Topology.read(text) for text in topology or ["1+1"]]
    if unknown := set(mode or ()) - MODES.keys():
        raise typer.BadParameter(f"found {sorted(unknown)}, wanted some of {list(MODES)}", param_hint="--mode")
    on_gpu = size == "4B"
    num_gpus = torch.cuda.device_count()
    if too_large := [one.name for one in wanted if on_gpu and one.num_gpus > num_gpus]:
        found = f"found {num_gpus} GPUs, wanted those of {', '.join(too_large)}; without a GPU: --size tiny"
        raise typer.BadParameter(found, param_hint="--topology")
    samples = samples or (32 if on_gpu else 4)
    out.mkdir(parents=True, exist_ok=True)
    model = scratch / f"photographs-{size}"
    if not (model / "config.json").is_file():
        if on_gpu:
            say(f"{build_photograph_model(model):,} parameters")
        else:
            build_small_model(model, "tiny")
    folder = Path(tempfile.mkdtemp(prefix="photographs-"))
    work = Workload(
        model=model,
        data=data,
        folder=folder,
        steps=steps,
        samples_per_step=samples,
        max_new_tokens=512 if on_gpu else 48,
        row_tokens=16_384 if on_gpu else 4096,
        on_gpu=on_gpu,
        limit_s=limit,
        modes=tuple(mode or MODES),
    )
    rows: list[dict[str, Any]] = []
    try:
        for row in (row for one in wanted for row in _rows(one, work, compiles=compile_engine)):
            rows.append(row)
            options = {"model": size, "samples": samples, "compile_engine": compile_engine}
            text = json.dumps({**circumstances(), **options, "runs": rows}, indent=1)
            (out / "photographs.json").write_text(text + "\n")
    finally:
        keep_logs(folder, out)
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(any("error" in row for row in rows))


def keep_logs(folder: Path, out: Path) -> None:
    """Copy the servers' logs and the learners' metrics from `folder` into `out`."""
    for log in folder.glob("server-*.log"):
        shutil.copy(log, out)
    for run in (path.parent for path in folder.glob("*/metrics.jsonl") if not path.parent.is_symlink()):
        shutil.copy(run / "metrics.jsonl", out / f"{run.name}-metrics.jsonl")


def _rows(topology: Topology, work: Workload, *, compiles: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per mode. The servers are started once, and serve one learner after the other."""
    adapts = any(MODES[name]["sync"] == "adapter" for name in work.modes)
    config = server_config(work.model, work.data, on_gpu=work.on_gpu, adapts=adapts, compiles=compiles)
    with supervised() as processes:
        servers = [
            start_server(processes, work.folder, f"server-{topology.name}-{i}", config, devices=mine)
            for i, mine in enumerate(topology.devices(on_gpu=work.on_gpu)[0])
        ]
        for server in servers:
            say(f"{topology.name}: {server.url} ready after {server.wait_ready():.0f} s")
        for name in work.modes:
            try:
                yield run_mode(processes, topology, name, servers, work)
            except ProjectError as error:
                say(f"{topology.name}, {name}: {error}")
                yield {"topology": topology.name, "mode": name, "error": str(error)}


if __name__ == "__main__":
    typer.run(main)
