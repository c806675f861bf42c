"""The loop of `examples/loop.py`, with real vLLM: it learns from rollouts, and its public names are enough."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from examples import loop

pytestmark = pytest.mark.integration
SOURCE = Path(loop.__file__)


@pytest.mark.slow
def test_the_loop_rolls_out_learns_syncs_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = loop.main(tmp_path, steps=1)
    shown = capsys.readouterr().out
    assert "ver 1" in shown
    assert scores.keys() == {"before", "after"}
    assert all(0.3 < value <= 1.0 for value in scores.values()), scores  # the shipped checkpoint, and one small step


def test_it_uses_public_names_alone() -> None:
    tree = ast.parse(SOURCE.read_text())
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [name for name in names if name.startswith("_")] == []
