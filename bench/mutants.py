"""Which small changes of the code do its unit tests notice: `python -m bench.mutants --out FILE`.

A *mutant* is the code with one change: another operator, a condition that is turned round, a number that is one larger,
a statement that is left out. It is *killed* when a test fails, or when the tests use up their time. Annotations, error
texts, log calls and docstrings are not changed.

In: the packages of TARGETS. Of all mutants `--number` are drawn, each module by its share, the same ones for a seed.
The tests of a mutant are those in the folder of its package's tests that import its module, with the module's own file
of tests first. Out: FILE, one JSON line per mutant. What is there is not done again, so a second command goes on. The
last words are the share of killed mutants, and those that live.

Every mutant is a process, forked from one that has imported what tests need from other projects. It works on a copy of
the repository, so that processes which a test starts have the mutant too.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench.runs import say

ROOT = Path(__file__).parents[1]
TARGETS = (
    "learner/steps",
    *(f"learner/tasks/detection/{name}.py" for name in ("labels", "prefix", "spelling", "target")),
    "learner/rollout",
    "rollout_server/gate.py",
    "shared/sync",
)
NEEDED = (
    "torch",
    "transformers",
    "scipy.optimize",
    "pytest",
    "httpx",
    "pydantic",
    "fastapi",
    "peft",
    "shapely",
    "PIL.Image",
    "yaml",
    "rich",
    "uvicorn",
    "safetensors.torch",
)
_COPIED = ("shared", "rollout_server", "learner", "deploy", "bench", "tests", "docs", "pyproject.toml")
_CPU_FACTOR, _CPU_MORE_S = 4, 20  # of what the tests take without a mutant
_WALL_S = 400.0

Outcome = Literal["killed", "killed by time", "lives"]


# ---- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    line: int
    change: str
    place: int  # among the mutants of its file

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.change} #{self.place}"


_COMPARE: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_QUIET = {"debug", "info", "warning", "error", "exception", "say"}


@dataclass(frozen=True, slots=True)
class Change:
    """One node of a tree, and what it becomes."""

    tree: ast.Module
    node: ast.AST
    other: ast.AST
    what: str

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 0)

    def source(self) -> str:
        return ast.unparse(_with(self.tree, self.node, self.other))


def changes_of(source: str) -> list[Change]:
    """All mutants of a file."""
    tree = ast.parse(source)
    return [Change(tree, node, other, what) for node in _changeable(tree) for what, other in _changes(node)]


def _changeable(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that decide what is computed, outermost first."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not _is_words(node):
                yield node
                yield from _changeable(node)


def _is_words(node: ast.AST) -> bool:
    """Docstrings, errors, logs, and what is for type checkers only."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = ast.unparse(node.value.func).rpartition(".")[2]
        return name in _QUIET
    if isinstance(node, ast.Call):  # an error that is made before it is raised
        return ast.unparse(node.func).rpartition(".")[2].endswith("Error")
    return False


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What one node can become."""
    other: Any
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _COMPARE:
            other = copy.deepcopy(node)
            other.ops[0] = _COMPARE[type(op)]()
            yield f"{type(op).__name__} to {type(other.ops[0]).__name__}", other
        case ast.BoolOp(op=op):
            other = copy.deepcopy(node)
            other.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} to {type(other.op).__name__}", other
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "no not", copy.deepcopy(operand)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
            other = copy.deepcopy(node)
            other.op = _ARITHMETIC[type(op)]()
            yield f"{type(op).__name__} to {type(other.op).__name__}", other
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            other = copy.deepcopy(node)
            other.op = _ARITHMETIC[type(op)]()
            yield f"{type(op).__name__}= to {type(other.op).__name__}=", other
        case ast.Constant(value=bool(value)):
            yield f"{value} to {not value}", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield f"{value} to {value + 1}", ast.Constant(value + 1)
        case ast.IfExp() | ast.If() | ast.While() if not _is_comparison(node.test):
            other = copy.deepcopy(node)
            other.test = ast.UnaryOp(ast.Not(), other.test)
            yield "condition turned round", other
        case ast.Name(id=name) if name in _NAMES and isinstance(node.ctx, ast.Load):
            yield f"{name} to {_NAMES[name]}", ast.Name(_NAMES[name], ast.Load())
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call left out", ast.Pass()
        case ast.Break():
            yield "break to continue", ast.Continue()
        case ast.Continue():
            yield "continue to break", ast.Break()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", ast.Return(ast.Constant(None))


def _is_comparison(test: ast.expr) -> bool:
    """Its operator is changed, which is the same."""
    return (isinstance(test, ast.Compare) and len(test.ops) == 1) or isinstance(test, ast.UnaryOp)


def _with(tree: ast.Module, node: ast.AST, mutated: ast.AST) -> ast.Module:
    """A copy of the tree with `mutated` for `node`."""

    def rebuilt(one: ast.AST) -> ast.AST:
        if one is node:
            return ast.copy_location(mutated, node) if hasattr(node, "lineno") else mutated
        fields = {
            name: [rebuilt(v) if isinstance(v, ast.AST) else v for v in value]
            if isinstance(value, list)
            else rebuilt(value)
            if isinstance(value, ast.AST)
            else value
            for name, value in ast.iter_fields(one)
        }
        return ast.copy_location(type(one)(**fields), one)

    made = rebuilt(tree)
    assert isinstance(made, ast.Module)
    return ast.fix_missing_locations(made)


def draw(targets: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """The first `number` of all mutants, shuffled, so that a larger draw has those of a smaller one."""
    found = []
    for target in targets:
        path = ROOT / target
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            changes = changes_of(file.read_text())
            found += [Mutant(name, change.line, change.what, place) for place, change in enumerate(changes)]
    random.Random(seed).shuffle(found)
    return found[:number]


# ---- tests -----------------------------------------------------------------------------------------------------------


def fitting_tests(path: str) -> list[str]:
    """Files of unit tests that import the module; its own file first."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    words = (f"from {module} import", f"import {module}", f"from {package} import {name}")
    folder = ROOT / "tests/unit" / Path(path).parent
    found = [file for file in sorted(folder.rglob("test_*.py")) if any(w in file.read_text() for w in words)]
    found.sort(key=lambda file: file.stem != f"test_{name}")
    return [file.relative_to(ROOT).as_posix() for file in found]


