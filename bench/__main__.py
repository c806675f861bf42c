"""The list of the benchmarks: `python -m bench`. Each is a program of its own, such as `python -m bench.run`.

A program is a module of this folder that ends in `if __name__ == "__main__"`. Nothing is imported for the list: names
and first lines of docstrings are read from the source.
"""

from __future__ import annotations

import ast
from pathlib import Path

import typer

from shared.version import Version

ENTRY = 'if __name__ == "__main__":'


def programs() -> dict[str, str]:
    """Return the first words of each program's docstring, by module name."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.stem != "__main__" and f"\n{ENTRY}" in source:
            says = ast.get_docstring(ast.parse(source)) or ""
            found[f"bench.{path.stem}"] = says.partition("\n")[0].partition(": `")[0]
    return found


def main(version: Version = False) -> None:
    """List the benchmarks. `python -m bench.NAME --help` says more of each."""
    typer.echo("Benchmarks; python -m NAME --help says more of each:\n")
    for name, says in programs().items():
        typer.echo(f"  {name:<20} {says}")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app(prog_name="bench")
