"""Start rollout servers and the learner together, each on its devices: `rollout-launch --config launch.yaml`, or
`python -m deploy.launch`, which is the same.

    servers:                                   # all must be ready before the learner starts
      - {config: server.yaml, devices: [0, 1, 2]}
    learner: {config: learner.yaml, devices: [3], nproc: 1}
    log_dir: runs/my_run/logs                  # one file per server; the learner prints here
    ready_timeout_s: 600

Every configuration is checked before anything starts. The exit code is the learner's, or 128 + n after signal n. If a
server ends while the learner runs, the run ends. Whatever happens, no started process is left at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from pydantic import Field

from deploy.torchrun import exit_code, without_working_directory
from learner.config.load import load_config
from rollout_server.config import ServerConfig, load_server_config
from shared.config.model import ConfigErrors, Mistake, Section, key
from shared.config.parse import load_yaml, parse
from shared.errors import DeadlineError, ProjectError, ServerError
from shared.wire import TOKEN_VARIABLE

STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
Device = Annotated[int, Field(ge=0)]


class ServerLaunch(Section):
    """One rollout server."""

    config: str = key("the server's configuration file", min_length=1)
    devices: list[Device] = key("CUDA devices, passed as CUDA_VISIBLE_DEVICES; empty: all of the machine", [])


class LearnerLaunch(Section):
    """The learner's ranks."""

    config: str = key("the learner's configuration file", min_length=1)
    devices: list[Device] = key("CUDA devices, passed as CUDA_VISIBLE_DEVICES; empty: all of the machine", [])
    nproc: int = key("ranks, one per device", 1, req="R17", ge=1)


class LaunchConfig(Section):
    """Servers and learner of one run on one machine: `make launch CONFIG=launch.yaml`."""

    servers: list[ServerLaunch] = key("the rollout servers", req="R17", min_length=1)
    learner: LearnerLaunch = key("the learner", req="R17")
    log_dir: str = key("folder of the servers' logs", min_length=1)
    ready_timeout_s: float = key("how long the servers may take to be ready", 600.0, unit="s", gt=0.0)


@dataclass
class Process:
    """A child process in its own session. Its output goes to `log` (None: this program's own output)."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path | None = None

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL to the whole session's group once the deadline has passed."""
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
    """What this program started, in order; stopped in reverse."""

    started: list[Process] = field(default_factory=list)
    _starting: bool = False
    _postponed: int | None = None

    def start(
        self, name: str, argv: Sequence[str], *, devices: Sequence[int | str] = (), log: Path | None = None
    ) -> Process:
        env = os.environ | without_working_directory(os.environ)
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        else:
            # Server and learner share the cores. Without this, a thread busy-waits for another one that the other
            # program keeps off its core: one step took 20 s instead of one.
            env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        self._starting = True
        try:
            popen = subprocess.Popen(
                argv, env=env, stdout=output, stderr=subprocess.STDOUT if output else None, start_new_session=True
            )
            self.started.append(Process(name, popen, log))
        finally:
            self._starting = False
            if output is not None:
                output.close()
        if self._postponed is not None:
            raise KeyboardInterrupt(self._postponed)
        return self.started[-1]

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """A signal handler. It lets a start finish, otherwise nobody would stop that process."""
        if self._starting:
            self._postponed = signum
        else:
            raise KeyboardInterrupt(signum)

    def stop_all(self) -> None:
        while self.started:
            self.started.pop().stop(STOP_TIMEOUT_S)


@contextmanager
def supervised() -> Iterator[Processes]:
    """Processes that are all stopped at the end, even if SIGTERM or Ctrl-C ends the block (KeyboardInterrupt)."""
    processes = Processes()
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(signum, processes.interrupt) for signum in signals]
    try:
        yield processes
    finally:
        for signum in signals:
            signal.signal(signum, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        processes.stop_all()
        for signum, handler in zip(signals, previous, strict=True):
            signal.signal(signum, handler)


def start_server(
    processes: Processes, config_path: str, *, log: Path, devices: Sequence[int | str] = ()
) -> tuple[Process, str]:
    """Start one rollout server; returns it and its base URL. `wait_ready` waits until it is ready."""
    config = load_server_config(config_path)
    return processes.start("server", server_argv(config_path), devices=devices, log=log), config.base_url


def wait_ready(server: Process, base_url: str, timeout_s: float, beside: Sequence[Process] = ()) -> float:
    """Seconds until the server answered `/ready/` with 200; the servers `beside` it must stay alive meanwhile.

    Raises ServerError if a server ended first (with the end of its log), DeadlineError after `timeout_s`.
    """
    started = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() - started < timeout_s:
            check_alive([server, *beside])
            try:
                if client.get(f"{base_url}/ready/").status_code == httpx.codes.OK:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_S)
    raise DeadlineError(
        f"the server at {base_url} was not ready in time",
        found=f"no 200 from /ready/ in {timeout_s:g} s; last words: {_last_words(server.log)}",
        wanted="a ready server",
        remedy=f"see {server.log}, or raise ready_timeout_s",
    )


