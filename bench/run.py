"""Every benchmark, on CPU and GPU: `python -m bench.run --name NAME [--part PART] [--device cpu|cuda]`.

Prints a table, and writes `bench/results/NAME.json`; outside a clone `bench-results/NAME.json`. The exit code is 1 if a
figure misses its bound or a part failed. Figures of one run belong together: ratios compare numbers measured side by
side.

PARTS says what is measured on which device. Each measurement is a separate process, because CUDA and vLLM do not give
back all memory. Models and scenes are built when needed, in a temporary folder that the measurements of a run share.
What needs more GPUs than the machine has is left out, and the run says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import ValidationError, validate_call
from rich.console import Console

from bench.figures import RESULTS, Figure, read, save, show, write
from bench.runs import say
from deploy.launch import Process, supervised
from shared.errors import ConfigError, ProjectError
from shared.packages import missing_package

Device = Literal["cpu", "cuda"]
Part = Literal[
    "stages",
    "training",
    "first_token",
    "adapters",
    "sync",
    "infer",
    "several",
    "learning",
    "learning_photographs",
    "offload",
]
_TIMEOUT_S = 1800.0
_WORK = "from bench.run import work; work()"  # the code of a measurement's process


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement: a function that takes the run's folder and `settings`, and returns figures."""

    function: str  # module:name
    device: Device = "cpu"
    gpus: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    only_named: bool = False  # long, or a trial without a GPU: runs only if its part is named

    def __str__(self) -> str:
        return " ".join([self.function, *(f"{name}={value}" for name, value in self.settings.items())])


def _cuda(gpus: int, function: str, **settings: Any) -> Job:
    return Job(function=function, device="cuda", gpus=gpus, settings=settings)


def _try(function: str, **settings: Any) -> Job:
    return Job(function=function, settings=settings, only_named=True)


PARTS: Mapping[Part, Sequence[Job]] = {
    "stages": [Job(function="bench.stages:measure")],
    "training": [Job(function="bench.training:measure")],
    "first_token": [Job(function="bench.training:first_token")],
    "adapters": [Job(function="bench.sync:adapters")],
    "sync": [_cuda(2, "bench.sync:full", size="4B")],
    "infer": [
        Job(function="bench.infer:measure", settings={"size": "demo"}),
        _cuda(1, "bench.infer:measure", size="0.6B"),
        _cuda(1, "bench.infer:measure", size="4B"),
    ],
    "several": [_cuda(4, "bench.sync:full", size="4B", servers=3)],
    "learning": [
        _cuda(1, "bench.learning:measure", size="4B"),
        _try("bench.learning:measure", size="tiny", row_tokens=1024),
    ],
    "learning_photographs": [
        _cuda(1, "bench.learning:photographs", size="4B"),
        _try("bench.learning:photographs", size="small", row_tokens=1024),
    ],
    "offload": [_cuda(1, "bench.training:offload", size="4B"), _try("bench.training:offload", size="tiny")],
}


