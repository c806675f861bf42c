"""Every benchmark on GPUs, in one run: `python -m bench.gpu.run --name NAME [--part PART]`.

Prints a table, and writes `bench/results/NAME.json`. A part is a process of its own, for CUDA keeps what it was given.
`learning` and `offload` need one GPU, `several` four of one host, the others two; what the machine is too small for is
left out, and said. Exit code 1 where a figure is not what was wanted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from bench.figures import RESULTS, Figure, save, show
from bench.gpu.results import read

_TIMEOUT_S = 1800.0
Part = Literal["sync", "infer", "several", "learning", "offload"]
# Name: (GPUs, module and its arguments)
PARTS: dict[Part, tuple[int, list[list[str]]]] = {
    "sync": (2, [["bench.gpu.sync", "--size", "4B"]]),
    "infer": (2, [["bench.gpu.infer", "--size", "0.6B"], ["bench.gpu.infer", "--size", "4B"]]),
    "several": (4, [["bench.gpu.sync", "--size", "4B", "--servers", "3"]]),
    "learning": (1, [["bench.gpu.learning", "--size", "4B"]]),
    "offload": (1, [["bench.gpu.offload", "--size", "4B"]]),
}


def main(
    name: Annotated[str, typer.Option(help="Of the result file.")] = "gpu",
    part: Annotated[Part | None, typer.Option(help="Only this one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    scratch: Annotated[Path, typer.Option(help="For models of up to 8 GB: large and fast.")] = Path("/dev/shm"),
) -> None:
    """Measure, print, write."""
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-", dir=scratch))  # stays after an error, for its logs
    measured = [_measure(one, folder) for one in ([part] if part else PARTS)]
    figures = [figure for found in measured for figure in found or []]
    failed = None in measured
    if not failed:
        shutil.rmtree(folder)
    console = Console()
    show(figures, console)
    console.print(f"written: {save(name, figures, out)}")
    sys.exit(failed or any(figure.good is False for figure in figures))


def _measure(part: Part, folder: Path) -> list[Figure] | None:
    """None where it failed, with its words on the screen."""
    say = Console(stderr=True, highlight=False).print
    num_gpus, commands = PARTS[part]
    if torch.cuda.device_count() < num_gpus:
        say(f"bench: {part} left out: it needs {num_gpus} GPUs, this machine has {torch.cuda.device_count()}")
        return []
    figures: list[Figure] = []
    for i, command in enumerate(commands):
        say(f"bench: {' '.join(command)}, minutes")
        out = folder / f"{part}-{i}.json"
        argv = [sys.executable, "-m", *command, "--out", str(out), "--folder", str(folder)]
        if subprocess.run(argv, timeout=_TIMEOUT_S, check=False).returncode != 0:
            say(f"bench: {' '.join(command)} failed; its logs are in {folder}")
            return None
        figures += read(out)
    return figures


if __name__ == "__main__":
    typer.run(main)
