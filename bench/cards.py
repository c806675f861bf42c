"""What fits which card: `python -m bench.cards --data BCCD --out FILE --minutes 25`.

Qwen3-VL's shapes of 2B, 4B and 8B with random weights learn BCCD's photographs for three steps, by `sft` and by `grpo`
with colocated vLLM, as LoRA (rank 64, all linear layers) and as a whole model. A card of another size is made from the
GPU at hand: a process of its own holds the rest of the memory, so the run gets what the card has and not a byte more.
CARDS are the least that common cards of a class report. A configuration is tried on its expected card first, then one
card up if it did not fit, or one card down if it did, until the boundary is known.

Out: FILE, written after each case: does it fit, the most memory in use (by NVML, without what is held), the learner's
own peak and the estimate that `check` prints for it, seconds of the last step and its phases, or the error's last
words. The same call goes on with what FILE lacks. Without a GPU: `--size small`, without cards.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench.figures import circumstances, markdown_table
from bench.models import PhotographSize, build_photograph_model
from bench.photographs import LORA, photographs
from bench.race import PHASES, apart
from bench.runs import last_words, learner_config, read_events, say, start_learner, steps_of, visible
from bench.watch import gpu_use
from deploy.launch import Processes, supervised
from learner.config.load import config_of
from learner.config.memory import GIB, of_run
from learner.run.files import write_atomically
from shared.errors import ProjectError

Method = Literal["sft", "grpo"]
# GiB that the driver reports: T4 and 4080; L4, A10; 5090; L40S; H100 or A100
CARDS: Mapping[str, float] = {"16": 15.6, "24": 22.5, "32": 31.4, "48": 44.9, "80": 79.1}
STEPS = 3
GROUP, TOKENS, CONTEXT = 8, 256, 2048  # rollouts of a photograph; an answer's tokens; prompt and answer
ROW_TOKENS = 4096
ENGINE_GIB = 2.5  # beside its weights: key and value cache, activations, graphs
_CASE_LIMIT_S = 180.0
_HELD_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One line of the table. `memory`: the engine sleeps while the learner computes, or also the trained model and the
    optimizer are in host memory while the engine works. `expected`: the card to try first."""

    size: PhotographSize
    method: Method
    whole_model: bool = False
    memory: Literal["shared", "sleep", "offload"] = "shared"
    expected: str

    @property
    def name(self) -> str:
        way = "whole model" if self.whole_model else "LoRA"
        return f"{self.size} {self.method}, {way}" + ("" if self.memory == "shared" else f", {self.memory}")


SETTINGS = (
    Setting(size="4B", method="grpo", memory="offload", expected="16"),
    Setting(size="4B", method="grpo", memory="sleep", expected="24"),
    Setting(size="8B", method="grpo", memory="offload", expected="32"),
    Setting(size="8B", method="grpo", memory="sleep", expected="48"),
    Setting(size="2B", method="grpo", memory="sleep", expected="16"),
    Setting(size="4B", method="sft", expected="16"),
    Setting(size="8B", method="sft", expected="24"),
    Setting(size="2B", method="sft", expected="16"),
    Setting(size="4B", method="grpo", expected="32"),
    Setting(size="2B", method="sft", whole_model=True, expected="24"),
    Setting(size="4B", method="sft", whole_model=True, expected="48"),
    Setting(size="8B", method="sft", whole_model=True, expected="80"),
    Setting(size="8B", method="grpo", expected="48"),
    Setting(size="2B", method="grpo", whole_model=True, memory="offload", expected="24"),
    Setting(size="4B", method="grpo", whole_model=True, memory="offload", expected="48"),
)


