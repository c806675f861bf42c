"""The rules of who may import what, read from the source of every module (AST, nothing is imported).

`rollout_server` and `learner` never import each other; `shared`, what both agree on, imports neither.
vLLM's API moves fast and lives in the few files listed here; the pure stages of the loop can be read, tested
and run without torch, HTTP or vLLM.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.imports import PROGRAMS, ROOT, circles, edges, imports, imports_up, modules, path_of

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
    assert importers("httpx", "shared") == {"shared/answers.py", "shared/fetching.py"}  # both read over HTTP
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


@pytest.mark.parametrize("module", ["learner.missing.review", "learner.report.page"])
def test_pages_for_people_open_without_a_model(module: str) -> None:
    """Importing torch and transformers takes ten seconds."""
    assert loaded_with(module) & {"torch", "transformers"} == set()


def test_every_module_says_what_it_is() -> None:
    silent = []
    for path in modules(*PROGRAMS, "tests"):
        text = (ROOT / path).read_text(encoding="utf-8")
        if text.strip() and not text.startswith('"""') and not ast.get_docstring(ast.parse(text)):
            silent.append(path)
    assert silent == [], "a module starts with a docstring"


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
