"""Kills and freezes of one of two real vLLM servers while a run goes on: `python -m bench.kills --out FILE`.

A real learner trains the demo's model on the rollouts of two real servers. In turn one of them is killed (SIGKILL of
its first process) or frozen (SIGSTOP of all its processes). The run must go on with the other one, and the server must
come back: a killed one is started again, a frozen one goes on.

Per fault: seconds until the run reported the loss, until the step in which it happened ended and the next one began,
until the first whole step without the server ended, and from the server's return until it serves again. FILE keeps all
rows: if `--seconds` is over before all faults were made, the same command goes on with what is left. Exit code 1 if the
run failed, or did not end with a checkpoint that loads.

On a GPU (`--gpu`) both servers share the first one, and the learner has the second. If there is only one, all share it
(`allow_shared_gpu`), and weights travel through sockets:
`python -m bench.kills --gpu --kills 10 --freezes 0 --out FILE`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bench import forked
from bench.figures import circumstances
from bench.models import demo_model, demo_scenes
from bench.runs import LearnerRun, Server, read_events, say, served_by, small_server, start_learner, visible
from bench.training import demo_run
from deploy.launch import Process, Processes, server_argv, supervised
from rollout_server.config import load_server_config
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.errors import ProjectError
from shared.wire import SERVER_ID_VARIABLE

INFER_TIMEOUT_S, TIMEOUT_S = 8.0, 60.0  # an answer takes a second on two quiet cores
FREEZE_S = INFER_TIMEOUT_S + 3.0
NOTICED_WITHIN_S = 60.0
BACK_WITHIN_S = 200.0
NAMES = ("one", "two")
Row = dict[str, Any]


class World:
    """Two servers and a run, in `folder`."""

    def __init__(self, processes: Processes, folder: Path, *, on_gpu: bool) -> None:
        self._processes, self._folder = processes, folder
        self._devices = [0] if on_gpu else []
        model, data = demo_model(folder), demo_scenes(folder)
        settings = small_server(
            model,
            data,
            on_gpu=on_gpu,
            max_num_seqs=8,
            graph_sizes=(),
            gpu_memory_utilization=0.2,
            kv_cache_bytes=1 << 30,
        ) | {"dtype": "float32"}
        for name in NAMES:
            write_yaml(folder / f"{name}.yaml", {**settings, "port": free_port()}, "bench")
        self.servers = [self._start(name) for name in NAMES]
        vllm = served_by(*self.servers, sync={"mode": "full"})
        place = _learner(on_gpu)
        vllm["server"] |= {"infer_timeout_s": INFER_TIMEOUT_S, "timeout_s": TIMEOUT_S, "min_servers": 1}
        vllm["server"]["allow_shared_gpu"] = on_gpu and place == self._devices
        short = {"decoding": {"temperature": 0.0, "max_new_tokens": 16}}
        config = demo_run(model, data, folder / "run", vllm, steps=1_000_000, batch_size=4, **short)
        config["training"] |= {"bf16": False, "learning_rate": 1e-5}
        self.run: LearnerRun = start_learner(processes, folder, "run", config, ranks=None, devices=place)

    def until(self, condition: Callable[[], Any], timeout_s: float) -> None:
        """Raises ServerError if the run ended, DeadlineError."""
        self.run.wait(timeout_s, until=lambda: bool(condition()))

    def steps_after(self, at_s: float) -> list[float]:
        return [e["time"] for e in read_events(self.run.run_dir) if e["event"] == "step" and e["time"] > at_s]

    def changed_after(self, at_s: float, what: str, url: str) -> list[float]:
        events = read_events(self.run.run_dir)
        return [
            e["time"]
            for e in events
            if e["event"] == "server" and e["what"] == what and e["base_url"] == url and e["time"] > at_s
        ]

    def hit(self, kind: str, index: int) -> Row:
        """One fault, until the server serves again."""
        server, at_s = self.servers[index], time.time()
        if kind == "kill":
            os.kill(server.pid, signal.SIGKILL)
        else:
            os.killpg(server.pid, signal.SIGSTOP)
        try:
            lost = lambda: self.changed_after(at_s, "lost", server.url)  # noqa: E731
            self.until(lambda: lost() and len(self.steps_after(at_s)) > 1, NOTICED_WITHIN_S)
            time.sleep(max(0.0, at_s + FREEZE_S - time.time()) if kind == "freeze" else 0.0)
        finally:
            if kind == "freeze":
                os.killpg(server.pid, signal.SIGCONT)
        ends = self.steps_after(at_s)
        row = {"kind": kind, "lost_s": lost()[0] - at_s, "next_step_s": ends[0] - at_s, "whole_step_s": ends[1] - at_s}
        if kind == "kill":
            self._start_again(index)
        back_s = time.time()
        self.until(lambda: self.changed_after(back_s, "joined", server.url), BACK_WITHIN_S)
        row["joined_s"] = self.changed_after(back_s, "joined", server.url)[0] - back_s
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}

    def end(self) -> str:
        """Stop the run as a user would; what is wrong with how it ended."""
        from learner.run.checkpoint import verify

        self.run.process.popen.send_signal(signal.SIGINT)
        code = self.run.process.popen.wait(60.0)
        found = sorted(self.run.run_dir.glob("checkpoint-*"))
        for path in found:
            verify(path)
        return "" if code == 130 and found else f"exit code {code}, {len(found)} checkpoints"

    def _start_again(self, index: int) -> None:
        self._processes.forget(self.servers[index].process)
        self.servers[index] = self._start(NAMES[index])

    def _start(self, name: str) -> Server:
        """A ready server of that name; its log goes on. On CPU it is forked, because importing vLLM takes longer than
        all the rest; CUDA does not outlive a fork."""
        path, log = str(self._folder / f"{name}.yaml"), self._folder / f"{name}.log"
        url = load_server_config(path).base_url
        if self._devices:
            argv, devices = server_argv(path), visible(*self._devices)
            process = self._processes.start(name, argv, devices=devices, log=log, again=True)
        else:
            process = self._fork(name, path, log)
            self._processes.started.append(process)
        server = Server(process=process, url=url)
        server.wait_ready()
        return server

    def _fork(self, name: str, path: str, log: Path) -> Process:
        server_id = uuid.uuid4().hex[:12]
        environment = os.environ | {SERVER_ID_VARIABLE: server_id, "OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("ab") as out:
            server = forked.start(
                forked.SERVER, "rollout_server", ["--config", path], env=environment, stdout=out, stderr=out
            )
        return Process(name, cast(Any, server), log, server_id)


def _learner(on_gpu: bool) -> list[int]:
    if not on_gpu:
        return []
    import torch

    return [1 if torch.cuda.device_count() > 1 else 0]


def left(rows: list[Row], kills: int, freezes: int) -> list[str]:
    """The kinds that are still to be made, alternating."""
    missing = {kind: n - sum(row["kind"] == kind for row in rows) for kind, n in (("kill", kills), ("freeze", freezes))}
    order = [kind for _ in range(max(missing.values())) for kind in missing]
    return [kind for i, kind in enumerate(order) if order[:i].count(kind) < missing[kind]]


def spread(rows: list[Row]) -> dict[str, Any]:
    """Per kind the number, and of each figure median and largest."""
    found: dict[str, Any] = {}
    for kind in ("kill", "freeze"):
        own = [row for row in rows if row["kind"] == kind]
        names = [name for name in (own[0] if own else {}) if name != "kind"]
        figures = {name: sorted(row[name] for row in own) for name in names}
        found[kind] = {"number": len(own)} | {
            name: {"median": round(statistics.median(values), 3), "largest": values[-1]}
            for name, values in figures.items()
        }
    return found


def main(
    out: Annotated[Path, typer.Option(help="The results; what is there already is not made again.")],
    seconds: Annotated[float, typer.Option(help="No fault begins later after the first.")] = 200.0,
    kills: Annotated[int, typer.Option()] = 20,
    freezes: Annotated[int, typer.Option()] = 20,
    gpu: Annotated[bool, typer.Option(help="Servers and learner on GPUs.")] = False,
) -> None:
    """Kill and freeze one of two real servers in turn, and measure how the run goes on."""
    before = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    rows: list[Row] = before["rows"]
    broken, began = "", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, supervised() as processes:
        try:
            world = World(processes, Path(folder), on_gpu=gpu)
            world.until(lambda: len(world.steps_after(0.0)) >= 3, 120.0)
            say(f"servers and run started in {time.monotonic() - began:.0f} s")
            end = time.monotonic() + seconds
            for kind in left(rows, kills, freezes):
                if time.monotonic() > end:
                    break
                rows.append(world.hit(kind, len(rows) % 2))
                say(f"{len(rows)}: {rows[-1]}")
                _write(out, rows, "")
            broken = world.end()
        except (ProjectError, ProcessLookupError, IndexError) as error:
            broken = f"{type(error).__name__}: {error}"
            for log in ("run.log", "run/learner_rank0.log", *(f"{name}.log" for name in NAMES)):
                with contextlib.suppress(OSError):
                    say(f"{log}: {(Path(folder) / log).read_text()[-6000:]}")
    _write(out, rows, broken)
    print(json.dumps(spread(rows), indent=1))
    say(f"left: {len(left(rows, kills, freezes))} faults{'; DOES NOT HOLD: ' + broken if broken else ''}")
    sys.exit(1 if broken else 0)


def _write(out: Path, rows: list[Row], broken: str) -> None:
    figures = {"infer_timeout_s": INFER_TIMEOUT_S, "by_fault": spread(rows), "broken": broken, "rows": rows}
    out.write_text(json.dumps({**circumstances(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