@contextmanager
def card(gib: float) -> Iterator[None]:
    """Leave `gib` GiB of the GPU's memory to others. Raises TimeoutError if the rest cannot be held in time."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    holder = context.Process(target=hold_all_but, args=(gib, there), name="rest of the GPU", daemon=True)
    holder.start()
    try:
        if not here.poll(_HELD_S):
            raise TimeoutError(f"the rest of the GPU's memory was not held after {_HELD_S:g} s")
        say(f"{here.recv():.1f} GiB of the GPU are free")
        yield
    finally:
        holder.kill()
        holder.join(_HELD_S)


def hold_all_but(gib: float, pipe: Connection) -> None:
    """Hold the GPU's memory until this process is killed, and send what is free, in GiB."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    step = 1 << 28
    held = []
    while free - gib * GIB > step:
        held.append(torch.empty(int(min(free - gib * GIB, 1 << 33)), dtype=torch.uint8, device="cuda"))
        free, _ = torch.cuda.mem_get_info()
    pipe.send(free / GIB)
    time.sleep(3600)


def run_config(setting: Setting, model: Path, data: Path, run_dir: Path, total_gib: float) -> dict[str, Any]:
    """Return the run's settings on a GPU that says it has `total_gib`."""
    on_gpu = setting.size != "small"
    matching: dict[str, Any] | None = None
    if setting.method == "grpo":
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / GIB
        vllm: dict[str, Any] = {"mode": "colocate", "max_model_len": CONTEXT}
        if on_gpu:
            share = round((weights + ENGINE_GIB) / total_gib, 3)
            vllm |= {
                "gpu_memory_utilization": share,
                "compile": False,
                "sleep": "auto" if setting.memory == "shared" else "always",
            }
        else:
            vllm |= {"enforce_eager": True, "cpu_kv_cache_gib": 1}
        matching = {
            "decode_batch_size": 4 * GROUP,
            "decoding": {"temperature": 1.0, "max_new_tokens": TOKENS if on_gpu else 16},
            "vllm": vllm,
        }
        if setting.memory == "offload":
            matching["offload"] = {"enabled": True, "offload_model": True, "offload_optimizer": True}
    return learner_config(
        model,
        data,
        run_dir,
        steps=STEPS,
        batch_size=4 * GROUP if setting.method == "grpo" else 8,
        variant=setting.method,
        matching=matching,
        model={
            "dtype": "bfloat16" if on_gpu else "float32",
            "gradient_checkpointing": True,
            **({} if setting.whole_model else LORA),
        },
        training={"learning_rate": 1e-5, "bf16": on_gpu, "save_on_end": False},
        grpo={"num_generations": GROUP} if setting.method == "grpo" else None,
        task={"container": "array", "coordinates": "digits"},
        logging={"trackers": []},
        data={**photographs(data), "num_workers": 4 if on_gpu else 0},
        global_max_length=ROW_TOKENS,
    )


def run_case(setting: Setting, model: Path, data: Path, gib: float | None, logs: Path) -> dict[str, Any]:
    """Run three steps; return what was seen."""
    total = apart(total_memory_gib) if gib else 0.0
    folder = Path(tempfile.mkdtemp(prefix="cards-"))
    config = run_config(setting, model, data, folder / "run", total)
    found: dict[str, Any] = {"fits": False, "free_gib": gib}
    memory = of_run(config_of(config, world_size=1), 1)
    found["estimate_gib"] = memory.to_json() if memory else None
    try:
        with supervised() as processes, card(gib) if gib else nullcontext(), gpu_use(100, visible(0)) as used:
            learn(processes, folder, config, on_gpu=gib is not None)
        found["fits"] = True
    except ProjectError as error:
        found["error"] = f"{error}\n{last_words(folder / 'run.log', 3)}"[-800:]
    events = read_events(folder / "run")
    if use := next(iter(used.values()), None):
        found["used_gib"] = round(use.memory_mib / 1024 - (total - (gib or 0.0)), 2)
    if steps := steps_of(events):
        names = ("step_s", "gpu_peak_gib", "num_tokens", *PHASES)
        found |= {name: max(step.get(name, 0) for step in steps) for name in ("gpu_peak_gib",)}
        found |= {name: round(steps[-1][name], 3) for name in names if name in steps[-1] and name != "gpu_peak_gib"}
    logs.mkdir(parents=True, exist_ok=True)
    stem = setting.name.replace(", ", "-").replace(" ", "_")
    for file in (folder / "run.log", folder / "run" / "metrics.jsonl"):
        if file.is_file():
            shutil.copy(file, logs / f"{stem}-{gib or 0:g}-{file.name}")
    shutil.rmtree(folder, ignore_errors=True)
    return found


