"""Which module imports which, read from every module's source (AST; nothing is imported), and imports against the
order."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ("shared", "rollout_server", "learner", "deploy")

# Rooms are packages, in order. A room imports only from itself and earlier rooms, also inside functions and for types.
FLOORS = (
    "shared",
    "rollout_server",
    "learner",  # __init__ alone
    "learner.records",
    "learner.config",
    "learner.extensions",
    "learner.tasks",
    "learner.data",
    "learner.policy",
    "learner.run",
    "learner.journal",
    "learner.rollout",
    "learner.sync",
    "learner.steps",
    "learner.trainer",
    "learner.report",
    "learner.api",
    "learner.detector",
    "learner.missing",
    "learner.wiring",
    "learner.predict",
    "learner.recipe",
    "learner.doctor",
    "learner.__main__",
    "deploy",
    "tools",
    "examples",
    "bench",
    "tests",
)


@dataclass(frozen=True)
class Import:
    """One imported module. `lazy`: inside a function; `typing`: below `if TYPE_CHECKING`, never executed."""

    module: str
    lazy: bool = False
    typing: bool = False

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def modules(*packages: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def path_of(module: str) -> Path | None:
    """Return the file of one of this project's modules."""
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8")), Import("")))


def _imports(node: ast.AST, where: Import) -> Iterator[Import]:
    statements = ("body", "handlers", "cases", "orelse", "finalbody")  # expressions import nothing
    for child in (child for name in statements for child in getattr(node, name, ())):
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide who imports whom"
            assert child.module is not None
            submodules = [f"{child.module}.{alias.name}" for alias in child.names]
            names = [child.module, *(name for name in submodules if path_of(name))]
        yield from (Import(name, where.lazy, where.typing) for name in names)
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = Import("", True, where.typing)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = Import("", where.lazy, True)
        yield from _imports(child, inside)


def room_of(module: str) -> str:
    """Return the room of one of this project's modules, the longest of FLOORS that it is in."""
    found = [room for room in FLOORS if module == room or module.startswith(f"{room}.")]
    return max(found, key=len, default="")


@cache
def edges(*, typing: bool = True) -> tuple[tuple[str, str], ...]:
    """Return pairs (importing module, imported module) of this project. `typing`: also imports for types only. Empty
    packages are left out."""
    found: set[tuple[str, str]] = set()
    for path in modules("shared", "rollout_server", "learner", "deploy", "tools", "examples", "bench", "tests"):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in {one.module for one in imports(ROOT / path) if typing or not one.typing}:
            target = path_of(name)
            if target is None or name == module or (target.name == "__init__.py" and not imports(target)):
                continue
            found.add((module, name))
    return tuple(sorted(found))


def imports_up(edges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the imports from a room that is later in FLOORS, or not in FLOORS."""
    height = {room: i for i, room in enumerate(FLOORS)}
    return [(a, b) for a, b in edges if height.get(room_of(b), len(FLOORS)) > height.get(room_of(a), -1)]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other, each with two nodes or more."""
    below: dict[str, set[str]] = {}
    for a, b in edges:
        if a != b:
            below.setdefault(a, set()).add(b)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            fresh = below.get(todo.pop(), set()) - seen
            seen |= fresh
            todo += fresh
        return seen

    reach = {node: reached(node) for node in below}
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in reach if a in reach[a]}
    return sorted(sorted(group) for group in groups)
