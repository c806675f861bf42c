"""The demo: learning from incomplete labels, end to end on this machine: `python -m deploy.demo.run` (`make demo`).

Training labels leave out 40% of the objects. Two runs learn from these labels, for equally many steps, from the shipped
checkpoint: plain teacher forcing (`sft`), and ours. Ours first completes the labels (`labels.complete`): the model
answers each scene four times, and objects on which the answers agree become labels. Every completion and evaluation
follows a checked weight sync. Test scenes with complete labels score two models: the best step of `sft`, chosen by
validation scenes with incomplete labels, and the last step of ours. Pictures show the predictions for three test
scenes, before and after our run.

Writes summary, report, pictures, metrics and logs under `runs/demo`. Free ports are used. All started processes are
stopped at the end.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from deploy.demo.build_data import Build, build
from deploy.launch import Processes, learner_argv, start_server, supervised, wait_ready
from learner.report.page import write_report
from learner.run.files import write_atomically
from shared.addresses import free_ports
from shared.config.parse import write_yaml
from shared.errors import ProjectError
from shared.version import Version

OUT = Path("runs/demo")
HERE = Path("deploy/demo")
MODEL = HERE / "checkpoint"
READY_TIMEOUT_S = 240.0
MISSING = 0.4  # fraction of the training objects that have no label
NUM_TRAIN, NUM_VAL, NUM_TEST = 192, 60, 200  # a run has 12 steps of 16 scenes, so it learns each training scene once
STAGES = {
    "ours": "ours: four answers to every scene complete its labels, then sft; every sync is checked",
    "sft": "sft on the labels as they are, as many steps",
}


def main() -> int:
    phases: dict[str, float] = {}
    try:
        with supervised() as processes:
            return _demo(processes, phases)
    except KeyboardInterrupt:
        print("[demo] interrupted; everything is stopped")
        return 130
    except ProjectError as error:
        print(f"[demo] error: {error}", file=sys.stderr)
        return error.exit_code


def _demo(processes: Processes, phases: dict[str, float]) -> int:
    started = time.monotonic()
    for old in ("ours", "sft", "logs"):
        shutil.rmtree(OUT / old, ignore_errors=True)
    configs = _write_configs()
    say("starting the rollout server (vLLM on CPU), and drawing scenes of handwritten digits")
    with timed(phases, "server and data"):
        # The server is started first, so that it loads its model while the scenes are drawn.
        server, url = start_server(processes, str(configs["server"]), log=OUT / "logs" / "server.out")
        write_data(OUT)
        wait_ready(server, url, READY_TIMEOUT_S)
    say(f"server ready at {url} (log: {OUT}/logs)")
    for name, what in STAGES.items():
        say(what)
        with timed(phases, name):
            if code := _learn(processes, name, configs):
                return code
    with timed(phases, "stop"):
        processes.stop_all()
    return _tell(phases, started)


def _learn(processes: Processes, name: str, configs: dict[str, Path]) -> int:
    code = processes.start(name, learner_argv(str(configs[name]), nproc=1)).popen.wait()
    if code != 0:
        say(f"{name} ended with exit code {code}; see {OUT}/{name} and {OUT}/logs")
    return code


def _tell(phases: dict[str, float], started: float) -> int:
    # Imported late, because the import takes seconds, and `--help` and the server do not need it.
    import torch

    from deploy.demo.summary import draw_before_and_after, show, summarize

    # The pictures show only three scenes, for which two threads are slower than one.
    torch.set_num_threads(1)
    with timed(phases, "pictures"):
        pictures = draw_before_and_after(MODEL, OUT / "ours", OUT / "pictures")
    phases["total"] = time.monotonic() - started
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    phases["CPU time"] = sum(one.ru_utime + one.ru_stime for one in used)
    summary = summarize(OUT / "ours", OUT / "sft", OUT / "data" / "test.jsonl", phases, missing=MISSING)
    write_atomically(OUT / "summary.json", json.dumps(summary, indent=2) + "\n")
    show(summary)
    say(f"three test scenes before and after: {', '.join(map(str, pictures))}")
    say(f"numbers: {OUT}/summary.json; pictures: {write_report(OUT).resolve().as_uri()}")
    return 0


def _write_configs() -> dict[str, Path]:
    """Write the committed configurations with free ports to `runs/demo`, and return their paths."""
    http_port, group_port = free_ports(2)
    entry = {"base_url": f"http://127.0.0.1:{http_port}", "group_port": group_port}
    learner: dict[str, Any] = {"custom": {"extra": {"rollout_matching": {"vllm": {"server": {"servers": [entry]}}}}}}
    server: dict[str, Any] = {"port": http_port}
    if not has_fast_bfloat16():
        say("this processor has no AVX-512, and computes bfloat16 slowly: float32 in both programs")
        learner["training"], server["dtype"] = {"bf16": False}, "float32"
    paths = {}
    # The server checks that its image roots exist, so the folders are made before the data.
    for name in ("data", "val"):
        (OUT / name).mkdir(parents=True, exist_ok=True)
    for name in ("server", "ours", "sft"):
        paths[name] = OUT / f"{name}.yaml"
        override = server if name == "server" else learner
        text = f"{HERE}/{name}.yaml with this run's ports."
        write_yaml(paths[name], {"base": str(Path("../..") / HERE / f"{name}.yaml"), **override}, text)
    return paths


def write_data(out: Path) -> None:
    """Write training scenes with missing labels and test scenes with all labels to `data/`. Write other scenes with
    missing labels, for validation, to `val/train.jsonl`."""
    build(Build(train=NUM_TRAIN, val=0, test=NUM_TEST, annotation_dropout=MISSING, seed=3), out / "data")
    build(Build(train=NUM_VAL, val=0, test=0, annotation_dropout=MISSING, seed=4), out / "val")


def has_fast_bfloat16() -> bool:
    """Return True if this CPU computes in bfloat16 about as fast as in float32. Without AVX-512, a training row takes
    12 times as long in bfloat16. (Processors with AMX have AVX-512 too.)"""
    import torch

    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def command(version: Version = False) -> None:
    """Serve, learn, sync and compare on this machine: the main use of rollouts. Writes to runs/demo."""
    raise typer.Exit(main())


if __name__ == "__main__":
    typer.run(command)
