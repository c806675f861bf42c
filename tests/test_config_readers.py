"""Every key of both configurations has a reader: a key that nothing reads is a defect.

The readers are found in the source (AST, nothing runs). A reader is an attribute access on the section that owns the
key, `config.training.seed` or `training.seed` where `training` is known to be that section, so that an equal name
elsewhere does not count. `getattr(section, name)` with a name that is a variable reads all keys of the section. Two
kinds of code are no readers: the sections' own classes (a property there counts when something else reads the
property), and rules, which only compare keys and yield mistakes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, create_model

from learner.config.schema import RunConfig
from learner.config.sections.model import ModelConfig
from learner.config.sections.training import TrainingConfig
from rollout_server.config import ServerConfig
from shared.config.model import dotted, item_of, section_of, walk_keys

ROOT = Path(__file__).parents[1]
LEARNER = ("learner/config/schema.py", *(str(p.relative_to(ROOT)) for p in ROOT.glob("learner/config/sections/*.py")))
SERVER = ("rollout_server/config.py",)
SCHEMA_OF: dict[type[BaseModel], tuple[str, ...]] = {RunConfig: LEARNER, ServerConfig: SERVER}

Type = str | tuple["Type", ...] | None  # a class's name, a tuple's types, or not known; "*X": a collection of X
Read = tuple[str, str]  # (section class, attribute)


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {model.__name__: model}
    for _, field in walk_keys(model):
        for annotation in (field.annotation, item_of(field.annotation)):
            if section := section_of(annotation):
                found[section.__name__] = section
    return found


# ---- which expressions are sections --------------------------------------------------------------------------------


class Source:
    """All that several modules say of types: fields of classes, and what functions return."""

    def __init__(self, trees: Sequence[ast.Module], sections: Mapping[str, type[BaseModel]]) -> None:
        self.sections = sections
        self.fields: dict[str, dict[str, Type]] = {
            name: {key: self._of_key(field.annotation) for key, field in section.model_fields.items()}
            for name, section in sections.items()
        }
        self.returns: dict[str, Type] = {}
        classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names = {*sections, *(node.name for node in classes)}
        self._names = names
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.returns[node.name] = self.of_annotation(node.returns)
        for node in classes:
            fields = self.fields.setdefault(node.name, {})
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    fields.setdefault(item.target.id, self.of_annotation(item.annotation))
                elif isinstance(item, ast.FunctionDef) and _is_property(item):
                    fields.setdefault(item.name, self.of_annotation(item.returns))
        for node in classes:  # `self.x = ...`, once all annotations are known
            for method in (item for item in node.body if isinstance(item, ast.FunctionDef)):
                scope = Scope(self, method, {}, owner=node.name)
                for target, value in scope.assignments():
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        self.fields[node.name].setdefault(target.attr, value)

    def _of_key(self, annotation: Any) -> Type:
        items = item_of(annotation)
        if (section := section_of(annotation)) is not None:
            return section.__name__
        return f"*{section.__name__}" if items is not None and (section := section_of(items)) else None

    def of_annotation(self, node: ast.expr | None) -> Type:
        """Return the one class of this project that an annotation names, or a collection of it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id if node.id in self._names else None
        if isinstance(node, ast.BinOp):
            return self.of_annotation(node.left) or self.of_annotation(node.right)
        if isinstance(node, ast.Subscript):
            first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            inner = self.of_annotation(first)
            return f"*{inner}" if isinstance(inner, str) else None
        return None


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)