def learn(processes: Processes, folder: Path, config: Mapping[str, Any], *, on_gpu: bool) -> None:
    """Run a learner to its end. Raises ServerError or DeadlineError."""
    start_learner(processes, folder, "run", config, ranks=None, devices=[0] if on_gpu else ()).wait(_CASE_LIMIT_S)


def total_memory_gib() -> float:
    import torch

    return torch.cuda.mem_get_info()[1] / GIB


def next_card(setting: Setting, seen: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the card to try next; None if the smallest that fits is known."""
    names = list(CARDS)
    if setting.expected not in seen:
        return setting.expected
    fits = [names.index(name) for name, case in seen.items() if case["fits"]]
    fails = [names.index(name) for name, case in seen.items() if not case["fits"]]
    if not fits:
        up = max(fails) + 1
        return names[up] if up < len(names) else None
    down = min(fits) - 1
    return names[down] if down >= 0 and names[down] not in seen else None


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = []
    for name, seen in results.items():
        for card_name in sorted(seen, key=list(CARDS).index):
            case = seen[card_name]
            told = ["used_gib", "gpu_peak_gib", "step_s", "rollout_s", "learn_s", "sync_s"]
            cells = [f"{case[key]:.1f}" if isinstance(case.get(key), int | float) else "" for key in told]
            estimate = (case.get("estimate_gib") or {}).get("total", "")
            rows.append(
                [name, card_name, "yes" if case["fits"] else "no", cells[0], cells[1], str(estimate), *cells[2:]]
            )
    head = [
        "setting",
        "card GB",
        "fits",
        "GiB used",
        "learner's peak",
        "estimate",
        "step s",
        "rollout",
        "learn",
        "sync",
    ]
    return "\n".join(markdown_table(head, rows))


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    minutes: Annotated[float, typer.Option(help="No case begins that could end later.")] = 25.0,
    size: Annotated[Literal["all", "small"], typer.Option(help="small: one try without a GPU.")] = "all",
    scratch: Annotated[Path, typer.Option(help="For the models, one at a time.")] = Path("/dev/shm"),
    only: Annotated[str, typer.Option(help="Cases whose names contain this text.")] = "",
) -> None:
    """Run the cases that FILE lacks."""
    deadline = time.monotonic() + 60 * minutes
    logs = out.with_name(f"{out.stem}-logs")
    before = json.loads(out.read_text()) if out.is_file() else {}
    results: dict[str, dict[str, dict[str, Any]]] = before.get("settings", {})
    longest_s = 90.0
    if size == "small":
        tried = [Setting(size="small", method="grpo", memory="offload", expected="16")]
    else:
        tried = [setting for setting in SETTINGS if only in setting.name]
    for setting in tried:
        seen = results.setdefault(setting.name, {})
        model = scratch / f"photographs-{setting.size}"
        while (name := next_card(setting, seen)) and time.monotonic() + longest_s < deadline:
            if not (model / "config.json").is_file():
                apart(build_photograph_model, model, setting.size)
            began = time.monotonic()
            seen[name] = run_case(setting, model, data, None if size == "small" else CARDS[name], logs)
            took = round(time.monotonic() - began, 1)
            longest_s = max(longest_s, took + 10)
            say(f"{setting.name}, {name} GB: {'fits' if seen[name]['fits'] else 'does not fit'}, {took:g} s")
            made = {**circumstances(), "cards_gib": dict(CARDS), "settings": results}
            write_atomically(out, json.dumps({**made, "list": [asdict(one) for one in tried]}, indent=1) + "\n")
            if size == "small":
                break
    print(table(results), flush=True)


if __name__ == "__main__":
    typer.run(main)
