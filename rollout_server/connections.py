"""Limits on a connection's time and size, which hold before the token is checked (R16).

uvicorn's own connections wait for their callers for ever. A few hundred such callers use up all open files, and then
not even `/health/` answers.

Invariants:
- at most `max_connections` + SPARE connections are open. A further connection closes the connection that has waited
  longest for its caller's next request. At most `max_connections` calls run (`BodyLimit`), so probes can always
  connect;
- connections leave RESERVED_FILES of the process's open files to the rest of the server;
- a request's headers arrive within HEADER_S of the connection, or of the first byte of a later request;
- a connection keeps at most about MAX_HEADER_BYTES of headers and of other bytes outside a body;
- a caller that reads nothing of its answer for BODY_S is disconnected.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from rollout_server import guards
from rollout_server.config import ServerConfig
from shared.errors import ConfigError

SPARE = 64  # number of connections beyond `max_connections`, so that probes can always connect
ACCEPTED_AT_ONCE = 64  # max connections that asyncio accepts at once, before they are counted
HEADER_S = 10.0  # longest time for sending a request's headers
MAX_HEADER_BYTES = 64 << 10
RESERVED_FILES = 256  # open files kept for the engine's sockets, images and logs
_MAX_PIPELINED = 8  # max requests of one connection that wait for earlier answers
_MIN_CONNECTIONS = 16


def with_open_files(config: ServerConfig) -> ServerConfig:
    """Raise the process's limit on open files, and return the configuration with `max_connections` lowered to what the
    limit allows.

    Raises ConfigError if the limit allows hardly any connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + SPARE + ACCEPTED_AT_ONCE + RESERVED_FILES
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = config.max_connections if soft == resource.RLIM_INFINITY else soft - (wanted - config.max_connections)
    if most < _MIN_CONNECTIONS:
        raise ConfigError(
            "the limit on open files is too low",
            found=f"ulimit -n {soft}",
            wanted=f"at least {wanted} for max_connections: {config.max_connections}",
            remedy="raise it (`ulimit -n`, or `LimitNOFILE=` of a systemd unit)",
        )
    return config.model_copy(update={"max_connections": min(config.max_connections, most)})


class Waiting:
    """Counts a server's open connections, and lists those that wait for their caller's next request, the longest wait
    first."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.num_open = 0
        self._waiting: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        self._waiting.setdefault(connection)

    def remove(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def make_room(self) -> None:
        """Drop the connection that has waited longest if too many are open."""
        if self.num_open > self.config.max_connections + SPARE and self._waiting:
            next(iter(self._waiting)).drop()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with the limits of this module."""

    def __init__(
        self,
        waiting: Waiting,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._waiting, self._config = waiting, waiting.config
        self._num_idle_bytes = 0  # bytes received since the last part of a body, or since the end of the headers
        self._in_message = False  # True until the end of the current request has arrived
        self._headers_ended = False
        # timer that drops the connection if the headers, or the rest of a refused body, come too late
        self._caller_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting.num_open += 1
        self._waiting.add(self)
        # uvicorn waits for ever for a request that never begins, or whose headers come byte by byte.
        self._await_caller(HEADER_S)
        self._waiting.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.num_open -= 1
        self._waiting.remove(self)
        self._end_waiting()
        self._end_reading()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_idle_bytes += len(data)
        super().data_received(data)
        # The count is checked after the bytes were parsed, because a part of a body sets it to 0.
        if self._num_idle_bytes > MAX_HEADER_BYTES or len(self.pipeline) > _MAX_PIPELINED:
            self.drop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headers_ended = False
        self._in_message = True
        self._await_caller(HEADER_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Headers that follow the body (trailers) are ignored, because nothing here needs them.
        if not self._headers_ended:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_ended = True
        self._waiting.remove(self)
        self._end_waiting()
        self._num_idle_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # With pipelining, the connection is not idle if the caller has already sent its next request.
        if self.cycle.response_complete:
            self._waiting.add(self)
            # The request was refused before its whole body arrived, and the caller may never send the rest.
            if self._in_message:
                self._await_caller(guards.BODY_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        # A caller that does not read its answer would keep the connection, and the answer's memory.
        self._reading_due = self.loop.call_later(guards.BODY_S, self.drop)

    def resume_writing(self) -> None:
        self._end_reading()
        super().resume_writing()

    def drop(self) -> None:
        self._waiting.remove(self)
        # `abort` closes at once. `close` would first send the buffered bytes, and the caller may read nothing.
        self.transport.abort()

    def _await_caller(self, timeout_s: float) -> None:
        self._end_waiting()
        self._caller_due = self.loop.call_later(timeout_s, self.drop)

    def _end_waiting(self) -> None:
        if self._caller_due is not None:
            self._caller_due.cancel()
            self._caller_due = None

    def _end_reading(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None
