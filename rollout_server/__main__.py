"""`rollout-server --config server.yaml [--check] [KEY=VALUE ...]`: serve until SIGTERM, Ctrl-C or the end of the
terminal. The same as `python -m rollout_server`.

Exit codes: 0 after a clean stop, 1 if the engine died, 2 for a user's mistake. `--check` prints the resolved
configuration as one JSON object, and imports neither vLLM nor torch. Only this module reads the environment
(ROLLOUT_SERVER_TOKEN, ROLLOUT_SERVER_ID) and writes it (vLLM's variables, before vLLM is imported).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn, TextIO

import typer

from rollout_server.config import SERVER_ID_VARIABLE, ServerConfig, load_server_config
from rollout_server.processes import SERVER_PID_VARIABLE
from shared.config.checks import READY
from shared.config.json_schema import schema_option
from shared.config.model import shown
from shared.errors import ConfigError, ProjectError
from shared.masking import masked, masked_in
from shared.packages import check_compiler, missing_package
from shared.private import cache_folder, locked_folder, note_processes, remove_semaphores, unlinked
from shared.processes import FEW_SHAPES, descendants, held_back, leave_lost_output, stop_signals
from shared.tokens import read_token
from shared.version import Version

_FOLDER = "rs-"
_LONGEST_FOLDER = 55  # max characters of a folder's path: the path of a Unix socket in it may have at most 107
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Start the console script."""
    app(prog_name="rollout-server")


@app.command(epilog="Other programs: rollout-learner, rollout-launch.")
def serve(
    config_path: Annotated[Path, typer.Option("--config", help="The server's YAML file.")],
    check: Annotated[
        bool, typer.Option("--check", help="Check the file, print the resolved configuration as JSON.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as port=8001.")
    ] = None,
    schema: Annotated[bool, schema_option("server")] = False,
    version: Version = False,
) -> None:
    """Serve rollouts of one model, and take weight syncs."""
    try:
        token = read_token(os.environ)
        config = load_server_config(config_path, has_token=token is not None, overrides=overrides or ())
        # Without a compiler vLLM on CPU would die minutes later, at the first check of weights (canary).
        check_compiler(os.environ)
        if check:
            typer.echo(json.dumps(resolved(config), indent=2))
            typer.echo(READY, err=True)
            return
        code = _serve(config, token, os.environ.get(SERVER_ID_VARIABLE, ""))
    except ProjectError as error:
        _fail(error)
    except (ImportError, OSError) as error:
        _fail(missing_package(error) or error)
    # The engine's processes have ended. vLLM's threads would delay a normal exit by many seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(error: Exception) -> NoReturn:
    if not isinstance(error, ProjectError):
        raise error
    typer.echo(str(error), err=True)
    sys.exit(error.exit_code)


def resolved(config: ServerConfig) -> dict[str, object]:
    """Return the value of every configuration key and derived property, with secrets masked."""
    derived = {"base_url": config.base_url, "group_host": config.group_host, "world_size": config.world_size}
    values: dict[str, object] = masked_in({**shown(config), **derived})
    return values


def _serve(config: ServerConfig, token: str | None, server_id: str) -> int:
    folder = _temporary_folder()
    # The port is bound before the engine's slow start, so that a port in use is reported at once.
    listener = _bind(config)
    # Forked processes must not keep the port after the server has ended.
    os.register_at_fork(after_in_child=listener.close)
    console = _console(config)
    _prepare_environment(config)
    # The signal handlers set here are used until uvicorn sets its own. The handlers raise SystemExit, so that vLLM can
    # clean up.
    for signum in {*stop_signals()} - {signal.SIGINT}:
        signal.signal(signum, _exit_on_signal)

    from rollout_server import serving
    from rollout_server.engine import VllmEngine

    print(f"[rollout_server] loading {masked(config.model)}", file=console, flush=True)
    # A closed terminal sends SIGHUP to all its processes. The engine's processes must ignore the signal, because
    # running calls need them until they have ended.
    with held_back(signal.SIGHUP):
        engine = VllmEngine(config)
    # If this server's processes are killed, the next server removes their semaphores from shared memory.
    note_processes(folder, {os.getpid(), *descendants(os.getpid())})
    try:
        return asyncio.run(serving.serve(engine, config, token, listener, console, server_id=server_id))
    finally:
        engine.shutdown()
        # The semaphores are removed only now, when the processes that use them have ended.
        remove_semaphores(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _temporary_folder() -> str:
    """Make the folder for the temporary files of this server's processes. The files include vLLM's sockets and torch's
    files for process groups, which nobody else deletes. The folder is removed when the server ends; after SIGKILL the
    next server that starts removes it."""
    around = "/tmp" if len(tempfile.gettempdir()) > _LONGEST_FOLDER else tempfile.gettempdir()
    # Compiled programs are kept for later servers. Torch's default folder is unsafe: another user can create it first.
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder(os.environ, "rollout-server"))
    folder = locked_folder(_FOLDER, Path(around), leave=remove_semaphores)
    os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def _bind(config: ServerConfig) -> socket.socket:
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm, which delays replies by 40 ms, only if the socket's protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            "host, port: cannot listen there",
            found=f"{config.host}:{config.port}: {error.strerror or error}",
            wanted="an address of this machine with a free port",
            remedy="stop what listens there, or choose another port",
        ) from error
    return listener


def _console(config: ServerConfig) -> TextIO:
    """Return the stream for the few lines that the server itself prints. With `log_dir`, all other output (also vLLM's)
    goes into a file."""
    if config.log_dir is None:
        return sys.stderr
    config.log_dir.mkdir(parents=True, exist_ok=True)
    console = os.fdopen(os.dup(2), "w")
    with open(config.log_dir / "rollout_server.log", "ab", opener=unlinked) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return console


def _prepare_environment(config: ServerConfig) -> None:
    """Set the options that vLLM reads only from the environment. Variables that the user has set are not changed."""
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        # All workers are on this machine. By default the workers' gloo groups would listen at the address of the
        # machine's host name, and accept connections from anybody.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        # seconds until vLLM kills its CPU workers, which never end by themselves
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "TOKENIZERS_PARALLELISM": "false",  # the server calls the tokenizer on its own threads
        **FEW_SHAPES,
    }
    # The environment variable would override this argument.
    if "kv_cache_memory_bytes" not in config.engine_args:
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gib)
    if config.cpu_threads is not None:
        settings |= {"OMP_NUM_THREADS": str(config.cpu_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # An inherited value is overwritten, because it may be the process id of another server, which the workers would
    # then watch.
    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    leave_lost_output()
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
