"""Does Channel-B run where rollouts take longer than a step: `python -m bench.late --out FILE`.

One server and one learner that runs ahead, as users start them, with the demo's model. A step's share takes several
generation calls and about two steps' time: few answers are decoded at once. In turn: `b_ratio` 0.75 with 3 steps an
epoch, and 1 with 2, 3 and 12. Out: FILE, and a table: steps of Channel-B of those that the slower side allows, rollouts
made and learned, and how long a share's rollouts take, in steps. With two GPUs server and learner have one each.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances, markdown_table
from bench.models import demo_model, demo_scenes
from bench.runs import Events, Server, last_words, learner_config, read_events, say, serve, served_by, start_learner
from bench.runs import steps_of as steps
from bench.training import DEMO_TASK
from deploy.launch import supervised
from learner.run.files import write_atomically
from shared.errors import ProjectError

CASES = ((0.75, 3), (1.0, 2), (1.0, 3), (1.0, 12))  # `b_ratio`, steps of an epoch
SAMPLES = 16  # of a step
_CASE_LIMIT_S = 280.0


def run_config(
    server: Server, model: Path, train: Path, run_dir: Path, b_ratio: float, num_steps: int
) -> dict[str, Any]:
    """Return a run whose shares take four generation calls."""
    ahead = {"enabled": True, "prefetch_target_packs": SAMPLES, "queue_limit": 2 * SAMPLES, "max_starved_steps": 10_000}
    return learner_config(
        model,
        train,
        run_dir,
        steps=num_steps,
        batch_size=SAMPLES,
        per_device=1,
        variant="stage2_ab_training",
        matching={
            "rollout_backend": "vllm",
            "decode_batch_size": 4,
            "decoding": {"temperature": 1.0, "max_new_tokens": 96},
            "vllm": served_by(server),
        },
        model={"dtype": "float32"},
        task=DEMO_TASK,
        training={"packing": True, "learning_rate": 1.0e-5, "bf16": False},
        logging={"trackers": [], "progress_bar": False},
        stage2_ab={"schedule": {"b_ratio": b_ratio}, "async_actor_learner": ahead},
        global_max_length=2048,
    )


def figures(events: Events, b_ratio: float) -> dict[str, Any]:
    """Return what a run did; `possible`: Channel-B steps that the slower side allows."""
    found = steps(events)
    made, learned = (
        sum(one.get(f"stage2_ab/async/packs_{what}", 0.0) for one in found) for what in ("made", "learned")
    )
    total_s = sum(one["step_s"] for one in found)
    share_s = sum(one.get("stage2_ab/rollout_s", 0.0) for one in found) * SAMPLES / max(1.0, made)
    possible = min(b_ratio * len(found), total_s / share_s if share_s else 0.0)
    learn_s = sum(one.get("learn_s", 0.0) for one in found) / max(1, len(found))
    return {
        "steps": len(found),
        "channels": "".join(one["channel"] for one in found),
        "channel_b": sum(one["channel"] == "B" for one in found),
        "possible": round(possible, 1),
        "made": int(made),
        "learned": int(learned),
        "share_in_steps": round(share_s / learn_s, 2) if learn_s else None,
        "step_s": round(total_s / max(1, len(found)), 3),
    }


def main(
    out: Annotated[Path, typer.Option(help="Result file.")],
    num_steps: Annotated[int, typer.Option("--steps", help="Of each run.")] = 26,
    case: Annotated[list[int] | None, typer.Option(help="Only these of the four, from 0.")] = None,
) -> None:
    """Run the cases, one after the other, by one server."""
    rows: dict[str, dict[str, Any]] = {}
    two = torch.cuda.device_count() > 1
    with tempfile.TemporaryDirectory(prefix="late-") as scratch, supervised() as processes:
        folder = Path(scratch)
        model, data = demo_model(folder), demo_scenes(folder)
        lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
        settings = {
            "model": str(model),
            "allowed_image_roots": [str(data)],
            "max_model_len": 1024,
            "enforce_eager": True,
        }
        more = {"gpu_memory_utilization": 0.3} if two else {"cpu_threads": 1}
        server = serve(processes, folder, "server", settings | more, devices=[0] if two else ())
        for index, (b_ratio, per_epoch) in enumerate(CASES):
            if case and index not in case:
                continue
            name = f"b_ratio {b_ratio:g}, {per_epoch} steps an epoch"
            train = data / f"train_{per_epoch}.jsonl"
            train.write_text("".join(lines[: per_epoch * SAMPLES]))
            config = run_config(server, model, train, folder / f"run{index}", b_ratio, num_steps)
            learner = start_learner(
                processes,
                folder,
                f"run{index}",
                config,
                prefix=("env", "OMP_NUM_THREADS=1"),
                devices=[1] if two else (),
            )
            error = {}
            try:
                learner.wait(_CASE_LIMIT_S)
            except ProjectError:
                error = {"error": last_words(learner.log, 2)}
            rows[name] = figures(read_events(learner.run_dir), b_ratio) | error
            say(f"{name}: {rows[name]}")
            write_atomically(out, json.dumps({**circumstances(), "cases": rows}, indent=1) + "\n")
    keys = ["channel_b", "possible", "steps", "made", "learned", "share_in_steps", "step_s"]
    print("\n".join(markdown_table(["case", *keys], [[n, *(str(r[k]) for k in keys)] for n, r in rows.items()])))


if __name__ == "__main__":
    typer.run(main)
