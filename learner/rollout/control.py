"""Requests to add rollout servers to a running run, and to remove them (R40). A user's requests are small files in the
run directory. More requests come from the list of servers that a cluster keeps.

`ask` writes one request as a file; rank 0 takes it at the end of a step (`ServerControl.take`). `ServerControl.show`
writes the run's servers to a file whenever they change; `read_state` reads this file. A user and the run communicate by
these files only, so a user can make requests on any machine that sees the run directory. Whoever can write in the run
directory can name servers.

Invariants: a file is complete or absent; a request is taken once; a damaged request is logged and removed; if the
servers cannot be written to their file, the run continues.

`Discovery` reads a cluster's list, from a file or a command, in the background, so that no step waits for it. A server
that is new in the list is added once. A server that was in an earlier list and is missing from two lists in a row is
removed. The removal is requested again until the server has left. Servers that were in no list are not touched. If the
list cannot be read, nothing changes. Servers in the list get the run's token and weights, so only people that you trust
may write the list. When the run ends, the process waits for a command that is still running, up to the command's
deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import stat
import subprocess
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from learner.config.sections.servers import FileOrCommand, entry_mistakes
from learner.rollout.membership import Membership
from learner.run.files import write_atomically
from learner.run.lock import is_running
from shared.errors import ConfigError, DeadlineError, OutputError, ProjectError
from shared.masking import bare_url, masked_in
from shared.reading import json_in

FOLDER, STATE, REQUESTS = "servers", "state.json", "requests"
_MAX_REQUEST_BYTES = 1 << 16
GROUP_PORT = 51216  # group port of a server whose line names no port
EVERY_S = 15.0  # seconds between two readings of the list
COMMAND_S = 10.0  # max seconds of the command that prints the list
MAX_BYTES = 1 << 20  # max bytes of a list; a longer one raises ConfigError
Listed = Mapping[str, int]  # base_url of each listed server -> its group port
log = logging.getLogger("learner.rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequest:
    """A request to add or remove a server, by a user or by the cluster's list. `group_port` is 0 for "remove"."""

    action: Literal["add", "remove"]
    base_url: str
    group_port: int = 0


def ask(run_dir: Path, request: ServerRequest) -> Path:
    """Write a request to the run in `run_dir`, and return the request's file. Raises ConfigError if no run with servers
    is running there, OutputError if the file can't be written."""
    read_state(run_dir)
    if not is_running(run_dir):
        raise ConfigError(
            f"{run_dir}: its run has ended",
            found="no process that holds the folder's lock",
            wanted="a run that goes on: the next one in this folder would not take the request",
            remedy="name the servers in that run's configuration",
        )
    # The time comes first in the name, so that names in order are requests in order.
    path = run_dir / FOLDER / REQUESTS / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json"
    write_atomically(path, json.dumps(asdict(request)))
    return path


def read_state(run_dir: Path) -> dict[str, Any]:
    """Return the state of the run's servers, as `ServerControl.show` wrote it last. Raises ConfigError if there is no
    such file, or if it is damaged."""
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
    """Takes requests and writes the state of the run's servers, on rank 0. Requests to an earlier run are removed."""

    def __init__(self, run_dir: Path, discovery: Discovery | None = None) -> None:
        self._folder, self._discovery = run_dir / FOLDER, discovery
        self._shown: Membership | None = None
        for old in self._requests():
            # The run before may have ended before it took this request.
            log.warning("%s was asked of an earlier run and is removed", old)
            _remove(old)

    def take(self) -> list[ServerRequest]:
        """Return the requests since the last call: first the users' requests in order, then the requests that are
        made from changes in the cluster's list of servers."""
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
        """Write the servers and their states to the file, if they have changed."""
        if membership == self._shown:
            return
        served = membership.served.model_dump() if membership.served else None
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
    """Return the state of `read_state` as lines for a terminal: one per server, then the served version."""
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
    except OSError as error:  # `path` is a folder, or the disk is read-only: the next call tries again
        log.warning("%s can't be removed: %s", path, error)


def _request(value: Any) -> ServerRequest:
    """Return a parsed JSON value as a request. Raises ValueError or TypeError if the value is no request."""
    request = ServerRequest(**value)
    if request.action not in ("add", "remove") or not isinstance(request.base_url, str):
        raise ValueError(f"unknown request {value!r:.200}")
    request.base_url.encode()  # raises ValueError for text that is not valid Unicode
    port = request.group_port if request.action == "add" else None
    if type(request.group_port) is not int or entry_mistakes(request.base_url, port):
        raise ValueError(f"no server {value!r:.200}")
    return request


