"""Real rollout servers for integration tests: started on a free port, with a log, ended whatever happens.

    with running_server({"model": str(folder)}, tmp_path) as server:
        httpx.get(f"{server.base_url}/status/")

Without a GPU they are forked from a process that has imported vLLM (`bench.forked`). `new_python=True` starts one
as a user does, with `python -m rollout_server`.

No process outlives the block: the server gets SIGTERM and a deadline, then its whole session gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import torch
import yaml

from bench import forked
from shared.addresses import free_port
from shared.processes import descendants

# Small and quick: what a test does not say. One thread, for the machine is shared.
DEFAULTS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "cpu_threads": 1,
    "engine_args": {"kv_cache_memory_bytes": 64 << 20},  # a second is spent on filling the usual gigabyte with zeros
    "shutdown_timeout_s": 5.0,
}
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    base_url: str
    process: subprocess.Popen[bytes] | forked.Forked
    log: Path

    def family(self) -> list[int]:
        """Process ids of the server and of all that it started, directly or not."""
        return [self.process.pid, *descendants(self.process.pid)]


@contextlib.contextmanager
def running_server(
    config: Mapping[str, Any],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 240.0,
    new_python: bool = False,
) -> Iterator[RunningServer]:
    """Run a server with `config` over DEFAULTS, ready when this yields; its files go into `folder`. Raises
    AssertionError with the end of the log where it does not become ready."""
    port = free_port()
    path = folder / f"server-{port}.yaml"
    path.write_text(yaml.safe_dump({**DEFAULTS, "port": port, **config}))
    log = folder / f"server-{port}.log"
    prefix = config.get("url_prefix", "")
    environment = {**os.environ, **(env or {})}
    with log.open("wb") as out:
        process = _start(["--config", str(path)], environment, out, new_python=new_python)
    server = RunningServer(base_url=f"http://127.0.0.1:{port}{prefix}", process=process, log=log)
    try:
        _wait_ready(server, start_timeout_s)
        yield server
    finally:
        stop(process)


def _start(
    arguments: list[str], environment: dict[str, str], out: BinaryIO, *, new_python: bool
) -> subprocess.Popen[bytes] | forked.Forked:
    if not new_python and not torch.cuda.is_available():
        return forked.start(forked.SERVER, "rollout_server", arguments, env=environment, stdout=out, stderr=out)
    argv = [sys.executable, "-m", "rollout_server", *arguments]
    return subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def stop(process: subprocess.Popen[bytes] | forked.Forked, timeout_s: float = _STOP_TIMEOUT_S) -> int:
    """Send SIGTERM, then SIGKILL to its session after the deadline; return the exit code."""
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return _kill(process)
    finally:
        for pid in family:
            if is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that ended and waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until all of `pids` are gone or the time has passed; return those that still run."""
    deadline = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _wait_ready(server: RunningServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5.0) as http:
        while time.monotonic() < deadline and server.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if http.get(f"{server.base_url}/ready/").status_code == httpx.codes.OK:
                    return
            time.sleep(0.1)
    words = server.log.read_text(errors="replace")[-3000:]
    raise AssertionError(f"no server after {timeout_s:g} s (exit code {server.process.poll()}):\n{words}")


def _kill(process: subprocess.Popen[bytes] | forked.Forked) -> int:
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait(10)
