"""The servers that a cluster has now, by a file or a command (R40).

In: `vllm.server.discovery`. Out: requests to add and to remove servers, as a user could make them. The list is read in
the background, so no step waits for it.

Invariants: a URL that is new in the list is added once. A member that an earlier list named and the last two lists lack
is asked to be removed until it is gone; a single list may be incomplete, because its file is being written or a name
service fails for a moment. Servers that no list named are left alone. A list that cannot be read changes nothing.
Whoever writes the list names servers that get the run's token and weights. At its end the process waits for a command
that still runs, up to the command's deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learner.config.sections.servers import FileOrCommand, entry_mistakes
from learner.rollout.membership import Membership
from shared.errors import ConfigError, DeadlineError, ProjectError
from shared.masking import bare_url

GROUP_PORT = 51216  # group port of a server whose line names no port
EVERY_S = 15.0  # time between two readings of the list
COMMAND_S = 10.0  # deadline of the command; no step waits for it
MAX_BYTES = 1 << 20  # a longer list is an error
Listed = Mapping[str, int]  # base_url -> group port
log = logging.getLogger("learner.rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequest:
    """A request to the run, of a user or of a list. Only `add` has a `group_port`."""

    action: Literal["add", "remove"]
    base_url: str
    group_port: int = 0


class Discovery:
    """Reads the list of servers on rank 0. One thread calls its methods."""

    def __init__(self, source: FileOrCommand, *, every_s: float = EVERY_S) -> None:
        self._source, self._every_s = source, every_s
        self._named: dict[str, int] = {}  # servers of all lists so far
        self._listed: Listed = {}  # servers of the last two lists
        self._last: Listed = {}  # servers of the last list
        self._due = 0.0  # monotonic seconds
        self._reading: Future[Listed] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="discovery")

    def take(self, membership: Membership) -> list[ServerRequest]:
        """Return requests to add and remove servers, by the last list that was read. Begins a new reading if one is
        due."""
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
        """Return the servers that are new in a list whose reading has ended since the last call."""
        if self._reading is None or not self._reading.done():
            return {}
        reading, self._reading = self._reading, None
        try:
            listed = reading.result()
        except ProjectError as error:
            log.warning("the list of servers is not known now, and nothing changes: %s", error)
            return {}
        new = {url: port for url, port in listed.items() if url not in self._listed}
        self._listed, self._last = {**self._last, **listed}, listed
        return new


def read(source: FileOrCommand) -> Listed:
    """Return the list as it is now. Raises ConfigError if it is not a list of servers, DeadlineError if the command
    does not end in time."""
    return parse(_content(Path(source)) if isinstance(source, str) else _output(source))


def parse(content: bytes) -> Listed:
    """Read one server a line: its URL, and its group port where that is not GROUP_PORT. `#` begins a comment. Raises
    ConfigError."""
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
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
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
    """Return the output of the command. All processes that the command started are ended."""
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last_words = said.decode(errors="replace")
        raise _not_a_list(f"{argv[0]} ended with exit code {process.returncode}: {last_words}")
    return output


def _read_both(process: subprocess.Popen[bytes], name: str, within_s: float) -> tuple[bytes, bytes]:
    """Return stdout, and the end of stderr, of a command that ends. Raises ConfigError as soon as stdout is too long,
    TimeoutExpired after `within_s`."""
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
