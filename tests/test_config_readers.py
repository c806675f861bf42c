"""Every key of both configurations has a reader: a key that nothing reads is a defect.

A reader is an attribute of the key's name that the programs' source reads (AST, nothing runs). In the sections' own
classes a method counts where something else reads the method. Rules, which only compare keys and yield mistakes, are
no readers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel, create_model

from learner.config.schema import RunConfig
from learner.config.sections.training import TrainingConfig
from rollout_server.config import ServerConfig
from shared.config.model import dotted, walk_keys

ROOT = Path(__file__).parents[1]
SCHEMAS = {ROOT / "learner/config/schema.py", ROOT / "rollout_server/config.py"}
SCHEMAS |= set(ROOT.glob("learner/config/sections/*.py"))
PROGRAMS = ("shared", "rollout_server", "learner", "deploy")


def read_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of all attributes that are read, but for those of functions that yield mistakes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.returns is not None and "Mistake" in ast.unparse(node.returns):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        yield from read_in(node)


@cache
def all_read() -> frozenset[str]:
    files = [path for program in PROGRAMS for path in (ROOT / program).rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    tops = [(node, path in SCHEMAS and isinstance(node, ast.ClassDef)) for path in trees for node in trees[path].body]
    found = {name for node, is_section in tops if not is_section for name in read_in(ast.Module([node], []))}
    methods = [one for node, is_section in tops if is_section for one in node.body if isinstance(one, ast.FunctionDef)]
    while new := {name for one in methods if one.name in found for name in read_in(one)} - found:
        found |= new
    return frozenset(found)


def unread(model: type[BaseModel]) -> list[str]:
    return [dotted(path) for path, _ in walk_keys(model) if path[-1] not in all_read()]


@pytest.mark.parametrize("model", [RunConfig, ServerConfig])
def test_every_key_has_a_reader(model: type[BaseModel]) -> None:
    assert unread(model) == []


def test_a_key_that_nobody_reads_is_found() -> None:
    training = create_model("TrainingConfig", __base__=TrainingConfig, nobody_reads_this=(int, 1))
    planted = create_model("RunConfig", __base__=RunConfig, training=(training, ...))
    assert unread(planted) == ["training.nobody_reads_this"]
