"""Seconds from the command to the first whole step, cold and warm: `python -m bench.first_step --data BCCD --out FILE`.

The race's run (`bench.race`) is started `--runs` times, each in a process of its own, with all caches of compilers in
one folder. It is empty for the first run, which is cold. Later ones find what it has left. Two steps are enough: what
the first one takes longer is what it compiles.

Out: FILE, and a table with a row per run. `imports` lasts until the run says its plan, `policy` until it has read the
model and the data, `engine` until vLLM has started and everything is ready. `sync`, `rollout` and `learn` are the first
step's phases. FILE has the parts of the first sync too, the second step, and per cache its size and the number of files
that the run added: a warm run that adds no `fxgraph` has compiled nothing again. Logs are beside FILE, in `STEM-logs`;
vLLM says there, with times, what its start did. Without a GPU: `--size tiny`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.figures import circumstances, markdown_table
from bench.photographs import Size
from bench.race import Race, learner_settings, race_of, steps_with_parts
from bench.runs import Events, exit_code_of, read_events, say, start_learner
from deploy.launch import Processes
from learner.run.environment import COMPILED_VARIABLE
from learner.run.files import write_atomically

STEPS = 2
LIMIT_S = 500.0  # a run's
PARTS = ("imports_s", "policy_s", "engine_s", "sync_s", "rollout_s", "learn_s", "other_s")
# Whatever keeps compiled programs, by the variable that says where.
CACHES = {"XDG_CACHE_HOME": ".", "TRITON_HOME": ".", "FLASHINFER_WORKSPACE_BASE": ".", "CUDA_CACHE_PATH": "nv"}
USERS_OWN = (COMPILED_VARIABLE, "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")  # would lead elsewhere
NAMES = {"rollout-learner/torch": "torch", "vllm": "vllm", ".triton": "triton", ".cache/flashinfer": "flashinfer"}


def parts_of(events: Events, began_at: float) -> dict[str, float]:
    """Return the seconds from `began_at`, in Unix time, to the end of the first step, and those of its parts."""
    at = {event["event"]: float(event["time"]) for event in reversed(events)}  # the first of each
    first = steps_with_parts(events)[0]
    phases = {name: first.get(name, 0.0) for name in ("sync_s", "rollout_s", "learn_s")}
    found = {
        "total_s": at["step"] - began_at,
        "imports_s": at["plan"] - began_at,
        "policy_s": at["data"] - at["plan"],
        "engine_s": at["begin"] - at["data"],
        **phases,
    }
    return {**found, "other_s": found["total_s"] - sum(found[name] for name in PARTS if name in found)}


def contents(folder: Path) -> dict[str, dict[str, int]]:
    """Return bytes and files of each cache in `folder`, and the number of graphs that torch has compiled."""
    found = {}
    for place, name in NAMES.items():
        files = [path for path in (folder / place).rglob("*") if path.is_file()]
        graphs = sum("fxgraph" in path.parts for path in files)
        if files:
            found[name] = {"bytes": sum(path.stat().st_size for path in files), "files": len(files), "fxgraph": graphs}
    return found


def added(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {
        name: {key: number - before.get(name, {}).get(key, 0) for key, number in numbers.items()}
        for name, numbers in after.items()
    }


def run(processes: Processes, folder: Path, name: str, race: Race, caches: Path, logs: Path) -> dict[str, Any]:
    """Return what one run took. Raises ServerError or DeadlineError if it failed."""
    config = learner_settings(race, folder / name)
    config["model"]["compile"] = "auto" if race.on_gpu else True
    variables = [f"{variable}={caches / place}" for variable, place in CACHES.items()]
    unset = [word for variable in USERS_OWN for word in ("-u", variable)]
    before, began_at = contents(caches), time.time()
    devices = [0] if race.on_gpu else ()
    prefix = ["env", *unset, *variables]
    learner = start_learner(processes, folder, name, config, ranks=None, devices=devices, prefix=prefix)
    try:
        learner.wait(LIMIT_S)
    finally:
        logs.mkdir(parents=True, exist_ok=True)
        for file in (learner.log, *learner.run_dir.glob("*.log"), *learner.run_dir.glob("metrics.jsonl")):
            if file.is_file():
                shutil.copy(file, logs / f"{name}-{file.name}")
    events = read_events(learner.run_dir)
    first, second = steps_with_parts(events)
    after = contents(caches)
    return {"run": name, **parts_of(events, began_at), "first_step": first, "second_step": second} | {
        "caches": after,
        "added": added(before, after),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["run", "to the first step s", *(part.removesuffix("_s") for part in PARTS), "graphs compiled", "caches MB"]
    return "\n".join(
        markdown_table(
            head,
            [
                [
                    row["run"],
                    f"{row['total_s']:.1f}",
                    *(f"{row[part]:.1f}" for part in PARTS),
                    str(sum(one["fxgraph"] for one in row["added"].values())),
                    f"{sum(one['bytes'] for one in row['caches'].values()) / 1e6:.0f}",
                ]
                for row in rows
            ],
        )
    )


def main(
    data: Annotated[Path, typer.Option(help="Photographs with VOC annotations: images/, voc/, splits/train.txt.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    size: Annotated[Size, typer.Option(help="Of the model.")] = "4B",
    runs: Annotated[int, typer.Option(min=1, help="The first is cold.")] = 2,
    whole_model: Annotated[bool, typer.Option(help="Train the whole model instead of a LoRA.")] = False,
    share: Annotated[float, typer.Option(help="Of the GPU's memory, for vLLM.")] = 0.3,
    compile_engine: Annotated[bool, typer.Option(help="vLLM compiles its model (`vllm.compile`).")] = True,
    scratch: Annotated[Path, typer.Option(help="For the model, kept there.")] = Path("/dev/shm"),
) -> None:
    """Start the run again and again, and write FILE after each."""
    options: dict[str, Any] = {
        "size": size,
        "photographs": "published",
        "whole_model": whole_model,
        "share": share,
        "compile_engine": compile_engine,
    }
    race = race_of(data, scratch, steps=STEPS, **options)
    rows: list[dict[str, Any]] = []

    def work(processes: Processes) -> None:
        with tempfile.TemporaryDirectory(prefix="first-step-") as name:
            folder, caches = Path(name), Path(name) / "caches"
            caches.mkdir()
            for i in range(runs):
                run_name = "cold" if i == 0 else f"warm-{i}"
                rows.append(run(processes, folder, run_name, race, caches, out.with_name(f"{out.stem}-logs")))
                say(f"{run_name}: {rows[-1]['total_s']:.1f} s to the first step")
                write_atomically(out, json.dumps({**circumstances(), **options, "runs": rows}, indent=1) + "\n")

    def report() -> None:
        if rows:
            print(table(rows), flush=True)
            for row in rows:
                parts = {name: value for name, value in row["first_step"].items() if "/" in name}
                print(f"{row['run']}: " + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()), flush=True)

    sys.exit(exit_code_of(work, report))


if __name__ == "__main__":
    typer.run(main)