class Copy:
    """A copy of the repository with its compiled files. Mutants write none: they could outlive the mutant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("results"))
            else:
                shutil.copy(source, folder / name)

    def run(self, tests: Sequence[str], cpu_s: int, *, compiles: bool) -> tuple[bool, bool, float]:
        """Whether the tests pass, whether their time is over, and their CPU seconds."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = self._test(tests, cpu_s, compiles=compiles)
            except BaseException:
                traceback.print_exc()
            os._exit(code)  # never into the caller's clean-up
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() - began < _WALL_S:
            time.sleep(0.02)
        late = ended == (0, 0)
        if late:
            os.killpg(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(ended[1])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return code == 0, late or code in (-signal.SIGXCPU, -signal.SIGKILL), seconds

    def _test(self, tests: Sequence[str], cpu_s: int, *, compiles: bool) -> int:
        os.setsid()
        os.chdir(self.folder)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:] = [str(self.folder), *(one for one in sys.path if one not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "" if compiles else "1"}
        sys.dont_write_bytecode = not compiles
        for name in [name for name in sys.modules if name.partition(".")[0] in _COPIED]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported already
        return int(pytest.main([*options, *tests]))

    def outcome(self, mutant: Mutant, tests: Sequence[str], cpu_s: int) -> Outcome:
        file = self.folder / mutant.path
        original, times = file.read_text(), file.stat()
        compiled = list((file.parent / "__pycache__").glob(f"{file.stem}.*"))
        for path in compiled:
            path.rename(path.with_name(f"{path.name}.kept"))
        file.write_text(changes_of(original)[mutant.place].source())
        try:
            passed, late, _ = self.run(tests, cpu_s, compiles=False)
        finally:
            file.write_text(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            for path in compiled:
                path.with_name(f"{path.name}.kept").rename(path)
        return "killed by time" if late else "lives" if passed else "killed"


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    out: Annotated[Path, typer.Option(help="One JSON line per mutant; what is there is kept.")],
    target: Annotated[list[str] | None, typer.Option(help="A file or folder; again for each.")] = None,
    number: Annotated[int, typer.Option(min=1, help="Mutants that are drawn.")] = 400,
    seed: Annotated[int, typer.Option()] = 0,
    seconds: Annotated[float, typer.Option(help="No mutant is begun after that.")] = 1e9,
) -> None:
    """Draw mutants, run their tests, say which live."""
    deadline = time.monotonic() + seconds
    for name in NEEDED:
        importlib.import_module(name)
    mutants = draw(target or TARGETS, number, seed)
    done, limits = _read(out)
    with tempfile.TemporaryDirectory() as folder:
        place = Copy(Path(folder) / "copy")
        for mutant in mutants:
            if mutant.name in done or time.monotonic() > deadline:
                continue
            tests = fitting_tests(mutant.path)
            if mutant.path not in limits:
                passed, _, cpu_s = place.run(tests, 600, compiles=True)
                if not passed:
                    say(f"{mutant.path}: its tests fail without a mutant: {' '.join(tests)}")
                limits[mutant.path] = round(_CPU_FACTOR * cpu_s) + _CPU_MORE_S if passed else 0
                _append(out, {"tests_of": mutant.path, "cpu_limit_s": limits[mutant.path]} if passed else {})
            if not limits[mutant.path]:
                continue
            outcome: Outcome = place.outcome(mutant, tests, limits[mutant.path]) if tests else "lives"
            done[mutant.name] = {**asdict(mutant), "outcome": outcome}
            _append(out, done[mutant.name])
            say(f"{len(done)}: {mutant.name}: {outcome}")
    report(done)


def _append(out: Path, row: Mapping[str, object]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n" if row else "")


def _read(out: Path) -> tuple[dict[str, dict[str, object]], dict[str, int]]:
    """Mutants by name, and the time limits of modules' tests."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    limits = {row["tests_of"]: row["cpu_limit_s"] for row in rows if "tests_of" in row}
    mutants = [row for row in rows if "outcome" in row]
    return {Mutant(row["path"], row["line"], row["change"], row["place"]).name: row for row in mutants}, limits


def report(done: Mapping[str, Mapping[str, object]]) -> None:
    """The share of killed mutants by package, and those that live."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in done.values():
        counts[str(Path(str(row["path"])).parent)][str(row["outcome"])] += 1
    for package, found in sorted(counts.items()):
        print(f"{package}: {found.total() - found['lives']} of {found.total()} killed")
    lives = [name for name, row in done.items() if row["outcome"] == "lives"]
    print(f"killed {len(done) - len(lives)} of {len(done)}", *sorted(lives), sep="\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
