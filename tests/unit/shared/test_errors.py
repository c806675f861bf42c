"""The errors that users meet: the picture of the tree is the tree, and an error survives the way between processes."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import shared.errors
from shared.errors import ConfigError, ProjectError

ROOT = Path(__file__).parents[3]


def drawn(picture: str) -> dict[str, str]:
    """Map each error to its base, as the docstring draws them."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in picture.splitlines():
        if match := re.match(r"    ((?:│   |    )*)(?:[├└]── )?(\w+)", line):
            depth = len(match[1]) // 4 + ("── " in line)
            above[depth:] = [match[2]]
            found[match[2]] = above[depth - 1] if depth else "Exception"
    return found


def defined() -> dict[str, str]:
    """The same of all classes of both programs, read from their source."""
    bases: dict[str, str] = {}
    for program in ("shared", "learner", "rollout_server", "deploy"):
        for path in (ROOT / program).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.bases:
                    bases[node.name] = ast.unparse(node.bases[0])

    def is_error(name: str) -> bool:
        return name == "ProjectError" or (name in bases and is_error(bases[name]))

    return {name: base for name, base in bases.items() if is_error(name)}


def test_the_picture_holds_all_errors() -> None:
    assert drawn(shared.errors.__doc__ or "") == defined()


def test_an_error_survives_a_process_boundary() -> None:
    error = ConfigError("a key is wrong", found="3", wanted="4", remedy="write 4")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.remedy) == (ConfigError, str(error), "write 4")
    assert isinstance(again, ProjectError)
