"""Mutants: what is changed and what is not, the same draw each time, and whether tests notice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import mutants
from bench.mutants import ROOT, changes_of, draw, fitting_tests

SOURCE = '''
"""Words: 1 < 2."""

def largest(values: list[int], start: int = 0) -> int:
    """Words."""
    found = start
    for value in values:
        if value > found and not value % 2:
            found = value
    if found < 0:
        log.warning("less than %d", 0)
        raise ValueError(f"{found} < 0", 1)
    values.clear()
    return found
'''


def test_each_mutant_is_one_change_that_python_reads() -> None:
    changes = changes_of(SOURCE)
    assert sorted(change.what for change in changes) == sorted(
        [
            "0 to 1",
            "And to Or",
            "Gt to GtE",
            "no not",
            "Mod to Add",
            "2 to 3",
            "condition turned round",
            "Lt to LtE",
            "0 to 1",
            "call left out",
            "returns None",
        ]
    )
    sources = {change.source() for change in changes}
    assert len(sources) == len(changes)
    for source in sources:
        compile(source, "mutant", "exec")
        assert "ValueError(f'{found} < 0', 1)" in source, "errors keep their words"
        assert "log.warning('less than %d', 0)" in source
    assert SOURCE.strip() not in sources


def test_the_same_seed_draws_the_same_mutants() -> None:
    one, other, third = (draw(["rollout_server/gate.py", "shared/sync"], 30, seed) for seed in (0, 0, 1))
    assert one == other != third
    assert len(set(one)) == 30
    assert len({mutant.path for mutant in one}) > 3


def test_fitting_tests_a_module_are_those_that_import_it() -> None:
    assert fitting_tests("rollout_server/gate.py")[0] == "tests/unit/rollout_server/test_gate.py"
    for name in fitting_tests("shared/sync/buckets.py"):
        assert "shared.sync" in (ROOT / name).read_text()


def test_what_is_in_the_file_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    timed: list[object] = []

    class Nothing:
        def __init__(self, folder: Path) -> None: ...

        def run(self, tests: object, cpu_s: int, *, compiles: bool) -> tuple[bool, bool, float]:
            timed.append(tests)
            return True, False, 1.0

        def outcome(self, mutant: mutants.Mutant, tests: object, cpu_s: int) -> str:
            done.append(mutant.name)
            return "lives" if len(done) == 3 else "killed"

    monkeypatch.setattr(mutants, "Copy", Nothing)
    monkeypatch.setattr(mutants, "NEEDED", ())
    out = tmp_path / "mutants.jsonl"
    for number in (5, 8):
        mutants.main(out=out, target=["rollout_server/gate.py"], number=number, seed=0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(done) == len(set(done)) == 8
    assert [row["outcome"] for row in rows if "outcome" in row].count("lives") == 1
    assert len(timed) == 1, "how long the tests take is kept too"
    printed = capsys.readouterr().out
    assert "killed 7 of 8" in printed
    assert done[2] in printed
