"""`--version` of every program: the installed distribution's version."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

DISTRIBUTION = "rollout-matching"


def version() -> str:
    """Return the version, or `unknown` in a clone that was not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _print_and_end(asked: bool) -> None:
    if asked:
        typer.echo(f"{DISTRIBUTION} {version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_and_end, is_eager=True)]
