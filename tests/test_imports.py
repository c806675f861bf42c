"""The rules of who may import what, read from the source of every module (AST, nothing is imported).

`rollout_server` and `learner` never import each other; `shared`, what both agree on, imports neither.
vLLM's API moves fast and lives in the few files listed here; the pure stages of the loop can be read, tested
and run without torch, HTTP or vLLM.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = ("shared", "rollout_server", "learner", "deploy")

# Rooms from the ground up. A room imports only from rooms before it, also inside functions and for types.
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

VLLM_FILES = {
    "rollout_server/engine.py",  # the engine's API
    "rollout_server/openai_api.py",  # its OpenAI layer
    "rollout_server/processes.py",  # a worker waits by it
    "rollout_server/service.py",  # its version, for /status/
    "learner/rollout/colocated_engine.py",  # the engine inside the learner's job
    "learner/rollout/engine_start.py",  # what its start need not do
    "shared/engine_images.py",  # feeds the vision tower of both engines
    "shared/generation.py",  # asks both engines, and reads their outputs
    "shared/sync/adapter_loading.py",  # adapters into the served model
    "shared/sync/loading.py",  # loading weights into the served model
    "shared/sync/group.py",  # PyNCCL
}
HEAVY = {"torch", "vllm", "httpx", "transformers"}
PURE = (
    "learner.tasks.detection.parse",
    "learner.tasks.detection.match",
    "learner.tasks.detection.target",
    "learner.steps.packing",
    "learner.rollout.distribution",
    "learner.config.schedule",
    "learner.steps.shares",
    "rollout_server.gate",
    "shared.seeds",
    "shared.sync.calls",
    "shared.wire",
    "shared.errors",
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


def path_of(module: str) -> Path | None:
    """Return the file of one of this project's modules."""
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8")), Import("")))


def _imports(node: ast.AST, where: Import) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
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
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
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
    """Return who imports whom among this project's modules, with `typing` also for types only. Empty packages are left
    out."""
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
    """Imports from a room that comes later in FLOORS, or is not in it."""
    height = {room: i for i, room in enumerate(FLOORS)}
    return [(a, b) for a, b in edges if height.get(room_of(b), len(FLOORS)) > height.get(room_of(a), -1)]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
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


def importers(name: str, *packages: str, typing: bool = True) -> set[str]:
    """Return files that import the package `name`, in whatever way. `typing`: also for types alone."""
    return {
        path
        for path in modules(*packages)
        if any(found.top == name and (typing or not found.typing) for found in imports(ROOT / path))
    }


def loaded_with(module: str) -> set[str]:
    """Return everything that importing `module` imports in turn: this project's modules, and the packages of others."""
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        parents = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
        for path in filter(None, map(path_of, [name, *parents])):
            todo += [i.module if i.top in PROGRAMS else i.top for i in imports(path) if not i.lazy and not i.typing]
    return found


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("rollout_server", ("learner", "deploy", "tests")),
        ("learner", ("rollout_server", "deploy", "tests")),
        ("shared", ("rollout_server", "learner", "deploy", "tests")),
        ("deploy", ("tools", "bench", "tests")),
        ("bench", ("tests",)),
    ],
)
def test_the_programs_do_not_know_each_other(package: str, others: tuple[str, ...]) -> None:
    assert modules(package)
    for other in others:
        assert importers(other, package) == set()


def test_imports_go_down() -> None:
    """The order is that of FLOORS; nothing stands outside of it."""
    assert imports_up(edges()) == []


def test_no_modules_import_each_other() -> None:
    """Within a room too, except for types: the rules of a section of the configuration take the whole of it. Rooms
    have no circle if no import goes up."""
    assert circles(edges(typing=False)) == []


def test_imports_up_and_circles_are_found() -> None:
    down, up = ("learner.trainer", "learner.steps.source"), ("learner.steps.source", "learner.trainer")
    outside = ("learner.steps.source", "learner_of_others")
    assert imports_up([down, up, outside]) == [up, outside]
    assert circles([down, up, outside]) == [["learner.steps.source", "learner.trainer"]]
    assert circles([down, outside]) == []


def test_vllm_is_imported_in_few_files_and_late() -> None:
    """Late: a process that does not generate never loads it, and settings reach its environment first."""
    assert importers("vllm", *PROGRAMS) <= VLLM_FILES | {"rollout_server/worker.py"}  # vLLM's own process loads it
    assert not {path for path in VLLM_FILES if _early(ROOT / path, "vllm")}


def _early(path: Path, package: str) -> bool:
    return any(found.top == package and not found.lazy and not found.typing for found in imports(path))


def test_torch_in_shared_is_for_weights() -> None:
    """One exception: the pixels that an engine was fed."""
    others = {path for path in importers("torch", "shared") if not path.startswith("shared/sync/")}
    assert others == {"shared/pixels.py"}
    assert importers("httpx", "shared") == {"shared/answers.py"}  # reads answers over HTTP
    for other in ("transformers", "fastapi", "peft"):
        assert importers(other, "shared", typing=False) == set()


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_load_nothing_heavy(module: str) -> None:
    """Their own imports count, and those of the modules that they import."""
    path = path_of(module)
    assert path is not None
    assert loaded_with(module) & HEAVY == set()
    assert {found.top for found in imports(path) if not found.typing} & HEAVY == set()  # late imports count too


@pytest.mark.parametrize("module", ["learner.config.load", "learner.__main__", "rollout_server.__main__"])
def test_what_check_loads_is_light(module: str) -> None:
    assert loaded_with(module) & (HEAVY | {"numpy", "scipy", "peft", "fastapi", "uvicorn"}) == set()


@pytest.mark.parametrize("path", modules(*PROGRAMS, "tests"))
def test_every_module_says_what_it_is(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module starts with a docstring"


def test_the_reader_of_imports_sees_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import a.b, c\nfrom shared import wire\nif TYPE_CHECKING:\n    import d\n"
        "class K:\n    import e\n    def f(self):\n        from g.h import i\ntry:\n    import j\n"
        "except ImportError: pass\n"
    )
    found = imports(path)
    assert [i.module for i in found] == ["a.b", "c", "shared", "shared.wire", "d", "e", "g.h", "j"]
    assert [i.module for i in found if i.typing] == ["d"]
    assert [i.module for i in found if i.lazy] == ["g.h"]
