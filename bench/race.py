"""One GRPO step on one GPU, here and in TRL: `python -m bench.race --data BCCD --out FILE --against trl`.

The same work on both sides: Qwen3-VL-4B's shape with random weights, LoRA of rank 64 on all linear layers (or the whole
model), colocated vLLM, 8 photographs x 8 rollouts x 256 tokens, gradient checkpointing, one update. The sides run one
after the other, each in a process of its own. Random models end no answer, so all answers have the same length.

Out: a table, and FILE with all steps. Per side: seconds of a step, here also by phase, the first step's seconds, the
most memory that the GPU had in use, and how busy it was, both from the end of the warm-up on. A side that is in FILE
already is not run again, so a call that was cut off can be repeated. Without a GPU: `--size tiny`, only this side.

The floor of a phase is the time that the GPU needs at least, at the copy bandwidth and the matmul rate that are
measured here: rollouts read the weights and all keys and values once per token, learning multiplies matrices three
times per token (forward, again for the backward pass, gradients of activations; with the whole model also gradients of
weights), a sync copies the weights once.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import typer

from bench.figures import circumstances, markdown_table
from bench.photographs import LORA, PROMPT, Size, build_model, photographs
from bench.runs import last_words, learner_config, read_events, say, start_learner, steps_of, visible
from bench.watch import GpuUse, gpu_use
from deploy.demo.model import build as build_small_model
from deploy.launch import Process, Processes, supervised
from learner.run.files import write_atomically
from shared.errors import DeadlineError, ProjectError, ServerError

Side = Literal["ours", "trl"]
WARM_UP_STEPS = 2
GROUP = 8
_LIMIT_S = 420.0
_GPU_EVERY_MS = 100
PHASES = ("rollout_s", "learn_s", "sync_s", "data_s", "target_s", "pack_s", "other_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The work of one step, the same for both sides."""

    model: Path
    data: Path  # photographs with VOC annotations
    steps: int
    photographs: int
    tokens: int  # of an answer
    whole_model: bool
    on_gpu: bool
    share: float  # of the GPU's memory, for vLLM

    @property
    def rollouts(self) -> int:
        return self.photographs * GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """`steps`: each one's seconds by name, the warm-up included. `gpu`: its use after the warm-up."""

    side: str
    run_s: float
    steps: Sequence[Mapping[str, float]]
    gpu: Mapping[str, float]

    def median_s(self, name: str) -> float:
        return median(step.get(name, 0.0) for step in self.steps[WARM_UP_STEPS:])


def learner_settings(race: Race, run_dir: Path) -> dict[str, Any]:
    """This project's side."""
    vllm: dict[str, Any] = {"mode": "colocate", "gpu_memory_utilization": race.share, "max_model_len": 2048}
    if not race.on_gpu:
        vllm |= {"enforce_eager": True, "cpu_kv_cache_gib": 1, "max_model_len": 2048}
    return learner_config(
        race.model,
        race.data,
        run_dir,
        steps=race.steps,
        batch_size=race.rollouts,
        variant="grpo",
        matching={
            "decode_batch_size": race.rollouts,
            "decoding": {"temperature": 1.0, "max_new_tokens": race.tokens},
            "vllm": vllm,
        },
        model={
            "dtype": "bfloat16" if race.on_gpu else "float32",
            "gradient_checkpointing": True,
            **({} if race.whole_model else LORA),
        },
        training={"learning_rate": 1e-5, "bf16": race.on_gpu, "save_on_end": False},
        grpo={"num_generations": GROUP},
        task={"container": "array", "coordinates": "digits"},
        logging={"trackers": [], "progress_bar": False},
        data={**photographs(race.data), "num_workers": 8 if race.on_gpu else 0},
        # A step's rollouts in one row: launching a row's kernels takes 0.7 s for this model, whatever its length.
        global_max_length=20_480 if race.on_gpu else 4096,
    )


def run_ours(processes: Processes, folder: Path, race: Race) -> Result:
    began = time.monotonic()
    config = learner_settings(race, folder / "ours")
    learner = start_learner(processes, folder, "ours", config, ranks=None, devices=[0] if race.on_gpu else ())

    def steps() -> list[dict[str, Any]]:
        return steps_of(read_events(learner.run_dir))

    gpu = _watched(lambda: len(steps()) >= WARM_UP_STEPS, learner.wait)
    names = ("step_s", *PHASES, "num_tokens", "rollout_tokens")
    rows = [{name: step[name] for name in names if name in step} for step in steps()]
    return Result(side="ours", run_s=time.monotonic() - began, steps=rows, gpu=gpu)


