"""Damaged files of every kind that we read end in typed errors (`bench.fuzz`): a few cases of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import bench.fuzz
from bench.fuzz import Ends, FileKind, _tagged, damaged, fuzz, kinds, run_case


@pytest.mark.parametrize("name", list(kinds()))
def test_damaged_files_end_in_typed_errors(name: str) -> None:
    (ends,) = fuzz([name], cases=40, seed=1).values()
    assert ends.counts.total() == 40
    assert ends.tracebacks == []


@pytest.mark.parametrize("name", list(kinds()))
def test_undamaged_files_are_read(name: str, tmp_path: Path) -> None:
    """Damage to a file that is wrong already would find nothing. A reader that refuses its file raises here."""
    kinds()[name].write(tmp_path)
    kinds()[name].read(tmp_path)


def test_waiting_for_the_writer_of_a_pipe_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself, which readers that expect OSError must not hide."""
    monkeypatch.setattr(bench.fuzz, "SLOWEST_S", 0.2)

    def read(folder: Path) -> object:
        try:
            return (folder / "a").read_bytes()
        except OSError:
            return None

    kind, ends = FileKind(files={"a": b"1"}, damaged=("a",), read=read), Ends()
    kind.write(tmp_path)
    for i in range(300):
        run_case(kind, tmp_path, random.Random(i), ends)
        if ends.tracebacks:
            break
    assert "LateError" in ends.tracebacks[0]
    assert (tmp_path / "a").read_bytes() == b"1", "whole again for the next case"


def test_yaml_gets_tags() -> None:
    tagged = {_tagged(b"a: 1\nb:\n- 2\n", random.Random(i)) for i in range(100)}
    assert any(b"a: !!" in one for one in tagged)
    assert any(b"- !!" in one for one in tagged)


def test_cases_depend_on_their_seed_alone() -> None:
    content = b'{"a": [1, 2, 3]}\n'
    assert damaged(content, random.Random("x")) == damaged(content, random.Random("x"))
    assert len({damaged(content, random.Random(i)) for i in range(50)}) > 30
