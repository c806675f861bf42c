"""The JSON Schemas of the programs' configuration files, for editors. The schemas are files in the installed packages.

`make docs` writes the schemas (`tools.docs`). With `--schema` each program prints the schema of its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import typer

SCHEMAS = {
    "learner": ("learner.config", "config.schema.json"),
    "server": ("rollout_server", "server.schema.json"),
    "launcher": ("deploy", "launch.schema.json"),
}


def json_schema(program: str) -> str:
    """Return the JSON Schema of the file of `program`, a key of SCHEMAS."""
    package, name = SCHEMAS[program]
    return (resources.files(package) / name).read_text(encoding="utf-8")


def schema_option(program: str) -> object:
    """Return the option `--schema`. `--schema` prints the schema and ends the program, even if required options are
    missing."""
    help = "Print the JSON Schema of this file, for editors."
    return typer.Option("--schema", help=help, callback=_printer(program), is_eager=True)


def _printer(program: str) -> Callable[[bool], None]:
    def print_and_end(asked: bool) -> None:
        if asked:
            typer.echo(json_schema(program), nl=False)
            raise typer.Exit

    return print_and_end