def run_trl(processes: Processes, folder: Path, race: Race) -> Result:
    """TRL in a process of its own, which writes the seconds of each step."""
    began = time.monotonic()
    said, log = folder / "trl.jsonl", folder / "trl.log"
    paths = {"model": str(race.model), "data": str(race.data), "out": str(said), "prompt": PROMPT}
    settings = json.dumps({**asdict(race), **paths, "group": GROUP, "lora": None if race.whole_model else LORA["lora"]})
    argv = [sys.executable, "-m", "bench.race_trl", settings]
    process: Process = processes.start("trl", argv, devices=visible(0), log=log)

    def steps() -> list[dict[str, float]]:
        lines = said.read_text().splitlines(keepends=True) if said.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(timeout_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + timeout_s
        while (code := process.popen.poll()) is None and not until():
            if time.monotonic() > deadline:
                raise DeadlineError("TRL's side did not end in time", found=last_words(log), wanted=f"{timeout_s:g} s")
            time.sleep(0.1)
        if code:
            raise ServerError("TRL's side failed", found=f"exit code {code}; {last_words(log)}", wanted="0")

    gpu = _watched(lambda: len(steps()) >= WARM_UP_STEPS, wait)
    return Result(side="trl", run_s=time.monotonic() - began, steps=steps(), gpu=gpu)


def _watched(warm: Callable[[], bool], wait: Callable[..., None]) -> dict[str, float]:
    """Wait for a side's end; how its GPU was used after the warm-up."""
    wait(_LIMIT_S, until=warm)
    with gpu_use(_GPU_EVERY_MS) as used:
        wait(_LIMIT_S)
    first: GpuUse | None = next(iter(used.values()), None)
    return {} if first is None else asdict(first)


def floors(race: Race, num_tokens: float) -> dict[str, float]:
    """Seconds of each phase of this side's step, in which `num_tokens` are learned."""
    import torch

    def seconds(work: Callable[[], object], times: int = 10) -> float:
        work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    source = torch.randint(255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / seconds(lambda: square @ square)
    text = json.loads((race.model / "config.json").read_text())["text_config"]
    weight_bytes = sum(file.stat().st_size for file in race.model.glob("*.safetensors"))
    head = text["vocab_size"] * text["hidden_size"]  # parameters, which only learned tokens meet
    kv_bytes = 2 * 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]  # of a token
    answers = race.rollouts * race.tokens
    prompts = (num_tokens - answers) / race.photographs  # tokens of one
    read = weight_bytes + race.rollouts * (prompts + race.tokens / 2) * kv_bytes
    passes = 4 if race.whole_model else 3
    multiplied = 2 * passes * ((weight_bytes / 2 - head) * num_tokens + head * answers)
    found = {"rollout_s": race.tokens * read / bandwidth, "learn_s": multiplied / rate}
    found["sync_s"] = 2 * weight_bytes / bandwidth
    return {"step_s": sum(found.values()), **found, "bandwidth_gb_s": bandwidth / 1e9, "rate_tflop_s": rate / 1e12}


def table(results: Sequence[Result]) -> str:
    """Medians after the warm-up; the factor is over the first side."""
    head = ["side", "step s", *(phase.removesuffix("_s") for phase in PHASES), "first step s", "busy", "memory GB", "x"]
    rows = [
        [
            one.side,
            f"{one.median_s('step_s'):.2f}",
            *(f"{one.median_s(phase):.2f}" if phase in one.steps[-1] else "" for phase in PHASES),
            f"{one.steps[0]['step_s']:.1f}",
            f"{one.gpu['busy_mean']:.2f}" if one.gpu else "",
            f"{one.gpu['memory_mib'] * 2**20 / 1e9:.1f}" if one.gpu else "",
            f"{one.median_s('step_s') / results[0].median_s('step_s'):.2f}",
        ]
        for one in results
    ]
    return "\n".join(markdown_table(head, rows))


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    against: Annotated[Literal["trl"] | None, typer.Option(help="The other side; none: only this project.")] = None,
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    steps: Annotated[int, typer.Option(min=WARM_UP_STEPS + 1)] = 8,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    scratch: Annotated[Path, typer.Option(help="For the model, which is kept there.")] = Path("/dev/shm"),
) -> None:
    """Run the sides that FILE lacks; write FILE after each."""
    on_gpu = size == "4B"
    model = scratch / f"photographs-{size}"
    if not (model / "config.json").is_file():
        say("making the model")
        build_model(model) if on_gpu else build_small_model(model, "tiny")
    shape = {"photographs": 8, "tokens": 256} if on_gpu else {"photographs": 2, "tokens": 24}
    race = Race(
        model=model, data=data.resolve(), steps=steps, whole_model=whole_model, on_gpu=on_gpu, share=share, **shape
    )
    results = [Result(**one) for one in json.loads(out.read_text())["sides"]] if out.is_file() else []
    failed = False
    sides: Mapping[str, Callable[[Processes, Path, Race], Result]] = {"ours": run_ours, "trl": run_trl}
    for side in ["ours", *([against] if against else [])]:
        if any(one.side == side for one in results):
            continue
        folder = Path(tempfile.mkdtemp(prefix="race-"))
        try:
            with supervised() as processes:
                results.append(sides[side](processes, folder, race))
        except ProjectError as error:
            say(f"{side}: {error}; logs are in {folder}")
            failed = True
            continue
        shutil.rmtree(folder, ignore_errors=True)
        work = {**asdict(race), "model": size, "data": data.name}
        found: dict[str, Any] = {**circumstances(), "race": work, "sides": [asdict(one) for one in results]}
        if on_gpu and results[0].side == "ours":
            found["floors"] = floors(race, results[0].median_s("num_tokens"))
            print("floors: " + ", ".join(f"{name} {value:.3g}" for name, value in found["floors"].items()), flush=True)
        write_atomically(out, json.dumps(found, indent=1, default=str) + "\n")
    if results:
        print(table(results), flush=True)
    sys.exit(failed or not results)


if __name__ == "__main__":
    typer.run(main)
