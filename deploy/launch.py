"""Start rollout servers and the learner together, each on its devices: `rollout-launch --config launch.yaml
[KEY=VALUE ...]`, or `python -m deploy.launch`, which is the same. With `--to slurm | kubernetes | skypilot | compose
--out DIR` it starts nothing, and writes the files for that place (`deploy.places`).

    servers:                                   # all must be ready before the learner starts
      - {config: server.yaml, devices: [0, 1, 2], max_restarts: 3}
    learner: {config: learner.yaml, devices: [3], nproc: 1, max_restarts: 0}
    log_dir: runs/my_run/logs                  # one file per server; the learner prints here
    ready_timeout_s: 600

Every configuration, and the learner's folder, is checked before anything starts. The exit code is the learner's, or
128 + n after signal n. `--check` starts nothing, but also checks the data, this machine, and the servers' ports.

If a server ends before the learner has started, the launch ends. A server that ends later is restarted up to
`max_restarts` times, each time after a longer wait; after an uptime of STEADY_S the count begins anew. A server that
ends after its last restart is not started again. Once no server is left, the run ends. A server counts as ready only if
its answer has the `server_id` of the process that was started here, so an older server on the same port does not count.

At the end no started process is left, even after an error. If this program is killed, the kernel ends its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer

from deploy.launch_file import LaunchConfig, LearnerLaunch, ServerLaunch, load_launch_config
from deploy.places import Place, write_place
from deploy.wait_ready import look
from learner.config.load import load_config
from learner.wiring.before_start import mistakes_before_start
from rollout_server.config import SERVER_ID_VARIABLE, load_server_config
from shared.config.checks import READY
from shared.config.json_schema import schema_option
from shared.config.model import ConfigErrors
from shared.errors import DeadlineError, ProjectError, ServerError
from shared.masking import masked
from shared.private import unlinked
from shared.processes import (
    describe,
    end_with_parent,
    exit_code,
    last_words,
    leave_lost_output,
    stop_signals,
    without_working_directory,
)
from shared.version import Version
from shared.waits import Deadline, Retry, awake_s, back_off_s

STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
LOOK_S = 5.0  # longest wait for one answer of `/ready/` while the learner has not started
BACK_OFF_S = 1.0  # wait before the first restart; doubled before each further restart
MAX_BACK_OFF_S = 60.0
STEADY_S = 600.0


@dataclass
class Process:
    """A child process in its own session. The process's output goes to `log` (None: this program's own output). A
    rollout server reports `server_id` in its answers; each start gets a new id."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path | None = None
    server_id: str = ""

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to the session's process group after `timeout_s`."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                print(f"{self.name} did not stop within {timeout_s:g} s: killed", file=sys.stderr)
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.popen.wait()


