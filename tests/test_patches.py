"""A patch of something that is not there patches nothing, and its test shows nothing."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def blind_patches(source: str) -> list[int]:
    """Return lines of `monkeypatch.setattr(..., raising=False)`, which also sets what nothing reads."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "delattr")
        and any(
            one.arg == "raising" and not (isinstance(one.value, ast.Constant) and one.value.value)
            for one in node.keywords
        )
    ]


def test_a_patch_fails_if_its_target_is_gone() -> None:
    found = {
        str(path.relative_to(TESTS)): lines
        for path in TESTS.rglob("*.py")
        if "raising=" in (text := path.read_text(encoding="utf-8")) and (lines := blind_patches(text))
    }
    assert found == {}


def test_blind_patches_are_found() -> None:
    source = "def f(patch):\n    patch.setattr(a, 'b', 1)\n    patch.setattr(a, 'b', 1, raising=False)\n"
    source += "    patch.delattr(a, 'b', raising=False)\n    patch.setattr(a, 'b', 1, raising=True)\n"
    assert blind_patches(source + "    patch.delenv('c', raising=False)\n") == [3, 4]
