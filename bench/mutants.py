"""Find which small changes of the code its unit tests notice: `python -m bench.mutants --out FILE`.

A *mutant* is the code with one change: another operator, a condition that is turned round, a number that is one larger,
a statement that is left out. It is *killed* when a test fails, or *killed by time* when the tests use up their time.

Annotations, error texts, asserts, log calls and docstrings are not changed. Four kinds of change are not made, because
by their kind they change no result:
- `strict=True` of a `zip`: it states that the lengths are equal, as an assert does. (`strict=False` is changed.)
- A number in the argument of `time.sleep` or `asyncio.sleep`: it says how long a pause is. (Operators, min and max are
  changed there, and the call is left out: a wait may have to end by a deadline.)
- The number of a module's constant whose name ends in `_S`: it is how many seconds a wait takes, and a second more is
  another choice. (Not 0, which means no wait, nor a rate, `_PER_S`; nor defaults of parameters and fields.)
- `<` to `<=` and the like beside a reading of a clock: they differ at one instant. (`<` is never changed to `>`.)

In: the packages of TARGETS. Of all mutants `--number` are drawn, each module by its share, the same ones for a seed.
The order is that of a hash of each mutant's own line, so a change of other code leaves the draw as it is.
First, all unit tests run once, and the lines that each executes are written to FILE with the suffix `.lines.jsonl`
(fifteen minutes of one core). A mutant is tried with tests that execute its line and pass without it: the *direct*
ones, in files beside the module's own that import it, then those of the whole *area* (AREAS). A line that no test
executes may be executed by a process that a test starts: such a mutant is tried with all direct tests. If it lives, its
line is *not executed here*: it may need CUDA or vLLM.

Out: FILE, one JSON line per mutant. What is there is not done again, so a second command goes on; mutants that only
direct tests have tried go on with the area's. `--again` tries those that live, and no others, when there are new tests.
The last words are the share of killed mutants, of all and of those whose lines are executed here, how many were killed
by time alone, and those that live. Every twentieth of the draw is also tried without its change, as a *control*: each
control that is killed is a kill by chance, so their share bounds how many of the kills mean nothing.

Every mutant is a process, forked from one that has imported what tests need from other projects. Each worker has a copy
of the repository, so that processes which a test starts have the mutant too.
"""

from __future__ import annotations

import ast
import compileall
import copy
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple

import pytest
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
    "hypothesis",
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
AREAS = ("tests/unit/shared", "tests/unit/rollout_server", "tests/unit/learner")
_COPIED = ("shared", "rollout_server", "learner", "deploy", "bench", "tests", "docs", "pyproject.toml")
_CPU_FACTOR, _CPU_MORE_S = 4, 20  # factor of what the tests take without a mutant, and seconds more
_QUICK_S = 2.0  # the quickest tests that take so long together are tried first: most mutants die there
_AREA_S = 40.0  # the area's quickest tests that take so long together
_BLIND_S = 90.0  # the same, of the direct tests of a line that only another process may execute
_EACH_CONTROL = 20  # mutants, for one control
_WALL_S = 240.0

_LATE = 98  # exit code of tests whose failure is that of a time limit
_NO_CHANGE = "no change"

Outcome = Literal["killed", "killed by time", "lives"]
Tests = Literal["direct", "area", "other processes"]


# ---- mutants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    line: int
    change: str
    place: int  # index among the mutants of its file; -1 without a change: a control

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
_CLOCKS = {"monotonic", "perf_counter", "awake_s"}
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
    """Return all mutants of a file."""
    tree = ast.parse(source)
    alike = set(_alike(tree))
    nodes = (node for node in _changeable(tree) if node not in alike)
    return [Change(tree, node, other, what) for node in nodes for what, other in _changes(node)]


