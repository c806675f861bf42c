"""`python -m rollout_server --config server.yaml [--check]`: serve until SIGTERM or Ctrl-C.

The only place that reads the environment (ROLLOUT_SERVER_TOKEN) and writes it (what vLLM is told through variables,
before vLLM is imported). Exit codes: 0 after a clean stop, 1 when the engine died, 2 for a mistake of the user's.
`--check` prints the resolved configuration as one JSON object, and imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from rollout_server.config import ServerConfig, load_server_config
from rollout_server.processes import SERVER_PID_VARIABLE
from shared.errors import ConfigError, ProjectError
from shared.wire import TOKEN_VARIABLE


def main(
    config_path: Annotated[Path, typer.Option("--config", help="The server's YAML file.")],
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, print the resolved configuration as JSON.")
    ] = False,
) -> None:
    """Serve rollouts of one model, and take weight syncs."""
    try:
        token = os.environ.get(TOKEN_VARIABLE) or None
        config = load_server_config(config_path, has_token=token is not None)
        if check:
            typer.echo(json.dumps(resolved(config), indent=2))
            return
        code = _serve(config, token)
    except ProjectError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
    # The engine's processes are gone; vLLM's threads in this one would keep it for many seconds more.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def resolved(config: ServerConfig) -> dict[str, Any]:
    """Every key with its value, and what follows from them."""
    follows = {"base_url": config.base_url, "group_host": config.group_host, "world_size": config.world_size}
    return {**config.model_dump(mode="json"), **follows}


def _serve(config: ServerConfig, token: str | None) -> int:
    listener = _bind(config)  # before the engine, which takes its time
    os.register_at_fork(after_in_child=listener.close)  # the port is free when this process has gone
    console = _console(config)
    _prepare_environment(config)
    # Until uvicorn takes over: SystemExit lets vLLM's own clean-up run.
    signal.signal(signal.SIGTERM, _exit_on_signal)

    from rollout_server.engine import VllmEngine
    from rollout_server.serving import serve

    print(f"[rollout_server] loading {config.model}", file=console, flush=True)
    engine = VllmEngine(config)
    try:
        return asyncio.run(serve(engine, config, token, listener, console))
    finally:
        engine.shutdown()


def _bind(config: ServerConfig) -> socket.socket:
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        # The protocol is named, for asyncio switches Nagle's algorithm off only then; with it replies come 40 ms late.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            "host, port: can't listen there",
            found=f"{config.host}:{config.port}: {error.strerror or error}",
            wanted="an address of this machine with a free port",
            remedy="stop what listens there, or choose another port",
        ) from error
    return listener


def _console(config: ServerConfig) -> TextIO:
    """Where our own few lines go. With a log folder, all else (vLLM's processes included) goes into a file there."""
    if config.log_dir is None:
        return sys.stderr
    config.log_dir.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(2), "w")
    with (config.log_dir / "rollout_server.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return console


def _prepare_environment(config: ServerConfig) -> None:
    """vLLM takes these as variables only. What the user has set stays."""
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_kv_cache_gib),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # CPU workers never end by themselves; then they are killed
        "TOKENIZERS_PARALLELISM": "false",  # the tokenizer runs on our threads
    }
    if config.cpu_threads is not None:
        settings |= {"OMP_NUM_THREADS": str(config.cpu_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    typer.run(main)
