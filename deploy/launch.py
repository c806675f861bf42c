"""Start rollout servers and the learner together, each on its devices: `python -m deploy.launch --config launch.yaml`.

    servers:                                   # started in order, all must be ready before the learner starts
      - {config: server.yaml, devices: [0, 1, 2]}
    learner: {config: learner.yaml, devices: [3], nproc: 1}
    log_dir: runs/my_run/logs                  # one file per process
    ready_timeout_s: 600

`devices` are CUDA device numbers, handed over as CUDA_VISIBLE_DEVICES; leave them out on a machine without GPUs. The
learner's exit code is this program's. Whatever happens, every started process is gone when it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
from pydantic import BaseModel, ConfigDict, Field

from rollout_server.config import load_server_config
from shared.config_io import load_yaml, parse
from shared.errors import ConfigError, DeadlineError, ProjectError, ServerError

STOP_TIMEOUT_S = 30.0


class LaunchSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerLaunch(LaunchSection):
    config: str
    devices: list[int] = []


class LearnerLaunch(LaunchSection):
    config: str
    devices: list[int] = []
    nproc: int = Field(default=1, ge=1)


class LaunchConfig(LaunchSection):
    servers: list[ServerLaunch] = Field(min_length=1)
    learner: LearnerLaunch
    log_dir: str
    ready_timeout_s: float = Field(default=600.0, gt=0)


@dataclass
class Process:
    """A child in its own session, with its output in a file (None: this program's own output)."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path | None = None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
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

    def start(self, name: str, argv: Sequence[str], *, devices: Sequence[int] = (), log: Path | None = None) -> Process:
        env = dict(os.environ)
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("wb")
        popen = subprocess.Popen(
            argv, env=env, stdout=output, stderr=subprocess.STDOUT if output else None, start_new_session=True
        )
        if output is not None:
            output.close()
        process = Process(name, popen, log)
        self.started.append(process)
        return process

    def stop_all(self) -> None:
        while self.started:
            self.started.pop().stop()


@contextmanager
def supervised() -> Iterator[Processes]:
    """Processes that are all stopped at the end, also when SIGTERM or Ctrl-C ends it."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    processes = Processes()
    try:
        yield processes
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        processes.stop_all()
        signal.signal(signal.SIGTERM, previous)


def start_server(
    processes: Processes, config_path: str, *, log: Path, devices: Sequence[int] = ()
) -> tuple[Process, str]:
    """Start one rollout server; returns it and its base URL. Ready only once `wait_ready` says so."""
    config = load_server_config(config_path)
    argv = [sys.executable, "-m", "rollout_server", "--config", config_path]
    return processes.start("server", argv, devices=devices, log=log), f"http://{config.host}:{config.port}"


def wait_ready(server: Process, base_url: str, timeout_s: float) -> float:
    """Seconds until the server answered `/ready/` with 200.

    Raises ServerError where it ended first (with the end of its log), DeadlineError where the time passed.
    """
    started = time.monotonic()
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() - started < timeout_s:
            if server.popen.poll() is not None:
                raise ServerError(
                    f"the server at {base_url} ended while starting",
                    found=f"exit code {server.popen.returncode}; last words: {_last_words(server.log)}",
                    wanted="a server that answers /ready/",
                    remedy=f"see {server.log}",
                )
            try:
                if client.get(f"{base_url}/ready/").status_code == httpx.codes.OK:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.2)
    raise DeadlineError(
        f"the server at {base_url} was not ready in time",
        found=f"no 200 from /ready/ in {timeout_s:g} s; last words: {_last_words(server.log)}",
        wanted="a ready server",
        remedy=f"see {server.log}, or raise ready_timeout_s",
    )


def learner_argv(config_path: str, nproc: int) -> list[str]:
    """torchrun for `nproc` learner ranks on this machine."""
    ranks = [sys.executable, "-m", "deploy.torchrun", "--nproc", str(nproc)]
    return [*ranks, "--", "-m", "learner", "--config", config_path]


def _last_words(log: Path | None, num_lines: int = 3) -> str:
    if log is None or not log.exists():
        return "(no log)"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-num_lines:]) or "(empty log)"


def check_devices(config: LaunchConfig) -> None:
    """No device may serve two processes. Raises ConfigError."""
    owners: dict[int, str] = {}
    claims: Mapping[str, Sequence[int]] = {
        **{f"servers[{i}]": s.devices for i, s in enumerate(config.servers)},
        "learner": config.learner.devices,
    }
    for owner, devices in claims.items():
        for device in devices:
            if device in owners:
                raise ConfigError(
                    f"{owner}.devices: device {device} is claimed twice",
                    found=f"{owners[device]} has it too",
                    wanted="each device in one process",
                    remedy="give servers and learner different devices",
                )
            owners[device] = owner


def launch(config: LaunchConfig) -> int:
    """Servers, then the learner; returns the learner's exit code."""
    check_devices(config)
    log_dir = Path(config.log_dir)
    with supervised() as processes:
        waiting = []
        for i, server in enumerate(config.servers):
            log = log_dir / f"server_{i}.log"
            process, url = start_server(processes, server.config, log=log, devices=server.devices)
            print(f"[launch] server {i} at {url}, devices {server.devices or 'cpu'}, log {log}")
            waiting.append((process, url))
        for process, url in waiting:
            print(f"[launch] {url} ready after {wait_ready(process, url, config.ready_timeout_s):.0f} s")
        print(f"[launch] learner: {config.learner.nproc} rank(s), devices {config.learner.devices or 'cpu'}")
        argv = learner_argv(config.learner.config, config.learner.nproc)
        return processes.start("learner", argv, devices=config.learner.devices).popen.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Start rollout servers and the learner together.")
    parser.add_argument("--config", required=True, help="launch.yaml")
    args = parser.parse_args()
    try:
        return launch(parse(LaunchConfig, load_yaml(args.config), args.config))
    except KeyboardInterrupt:
        return 130
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