@dataclass
class Processes:
    """The processes that this program started, in order; they are stopped in reverse."""

    started: list[Process] = field(default_factory=list)
    _starting: bool = False
    _postponed: int | None = None

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        devices: Sequence[int | str] = (),
        log: Path | None = None,
        again: bool = False,
    ) -> Process:
        """Start a program in a session of its own. `devices`: its CUDA_VISIBLE_DEVICES; () for all devices. `again`:
        append to `log`. The program is killed when the calling thread ends."""
        server_id, parent_pid = uuid.uuid4().hex[:12], os.getpid()
        env = os.environ | without_working_directory(os.environ) | {SERVER_ID_VARIABLE: server_id}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        else:
            # Server and learner share the cores. By default an OpenMP thread busy-waits for threads whose cores the
            # other program uses: one step took 20 s instead of 1 s.
            env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = FileIO(log, "a" if again else "w", opener=unlinked)
        self._starting = True
        try:
            # The child gets a session of its own. So Ctrl-C reaches only this program, which then stops its children in
            # order.
            popen = subprocess.Popen(
                argv,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL, parent_pid),
            )
            self.started.append(Process(name, popen, log, server_id))
        finally:
            self._starting = False
            if output is not None:
                output.close()
        if self._postponed is not None:
            raise KeyboardInterrupt(self._postponed)
        return self.started[-1]

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: raise KeyboardInterrupt with its number. While a process starts, the error is postponed
        until the process is in `started`. So a process that is just starting is stopped too."""
        leave_lost_output()
        if self._starting:
            self._postponed = signum
        else:
            raise KeyboardInterrupt(signum)

    def forget(self, process: Process) -> None:
        """Remove a process that has ended from the list, and kill other processes of its session."""
        process.stop(0.0)
        self.started.remove(process)

    def stop_all(self) -> None:
        while self.started:
            self.started.pop().stop(STOP_TIMEOUT_S)


@contextmanager
def supervised() -> Iterator[Processes]:
    """Yield a `Processes` whose processes are all stopped at the end of the `with` block, also if SIGTERM, Ctrl-C or a
    closed terminal ends the block (KeyboardInterrupt)."""
    processes = Processes()
    signals = stop_signals()
    previous = [signal.signal(signum, processes.interrupt) for signum in signals]
    try:
        yield processes
    finally:
        for signum in signals:
            # A second Ctrl-C must not leave processes behind.
            signal.signal(signum, signal.SIG_IGN)
        processes.stop_all()
        for signum, handler in zip(signals, previous, strict=True):
            signal.signal(signum, handler)


def start_server(
    processes: Processes,
    config_path: str,
    *,
    log: Path,
    devices: Sequence[int | str] = (),
    via: Sequence[str] = (),
) -> tuple[Process, str]:
    """Start one rollout server; returns it and its base URL. `wait_ready` waits until it is ready."""
    config = load_server_config(config_path)
    url = config.base_url_for(config.group_host) if via else config.base_url
    return processes.start("server", [*via, *server_argv(config_path)], devices=devices, log=log), url


def wait_ready(server: Process, base_url: str, timeout_s: float, beside: Sequence[Process] = ()) -> float:
    """Wait until `server` itself, not another server at the same address, answers `/ready/` with 200. Return the
    seconds that the wait took. The servers `beside` must not end meanwhile.

    Raises ServerError, which shows the end of the log, if one of these servers ends first. Raises DeadlineError after
    `timeout_s`.
    """
    started, retry = time.monotonic(), Retry(timeout_s, POLL_S)
    with httpx.Client(trust_env=False, timeout=LOOK_S) as client:
        while True:
            # A server that ends before the learner has started would only fail again, so it is not restarted.
            check_alive([server, *beside])
            # An older server at this port would answer at once, so the answer must have the id of this start.
            if not (said := look(client, base_url, server.server_id)):
                return time.monotonic() - started
            # The time is checked after `look`. If the time were checked before `look`, a launcher that was paused for
            # long would raise an error for a server that has become ready meanwhile.
            if not retry.wait():
                break
    raise DeadlineError(
        f"the server at {base_url} was not ready in time",
        found=f"{said} from /ready/ after {timeout_s:g} s; last words: {last_words(server.log)}",
        wanted="a ready server",
        remedy=f"see {server.log}, or raise ready_timeout_s. If it was downloading its model, start again: what is "
        "there stays",
    )


def check_alive(servers: Sequence[Process]) -> None:
    """Raises ServerError, which shows the end of the log, if a server has ended."""
    for server in servers:
        if server.popen.poll() is not None:
            raise ServerError(
                f"a rollout server ended unexpectedly ({' '.join(map(str, server.popen.args))})",  # type: ignore[arg-type]
                found=f"exit code {server.popen.returncode}; last words: {last_words(server.log)}",
                wanted="a server that runs until the learner has ended",
                remedy=f"see {server.log}",
            )


def server_argv(config_path: str) -> list[str]:
    return [sys.executable, "-m", "rollout_server", "--config", config_path]


def learner_argv(config_path: str, nproc: int, max_restarts: int = 0) -> list[str]:
    """Return the command that runs `nproc` learner ranks on this machine by torchrun."""
    learner = LearnerLaunch(config=config_path, nproc=nproc, max_restarts=max_restarts)
    return [sys.executable, "-m", *learner.torchrun(config_path)]


def ranks_argv(learner: LearnerLaunch) -> list[str]:
    """Return the command that starts the learner's ranks by torchrun. The command begins with `learner.via`, if that is
    set."""
    if learner.nodes == 1:
        return [*learner.via, *learner_argv(learner.config, learner.nproc, learner.max_restarts)]
    # Every start gets a new store, because an old store holds the addresses of ended ranks.
    python = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m"]
    ranks = learner.torchrun(learner.config, endpoint=learner.rendezvous, run_id=uuid.uuid4().hex[:12])
    return [*learner.via, *python, *ranks]


class Server:
    """One rollout server of a launch. `look` restarts the server after it has ended."""

    def __init__(self, processes: Processes, index: int, entry: ServerLaunch, log_dir: Path) -> None:
        self._processes, self._name, self._entry = processes, f"server {index}", entry
        self._log = log_dir / f"server_{index}.log"
        self.process, self.url = start_server(
            processes, entry.config, log=self._log, devices=entry.devices, via=entry.via
        )
        self.given_up = False
        self._is_ready = True  # True before the first `look`, because `launch` waits for the first start
        self._num_restarts = 0
        self._started_at = awake_s()
        self._start_at: float | None = None  # time of the next restart (`awake_s`); None: no restart is planned
        say(f"{self._name} at {self.url}, devices {entry.devices or 'any'}, log {self._log}")

    def look(self, client: httpx.Client, ready_timeout_s: float) -> None:
        """Check the server once. If the pause before its restart is over, restart it. Print when the server is ready
        again. If the server has ended, plan its next restart, unless no restart is left."""
        now = awake_s()
        if self.given_up:
            return
        if self._start_at is not None:
            if now >= self._start_at:
                self._start_again()
        elif (code := self.process.popen.poll()) is not None:
            self._ended(f"{self._name} {describe(code)}")
        elif not self._is_ready:
            if not look(client, self.url, self.process.server_id):
                self._is_ready = True
                say(f"{self._name} ready again after {now - self._started_at:.0f} s")
            elif now - self._started_at > ready_timeout_s:
                self.process.stop(STOP_TIMEOUT_S)
                self._ended(f"{self._name} was not ready again within {ready_timeout_s:g} s")

    def _ended(self, what: str) -> None:
        self._processes.forget(self.process)
        if self._is_ready and awake_s() - self._started_at > STEADY_S:
            self._num_restarts = 0
        said = f"{what}; last words: {last_words(self._log)}"
        if self._num_restarts >= self._entry.max_restarts:
            self.given_up = True
            say(f"{said}. Given up after {self._num_restarts} restart(s) (max_restarts)")
            return
        self._num_restarts += 1
        pause_s = back_off_s(self._num_restarts, BACK_OFF_S, MAX_BACK_OFF_S)
        self._start_at = awake_s() + pause_s
        say(f"{said}. Restart {self._num_restarts} of {self._entry.max_restarts} in {pause_s:g} s")

    def _start_again(self) -> None:
        self._is_ready, self._start_at, self._started_at = False, None, awake_s()
        argv = [*self._entry.via, *server_argv(self._entry.config)]
        self.process = self._processes.start("server", argv, devices=self._entry.devices, log=self._log, again=True)


def launch(config: LaunchConfig) -> int:
    """Start servers, then the learner. Returns the learner's exit code (128 + n if signal n ended it).

    Raises ConfigErrors if the learner could not start, ServerError, DeadlineError, and KeyboardInterrupt with the
    signal's number.
    """
    # With `via`, the learner's files may be on another machine, where only the learner can check them.
    if not config.learner.via:
        found = load_config(config.learner.config, world_size=config.learner.nproc)
        # The run is checked here, because the learner would report these mistakes only when all servers are ready,
        # after about 100 s.
        if mistakes := mistakes_before_start(found, os.environ):
            raise ConfigErrors("the learner could not start", mistakes=mistakes)
    deadline = Deadline(config.ready_timeout_s)
    with supervised() as processes:
        servers = [Server(processes, i, entry, Path(config.log_dir)) for i, entry in enumerate(config.servers)]
        alive = [server.process for server in servers]
        for server in servers:
            left_s = max(POLL_S, deadline.left_s())
            seconds = wait_ready(server.process, server.url, left_s, beside=alive)
            say(f"{server.url} ready after {seconds:.0f} s")
        learner = config.learner
        say(f"learner: {learner.nodes * learner.nproc} rank(s), devices {learner.devices or 'any'}")
        process = processes.start("learner", ranks_argv(learner), devices=learner.devices)
        return _run_beside(process, servers, config.ready_timeout_s)


def check(config: LaunchConfig) -> int:
    """Check the learner's run and this machine as `rollout-learner check --machine` does, for servers that are not yet
    started. Returns the exit code. A learner with `via` is on another machine, so nothing is checked."""
    if config.learner.via:
        print(f"not checked: the learner's files and machine, which are elsewhere (learner.via)\n{READY}")
        return 0
    from learner.doctor.check import check_machine  # imported here: a launch needs no checks of the machine

    devices = sorted({device for part in config.parts.values() for device in part.devices})
    learner = config.learner
    return check_machine(learner.config, world_size=learner.nproc, environment=os.environ, devices=devices)


def _run_beside(learner: Process, servers: Sequence[Server], ready_timeout_s: float) -> int:
    """Wait for the learner's end, and return its exit code. Meanwhile, ended servers are restarted. Raises ServerError
    once no server is left."""
    with httpx.Client(trust_env=False, timeout=1.0) as client:
        while (code := learner.popen.poll()) is None:
            for server in servers:
                server.look(client, ready_timeout_s)
            if all(server.given_up for server in servers):
                check_alive([server.process for server in servers])
            time.sleep(POLL_S)
    return exit_code(code)


def say(text: str) -> None:
    print(f"[launch] {masked(text)}", flush=True)


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Run the console script."""
    app(prog_name="rollout-launch")