def check_alive(servers: Sequence[Process]) -> None:
    """Raises ServerError if a server has ended, with the end of its log."""
    for server in servers:
        if server.popen.poll() is not None:
            raise ServerError(
                f"a rollout server ended unexpectedly ({' '.join(map(str, server.popen.args))})",  # type: ignore[arg-type]
                found=f"exit code {server.popen.returncode}; last words: {_last_words(server.log)}",
                wanted="a server that runs until the learner has ended",
                remedy=f"see {server.log}",
            )


def server_argv(config_path: str) -> list[str]:
    return [sys.executable, "-m", "rollout_server", "--config", config_path]


def learner_argv(config_path: str, nproc: int) -> list[str]:
    """torchrun for `nproc` learner ranks on this machine."""
    ranks = [sys.executable, "-m", "deploy.torchrun", "--nproc", str(nproc)]
    return [*ranks, "--", "-m", "learner", "--config", config_path]


def _last_words(log: Path | None, num_lines: int = 3) -> str:
    if log is None or not log.exists():
        return "(no log)"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-num_lines:]) or "(empty log)"


def load_launch_config(path: str) -> LaunchConfig:
    """The launcher's file. Every configuration that it names is checked too. Raises ConfigErrors."""
    config = parse(LaunchConfig, load_yaml(path), rules=(claimed_once, rank_devices))
    load_config(config.learner.config, world_size=config.learner.nproc)
    has_token = bool(os.environ.get(TOKEN_VARIABLE))
    servers = [load_server_config(server.config, has_token=has_token) for server in config.servers]
    if mistakes := list(_server_devices(config, servers)):
        raise ConfigErrors(f"{path} is wrong", mistakes=mistakes)
    return config


def claimed_once(config: LaunchConfig) -> Iterator[Mistake]:
    """No device is used by two processes."""
    owners: dict[int, str] = {}
    claims = {f"servers[{i}].devices": server.devices for i, server in enumerate(config.servers)}
    for owner, devices in {**claims, "learner.devices": config.learner.devices}.items():
        for device in devices:
            if device in owners:
                wanted, remedy = f"each device once ({owners[device]} has it too)", "choose another device"
                yield Mistake(path=owner, found=f"device {device}", wanted=wanted, remedy=remedy)
            owners.setdefault(device, owner)


def rank_devices(config: LaunchConfig) -> Iterator[Mistake]:
    """If devices are named, each learner rank has a device of its own."""
    devices, nproc = config.learner.devices, config.learner.nproc
    if devices and len(devices) < nproc:
        wanted, remedy = f"one for each of the {nproc} ranks", "name more devices, or lower learner.nproc"
        yield Mistake(path="learner.devices", found=f"{len(devices)} device(s)", wanted=wanted, remedy=remedy)


def _server_devices(config: LaunchConfig, servers: Sequence[ServerConfig]) -> Iterator[Mistake]:
    urls: dict[str, int] = {}
    for i, (entry, server) in enumerate(zip(config.servers, servers, strict=True)):
        if entry.devices and len(entry.devices) < server.world_size:
            found, wanted = f"{len(entry.devices)} device(s)", f"{server.world_size}, as {entry.config} asks for"
            remedy = "name more devices, or lower tensor_parallel_size or data_parallel_size there"
            yield Mistake(path=f"servers[{i}].devices", found=found, wanted=wanted, remedy=remedy)
        address = f"{server.host}:{server.port}"
        if address in urls:
            wanted, remedy = f"an address of its own (servers[{urls[address]}] has it too)", "change its port"
            yield Mistake(path=f"servers[{i}].config", found=address, wanted=wanted, remedy=remedy)
        urls.setdefault(address, i)


def launch(config: LaunchConfig) -> int:
    """Start servers, then the learner. Returns the learner's exit code (128 + n if signal n ended it).

    Raises ServerError, DeadlineError, and KeyboardInterrupt with the signal's number.
    """
    deadline = time.monotonic() + config.ready_timeout_s
    with supervised() as processes:
        servers: list[tuple[Process, str]] = []
        for i, entry in enumerate(config.servers):
            log = Path(config.log_dir) / f"server_{i}.log"
            servers.append(start_server(processes, entry.config, log=log, devices=entry.devices))
            print(f"[launch] server {i} at {servers[-1][1]}, devices {entry.devices or 'any'}, log {log}", flush=True)
        alive = [process for process, _ in servers]
        for process, url in servers:
            seconds = wait_ready(process, url, max(POLL_S, deadline - time.monotonic()), beside=alive)
            print(f"[launch] {url} ready after {seconds:.0f} s", flush=True)
        ranks, devices = config.learner.nproc, config.learner.devices
        print(f"[launch] learner: {ranks} rank(s), devices {devices or 'any'}", flush=True)
        learner = processes.start("learner", learner_argv(config.learner.config, ranks), devices=devices)
        while (code := learner.popen.poll()) is None:
            check_alive(alive)
            time.sleep(POLL_S)
        return exit_code(code)


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """The console script."""
    app(prog_name="rollout-launch")


@app.command(epilog="Other programs: rollout-server, rollout-learner.")
def start(config: Annotated[str, typer.Option(help="launch.yaml")]) -> None:
    """Start rollout servers and the learner together, each on its devices, and stop them at the end."""
    raise typer.Exit(_run(config))


def _run(config_path: str) -> int:
    try:
        return launch(load_launch_config(config_path))
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
