"""Rollout servers and learners as separate processes, as users start them: the harness of all benchmarks.

In: configurations as mappings, and a folder. Process NAME has its configuration in `NAME.yaml`, its output in
`NAME.log`, and a learner its run directory in `NAME`, all in that folder. Out: servers' addresses, and the events of
learner runs. A process gets only GPUs that this program may use. Device numbers are torch's here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.launch import Process, Processes, learner_argv, supervised, wait_ready
from deploy.launch import start_server as launch_server
from shared.addresses import free_port, free_ports
from shared.config.parse import write_yaml
from shared.errors import DeadlineError, ProjectError, ServerError

Events = Sequence[Mapping[str, Any]]
_READY_TIMEOUT_S = 400.0
_RUN_TIMEOUT_S = 900.0
_POLL_S = 0.1
_STOP_S = 5.0


def say(text: str) -> None:
    """Print progress; stdout is for results."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def exit_code_of(work: Callable[[Processes], None], report: Callable[[], None]) -> int:
    """Do the work, report whatever happens, then stop what still runs: servers take a while. 0, or that of an error."""
    try:
        with supervised() as processes:
            try:
                work(processes)
            finally:
                report()
    except ProjectError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def last_words(log: Path, num_lines: int = 5) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join([line for line in lines if line.strip()][-num_lines:])


def visible(*indices: int) -> list[str]:
    """The host's names of this program's own GPUs `indices`, for another program's `CUDA_VISIBLE_DEVICES`."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    return [allowed.split(",")[i] if allowed else str(i) for i in indices]


# ---- servers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A started rollout server; `wait_ready` waits until it serves."""

    process: Process
    url: str

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> float:
        """Returns the seconds waited. Raises ServerError if it ended first, DeadlineError."""
        return wait_ready(self.process, self.url, timeout_s)


def start_server(
    processes: Processes, folder: Path, name: str, config: Mapping[str, Any], *, devices: Sequence[int] = ()
) -> Server:
    """Start a server on a free port, and return at once."""
    path = folder / f"{name}.yaml"
    write_yaml(path, {**config, "port": free_port()}, "bench")
    log = path.with_suffix(".log")
    process, url = launch_server(processes, str(path), log=log, devices=visible(*devices))
    return Server(process=process, url=url)


def serve(
    processes: Processes, folder: Path, name: str, config: Mapping[str, Any], *, devices: Sequence[int] = ()
) -> Server:
    """Start a server, and return it when it is ready. Raises ServerError, DeadlineError."""
    server = start_server(processes, folder, name, config, devices=devices)
    server.wait_ready()
    return server


def small_server(model: Path, images: Path) -> dict[str, Any]:
    """Return a CPU server's configuration for a small model and short prompts, which it decodes eagerly."""
    config: dict[str, Any] = {"model": str(model), "allowed_image_roots": [str(images)], "max_model_len": 1024}
    return {**config, "max_num_seqs": 8, "enforce_eager": True, "cpu_threads": 1}


class TrlServer:
    """TRL's server (`vllm serve`), for comparison. It starts at once; `client` waits until it serves.

    TRL's client does not check what it sends. Without `trl` the comparison is left out.
    """

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("trl") is not None

    def __init__(
        self, processes: Processes, model: Path, *, device: int, max_num_seqs: int, kv_cache_bytes: int, log: Path
    ) -> None:
        from trl.scripts.vllm_serve import ScriptArguments, build_command

        self._port, self._group_port = free_ports(2)
        arguments = ScriptArguments(
            model=str(model), host="127.0.0.1", port=self._port, max_model_len=2048, gpu_memory_utilization=0.4
        )
        more = ["--max-num-seqs", str(max_num_seqs), "--kv-cache-memory-bytes", str(kv_cache_bytes)]
        # TRL's own command sets these before it becomes vLLM's: its clients need the development endpoints.
        os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        self._process = processes.start("trl", build_command(arguments, more), devices=visible(device), log=log)

    def client(self) -> Any:
        """A `VLLMClient`, once the server answers."""
        from trl.generation.vllm_client import VLLMClient

        url = f"http://127.0.0.1:{self._port}"
        return VLLMClient(base_url=url, group_port=self._group_port, connection_timeout=_READY_TIMEOUT_S)

    def stop(self) -> None:
        """Stop at once: when asked to end, it takes half a minute."""
        self._process.stop(timeout_s=1.0)


