"""A server and learner runs as processes of their own, as users start them, and what a run wrote about itself.

In: configurations as mappings, and a folder for their files, logs and run directories. Out: a server's address; a run's
events, once it ended well. Used by the parts that measure whole runs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.launch import Process, Processes, learner_argv, start_server, wait_ready
from shared.config.parse import write_yaml
from shared.errors import DeadlineError, ServerError

_READY_TIMEOUT_S = 240.0
_RUN_TIMEOUT_S = 900.0


def serve(processes: Processes, config: Mapping[str, Any], folder: Path, name: str) -> Process:
    """A server that is ready; files are `folder/name.*`. Raises ServerError, DeadlineError."""
    path = folder / f"{name}.yaml"
    write_yaml(path, dict(config), "bench")
    server, url = start_server(processes, str(path), log=folder / f"{name}.out")
    wait_ready(server, url, _READY_TIMEOUT_S)
    return server


@dataclass(frozen=True, kw_only=True)
class LearnerRun:
    """A learner that was started. `config` must name `folder/name` as its run directory."""

    process: Process
    log: Path
    run_dir: Path

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def events(self) -> list[dict[str, Any]]:
        """All lines of `metrics.jsonl`, once the run has ended. Raises ServerError where it failed, DeadlineError."""
        try:
            code = self.process.popen.wait(_RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError("the benchmark's run did not end", found=f"{_RUN_TIMEOUT_S:g} s") from error
        if code != 0:
            raise ServerError(
                "the benchmark's run failed",
                found=f"exit code {code}: {self.log.read_text()[-500:]}",
                wanted="0",
                remedy=f"see {self.log}",
            )
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


def start_learner(
    processes: Processes, config: Mapping[str, Any], folder: Path, name: str, *, command: Sequence[str] = ()
) -> LearnerRun:
    """A learner on one rank, started by `command` if given; files are `folder/name.*`."""
    path, log = folder / f"{name}.yaml", folder / f"{name}.out"
    write_yaml(path, dict(config), "bench")
    process = processes.start(f"learner {name}", [*command, *learner_argv(str(path), nproc=1)], log=log)
    return LearnerRun(process=process, log=log, run_dir=folder / name)
