"""Figures of how tidy the house is: `python -m tests.house [--wheel FILE]`.

Out: a table with the imports up and the circles of modules (`tests/test_imports.py` keeps both at 0), lines of the core
(`shared`, `rollout_server` and `learner`), its files over 500 lines, and how often it says `Any`. With `--wheel`, lines
of all Python files in that wheel. None of the other figures is a test: a limit on lines would be met by bad lines.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tests.test_imports import ROOT, circles, edges, imports_up, modules

CORE = ("shared", "rollout_server", "learner")
LONG = 500


def any_count(source: str) -> int:
    """Names `Any` in the code, its imports not counted."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(source)))


def figures() -> Iterator[tuple[str, int]]:
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in modules(*CORE)}
    lines = {path: text.count("\n") for path, text in sources.items()}
    yield "imports up", len(imports_up(edges()))
    yield "circles of modules", len(circles(edges(typing=False)))
    yield "modules of the core", len(sources)
    yield "lines of the core", sum(lines.values())
    yield f"files over {LONG} lines", len(_long(lines))
    yield "Any", sum(map(any_count, sources.values()))


def _long(lines: Mapping[str, int]) -> list[str]:
    return [path for path, number in lines.items() if number > LONG]


def wheel_lines(path: Path) -> int:
    with zipfile.ZipFile(path) as wheel:
        return sum(wheel.read(name).count(b"\n") for name in wheel.namelist() if name.endswith(".py"))


def main(wheel: Annotated[Path | None, typer.Option(help="A wheel to count the lines of.")] = None) -> None:
    """Print the figures."""
    for name, value in figures():
        print(f"{name:24} {value:7,}")
    if wheel is not None:
        print(f"{'lines of the wheel':24} {wheel_lines(wheel):7,}")


if __name__ == "__main__":
    typer.run(main)
