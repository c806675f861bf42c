"""Mutants: what is changed and what is not, the same draw each time, and whether tests notice."""

from __future__ import annotations

from collections import Counter
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


ALIKE = """
import asyncio, time
PAUSE_S = 3.0
NO_WAIT_S = 0.0
LOOKS_PER_S = 3.0
MOST = 3

def waits(values, others, until, default_s=1.5):
    for a, b in zip(values, others, strict=True):
        time.sleep(min(0.25, until - 0.5))
    engine.sleep(level=7)
    time.sleep(values[11])
    if time.monotonic() - until >= 60:
        return zip(values, others, strict=False)
    if until < MOST:
        asyncio.sleep(0.125)
"""


def test_what_changes_nothing_by_its_kind_is_no_mutant_and_its_neighbours_are() -> None:
    found = Counter(change.what for change in changes_of(ALIKE))
    others = Counter(
        {
            "0.0 to 1.0": 1,  # no wait becomes one
            "3.0 to 4.0": 1,  # a rate; not that of PAUSE_S
            "3 to 4": 1,  # no length of a wait
            "1.5 to 2.5": 1,  # a parameter's default
            "min to max": 1,
            "Sub to Add": 2,
            "7 to 8": 1,  # another program's `sleep`
            "11 to 12": 1,  # chooses a pause, not its length
            "60 to 61": 1,
            "returns None": 1,
            "False to True": 1,  # lengths that may differ
            "Lt to LtE": 1,  # no clock
            "call left out": 4,
        }
    )
    assert found == others, "neither of strict=True, 3.0, 0.25, 0.5, 0.125, nor of the comparison with the clock"


def test_a_draw_stays_when_other_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "one.py").write_text(SOURCE)
    before = draw(["one.py"], 99, 0)
    (tmp_path / "one.py").write_text("def other(a: int) -> bool:\n    return a == 5\n" + SOURCE)
    after = [(one.line - 2, one.change) for one in draw(["one.py"], 99, 0) if one.line > 2]
    assert after == [(one.line, one.change) for one in before]
    assert after != [(one.line, one.change) for one in draw(["one.py"], 99, 1) if one.line > 2], "the seed counts"


def test_the_same_seed_draws_the_same_mutants() -> None:
    one, other, third = (draw(["rollout_server/gate.py", "shared/sync"], 30, seed) for seed in (0, 0, 1))
    assert one == other != third
    assert len(set(one)) == 30
    assert len({mutant.path for mutant in one}) > 3


def test_fitting_tests_a_module_are_those_that_import_it() -> None:
    assert fitting_tests("rollout_server/gate.py")[0] == "tests/unit/rollout_server/test_gate.py"
    for name in fitting_tests("shared/sync/buckets.py"):
        assert "shared.sync" in (ROOT / name).read_text()


def _repository(folder: Path) -> Path:
    """One module, and tests of it: one that fails, one with a fixture for all, one that knows nothing of the module."""
    files = {
        "shared/sums.py": "LIMIT = 3\n\ndef less(a):\n    return a < LIMIT\n\ndef more(a):\n    return a + 1\n",
        "tests/unit/shared/test_sums.py": "from shared.sums import less\n\n"
        "def test_less():\n    assert less(3) is False\n\ndef test_fails():\n    assert less(3)\n",
        "tests/unit/shared/test_area.py": "import pytest\nimport shared.sums as sums\n\n"
        "@pytest.fixture(scope='module')\ndef made():\n    return sums.more(1)\n\n"
        "def test_first(made):\n    pass\n\ndef test_second(made):\n    assert made == 2\n",
        "tests/unit/shared/test_else.py": "def test_nothing():\n    pass\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\nmarkers = ['slow: long']\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_tests_of_a_mutant_are_those_that_execute_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "_COPIED", ("shared", "tests", "pyproject.toml"))
    place = mutants.Copy(_repository(tmp_path / "one"), tmp_path / "copy")
    files = [f"tests/unit/shared/test_{name}.py" for name in ("sums", "area", "else")]
    known = {file: place.lines(file, ["shared/sums.py"]) for file in files}

    def names(line: int) -> set[str]:
        mutant = mutants.Mutant("shared/sums.py", line, "any", 0)
        return {test.rpartition("::")[2] for test in mutants.executing(mutant, known)}

    assert names(4) == {"test_less"}, "not the one that fails without a mutant"
    assert names(7) == {"test_first", "test_second"}, "what the fixture of a module executes is of all that have it"
    assert names(1) == {"test_less", "test_first", "test_second"}, "what imports execute is of all that use the module"
    assert names(5) == set()


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_tests_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "_COPIED", ("shared", "tests", "pyproject.toml"))
    source = _repository(tmp_path / "one")
    place = mutants.Copy(source, tmp_path / "copy")
    changes = changes_of((source / "shared/sums.py").read_text())
    mutant = next(
        mutants.Mutant("shared/sums.py", one.line, "", n) for n, one in enumerate(changes) if "Lt" in one.what
    )
    test = "tests/unit/shared/test_sums.py::test_less"
    assert place.outcome(mutant, {test: 0.1}) == ("killed", test)
    assert place.outcome(mutant, {"tests/unit/shared/test_else.py::test_nothing": 0.1}) == ("lives", "")
    assert place.outcome(mutant, {"tests/unit/shared/test_else.py::test_of_no_name": 0.1}) == ("lives", "")
    assert place.outcome(mutants._control(mutant), {test: 0.1}) == ("lives", ""), "a control has no change"
    assert (place.folder / "shared/sums.py").read_text() == (source / "shared/sums.py").read_text()


def test_the_report_gives_both_shares(capsys: pytest.CaptureFixture[str]) -> None:
    def row(place: int, outcome: str, executed_by: int) -> dict[str, object]:
        one = {"path": "shared/sync/one.py", "line": place, "change": "x", "place": place}
        return one | {"outcome": outcome, "executed_by": executed_by}

    rows = [
        row(0, "killed", 1),
        row(1, "killed by time", 1),
        row(2, "lives", 1),
        row(3, "lives", 0),
        row(4, "killed", 0),
        row(-1, "lives", 3),
    ]
    mutants.report({f"{one['path']} {one['place']}": one for one in rows})
    printed = capsys.readouterr().out.splitlines()
    for line in ("all: killed 3 of 5 (60.0%)", "executed here: killed 3 of 4 (75.0%)", "by time alone: 1"):
        assert line in printed
    assert "controls: killed 0 of 1 (0.0%)" in printed
    assert printed.index("shared/sync/one.py:3 x #3") > printed.index("not executed here:")
    assert printed.index("shared/sync/one.py:2 x #2") < printed.index("not executed here:")