def _check_state(state: object) -> None:
    """Raises ValueError if `state` does not have the form that `ServerControl.show` writes."""
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
    """Return a Unix time (seconds) as text in local time. Raises ValueError if the value is no time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, TypeError, OSError) as error:
        raise ValueError(f"not a time: {unix_s!r:.100}") from error


# ---- discovery -------------------------------------------------------------------------------------------------------


class Discovery:
    """Reads the cluster's list of servers every `every_s` seconds, on rank 0. All methods must be called on one
    thread."""

    def __init__(self, source: FileOrCommand, *, every_s: float = EVERY_S) -> None:
        self._source, self._every_s = source, every_s
        self._named: dict[str, int] = {}  # servers that were in any list so far
        self._listed: Listed = {}  # servers in one of the last two lists
        self._last: Listed = {}  # servers in the list that was read last
        self._due = 0.0  # time of the next reading, in seconds of `time.monotonic`
        self._reading: Future[Listed] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="discovery")

    def take(self, membership: Membership) -> list[ServerRequest]:
        """Return requests to add servers that are new in the list, and to remove members that are missing from the list
        (see the module). Begins a new reading of the list if it is time."""
        new = self._read()
        if self._reading is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self._reading = self._thread.submit(read, self._source)
        self._named |= new
        gone = [
            member.base_url
            for member in membership.members
            if member.state != "draining" and member.base_url in self._named and member.base_url not in self._listed
        ]
        added = [ServerRequest(action="add", base_url=url, group_port=port) for url, port in new.items()]
        return added + [ServerRequest(action="remove", base_url=url) for url in gone]

    def _read(self) -> dict[str, int]:
        """If the reading of a list has ended since the last call, return its servers that were in none of the last two
        lists, as URL -> group port. Otherwise return {}."""
        if self._reading is None or not self._reading.done():
            return {}
        reading, self._reading = self._reading, None
        try:
            listed = reading.result()
        except ProjectError as error:
            log.warning("the list of servers is not known now, and nothing changes: %s", error)
            return {}
        new = {url: port for url, port in listed.items() if url not in self._listed}
        # The last two lists are kept, because one may be incomplete while its file is written.
        self._listed, self._last = {**self._last, **listed}, listed
        return new


def read(source: FileOrCommand) -> Listed:
    """Return the list of servers that `source` (a file's path, or a command) gives now. Raises ConfigError if the
    source gives no list of servers, DeadlineError if the command does not end in time."""
    return parse(_content(Path(source)) if isinstance(source, str) else _output(source))


def parse(content: bytes) -> Listed:
    """Return the servers in a text with one server per line: its URL, and its group port if that is not GROUP_PORT. `#`
    begins a comment. Raises ConfigError for a line that is no server."""
    listed: dict[str, int] = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        url, port = fields[0].rstrip("/"), fields[1] if len(fields) > 1 else str(GROUP_PORT)
        is_port = port.isascii() and port.isdecimal()
        if len(fields) > 2 or not is_port or entry_mistakes(url, int(port)):
            raise _not_a_list(f"line {number}: {' '.join([bare_url(url), *fields[1:]])[:200]!r}")
        listed[url] = int(port)
    return listed


def _content(path: Path) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _not_a_list(f"{path}: no file")
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _not_a_list(f"{path}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise _not_a_list(f"{path}: more than {MAX_BYTES} bytes")
    return content


def _output(argv: list[str]) -> bytes:
    """Run the command and return its standard output. At the end all processes that the command started are killed.
    Raises ConfigError if the command fails, DeadlineError after COMMAND_S."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise _not_a_list(f"{argv[0]}: {error.strerror}") from error
    with process:
        try:
            output, said = _read_both(process, argv[0], COMMAND_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                "the command that lists the servers did not end",
                found=f"{argv[0]} was still running after {COMMAND_S:g} s",
                wanted=f"a list within {COMMAND_S:g} s",
                remedy="let the command have a deadline of its own",
            ) from None
        finally:
            # Processes that the command has started would outlive it, and hold its output open, so its whole group is
            # killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last_words = said.decode(errors="replace")
        raise _not_a_list(f"{argv[0]} ended with exit code {process.returncode}: {last_words}")
    return output


def _read_both(process: subprocess.Popen[bytes], name: str, within_s: float) -> tuple[bytes, bytes]:
    """Wait for the command and return its stdout, and the last 300 bytes of its stderr. Raises ConfigError when stdout
    has more than MAX_BYTES, TimeoutExpired after `within_s`."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline, output, said = time.monotonic() + within_s, bytearray(), b""
    with selectors.DefaultSelector() as streams:
        streams.register(process.stdout, selectors.EVENT_READ)
        streams.register(process.stderr, selectors.EVENT_READ)
        while streams.get_map():
            ready = streams.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(name, within_s)
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    streams.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    said = (said + chunk)[-300:]
                # The output is counted while it is read, because an endless command printed 946 MB in 3 s.
                elif len(output) + len(chunk) > MAX_BYTES:
                    raise _not_a_list(f"{name}: more than {MAX_BYTES} bytes")
                else:
                    output += chunk
    process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(output), said


def _not_a_list(found: str) -> ConfigError:
    return ConfigError(
        "the servers of custom.extra.rollout_matching.vllm.server.discovery could not be listed",
        found=found,
        wanted=f"one server a line: its URL, and its group port if it is not {GROUP_PORT}",
        remedy="correct the file or the command",
    )