@app.command(epilog="Other programs: rollout-server, rollout-learner.")
def start(
    config: Annotated[str, typer.Option(help="launch.yaml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as learner.nproc=2."),
    ] = None,
    to: Annotated[Place | None, typer.Option(help="Start nothing; write what this place needs.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --to: the folder for it.")] = None,
    only_check: Annotated[
        bool, typer.Option("--check", help="Start nothing; check configurations, data, this machine and ports.")
    ] = False,
    schema: Annotated[bool, schema_option("launcher")] = False,
    version: Version = False,
) -> None:
    """Start rollout servers and the learner together, each on its devices, and stop them at the end. Or write the same
    run for a cluster."""
    if (to is None) != (out is None):
        raise typer.BadParameter("--to and --out go together", param_hint="--to")
    if to is not None and only_check:
        raise typer.BadParameter("a launch for another place cannot be checked here: leave --to out")
    if to is not None and out is not None:
        raise typer.Exit(_told(lambda: write_place(to, config, overrides or (), out)))
    work = check if only_check else launch
    raise typer.Exit(_told(lambda: work(load_launch_config(config, overrides or ()))))


def _told(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. Errors are printed without a traceback."""
    try:
        return command()
    except KeyboardInterrupt as stopped:
        signum = stopped.args[0] if stopped.args else signal.SIGINT
        print(f"[launch] stopped by {signal.Signals(signum).name}", file=sys.stderr)
        return exit_code(-signum)
    except ConfigErrors as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    main()
