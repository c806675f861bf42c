"""Kills and freezes of real vLLM servers while a run goes on: `python -m bench.kills --out FILE`.

A real learner trains the demo's model on the rollouts of `--servers` real servers (two). In turn one of them is killed
(SIGKILL of its first process) or frozen (SIGSTOP of all its processes). The run must go on with the others, and the
server must come back: a killed one is started again, a frozen one goes on. One server at least always serves.

With more than two servers the next faults hit others while killed ones start, because a start takes longer than all the
rest. A row says how many servers were away already when its fault came (`away`); they come back beside it, which can
only make its figures worse.

Per fault: seconds until the run reported the loss, until the step in which it happened ended and the next one began,
until the first whole step without the server ended, how long a killed server took to start, and from the server's
return until it serves again. FILE keeps all rows: if `--seconds` is over before all faults were made, the same command
goes on with what is left. Exit code 1 if the run failed, or did not end with a checkpoint that loads.

On a GPU (`--gpu`) the servers share the first one, and the learner has the second. If there is only one, all share it
(`allow_shared_gpu`), and weights travel through sockets:
`python -m bench.kills --gpu --servers 5 --infer-timeout-s 6 --kills 10 --freezes 10 --out FILE`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import httpx
import typer

from bench import forked
from bench.figures import check_options, circumstances
from bench.models import demo_model, demo_scenes
from bench.runs import LearnerRun, Server, read_events, say, served_by, small_server, start_learner, visible
from bench.training import demo_run
from deploy.launch import Process, Processes, check_alive, look, server_argv, supervised
from rollout_server.config import load_server_config
from shared.addresses import free_port
from shared.config.parse import write_yaml
from shared.errors import ProjectError
from shared.wire import SERVER_ID_VARIABLE

TIMEOUT_S = 60.0
FROZEN_PAST_S = 3.0  # a freeze lasts longer than `infer_timeout_s` by this
NOTICED_WITHIN_S = 60.0  # beyond `infer_timeout_s`
BACK_WITHIN_S = 200.0
WHOLE_STEP_WITHIN_S = 5.0  # wanted after a kill, and after `infer_timeout_s` of a freeze
LOOK_S = 2.0
Row = dict[str, Any]


@dataclass
class Away:
    """A server that was hit and does not serve yet. `started_s`: when its new start began; `back_s`: when it was there
    again (None: not yet). Times are those of events, seconds since the epoch."""

    row: Row
    started_s: float | None = None
    back_s: float | None = None


class ServersAndRun:
    """Servers and a run, in `folder`. `rows`: the faults whose servers are back. For one thread."""

    def __init__(
        self, processes: Processes, folder: Path, *, servers: int, on_gpu: bool, infer_timeout_s: float, rows: list[Row]
    ) -> None:
        self._processes, self._folder, self._infer_timeout_s = processes, folder, infer_timeout_s
        self._devices = [0] if on_gpu else []
        self._names = [f"server-{i}" for i in range(servers)]
        self._away: dict[int, Away] = {}  # keys are the servers' indices
        self._last_hit = [0] * servers  # number of the last fault
        self._client = httpx.Client(trust_env=False, timeout=LOOK_S)
        self.rows = rows
        model, data = demo_model(folder), demo_scenes(folder)
        settings = small_server(
            model,
            data,
            on_gpu=on_gpu,
            max_num_seqs=8,
            graph_sizes=(),
            gpu_memory_utilization=0.1,
            kv_cache_bytes=1 << 30,
        ) | {"dtype": "float32"}
        for name in self._names:
            write_yaml(folder / f"{name}.yaml", {**settings, "port": free_port()}, "bench")
        self.servers = [self._start(name) for name in self._names]
        for server in self.servers:
            server.wait_ready()
        vllm = served_by(*self.servers, sync={"mode": "full"})
        place = _learner(on_gpu)
        vllm["server"] |= {"infer_timeout_s": infer_timeout_s, "timeout_s": TIMEOUT_S, "min_servers": 1}
        vllm["server"]["allow_shared_gpu"] = on_gpu and place == self._devices
        short = {"decoding": {"temperature": 0.0, "max_new_tokens": 16}}
        config = demo_run(model, data, folder / "run", vllm, steps=1_000_000, batch_size=4, **short)
        config["training"] |= {"bf16": False, "learning_rate": 1e-5}
        self.run: LearnerRun = start_learner(processes, folder, "run", config, ranks=None, devices=place)

    def until(self, condition: Callable[[], Any], timeout_s: float) -> None:
        """Wait for `condition`, while servers that were hit come back. Raises ServerError if the run or a server ended,
        DeadlineError."""

        def met() -> bool:
            self._see_who_is_back()
            return bool(condition())

        self.run.wait(timeout_s, until=met)

    def steps_after(self, at_s: float) -> list[float]:
        return [e["time"] for e in read_events(self.run.run_dir) if e["event"] == "step" and e["time"] > at_s]

    def changed_after(self, at_s: float, what: str, url: str) -> list[float]:
        events = read_events(self.run.run_dir)
        return [
            e["time"]
            for e in events
            if e["event"] == "server" and e["what"] == what and e["base_url"] == url and e["time"] > at_s
        ]

    @property
    def num_serving(self) -> int:
        return len(self.servers) - len(self._away)

    @property
    def faults(self) -> list[Row]:
        """All faults so far, also those whose servers are away."""
        return [*self.rows, *(away.row for away in self._away.values())]

    def hit(self, kind: str) -> None:
        """Make one fault, of the server that was longest without one. Wait until the run has made a whole step without
        it, and a frozen one serves again. A killed one then starts beside the next faults."""
        index = min((i for i in range(len(self.servers)) if i not in self._away), key=lambda i: self._last_hit[i])
        self._last_hit[index] = max(self._last_hit) + 1
        server, at_s, num_away = self.servers[index], time.time(), len(self._away)
        if kind == "kill":
            os.kill(server.pid, signal.SIGKILL)
        else:
            os.killpg(server.pid, signal.SIGSTOP)
        try:
            lost = lambda: self.changed_after(at_s, "lost", server.url)  # noqa: E731
            limit_s = self._infer_timeout_s + NOTICED_WITHIN_S
            self.until(lambda: lost() and len(self.steps_after(at_s)) > 1, limit_s)
            if kind == "freeze":
                end_s = at_s + self._infer_timeout_s + FROZEN_PAST_S
                self.until(lambda: time.time() >= end_s, limit_s)
        finally:
            if kind == "freeze":
                os.killpg(server.pid, signal.SIGCONT)
        ends = self.steps_after(at_s)
        row = {"kind": kind, "away": num_away, "lost_s": lost()[0] - at_s}
        row |= {"next_step_s": ends[0] - at_s, "whole_step_s": ends[1] - at_s}
        self._away[index] = Away(row=row)
        if kind == "kill":
            self._processes.forget(server.process)
            self._away[index].started_s = time.time()
            self.servers[index] = self._start(self._names[index])
        else:
            self._away[index].back_s = time.time()
            self.until(lambda: index not in self._away, BACK_WITHIN_S)
        say(f"{len(self.faults)}: {row}")

    def _see_who_is_back(self) -> None:
        """Notice the servers that have started, and those that the run has taken back."""
        for index, away in list(self._away.items()):
            server = self.servers[index]
            check_alive([server.process])
            if away.back_s is None and not look(self._client, server.url):
                assert away.started_s is not None
                away.back_s = time.time()
                away.row["start_s"] = away.back_s - away.started_s
            if away.back_s is None:
                continue
            if joined := self.changed_after(away.back_s, "joined", server.url):
                away.row["joined_s"] = joined[0] - away.back_s
                del self._away[index]
                rounded = {name: round(v, 3) if isinstance(v, float) else v for name, v in away.row.items()}
                self.rows.append(rounded)

    def end(self) -> str:
        """Stop the run as a user would; what is wrong with how it ended."""
        from learner.run.checkpoint import verify

        self.run.process.popen.send_signal(signal.SIGINT)
        code = self.run.process.popen.wait(60.0)
        found = sorted(self.run.run_dir.glob("checkpoint-*"))
        for path in found:
            verify(path)
        return "" if code == 130 and found else f"exit code {code}, {len(found)} checkpoints"

    def logs(self) -> Iterator[tuple[str, str]]:
        """The ends of all logs, by file name."""
        for name in ("run.log", "run/learner_rank0.log", *(f"{name}.log" for name in self._names)):
            with contextlib.suppress(OSError):
                yield name, (self._folder / name).read_text()[-6000:]

    def _start(self, name: str) -> Server:
        """Start a server of that name, which is not ready yet; its log goes on. On CPU it is forked, because importing
        vLLM takes longer than all the rest; CUDA does not outlive a fork."""
        path, log = str(self._folder / f"{name}.yaml"), self._folder / f"{name}.log"
        url = load_server_config(path).base_url
        if self._devices:
            argv, devices = server_argv(path), visible(*self._devices)
            process = self._processes.start(name, argv, devices=devices, log=log, again=True)
        else:
            process = self._fork(name, path, log)
            self._processes.started.append(process)
        return Server(process=process, url=url)

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
    """Return the kinds that are still to be made, alternating; first the one of which more are missing."""
    missing = {kind: n - sum(row["kind"] == kind for row in rows) for kind, n in (("kill", kills), ("freeze", freezes))}
    order = sorted(missing, key=lambda kind: -missing[kind]) * max(missing.values())
    return [kind for i, kind in enumerate(order) if order[:i].count(kind) < missing[kind]]


def choose(kinds: Sequence[str], *, num_serving: int, num_away: int) -> str | None:
    """Return the fault to make now, of those that are left; None: wait until a server is back. One server must be left
    over. While two serve and others start, freezes come first: a kill would leave one, and no fault until a start has
    ended.
    """
    if num_serving < 2 or not kinds:
        return None
    first = "kill" if num_serving > 2 else "freeze" if num_away else kinds[0]
    return first if first in kinds else kinds[0]


def spread(rows: list[Row]) -> dict[str, Any]:
    """Return per kind the number, and of each figure median and largest."""
    found: dict[str, Any] = {}
    for kind in ("kill", "freeze"):
        own = [row for row in rows if row["kind"] == kind]
        names = dict.fromkeys(name for row in own for name in row if name.endswith("_s"))
        figures = {name: sorted(row[name] for row in own if name in row) for name in names}
        found[kind] = {"number": len(own)} | {
            name: {"median": round(statistics.median(values), 3), "largest": values[-1]}
            for name, values in figures.items()
        }
    return found


def in_time(rows: list[Row], kind: str, within_s: float) -> str:
    """Say how many faults were followed by a whole step within `within_s`."""
    own = [row["whole_step_s"] for row in rows if row["kind"] == kind]
    return f"{kind}: next whole step within {within_s:g} s in {sum(s <= within_s for s in own)} of {len(own)}"


def main(
    out: Annotated[Path, typer.Option(help="The results; what is there already is not made again.")],
    seconds: Annotated[float, typer.Option(help="No fault begins later after the first.")] = 200.0,
    kills: Annotated[int, typer.Option()] = 20,
    freezes: Annotated[int, typer.Option()] = 20,
    servers: Annotated[int, typer.Option(min=2, help="With more, killed ones start beside the next faults.")] = 2,
    infer_timeout_s: Annotated[float, typer.Option(help="An answer takes a second on two quiet cores.")] = 8.0,
    gpu: Annotated[bool, typer.Option(help="Servers and learner on GPUs.")] = False,
) -> None:
    """Kill and freeze one of some real servers in turn, and measure how the run goes on."""
    options = {"servers": servers, "infer_timeout_s": infer_timeout_s, "gpu": gpu}
    try:
        rows = rows_before(out, options)
    except ProjectError as error:
        say(str(error))
        sys.exit(error.exit_code)
    broken, began, world = "", time.monotonic(), None

    def write(broken: str) -> None:
        figures = {**options, "by_fault": spread(rows)}
        out.write_text(json.dumps({**circumstances(), **figures, "broken": broken, "rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="kills-") as folder, supervised() as processes:
        try:
            world = ServersAndRun(
                processes, Path(folder), servers=servers, on_gpu=gpu, infer_timeout_s=infer_timeout_s, rows=rows
            )
            say(f"servers ready after {time.monotonic() - began:.0f} s")
            world.until(lambda: len(world.steps_after(0.0)) >= 3, 120.0)
            say(f"servers and run started in {time.monotonic() - began:.0f} s")
            make_faults(world, kills, freezes, seconds, lambda: write(""))
            broken = world.end()
        except (ProjectError, ProcessLookupError, IndexError) as error:
            broken = f"{type(error).__name__}: {error}"
            for log, text in world.logs() if world else ():
                say(f"{log}: {text}")
    write(broken)
    print(json.dumps(spread(rows), indent=1))
    print(in_time(rows, "kill", WHOLE_STEP_WITHIN_S))
    print(in_time(rows, "freeze", infer_timeout_s + WHOLE_STEP_WITHIN_S))
    say(f"{time.monotonic() - began:.0f} s in all")
    say(f"left: {len(left(rows, kills, freezes))} faults{'; DOES NOT HOLD: ' + broken if broken else ''}")
    sys.exit(1 if broken else 0)


def rows_before(out: Path, options: Mapping[str, Any]) -> list[Row]:
    """Return the faults that the result file has. Raises DataError if they were made with other options."""
    if not out.is_file():
        return []
    before = json.loads(out.read_text())
    check_options(out, {name: before[name] for name in options if name in before}, options)
    return list(before["rows"])


def _more_serve(world: ServersAndRun, before: int) -> bool:
    return world.num_serving > before


def make_faults(world: ServersAndRun, kills: int, freezes: int, seconds: float, write: Callable[[], None]) -> None:
    """Make what is left while there is time, then wait until all servers serve."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kinds = left(world.faults, kills, freezes)
        if not kinds:
            break
        serving = world.num_serving
        kind = choose(kinds, num_serving=serving, num_away=len(world.servers) - serving)
        if kind is None:
            world.until(partial(_more_serve, world, serving), BACK_WITHIN_S)
            continue
        world.hit(kind)
        write()
    world.until(lambda: world.num_serving == len(world.servers), BACK_WITHIN_S)


if __name__ == "__main__":
    typer.run(main)
