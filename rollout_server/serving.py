"""Runs the app under uvicorn: listens, watches the engine, drains at SIGTERM, Ctrl-C and the end of the terminal
(SIGHUP)."""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
from collections.abc import Collection
from types import FrameType
from typing import TextIO

import uvicorn

from rollout_server.app import create_app
from rollout_server.config import ServerConfig
from rollout_server.connections import ACCEPTED_AT_ONCE, Connection, Waiting, with_open_files
from rollout_server.engine import Engine
from rollout_server.service import RolloutService
from shared.masking import masked
from shared.processes import leave_lost_output, stop_signals

_WATCH_EVERY_S = 0.5
_BACKLOG = 2048  # max connections that the kernel holds until they are accepted
_HANG_UP_S = 5.0  # seconds between the engine's death and the process's end, in which `/health/` answers 503


class _UvicornServer(uvicorn.Server):
    """uvicorn's server with a longer kernel queue of connections. asyncio uses one number for the queue's length and
    for the connections that it accepts at once. `streams`: the file descriptors that the server prints to."""

    def __init__(self, config: uvicorn.Config, *, streams: Collection[int]) -> None:
        super().__init__(config)
        self._streams = streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio has just set its own backlog, which is also the number that it accepts at once.
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    def listen_to_signals(self) -> None:
        """Make each of `stop_signals` drain the server: running calls may end, then it stops. Call this method in the
        main thread, before serving starts."""
        for signum in stop_signals():
            # uvicorn drains at SIGTERM and SIGINT, and then sends the signal again, to the handler that is set here.
            signal.signal(signum, self._hung_up if signum == signal.SIGHUP else signal.SIG_IGN)

    def _hung_up(self, signum: int, frame: FrameType | None) -> None:
        leave_lost_output(streams=self._streams)
        self.should_exit = True


async def serve(
    engine: Engine,
    config: ServerConfig,
    token: str | None,
    listener: socket.socket,
    console: TextIO,
    *,
    server_id: str = "",
) -> int:
    """Serve until a signal or the engine's death; returns the exit code. Running calls may take up to
    `shutdown_timeout_s` longer. Raises ConfigError if the limit on open files is too low."""
    config = with_open_files(config)
    server = _UvicornServer(
        uvicorn.Config(
            create_app(RolloutService(engine, config, server_id), token),
            http=functools.partial(Connection, Waiting(config)),  # type: ignore[arg-type]
            ws="none",
            log_level="error",  # uvicorn's warnings are about mistakes of callers
            access_log=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
            timeout_keep_alive=30,
            lifespan="off",
        ),
        streams=(1, 2, console.fileno()),
    )
    watching = [asyncio.create_task(_stop_when_dead(engine, server)), asyncio.create_task(engine.watch())]
    listener.listen(_BACKLOG)
    server.listen_to_signals()
    bound = f", bound to {config.host}:{config.port}" if config.host not in config.base_url else ""
    print(f"[rollout_server] serving at {masked(config.base_url)}/{bound}", file=console, flush=True)
    try:
        await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        return 0
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    if engine.dead:
        print("[rollout_server] the engine died; see the log", file=console, flush=True)
        return 1
    print("[rollout_server] stopped", file=console, flush=True)
    return 0


async def _stop_when_dead(engine: Engine, server: uvicorn.Server) -> None:
    while not engine.dead:
        await asyncio.sleep(_WATCH_EVERY_S)
    await asyncio.sleep(_HANG_UP_S)
    server.should_exit = True
