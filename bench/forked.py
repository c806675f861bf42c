"""Programs forked from a process that has imported what they need. A new Python spends most of a short test on imports.

    process = start(LEARNER, "learner", ["--config", "run.yaml"], env=os.environ, stdout=file, stderr=file)
    process.wait(60)

In: what the process of origin imports, then the module that `python -m` would run, its arguments and environment. Out:
an object with the part of `subprocess.Popen` that is used here. Each program leads a session of its own. From the fork
on nothing is shared: arguments, environment, working directory, output, signals and exit are those of a new program.

The process of origin ends with the last program that asks. It has one thread, so forking it is safe. Programs that
name one folder (`share`) ask one process: the two workers of a test run import vLLM once.

`multiprocessing`'s fork server cannot replace it: its children leave by `os._exit`, so what a program does at its exit
(`atexit`, what the interpreter destroys) would not be tested, and a process has only one such server, with one list of
modules.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import math
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bench.namespaces import enter
from learner.run.environment import prepare_for_vllm

ROOT = Path(__file__).parents[1]
_MESSAGE_BYTES = 1 << 20

# Each kind of program needs these modules. They are names, so that nothing is imported here.
_LEARNER = (
    "learner.wiring.build",
    "learner.trainer",
    "learner.run.checkpoint",
    "learner.sync",
    "transformers.models.qwen3_vl",
)
_VLLM = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3_vl",
    "compressed_tensors",
)
LEARNER = (*_LEARNER, "pytest", "respx")  # a module of the tests too, as a rank
COLOCATED = (*_LEARNER, *_VLLM)
SERVER = ("rollout_server.serving", "rollout_server.engine", *_VLLM)


class Forked:
    """A running program."""

    def __init__(self, origin: _Origin, pid: int, args: Sequence[str]) -> None:
        self._origin, self.pid, self.args = origin, pid, args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._origin.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    loaded: tuple[str, ...],
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: BinaryIO,
    stderr: BinaryIO,
    cwd: Path = ROOT,
    node: int | None = None,
) -> Forked:
    """Start `python -m module arguments`, forked from a process that has imported the modules `loaded`.

    `node`: a process whose user and network namespaces the program enters (`bench.namespaces`).
    """
    origin = _origin(loaded)
    order = {"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "node": node}
    return Forked(origin, origin.ask(order, [stdout.fileno(), stderr.fileno()]), [module, *arguments])


def finish(
    loaded: tuple[str, ...],
    module: str,
    arguments: Sequence[str],
    *,
    envs: Sequence[Mapping[str, str]],
    timeout_s: float,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the program to its end, once side by side for each environment.

    Raises subprocess.TimeoutExpired with what the first one said that has not ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(envs))]
        processes = []
        try:
            for env, (out, err) in zip(envs, paths, strict=True):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    processes.append(start(loaded, module, arguments, env=env, stdout=stdout, stderr=stderr))
            deadline = time.monotonic() + timeout_s
            while None in [process.poll() for process in processes] and time.monotonic() < deadline:
                time.sleep(0.02)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait(10.0)
        said = [(out.read_text(), err.read_text()) for out, err in paths]
    if None in codes:
        raise subprocess.TimeoutExpired(module, timeout_s, *said[codes.index(None)])
    return [
        subprocess.CompletedProcess([module, *arguments], code or 0, *texts)
        for code, texts in zip(codes, said, strict=True)
    ]


class _Origin:
    """The process that is forked, and the connection through which it is asked to."""

    def __init__(self, loaded: tuple[str, ...], folder: Path) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        path = folder / hashlib.sha256(" ".join(loaded).encode()).hexdigest()[:16]
        with path.with_suffix(".lock").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            try:
                self._channel.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):  # nobody has asked yet, or all who had are gone
                path.unlink(missing_ok=True)
                _start_origin(loaded, path)
                self._channel.connect(str(path))

    def ask(self, order: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(order).encode()], files)
            answer = self._channel.recv(_MESSAGE_BYTES)
        assert answer, "the process to fork from has ended"
        return json.loads(answer)


def _start_origin(loaded: tuple[str, ...], path: Path) -> None:
    """Start the process. Connections are taken from now on, and served when it has imported all."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may be there alone
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if loaded == COLOCATED:
        prepare_for_vllm(environment)  # vLLM reads some of it when it is imported
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.forked", str(listener.fileno()), *loaded],
            cwd=ROOT,
            env=environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


_folders: list[Path] = []


def share(folder: Path) -> None:
    """Ask the processes of origin of all programs that name this folder."""
    _folders[:] = [folder]


@functools.cache
def _origin(loaded: tuple[str, ...]) -> _Origin:
    if not _folders:
        own = tempfile.mkdtemp(prefix="forked-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        share(Path(own))
    return _Origin(loaded, _folders[0])


# ---- in the process that is forked -----------------------------------------------------------------------------------


def _obey(listener: socket.socket) -> dict[str, Any]:
    """Answer orders until nobody asks any more. In a program that was forked: returns what to run."""
    sockets = [listener]
    while True:
        for channel in select.select(sockets, [], [])[0]:
            if channel is listener:
                sockets.append(listener.accept()[0])
                continue
            try:
                message, files, *_ = socket.recv_fds(channel, _MESSAGE_BYTES, 2)
            except ConnectionError:  # killed while it asked
                message, files = b"", []
            if not message:
                sockets.remove(channel)
                channel.close()
                if sockets == [listener] and not select.select(sockets, [], [], 0)[0]:
                    sys.exit(0)
                continue
            order: dict[str, Any] = json.loads(message)
            if "poll" in order:
                pid, status = os.waitpid(order["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = os.fork()
                if answer == 0:
                    for one in sockets:
                        one.close()
                    os.setsid()
                    for file, number in zip(files, (1, 2), strict=True):
                        os.dup2(file, number)
                for file in files:
                    os.close(file)
                if answer == 0:
                    return order
            with contextlib.suppress(ConnectionError):
                channel.send(json.dumps(answer).encode())


def _main(number: str, *loaded: str) -> NoReturn:
    for name in loaded:
        importlib.import_module(name)
    gc.collect()
    # Programs never look through what was imported, nor copy its pages. An exit takes 0.4 CPU seconds, not 2, but
    # triton's bindings (nanobind) find their frozen types alive there, and list them on stderr as leaked.
    gc.freeze()
    order = _obey(socket.socket(fileno=int(number)))
    if order["node"] is not None:
        enter(order["node"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = [order["module"], *order["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-m", *sys.argv]  # of a program that starts itself anew
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