_KINDS = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem),
    *(ast.Attribute, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that say something of types, but for those of functions and classes within."""
    todo = [node]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, _KINDS):
                yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                todo.append(child)


class Scope:
    """One function (or module): what its names are, whatever the order of its statements."""

    def __init__(self, source: Source, node: ast.AST, outer: Mapping[str, Type], owner: str = "") -> None:
        self.source, self.node, self.owner = source, node, owner
        self.names: dict[str, Type] = dict(outer)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                self.names[argument.arg] = source.of_annotation(argument.annotation)
        if owner:
            self.names["self"] = owner
        self.inside = list(_inside(node))
        before: dict[str, Type] = {}
        while before != self.names:  # ends when what is assigned from other names is known too
            before = dict(self.names)
            for target, value in self.assignments():
                if isinstance(target, ast.Name) and value is not None:
                    self.names.setdefault(target.id, value)

    def assignments(self) -> Iterator[tuple[ast.expr, Type]]:
        for node in self.inside:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._spread(target, self.of(node.value))
            elif isinstance(node, ast.AnnAssign):
                yield node.target, self.source.of_annotation(node.annotation)
            elif isinstance(node, ast.NamedExpr):
                yield node.target, self.of(node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                yield from self._spread(node.target, self._item(node.iter))
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield node.optional_vars, self.of(node.context_expr)

    def _spread(self, target: ast.expr, value: Type) -> Iterator[tuple[ast.expr, Type]]:
        if isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(target.elts) == len(value):
            for part, own in zip(target.elts, value, strict=True):
                yield from self._spread(part, own)
        else:
            yield target, value if isinstance(value, str) else None

    def _item(self, node: ast.expr) -> Type:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "enumerate":
                return (None, self._item(node.args[0]))
            if node.func.id == "zip":
                return tuple(self._item(argument) for argument in node.args)
        whole = self.of(node)
        return whole[1:] if isinstance(whole, str) and whole.startswith("*") else None

    def of(self, node: ast.expr) -> Type:
        """Return the type of an expression, as far as it is known."""
        match node:
            case ast.Name():
                return self.names.get(node.id)
            case ast.Attribute():
                owner = self.of(node.value)
                return self.source.fields.get(owner, {}).get(node.attr) if isinstance(owner, str) else None
            case ast.Tuple():
                return tuple(self.of(part) for part in node.elts)
            case ast.IfExp():
                return self.of(node.body) or self.of(node.orelse)
            case ast.BoolOp():
                return next((found for part in node.values if (found := self.of(part))), None)
            case ast.NamedExpr() | ast.Await():
                return self.of(node.value)
            case ast.Subscript():
                return self._item(node.value)
            case ast.Call(func=ast.Attribute(attr="model_copy")):
                return self.of(node.func.value)
            case ast.Call(func=ast.Name(id="tuple" | "list" | "sorted")) if node.args:
                return self.of(node.args[0])
            case ast.Call(func=ast.Name()):
                name = node.func.id
                return name if name in self.source.fields else self.source.returns.get(name)
        return None

    def reads(self) -> Iterator[Read]:
        for node in self.inside:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = self.of(node.value)
                if isinstance(owner, str) and owner in self.source.sections:
                    yield owner, node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                owner, name = self.of(node.args[0]), node.args[1]
                if isinstance(owner, str) and owner in self.source.sections and not isinstance(name, ast.Constant):
                    for key in self.source.sections[owner].model_fields:  # chosen by name as the program runs
                        yield owner, key


# ---- who reads what ------------------------------------------------------------------------------------------------


def reads_of(tree: ast.AST, source: Source, outer: Mapping[str, Type] | None = None, owner: str = "") -> Iterator[Read]:
    """Yield what a module, class or function reads of sections. Functions that yield mistakes are left out."""
    scope = Scope(source, tree, outer or {}, owner)
    if not isinstance(tree, ast.ClassDef):
        yield from scope.reads()
    for node in scope.inside:
        if isinstance(node, ast.ClassDef):
            yield from reads_of(node, source, scope.names, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _only_judges(node):
            yield from reads_of(node, source, scope.names, owner)


def _only_judges(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return function.returns is not None and "Mistake" in ast.unparse(function.returns)


def without_classes(tree: ast.Module) -> ast.Module:
    return ast.Module([node for node in tree.body if not isinstance(node, ast.ClassDef)], [])


def with_properties(reads: set[Read], schema: Sequence[ast.Module], source: Source) -> set[Read]:
    """Add what the properties that are read look at themselves."""
    inside: dict[Read, set[Read]] = {}
    classes = [node for tree in schema for node in tree.body if isinstance(node, ast.ClassDef)]
    for section in classes:
        for item in section.body:
            if isinstance(item, ast.FunctionDef):
                inside[section.name, item.name] = set(Scope(source, item, {}, section.name).reads())
    found, todo = set(reads), list(reads)
    while todo:
        new = inside.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def unread(model: type[BaseModel], reads: set[Read]) -> list[str]:
    """Return the keys of `model` that nobody reads."""
    keys = []
    for name, section in sections_of(model).items():
        keys += [(name, key) for key in section.model_fields if (name, key) not in reads]
    paths = {}
    for path, _ in walk_keys(model):
        owner: Any = model
        for part in path[:-1]:
            owner = item_of(owner) if isinstance(part, int) else section_of(owner).model_fields[part].annotation  # type: ignore[union-attr]
        paths[section_of(owner).__name__, path[-1]] = dotted(path)  # type: ignore[union-attr]
    return sorted(paths[key] for key in keys)


@pytest.fixture(autouse=True, scope="module")
def no_trees_afterwards() -> Iterator[None]:
    """Millions of nodes would make each later collection of garbage take a second."""
    yield
    for cached in (trees, reads_outside, all_reads):
        cached.cache_clear()


@cache
def trees() -> dict[str, ast.Module]:
    programs = ("shared", "rollout_server", "learner", "deploy")
    files = [path for program in programs for path in ROOT.glob(f"{program}/**/*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def reads_outside() -> tuple[Source, frozenset[Read]]:
    """What is read of the sections of both configurations, outside of their classes."""
    learner, server = sections_of(RunConfig), sections_of(ServerConfig)
    assert not learner.keys() & server.keys(), "sections are told apart by their names"
    source = Source(list(trees().values()), learner | server)
    schemas = {*LEARNER, *SERVER}
    readers = [without_classes(tree) if name in schemas else tree for name, tree in trees().items()]
    return source, frozenset(read for tree in readers for read in reads_of(tree, source))


@cache
def all_reads(model: type[BaseModel]) -> frozenset[Read]:
    source, reads = reads_outside()
    return frozenset(with_properties(set(reads), [trees()[name] for name in SCHEMA_OF[model]], source))


@pytest.mark.parametrize("model", [RunConfig, ServerConfig])
def test_every_key_has_a_reader(model: type[BaseModel]) -> None:
    assert unread(model, set(all_reads(model))) == []


def test_a_key_that_nobody_reads_is_found() -> None:
    """Planted: one key with a new name, and one whose name is read of another section (`training.seed`)."""
    training = create_model("TrainingConfig", __base__=TrainingConfig, nobody_reads_this=(int, 1))
    model = create_model("ModelConfig", __base__=ModelConfig, seed=(int, 1))
    planted = create_model("RunConfig", __base__=RunConfig, training=(training, ...), model=(model, ...))
    reads = set(all_reads(RunConfig))
    assert set(unread(planted, reads)) - set(unread(RunConfig, reads)) == {"model.seed", "training.nobody_reads_this"}


READER = """
from dataclasses import dataclass

def build(config: RunConfig) -> None:
    training, other = config.training, 3
    print(training.seed, other.bf16)
    for entry in config.rollout_matching.vllm.server.servers or ():
        print(entry.base_url)

def rule(config: RunConfig) -> Iterator[Mistake]:
    if config.training.packing:
        yield Mistake()

class Loop:
    def __init__(self, config: RunConfig) -> None:
        self._loss = config.loss

    def step(self) -> float:
        return self._loss.desc_weight
"""


def test_a_reader_is_an_access_on_the_section_itself() -> None:
    tree = ast.parse(READER)
    source = Source([tree, *(trees()[name] for name in LEARNER)], sections_of(RunConfig))
    found = set(reads_of(tree, source))
    assert found >= {("TrainingConfig", "seed"), ("ServerEntry", "base_url"), ("LossConfig", "desc_weight")}
    assert not {name for _, name in found} & {"bf16", "packing"}
