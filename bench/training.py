"""Short real runs of `rollout_matching_sft`: where a step's time goes, the first token, peak memory, offload.

- `measure`: server and learner as processes, the demo's settings, a checked full sync before every step. Idle is the
  time of a step outside rollouts, computing (targets, packing, learning) and the sync: its phases `data` and `other`.
  The sync's share is a figure of its own, because it is the product's work and the rest is waste.
- `first_token`: for every rollout backend, from the end of an optimizer step to the first token of the new weights. The
  runs' steps roll out one sample and one token. Before that token a step reads the sample, syncs with all checks (no
  sync if the trained model itself generates), and rolls out.
- `offload`: colocated runs on the first GPU that differ in `offload` only. Figures are the device's peak memory, by
  any user, and a step's seconds, because moving costs time. Weights, gradients and moments are bfloat16.

Out: figures from the runs' `metrics.jsonl`, from `/proc` and from nvidia-smi. First steps warm up and do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from bench.figures import Figure, median, sampled
from bench.models import Size, demo_model, demo_scenes, text_model
from bench.runs import Events, learner_config, serve, served_by, start_learner, steps_of, visible
from bench.watch import gpu_use, peak_memory
from deploy.launch import supervised

WANTED_SYNC_S = 0.5
WANTED_IDLE = 0.05
WARM_UP_STEPS = 3
_BUSY = ("rollout_s", "target_s", "pack_s", "learn_s")
_BEFORE_THE_TOKEN = ("data_s", "sync_s", "rollout_s")
DEMO_TASK = {"container": "index_map", "coordinates": "tokens", "iou_threshold": 0.3}


def measure(folder: Path, *, num_steps: int = 15, batch_size: int = 16) -> Iterator[Figure]:
    """Figures of one run of `num_steps` steps after the warm-up."""
    model, data = demo_model(folder), demo_scenes(folder)
    with supervised() as processes:
        server = serve(processes, folder, "server", {"model": str(model), "allowed_image_roots": [str(data)]})
        vllm = served_by(server, sync={"mode": "full"})
        config = demo_run(model, data, folder / "run", vllm, steps=WARM_UP_STEPS + num_steps, batch_size=batch_size)
        learner = start_learner(processes, folder, "run", config)
        with peak_memory({"server": server.pid, "learner": learner.pid}) as peaks:
            events = learner.events()
    yield from figures(events)
    for name, peak in peaks.items():
        yield Figure(name=f"peak memory of the {name}, children included", value=peak / 2**20, unit="MiB")


def figures(events: Events) -> list[Figure]:
    """Return the figures of a run's events, after the warm-up."""
    syncs = [event["seconds"] for event in events if event["event"] == "sync"][WARM_UP_STEPS:]
    seconds = [_seconds_of(step) for step in steps_of(events)[WARM_UP_STEPS:]]
    idle = [(s["step_s"] - sum(s.get(name, 0.0) for name in (*_BUSY, "sync_s"))) / s["step_s"] for s in seconds]
    sync_share = [s.get("sync_s", 0.0) / s["step_s"] for s in seconds]
    phases = [name for name in seconds[0] if name != "step_s"]
    return [
        sampled("sync, all checks included", syncs, "s", at_most=WANTED_SYNC_S),
        sampled("idle share of a step (not rollout, not computing, not sync)", idle, "of a step", at_most=WANTED_IDLE),
        sampled("sync's share of a step", sync_share, "of a step"),
        *(
            Figure(name=f"step: {name.removesuffix('_s')}", value=median([s.get(name, 0.0) for s in seconds]), unit="s")
            for name in phases
        ),
        Figure(name="step", value=median([s["step_s"] for s in seconds]), unit="s"),
    ]


def _seconds_of(step: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in step.items() if name.endswith("_s") and not name.endswith("_per_s")}


def demo_run(
    model: Path, data: Path, run_dir: Path, vllm: Mapping[str, Any], *, steps: int, batch_size: int, **matching: Any
) -> dict[str, Any]:
    """Return a run with the demo's settings; `matching` are other keys of `rollout_matching`."""
    base = {
        "rollout_backend": "vllm",
        "decode_batch_size": 64,
        "decoding": {"temperature": 0.0, "max_new_tokens": 128},
        "vllm": dict(vllm),
    }
    return learner_config(
        model,
        data / "train.jsonl",
        run_dir,
        matching=base | matching,
        steps=steps,
        batch_size=batch_size,
        model={"dtype": "float32"},
        task=DEMO_TASK,
        training={"learning_rate": 3.0e-4, "save_on_end": True},
        global_max_length=9216,
    )


# ---- the first token -----------------------------------------------------------------------------------------------

Backend = Literal["hf", "colocate", "server"]