def _changeable(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that decide what is computed, outermost first."""
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


def _alike(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes whose change no input can show, by their kind; the module's docstring says why."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as number)):
                if name.isupper() and name.endswith("_S") and not name.endswith("_PER_S") and number != 0:
                    yield statement.value
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="zip"), keywords=keywords):
                yield from (one.value for one in keywords if one.arg == "strict" and ast.unparse(one.value) == "True")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"), args=[pause]):
                yield from _lengths(pause)
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[right]):
                if any(_reads_a_clock(part) for side in (left, right) for part in ast.walk(side)):
                    yield node


def _lengths(pause: ast.expr) -> Iterator[ast.expr]:
    """Yield the numbers of which a pause's length is made."""
    match pause:
        case ast.Constant():
            yield pause
        case ast.BinOp(left=left, right=right):
            yield from (*_lengths(left), *_lengths(right))
        case ast.Call(func=ast.Name(id="min" | "max"), args=args):
            for one in args:
                yield from _lengths(one)


def _reads_a_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _CLOCKS


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what one node can become."""
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
    """Return a copy of the tree with `mutated` for `node`."""

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
    """Return the first `number` of all mutants, in an order that follows from the seed. A larger draw has those of a
    smaller one, and two draws from versions of the code have the mutants of the lines that are the same."""
    found = []
    for target in targets:
        path = ROOT / target
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name, lines = file.relative_to(ROOT).as_posix(), file.read_text().splitlines()
            alike: Counter[tuple[str, ...]] = Counter()
            for place, change in enumerate(changes_of("\n".join(lines))):
                words = (name, lines[change.line - 1].strip(), change.what)
                alike[words] += 1
                key = hashlib.sha256(json.dumps([seed, *words, alike[words]]).encode()).digest()
                found.append((key, Mutant(name, change.line, change.what, place)))
    return [mutant for _, mutant in sorted(found, key=lambda one: one[0])[:number]]


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


class Lines:
    """A plugin of pytest: which lines of `paths` each test executes, and how long it takes, written to `into`.

    What a fixture executes belongs to all tests of the file, since it may be made once for them. What executes while
    tests are imported belongs to all that execute anything of the module.
    """

    def __init__(self, folder: Path, paths: Collection[str], into: Path) -> None:
        self._paths = {str(folder / path): path for path in paths}
        self._into = into
        self._now = ""  # a test, a file of tests, or nothing: imports
        self._found: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._paths else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self._found[self._now].add((self._paths[frame.f_code.co_filename], frame.f_lineno))
        return self._line

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._now = item.nodeid.partition("::")[0]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._now = item.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._now = item.nodeid.partition("::")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for now, lines in self._found.items():
            for path, line in sorted(lines):
                found[now][path].append(line)
        seconds = {test: round(s, 3) for test, s in self._seconds.items() if test not in self._failed}
        self._into.write_text(json.dumps({"seconds": seconds, "lines": found}))


class Only:
    """A plugin of pytest: no other tests than these."""

    def __init__(self, tests: Collection[str], failed: Path) -> None:
        self._tests, self._into = set(tests), failed
        self.late = False  # a test failed because its own time was over

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._tests]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.late = "from pytest-timeout" in report.longreprtext
            self._into.write_text(report.nodeid)


def executing(mutant: Mutant, known: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Tests that execute the mutant's line and pass without it, and their seconds. `known`: files of tests."""
    found: dict[str, float] = {}
    for file, row in known.items():
        module = {now: paths[mutant.path] for now, paths in row["lines"].items() if mutant.path in paths}
        executed = {now for now, lines in module.items() if mutant.line in lines}
        for test, seconds in row["seconds"].items():
            at_import = "" in executed and (test in module or file in module)
            if at_import or test in executed or file in executed:
                found[test] = seconds
    return found


def of_files(files: Collection[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """All tests of the files that pass, and their seconds."""
    return {test: s for file in files if file in known for test, s in known[file]["seconds"].items()}


class Copy:
    """A copy of a repository with its compiled files. Mutants write none: they could outlive the mutant."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        for name in _COPIED:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("results"))
            else:
                shutil.copy(source / name, folder / name)

    def run(self, files: Sequence[str], plugin: Lines | Only, cpu_s: float) -> tuple[bool, bool]:
        """Run the tests. Return whether they pass, and whether their time is over."""
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = self._test(files, plugin, round(cpu_s))
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
        late |= code in (_LATE, -signal.SIGXCPU, -signal.SIGKILL)
        return code in (0, pytest.ExitCode.NO_TESTS_COLLECTED), late

    def _test(self, files: Sequence[str], plugin: Lines | Only, cpu_s: int) -> int:
        os.setsid()
        os.chdir(self.folder)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:] = [str(self.folder), *(one for one in sys.path if one not in ("", str(ROOT)))]
        also = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", str(ROOT))]
        path = os.pathsep.join([str(self.folder), *also])
        os.environ |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] in _COPIED]:
            del sys.modules[name]
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are imported already
        if isinstance(plugin, Lines):
            plugin.start()
        else:
            options.append("-x")
        code = int(pytest.main([*options, *files], plugins=[plugin]))
        return _LATE if isinstance(plugin, Only) and plugin.late else code

    def lines(self, file: str, paths: Collection[str]) -> dict[str, Any]:
        """Return what the tests of a file execute; nothing if they do not end."""
        into = self.folder / "lines.json"
        into.unlink(missing_ok=True)
        self.run([file], Lines(self.folder, paths, into), 600)
        found: dict[str, Any] = json.loads(into.read_text()) if into.is_file() else {"seconds": {}, "lines": {}}
        return found

    def outcome(self, mutant: Mutant, tests: Mapping[str, float]) -> tuple[Outcome, str]:
        """Return what the tests make of a mutant, and the test that failed."""
        failed = self.folder / "failed"
        failed.unlink(missing_ok=True)
        file = self.folder / mutant.path
        original, times = file.read_text(), file.stat()
        compiled = list((file.parent / "__pycache__").glob(f"{file.stem}.*"))
        for path in compiled:
            path.rename(path.with_name(f"{path.name}.kept"))
        if mutant.place >= 0:
            file.write_text(changes_of(original)[mutant.place].source())
        quick = _quickest(tests, _QUICK_S)
        try:
            for part in (quick, {test: s for test, s in tests.items() if test not in quick}):
                files = sorted({test.partition("::")[0] for test in part})
                cpu_s = _CPU_FACTOR * sum(part.values()) + _CPU_MORE_S
                passed, late = self.run(files, Only(part, failed), cpu_s) if part else (True, False)
                if late or not passed:
                    break
        finally:
            file.write_text(original)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            for path in compiled:
                path.with_name(f"{path.name}.kept").rename(path)
        outcome: Outcome = "killed by time" if late else "lives" if passed else "killed"
        return outcome, failed.read_text() if failed.is_file() else ""


# ---- the command -----------------------------------------------------------------------------------------------------


def main(
    out: Annotated[Path, typer.Option(help="One JSON line per mutant; what is there is kept.")],
    target: Annotated[list[str] | None, typer.Option(help="A file or folder; again for each.")] = None,
    number: Annotated[int, typer.Option(min=1, help="Mutants that are drawn.")] = 400,
    seed: Annotated[int, typer.Option()] = 0,
    seconds: Annotated[float, typer.Option(help="No mutant is begun after that.")] = 1e9,
    workers: Annotated[int, typer.Option(min=1, help="Processes that work side by side.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Try those that live, and no others.")] = False,
) -> None:
    """Draw mutants, run their tests, say which live."""
    deadline = time.monotonic() + seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported
    for name in NEEDED:
        importlib.import_module(name)
    done = _read(out)
    everything = draw(target or TARGETS, sys.maxsize, seed)
    mutants = everything if again else [*everything[:number], *map(_control, everything[:number:_EACH_CONTROL])]
    lives = {name for name, row in done.items() if row["outcome"] == "lives" and row["place"] >= 0}
    tried = lives if again else {name for name in lives if "tests" not in done[name]}
    todo = [one for one in mutants if one.name in tried or not (again or one.name in done)]
    with tempfile.TemporaryDirectory() as folder:
        master = Copy(ROOT, Path(folder) / "master")
        compileall.compile_dir(master.folder, quiet=2)
        begin = (master.folder, Path(folder), deadline)
        with multiprocessing.get_context("fork").Pool(workers, _begin, begin) as pool:
            known = _lines(out.with_suffix(".lines.jsonl"), pool, {mutant.path for mutant in everything})
            jobs = [_job(mutant, known) for mutant in todo]
            for row in pool.imap_unordered(_judge, jobs):
                if row is not None:
                    _append(out, row)
                    done[_name(row)] = row
                    say(f"{len(done)}: {_name(row)}: {row['outcome']} ({row['tests']})")
    report(done)


_worker: tuple[Copy, float]  # a process of the pool has its copy, and when no mutant is begun any more


def _begin(master: Path, folder: Path, deadline: float) -> None:
    global _worker
    _worker = Copy(master, folder / f"copy-{os.getpid()}"), deadline


def _lines(kept: Path, pool: Any, paths: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return what each file of tests executes. What is in `kept` is not run again if the file and `paths` are the
    same."""
    sources = b"".join((ROOT / path).read_bytes() for path in sorted(paths))
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    known = {row["file"]: row for row in rows}
    files = [file for area in AREAS for file in (ROOT / area).rglob("test_*.py")]
    files.sort(key=lambda file: -file.stat().st_size)  # those that may take long first
    jobs = []
    for file in files:
        name, digest = file.relative_to(ROOT).as_posix(), hashlib.sha256(file.read_bytes() + sources).hexdigest()
        if known.get(name, {}).get("sha256") != digest:
            jobs.append((name, digest, sorted(paths)))
    for row in pool.imap_unordered(_lines_of, jobs):
        known[row["file"]] = row
        _append(kept, row)
        say(f"lines: {row['file']}: {len(row['seconds'])} tests")
    return known


def _lines_of(job: tuple[str, str, Sequence[str]]) -> dict[str, Any]:
    file, digest, paths = job
    return {"file": file, "sha256": digest, **_worker[0].lines(file, paths)}


class _Job(NamedTuple):
    """A mutant, and tests with their seconds."""

    mutant: Mutant
    direct: dict[str, float]
    area: dict[str, float]
    blind: dict[str, float]  # those that may execute it in another process, if no test executes it in its own


def _job(mutant: Mutant, known: Mapping[str, Mapping[str, Any]]) -> _Job:
    files, tests = set(fitting_tests(mutant.path)), executing(mutant, known)
    direct = {test: s for test, s in tests.items() if test.partition("::")[0] in files}
    area = {test: s for test, s in tests.items() if test not in direct}
    return _Job(mutant, direct, area, {} if tests else of_files(files, known))


def _control(mutant: Mutant) -> Mutant:
    return Mutant(mutant.path, mutant.line, _NO_CHANGE, -1)


def _judge(job: _Job) -> dict[str, Any] | None:
    """Return the row of a mutant; nothing after the deadline."""
    place, deadline = _worker
    if time.monotonic() > deadline:
        return None
    row = asdict(job.mutant) | {"executed_by": len(job.direct) + len(job.area)}
    parts: list[tuple[Tests, dict[str, float]]] = [("direct", job.direct), ("area", _quickest(job.area, _AREA_S))]
    if job.blind:
        parts = [("other processes", _quickest(job.blind, _BLIND_S))]
    for kind, tests in parts:
        outcome, failed = place.outcome(job.mutant, tests) if tests else ("lives", "")
        row |= {"outcome": outcome, "tests": kind, "failed": failed}
        if outcome != "lives":
            break
    return row


def _quickest(tests: Mapping[str, float], most_s: float) -> dict[str, float]:
    """Return as many tests as take `most_s` seconds together, the quickest ones."""
    found, all_s = {}, 0.0
    for test, s in sorted(tests.items(), key=lambda one: one[1]):
        all_s += s
        if all_s <= most_s:
            found[test] = s
    return found


def _append(out: Path, row: Mapping[str, object]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the mutants by name, each by its last line."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    return {_name(row): row for row in rows if "outcome" in row}


def _name(row: Mapping[str, Any]) -> str:
    return Mutant(row["path"], row["line"], row["change"], row["place"]).name


def report(done: Mapping[str, Mapping[str, Any]]) -> None:
    """Report the share of killed mutants by package, of all, and of those that are executed here; then those that
    live."""
    rows = [row for row in done.values() if row["place"] >= 0]
    packages = {str(Path(row["path"]).parent) for row in rows}
    for package in sorted(packages):
        print(f"{package}: {_share([row for row in rows if str(Path(row['path']).parent) == package])}")
    lives = {_name(row): row for row in rows if row["outcome"] == "lives"}
    hidden = {name for name, row in lives.items() if row.get("executed_by") == 0}
    late = sum(row["outcome"] == "killed by time" for row in rows)
    controls = [row for row in done.values() if row["place"] < 0]
    print(f"by time alone: {late}", f"controls: {_share(controls)}", "executed here, and living:", sep="\n")
    print(*sorted(lives.keys() - hidden), "not executed here:", *sorted(hidden), sep="\n")
    print(f"all: {_share(rows)}", f"executed here: {_share([r for r in rows if _name(r) not in hidden])}", sep="\n")
    sys.stdout.flush()


def _share(rows: Collection[Mapping[str, Any]]) -> str:
    killed = sum(row["outcome"] != "lives" for row in rows)
    return f"killed {killed} of {len(rows)}" + (f" ({killed / len(rows):.1%})" if rows else "")


if __name__ == "__main__":
    typer.run(main)