def main(
    name: Annotated[str, typer.Option(help="Of the result file.")] = "latest",
    part: Annotated[Part | None, typer.Option(help="Only this one.")] = None,
    device: Annotated[
        Device | None, typer.Option(help="Default: what the machine has, if the part runs on it.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE, an argument of the part's function (size=0.6B); again for each."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    scratch: Annotated[
        Path | None, typer.Option(help="For models of up to 8 GB: large and fast. Default on GPUs: /dev/shm.")
    ] = None,
) -> None:
    """Measure, print, write."""
    try:
        jobs = choose(part, device, read_settings(setting or []))
        memory = Path("/dev/shm")
        if scratch is None and jobs[0].device == "cuda" and memory.is_dir():
            scratch = memory
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=scratch))
        figures, failed = measure_all(jobs, folder)
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    if failed:
        say(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if not figures:
        say("nothing was measured, so no file is written")
        sys.exit(1)
    console = Console()
    show(figures, console)
    console.print(f"written: {save(name, figures, out)}")
    sys.exit(failed or any(figure.good is False for figure in figures))


def choose(part: Part | None, device: Device | None, settings: Mapping[str, str]) -> list[Job]:
    """Return the measurements, in order. `settings` override each part's own. Raises ConfigError."""
    if settings and part is None:
        raise ConfigError("--set is for one part", found="no --part", wanted="--part NAME", remedy="name the part")
    jobs = [job for name, jobs in PARTS.items() for job in jobs if part == name or not (part or job.only_named)]
    whole = {job.device for job in jobs if not job.only_named}
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if len(whole) == 1:  # a named part has one device
            (device,) = whole
    chosen = [replace(job, settings={**job.settings, **settings}) for job in jobs if job.device == device]
    if not chosen:
        wanted = " or ".join(sorted({job.device for job in jobs}))
        found, remedy = f"--device {device}", "leave --device out"
        raise ConfigError(f"--part {part} does not run on this device", found=found, wanted=wanted, remedy=remedy)
    return [job for i, job in enumerate(chosen) if job not in chosen[:i]]


def read_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of `--set`. Raises ConfigError."""
    if wrong := [text for text in texts if "=" not in text]:
        raise ConfigError("--set cannot be read", found=wrong[0], wanted="NAME=VALUE", remedy="such as size=0.6B")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def measure_all(jobs: Sequence[Job], folder: Path) -> tuple[list[Figure], bool]:
    """Return the figures of all jobs for which the machine has enough GPUs, and whether a job failed.

    A failed job does not end the others. The figures that it measured before are included.
    """
    figures: list[Figure] = []
    failed = False
    num_gpus = torch.cuda.device_count()
    for i, job in enumerate(jobs):
        if num_gpus < job.gpus:
            say(f"{job} is left out: it needs {job.gpus} GPUs, this machine has {num_gpus}")
            continue
        say(f"{job}: minutes")
        out = folder / f"figures-{i}.json"
        if problem := _run(job, folder, out):
            say(f"{job} failed: {problem}")
            failed = True
        figures += read(out)
    return figures, failed


def _run(job: Job, folder: Path, out: Path) -> str:
    """Run the measurement's process. Return why it failed, or empty."""
    env = dict(os.environ)
    if job.device == "cpu" and torch.cuda.is_available():
        env["CUDA_VISIBLE_DEVICES"] = ""
    argv = [sys.executable, "-c", _WORK, job.function, json.dumps(dict(job.settings)), str(folder), str(out)]
    with supervised() as processes:
        popen = subprocess.Popen(argv, env=env, start_new_session=True)
        processes.started.append(Process(job.function, popen))
        try:
            code = popen.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {_TIMEOUT_S:g} s"
    return f"exit code {code}" if code else ""


def work() -> None:
    """Work as a measurement's process: run what `sys.argv` says. Each figure is written as soon as it is known."""
    name, settings, folder, out = sys.argv[1:]
    module, _, attribute = name.partition(":")
    figures: list[Figure] = []
    try:
        for figure in call(getattr(import_module(module), attribute), Path(folder), json.loads(settings)):
            say(f"{figure.name}: {figure.value:.4g} {figure.unit}")
            figures.append(figure)
            write(Path(out), figures)
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ImportError as error:
        if (known := missing_package(error)) is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        sys.exit(known.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def call(measure: Callable[..., Iterable[Figure]], folder: Path, settings: Mapping[str, Any]) -> Iterable[Figure]:
    """Call a part's function with `settings`, which may be strings. Raises ConfigError."""
    try:
        return validate_call(measure)(folder, **settings)
    except ValidationError as error:
        mistake = error.errors()[0]
        raise ConfigError(
            f"--set {mistake['loc'][0]}: {mistake['msg']}",
            found=repr(mistake["input"]),
            wanted=f"an argument of {measure.__module__}:{measure.__name__}",
            remedy="see its signature",
        ) from error


if __name__ == "__main__":
    typer.run(main)