def first_token(folder: Path, *, num_steps: int = 15) -> Iterator[Figure]:
    """Make one run per backend, one after the other."""
    model, data = demo_model(folder), demo_scenes(folder)
    for backend in get_args(Backend):
        with supervised() as processes:
            vllm: dict[str, Any] = {"mode": "colocate", "max_model_len": 1024}
            if backend == "server":
                settings = {"model": str(model), "allowed_image_roots": [str(data)]}
                vllm = served_by(serve(processes, folder, "first_token_server", settings), sync={"mode": "full"})
            name = f"first_token_{backend}"
            config = first_token_run(backend, model, data, folder / name, vllm, steps=WARM_UP_STEPS + num_steps)
            yield first_token_figure(backend, start_learner(processes, folder, name, config).events())


def first_token_figure(backend: Backend, events: Events) -> Figure:
    """Return the figure of a run's events, after the warm-up."""
    seconds = [sum(step.get(phase, 0.0) for phase in _BEFORE_THE_TOKEN) for step in steps_of(events)[WARM_UP_STEPS:]]
    return sampled(f"from step end to first rollout token, {backend}", seconds, "s")


def first_token_run(
    backend: Backend, model: Path, data: Path, run_dir: Path, vllm: Mapping[str, Any], *, steps: int
) -> dict[str, Any]:
    few = {"decode_batch_size": 1, "decoding": {"temperature": 0.0, "max_new_tokens": 1}}
    config = demo_run(model, data, run_dir, vllm, steps=steps, batch_size=1, **few)
    if backend == "hf":
        matching = config["custom"]["extra"]["rollout_matching"]
        del matching["vllm"]
        matching["rollout_backend"] = "hf"
    config["training"]["save_on_end"] = False
    return config


# ---- offload -------------------------------------------------------------------------------------------------------

# the optimizer has moments, and the host memory for them, from the second step on
OFFLOAD_WARM_UP, OFFLOAD_STEPS = 2, 4
OFFLOAD_BATCH, NEW_TOKENS = 16, 64
ENGINE_SHARE = 0.3  # vLLM's share of the device
_GPU_EVERY_MS = 50
Moved = Literal["nothing moved", "optimizer moved", "model and optimizer moved"]
MOVED: dict[Moved, dict[str, bool]] = {
    "nothing moved": {},
    "optimizer moved": {"enabled": True, "offload_optimizer": True},
    "model and optimizer moved": {"enabled": True, "offload_model": True, "offload_optimizer": True},
}


def offload(folder: Path, *, size: Size = "4B", only: Moved | None = None) -> Iterator[Figure]:
    """A run of a minute and a half for each way in MOVED, or for one."""
    model, data = text_model(folder, size), folder / "offload.jsonl"
    data.write_text("".join(json.dumps(_row(i)) + "\n" for i in range(2 * OFFLOAD_BATCH)), encoding="utf-8")
    for i, moved in enumerate([only] if only else MOVED):
        name = f"offload-{i}"
        config = offload_run(model, data, folder / name, MOVED[moved])
        with supervised() as processes, gpu_use(_GPU_EVERY_MS, visible(0)) as gpus:
            steps = steps_of(start_learner(processes, folder, name, config).events())[OFFLOAD_WARM_UP:]
        peak_mib = max((use.memory_mib for use in gpus.values()), default=0.0)
        yield Figure(name=f"{size}, peak device memory, {moved}", value=peak_mib / 1024, unit="GiB")
        yield sampled(f"{size}, step, {moved}", [step["step_s"] for step in steps], "s")


def _row(index: int) -> dict[str, Any]:
    """Return a sample without an image: the model is a language model."""
    objects = [{"desc": str(n), "bbox_2d": [10 * n, 10 * n, 10 * n + 9, 10 * n + 9]} for n in range(10)]
    messages = [{"role": "user", "content": f"{index}: name every digit, and where it is."}]
    return {"id": index, "messages": messages, "images": [], "objects": objects, "width": 128, "height": 128}


def offload_run(model: Path, data: Path, run_dir: Path, moved: Mapping[str, bool]) -> dict[str, Any]:
    vllm = {
        "mode": "colocate",
        "gpu_memory_utilization": ENGINE_SHARE,
        "tensor_parallel_size": 1,
        "max_model_len": 1024,
        "enforce_eager": True,
    }
    matching = {
        "decode_batch_size": OFFLOAD_BATCH,
        "decoding": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS},
        "vllm": vllm,
        "offload": dict(moved),
    }
    return learner_config(
        model,
        data,
        run_dir,
        matching=matching,
        steps=OFFLOAD_WARM_UP + OFFLOAD_STEPS,
        batch_size=OFFLOAD_BATCH,
        model={"dtype": "bfloat16", "compile": False},
        task={"container": "index_map", "coordinates": "tokens"},
        training={"learning_rate": 1.0e-6},
        global_max_length=8192,
    )
