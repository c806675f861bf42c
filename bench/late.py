"""Does Channel-B run where rollouts take longer than a step: `python -m bench.late --out FILE`.

One real server and one learner that runs ahead, with the defaults of `async_actor_learner` and a tiny model with random
weights, so every answer has the same length. The server runs for a third of the time and answers one request after the
other: a step's share takes four calls and about three steps' time. On GPUs the server is not held: a step is short
there. With two GPUs server and learner have one each. In turn: `b_ratio` 0.75 and 1, each with 3 steps an epoch.
Out: FILE, with each step's channel, rollouts made and learned, and how many steps a share's rollouts take.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.figures import circumstances
from bench.models import vision_model
from bench.runs import last_words, learner_config, read_events, say, serve, served_by, start_learner, steps_of
from deploy.demo.build_data import Build, build
from deploy.launch import supervised
from learner.run.files import write_atomically
from shared.errors import ProjectError

B_RATIOS = (0.75, 1.0)
SAMPLES, STEPS_PER_EPOCH, STEPS = 4, 3, 26
_LIMIT_S = 480.0


def slow_down(pid: int) -> bool:
    """Hold a process's session for a while. Between two calls `LearnerRun.wait` lets it run for half as long."""
    os.killpg(pid, signal.SIGSTOP)
    time.sleep(0.2)
    os.killpg(pid, signal.SIGCONT)
    return False


def figures(run_dir: Path) -> dict[str, Any]:
    """Return what a run did. `made`, `learned`: rollouts; `share_in_steps`: seconds of a share's calls, of a step's."""
    events = read_events(run_dir)
    steps = steps_of(events)
    calls = [event for event in events if event["event"] == "rollout_call"]
    made = sum(event["num_requests"] for event in calls)
    calls_s = sum(one["seconds"] for event in calls for one in event["calls"])
    step_s = sum(step["step_s"] - step.get("wait_s", 0.0) for step in steps) / max(1, len(steps))
    return {
        "channels": "".join(step["channel"] for step in steps),
        "made": made,
        "learned": sum(step["channel"] == "B" for step in steps) * SAMPLES,
        "share_in_steps": round(calls_s / max(1, made) * SAMPLES / step_s, 2) if steps else None,
        "step_s": round(step_s, 2),
    }


def main(
    out: Annotated[Path, typer.Option(help="Result file.")],
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 96,
) -> None:
    """Run the cases, one after the other, by one server."""
    gpus = list(range(torch.cuda.device_count()))
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="late-") as scratch, supervised() as processes:
        folder = Path(scratch)
        model, data = vision_model(folder, "tiny"), folder / "data"
        build(Build(train=STEPS_PER_EPOCH * SAMPLES, val=1, test=1), data)
        settings = {"model": str(model), "allowed_image_roots": [str(data)], "enforce_eager": True}
        settings |= {"gpu_memory_utilization": 0.3} if gpus else {"cpu_threads": 1}
        server = serve(processes, folder, "server", settings, devices=gpus[:1])
        for b_ratio in B_RATIOS:
            name = f"b_ratio {b_ratio:g}"
            config = learner_config(
                model,
                data / "train.jsonl",
                folder / name,
                steps=STEPS,
                batch_size=SAMPLES,
                per_device=1,
                variant="stage2_ab_training",
                matching={
                    "decode_batch_size": 1,
                    "decoding": {"temperature": 1.0, "max_new_tokens": tokens},
                    "vllm": served_by(server),
                },
                training={"learning_rate": 1.0e-5},
                logging={"trackers": []},
                stage2_ab={"schedule": {"b_ratio": b_ratio}, "async_actor_learner": {"enabled": True}},
                global_max_length=1024,
            )
            one_thread = () if gpus else ("env", "OMP_NUM_THREADS=1")
            learner = start_learner(processes, folder, name, config, ranks=None, devices=gpus[-1:], prefix=one_thread)
            error = {}
            try:
                learner.wait(_LIMIT_S, until=(lambda: False) if gpus else partial(slow_down, server.pid))
            except ProjectError:
                error = {"error": last_words(learner.log, 4)}
            rows[name] = figures(learner.run_dir) | error
            say(f"{name}: {rows[name]}")
            write_atomically(out, json.dumps({**circumstances(), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