# ---- learners ------------------------------------------------------------------------------------------------------


def served_by(*servers: Server, **more: Any) -> dict[str, Any]:
    """Return the learner's `vllm` section. A run gets new ports for weights, because the last run's may still be in
    use."""
    ports = free_ports(len(servers))
    entries = [{"base_url": s.url, "group_port": port} for s, port in zip(servers, ports, strict=True)]
    return {"mode": "server", "server": {"servers": entries}, **more}


def learner_config(
    model: Path,
    train: Path,
    run_dir: Path,
    /,
    *,
    steps: int,
    batch_size: int,
    per_device: int | None = None,
    variant: str = "rollout_matching_sft",
    matching: Mapping[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """Return a learner's configuration: what every run needs, overridden by `sections` key by key.

    `per_device`: samples of a micro-step; all samples of a step by default.
    """
    training = {"output_dir": str(run_dir), "max_steps": steps, "bf16": True, "save_on_end": False}
    training |= {"effective_batch_size": batch_size, "per_device_train_batch_size": per_device or batch_size}
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(train)},
        "training": training,
        "custom": {"trainer_variant": variant},
    }
    if matching is not None:
        config["custom"]["extra"] = {"rollout_matching": dict(matching)}
    for name, value in ((name, value) for name, value in sections.items() if value is not None):
        config[name] = {**config.get(name, {}), **value} if isinstance(value, Mapping) else value
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerRun:
    """A started learner."""

    process: Process
    log: Path
    run_dir: Path

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def events(self, timeout_s: float = _RUN_TIMEOUT_S) -> list[dict[str, Any]]:
        """Return all events, when the run has succeeded. Raises ServerError if it failed, DeadlineError."""
        self.wait(timeout_s)
        return read_events(self.run_dir)

    def wait(self, timeout_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until the run has succeeded, or `until()` is true. Raises ServerError if it failed, DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while (code := self.process.popen.poll()) is None:
            if until():
                return
            if time.monotonic() > deadline:
                self.process.stop(_STOP_S)
                raise DeadlineError(
                    "the benchmark's run did not end in time",
                    found=f"{timeout_s:g} s; last words: {last_words(self.log)}",
                    wanted="a run that ends in time",
                    remedy=f"see {self.log}",
                )
            time.sleep(_POLL_S)
        if code != 0:
            found = f"exit code {code}; last words: {last_words(self.log)}"
            raise ServerError("the benchmark's run failed", found=found, wanted="0", remedy=f"see {self.log}")


def start_learner(
    processes: Processes,
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    *,
    ranks: int | None = 1,
    devices: Sequence[int] = (),
    prefix: Sequence[str] = (),
    command: Sequence[str] = (),
) -> LearnerRun:
    """Start a learner whose run directory is `folder/name`. `ranks` None: one, without torchrun, which may have another
    `command` than `train`."""
    path = folder / f"{name}.yaml"
    write_yaml(path, dict(config), "bench")
    alone = [sys.executable, "-m", "learner", *command, "--config", str(path)]
    argv = [*prefix, *(alone if ranks is None else learner_argv(str(path), ranks))]
    log = path.with_suffix(".log")
    process = processes.start(f"learner {name}", argv, devices=visible(*devices), log=log)
    return LearnerRun(process=process, log=log, run_dir=folder / name)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's events so far, without an unfinished last line."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(events: Events) -> list[dict[str, Any]]:
    """Return the metrics of each optimizer step, with the other fields of its event."""
    return [{**event["metrics"], **event} for event in events if event["event"] == "step"]
