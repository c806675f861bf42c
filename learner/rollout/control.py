"""Requests to add servers to a running run, and to remove servers (R40): a user's, through small files in the run
directory, and those that follow from the list of servers that a cluster keeps (`discovery.py`).

`ask` writes one request as a file; rank 0 takes it at the end of a step (`ServerControl.take`). `ServerControl.show`
writes which servers the run has, whenever that changes; `read_state` reads it. No process talks to another, so the
command also works on any machine that sees the run directory. Whoever can write there can name servers.

Invariants: a file is whole or not there; a request is taken once; a damaged one is logged and removed; a run goes on
where the state cannot be written.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.config.sections.servers import entry_mistakes
from learner.rollout.discovery import Discovery, ServerRequest
from learner.rollout.membership import Membership
from learner.run.files import write_atomically
from learner.run.lock import is_running
from shared.errors import ConfigError, OutputError
from shared.masking import masked_in
from shared.reading import json_in

FOLDER, STATE, REQUESTS = "servers", "state.json", "requests"
_MAX_REQUEST_BYTES = 1 << 16
log = logging.getLogger("learner.rollout")


def ask(run_dir: Path, request: ServerRequest) -> Path:
    """Write a request to the run in `run_dir`. Raises ConfigError if no run there could read it, OutputError if it
    can't be written."""
    read_state(run_dir)
    if not is_running(run_dir):
        raise ConfigError(
            f"{run_dir}: its run has ended",
            found="no process that holds the folder's lock",
            wanted="a run that goes on: the next one in this folder would not take the request",
            remedy="name the servers in that run's configuration",
        )
    path = run_dir / FOLDER / REQUESTS / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    write_atomically(path, json.dumps(asdict(request)))
    return path


def read_state(run_dir: Path) -> dict[str, Any]:
    """Return what `ServerControl.show` wrote last. Raises ConfigError where no run has written it."""
    path = run_dir / FOLDER / STATE
    try:
        state = json_in(path)
        _check_state(state)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} has no list of rollout servers",
            found=f"{path}: {getattr(error, 'strerror', None) or error}",
            wanted="the run directory (training.output_dir) of a run with vllm.mode: server",
            remedy="correct --run",
        ) from error
    return state


class ServerControl:
    """Rank 0's side: takes requests, and writes the state."""

    def __init__(self, run_dir: Path, discovery: Discovery | None = None) -> None:
        self._folder, self._discovery = run_dir / FOLDER, discovery
        self._shown: Membership | None = None
        for old in self._requests():  # requests to an earlier run do not count for this one
            log.warning("%s was asked of an earlier run and is removed", old)
            _remove(old)

    def take(self) -> list[ServerRequest]:
        """Return the requests since the last call, in order."""
        found = []
        for path in self._requests():
            try:
                if not path.is_file():  # opening a pipe would wait for its writer
                    raise OSError("not a file")
                with path.open("rb") as file:
                    found.append(_request(json.loads(file.read(_MAX_REQUEST_BYTES))))
            except (OSError, ValueError, TypeError, RecursionError) as error:
                log.warning("%s is not a request for servers and is removed: %s", path, error)
            _remove(path)
        members = self._shown or Membership(members=())
        return found + (self._discovery.take(members) if self._discovery is not None else [])

    def _requests(self) -> list[Path]:
        folder = self._folder / REQUESTS
        return sorted(folder.glob("*.json")) if folder.is_dir() else []

    def show(self, membership: Membership) -> None:
        """Write the state, if it has changed."""
        if membership == self._shown:
            return
        served = asdict(membership.served) if membership.served else None
        state = {
            "time": time.time(),
            "min_servers": membership.min_servers,
            "served": served,
            "servers": [asdict(member) for member in membership.members],
        }
        try:
            write_atomically(self._folder / STATE, json.dumps(masked_in(state), indent=1))
        except OutputError as error:
            log.warning("the list of servers could not be written: %s", error)
        self._shown = membership


def state_lines(state: dict[str, Any]) -> list[str]:
    """Return one line per server, for a terminal."""
    lines = []
    for server in state["servers"]:
        since = _local_time(server["since_s"]) if server.get("since_s") else "start"
        because = f"  {server['because']}" if server.get("because") else ""
        lines.append(f"{server.get('base_url', '?')}  {server.get('state', '?')}  since {since}{because}")
    served = state["served"]
    lines.append(f"weights: ver {served['ver']}" if served else "weights: none synced yet")
    return lines


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # a folder, or a read-only disk: the next call meets the file again
        log.warning("%s can't be removed: %s", path, error)


def _request(value: Any) -> ServerRequest:
    """Return the request in a JSON value. Raises ValueError or TypeError."""
    request = ServerRequest(**value)
    if request.action not in ("add", "remove") or not isinstance(request.base_url, str):
        raise ValueError(f"unknown request {value!r:.200}")
    request.base_url.encode()  # a lone surrogate is no text, and a ValueError
    port = request.group_port if request.action == "add" else None
    if type(request.group_port) is not int or entry_mistakes(request.base_url, port):
        raise ValueError(f"no server {value!r:.200}")
    return request


def _check_state(state: object) -> None:
    """Raises ValueError if `state` has not the form that `ServerControl.show` writes."""
    if not isinstance(state, dict) or not isinstance(state.get("servers"), list):
        raise ValueError("not a list of servers")
    for server in state["servers"]:
        texts = [server.get(name, "") for name in ("base_url", "state")] if isinstance(server, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"not a server: {server!r:.100}")
        if server.get("since_s") is not None:
            _local_time(server["since_s"])
    served = state.setdefault("served", None)
    if served is not None and not (isinstance(served, dict) and isinstance(served.get("ver"), int)):
        raise ValueError(f"not a weight version: {served!r:.100}")


def _local_time(unix_s: Any) -> str:
    """Return a Unix time as text in local time. Raises ValueError."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, TypeError, OSError) as error:
        raise ValueError(f"not a time: {unix_s!r:.100}") from error
