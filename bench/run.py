"""Every benchmark, in one run: `python -m bench.run --name NAME [--part PART]`.

Prints a table, and writes `bench/results/NAME.json`. Builds what it needs (a model of the demo's size, unless the
demo's trained checkpoint is there; a hundred scenes) in a temporary folder. Exit code 1 where a figure is not what
was wanted. Figures of one run belong together: ratios are of numbers taken side by side.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from bench import adapters, ahead, first_token, serving, straight_line, training
from bench.figures import RESULTS, Figure, save, show
from deploy.demo.build_data import Build
from deploy.demo.build_data import build as build_data
from deploy.demo.model import build as build_model

Part = Literal["line", "serving", "training", "first_token", "adapters", "ahead"]
CHECKPOINT = Path("deploy/demo/checkpoint")


def main(
    name: Annotated[str, typer.Option(help="Of the result file.")] = "latest",
    part: Annotated[Part | None, typer.Option(help="Only this one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))  # stays after an error, for its logs
    figures = _measure({part} if part else set(get_args(Part)), folder)
    shutil.rmtree(folder)
    console = Console()
    show(figures, console)
    console.print(f"written: {save(name, figures, out)}")
    sys.exit(any(figure.good is False for figure in figures))


def _measure(parts: Set[Part], folder: Path) -> list[Figure]:
    say = Console(stderr=True, highlight=False).print
    figures: list[Figure] = []
    if "line" in parts:
        say("bench: parse, match and target of rollouts, about a minute")
        figures += straight_line.measure()
    if parts == {"line"}:
        return figures
    model = _model(folder)
    build_data(Build(train=600, val=1, test=1), folder / "data")
    if "training" in parts:  # before an engine lives in this process
        say("bench: a short real run, server and learner as processes, two minutes or more")
        figures += training.measure(model, folder / "data", folder)
    if "first_token" in parts:
        say("bench: from step end to first rollout token, one run per backend, about two minutes")
        figures += first_token.measure(model, folder / "data", folder)
    if "adapters" in parts:
        say("bench: adapter sync against full sync, about a minute")
        figures += adapters.measure(model, folder / "data", folder)
    if "ahead" in parts:
        say("bench: overlap and running ahead, simulated and with a real server, five minutes or more")
        figures += ahead.measure(model, folder / "data", folder)
    if "serving" in parts:
        images = sorted((folder / "data" / "images" / "train").glob("*.png"))[: serving.NUM_REQUESTS]
        say("bench: /infer/ against the engine in the same process, a minute or more")
        figures += serving.measure(model, images)
    return figures


def _model(folder: Path) -> Path:
    if (CHECKPOINT / "config.json").is_file():
        return CHECKPOINT.resolve()
    build_model(folder / "model", "demo")
    return folder / "model"


if __name__ == "__main__":
    typer.run(main)
