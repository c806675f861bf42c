"""What a user asks of a running run's servers: through small files in the run directory (R40).

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from learner.rollout.membership import Membership
from learner.run.files import write_atomically
from shared.errors import ConfigError, OutputError

FOLDER, STATE, REQUESTS = "servers", "state.json", "requests"
log = logging.getLogger("learner.rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequest:
    """`group_port`: of `add` only."""

    action: Literal["add", "remove"]
    base_url: str
    group_port: int = 0


def ask(run_dir: Path, request: ServerRequest) -> Path:
    """Leave a request for the run in `run_dir`. Raises ConfigError if there is none that could read it,
    OutputError if it can't be written."""
    read_state(run_dir)
    path = run_dir / FOLDER / REQUESTS / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    write_atomically(path, json.dumps(asdict(request)))
    return path


def read_state(run_dir: Path) -> dict[str, Any]:
    """What `ServerControl.show` wrote last. Raises ConfigError where no run has written it."""
    path = run_dir / FOLDER / STATE
    try:
        state = json.loads(path.read_text())
        if not isinstance(state, dict) or not isinstance(state.get("servers"), list):
            raise ValueError("not a list of servers")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} has no list of rollout servers",
            found=f"{path}: {getattr(error, 'strerror', None) or error}",
            wanted="the run directory (training.output_dir) of a run with vllm.mode: server",
            remedy="correct --run",
        ) from error
    return state


class ServerControl:
    """Rank 0's side."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._shown: Membership | None = None

    def take(self) -> list[ServerRequest]:
        """What was asked since the last time, in order."""
        folder = self._folder / REQUESTS
        if not folder.is_dir():
            return []
        found = []
        for path in sorted(folder.glob("*.json")):
            try:
                found.append(_request(json.loads(path.read_text())))
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s is not a request for servers and is removed: %s", path, error)
            path.unlink(missing_ok=True)
        return found

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
            write_atomically(self._folder / STATE, json.dumps(state, indent=1))
        except OutputError as error:
            log.warning("the list of servers could not be written: %s", error)
        self._shown = membership


def state_lines(state: dict[str, Any]) -> list[str]:
    """For a terminal: one line per server."""
    lines = []
    for server in state["servers"]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(server["since_s"])) if server["since_s"] else "start"
        because = f"  {server['because']}" if server["because"] else ""
        lines.append(f"{server['base_url']}  {server['state']}  since {since}{because}")
    served = state["served"]
    lines.append(f"weights: ver {served['ver']}" if served else "weights: none synced yet")
    return lines


def _request(value: Any) -> ServerRequest:
    request = ServerRequest(**value)
    if request.action not in ("add", "remove") or not isinstance(request.base_url, str):
        raise ValueError(f"unknown request {value!r:.200}")
    return request
