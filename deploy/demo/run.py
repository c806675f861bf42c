"""The main job end to end on this machine: `python -m deploy.demo.run` (`make demo`).

Builds the data, starts the rollout server (vLLM on CPU), trains stage 2 on real rollouts with a weight sync before
each step, trains the `sft` comparison for as many steps from the same checkpoint, evaluates before and after, stops
everything, and leaves summary, report, metrics and logs under `runs/demo`. Ports are chosen free.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.demo.build_data import Build, build
from deploy.demo.summary import show, summarize
from deploy.launch import Processes, learner_argv, start_server, supervised, wait_ready
from learner.report.__main__ import write_report
from learner.run.checkpoint import write_atomically
from shared.addresses import free_ports
from shared.config.parse import write_yaml
from shared.errors import ProjectError

OUT = Path("runs/demo")
HERE = Path("deploy/demo")
READY_TIMEOUT_S = 240.0


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
    for old in ("stage2", "sft", "logs"):
        shutil.rmtree(OUT / old, ignore_errors=True)
    configs = _write_configs()
    say("starting the rollout server (vLLM on CPU) and drawing scenes of handwritten digits meanwhile")
    with timed(phases, "server start and data"):
        server, url = start_server(processes, str(configs["server"]), log=OUT / "logs" / "server.out")
        build(Build(train=1500, val=100, test=200), OUT / "data")
        wait_ready(server, url, READY_TIMEOUT_S)
    say(f"server ready at {url} after {phases['server start and data']:.0f} s (log: {OUT}/logs)")
    for name, what in (("stage2", "stage 2: rollouts, matching, targets, learning, sync"), ("sft", "comparison: sft")):
        say(what)
        with timed(phases, name):
            code = processes.start(name, learner_argv(str(configs[name]), nproc=1)).popen.wait()
        if code != 0:
            say(f"{name} ended with exit code {code}; see {OUT}/{name} and {OUT}/logs")
            return code
    with timed(phases, "stop"):
        processes.stop_all()
    phases["total"] = time.monotonic() - started
    return _tell(phases)


def _tell(phases: dict[str, float]) -> int:
    summary = summarize(OUT / "stage2", OUT / "sft", phases)
    write_atomically(OUT / "summary.json", json.dumps(summary, indent=2) + "\n")
    show(summary)
    say(f"numbers: {OUT}/summary.json; pictures: {write_report(OUT)}")
    return 0


def _write_configs() -> dict[str, Path]:
    """The committed configurations with free ports, under `runs/demo`: they can be run again as they are."""
    http_port, group_port = free_ports(2)
    entry = {"base_url": f"http://127.0.0.1:{http_port}", "group_port": group_port}
    vllm = {"server": {"servers": [entry]}}
    learner = {"custom": {"extra": {"rollout_matching": {"vllm": vllm}}}}
    overrides: dict[str, dict[str, Any]] = {"server": {"port": http_port}, "stage2": learner, "sft": learner}
    paths = {}
    (OUT / "data").mkdir(parents=True, exist_ok=True)  # the server looks whether its image roots exist
    for name, override in overrides.items():
        base = Path("../..") / HERE / f"{name}.yaml"
        paths[name] = OUT / f"{name}.yaml"
        write_yaml(paths[name], {"base": str(base), **override}, f"{HERE}/{name}.yaml with this run's ports.")
    return paths


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    phases[name] = time.monotonic() - started


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
