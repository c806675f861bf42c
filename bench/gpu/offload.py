"""Peak device memory of a colocated run, with and without training state moved off the device around rollouts.

In: a size of model. Out: figures of real runs of `rollout_matching_sft` in colocate mode on the first GPU, which differ
in `offload` only: the most that the device held, whoever held it, sampled twenty times a second, and the seconds of a
step, which moving costs. Weights, gradients and moments are bfloat16. Run by `run.py`, in a process of its own:
`python -m bench.gpu.offload --help`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from bench.figures import Figure, median
from bench.gpu.devices import visible
from bench.gpu.models import Size, build
from bench.gpu.results import write
from bench.runs import start_learner
from deploy.launch import supervised

WARM_UP_STEPS, STEPS = 2, 4  # the optimizer has moments, and the host a place for them, only in the second step
BATCH_SIZE, NEW_TOKENS = 16, 64
ENGINE_SHARE = 0.3  # of the device, for vLLM
_SAMPLE_EVERY_MS = 50
Moved = Literal["nothing moved", "optimizer moved", "model and optimizer moved"]
MOVED: dict[Moved, dict[str, bool]] = {
    "nothing moved": {},
    "optimizer moved": {"enabled": True, "offload_optimizer": True},
    "model and optimizer moved": {"enabled": True, "offload_model": True, "offload_optimizer": True},
}


def main(
    out: Annotated[Path, typer.Option(help="File for the figures.")],
    folder: Annotated[Path, typer.Option(help="For the model, configurations and logs; large and fast.")],
    size: Annotated[str, typer.Option(help="0.6B or 4B.")] = "4B",
    only: Annotated[Moved | None, typer.Option(help="One run alone.")] = None,
) -> None:
    """Measure and write; what has ended is on disk, whatever happens to the next run."""
    figures: list[Figure] = []
    for measured in measure(size, folder, [only] if only else list(MOVED)):  # type: ignore[arg-type]
        figures += measured
        write(out, figures)


def measure(size: Size, folder: Path, names: Sequence[Moved]) -> Iterator[list[Figure]]:
    """The figures of one run for each of the names in `MOVED`, a minute and a half each."""
    model = folder / f"model-{size}"
    if not model.is_dir():
        build(model, size, device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        torch.cuda.empty_cache()
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(_row(i)) + "\n" for i in range(2 * BATCH_SIZE)), encoding="utf-8")
    for i, name in enumerate(names):
        peak, seconds = _run(_config(model, data, folder / f"offload-{i}", MOVED[name]), folder, f"offload-{i}")
        yield [
            Figure(name=f"{size}, peak device memory, {name}", value=peak, unit="GiB"),
            Figure(name=f"{size}, step, {name}", value=median(seconds), unit="s", samples=seconds),
        ]


def _run(config: Mapping[str, Any], folder: Path, name: str) -> tuple[float, list[float]]:
    """GiB at the peak; seconds of each step after the warm-up."""
    with supervised() as processes, _device_memory(folder / f"{name}.mib") as mib:
        events = start_learner(processes, config, folder, name).events()
    steps = [event["metrics"]["step_s"] for event in events if event["event"] == "step"]
    return max(mib) / 1024, steps[WARM_UP_STEPS:]


@contextmanager
def _device_memory(file: Path) -> Iterator[list[float]]:
    """MiB of the first visible GPU in use, sample by sample, kept in `file`; complete once the block has ended."""
    mib = [0.0]
    if shutil.which("nvidia-smi") is None:  # a try without a GPU
        yield mib
        return
    query = ["nvidia-smi", "-i", *visible(0), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with file.open("w") as samples, subprocess.Popen([*query, f"-lms={_SAMPLE_EVERY_MS}"], stdout=samples) as watch:
        try:
            yield mib
        finally:
            watch.terminate()
    mib += [float(line) for line in file.read_text().splitlines() if line.strip().isdigit()]


def _row(index: int) -> dict[str, Any]:
    """A sample without an image: the model is a language model."""
    objects = [{"desc": str(n), "bbox_2d": [10 * n, 10 * n, 10 * n + 9, 10 * n + 9]} for n in range(10)]
    messages = [{"role": "user", "content": f"{index}: name every digit, and where it is."}]
    return {"id": index, "messages": messages, "images": [], "objects": objects, "width": 128, "height": 128}


def _config(model: Path, data: Path, run_dir: Path, offload: Mapping[str, bool]) -> dict[str, Any]:
    vllm = {
        "mode": "colocate",
        "gpu_memory_utilization": ENGINE_SHARE,
        "tensor_parallel_size": 1,
        "max_model_len": 1024,
        "enforce_eager": True,
    }
    matching = {
        "decode_batch_size": BATCH_SIZE,
        "decoding": {"temperature": 1.0, "max_new_tokens": NEW_TOKENS},
        "vllm": vllm,
        "offload": dict(offload),
    }
    return {
        "model": {"path": str(model), "dtype": "bfloat16", "compile": False},
        "data": {"train": str(data)},
        "task": {"container": "index_map", "coordinates": "tokens"},
        "training": {
            "output_dir": str(run_dir),
            "max_steps": WARM_UP_STEPS + STEPS,
            "effective_batch_size": BATCH_SIZE,
            "per_device_train_batch_size": BATCH_SIZE,
            "learning_rate": 1.0e-6,
            "bf16": True,
            "eval_on_start": False,
            "eval_on_end": False,
            "save_on_end": False,
        },
        "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": matching}},
        "global_max_length": 8192,
    }


if __name__ == "__main__":
    typer.run(main)
