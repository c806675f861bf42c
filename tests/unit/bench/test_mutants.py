"""Mutants: what is changed and what is not, the same draw each time, and whether tests notice."""

from __future__ import annotations

import json
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


@pytest.mark.slow
def test_a_test_that_runs_out_of_its_time_kills_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "_COPIED", ("shared", "tests", "pyproject.toml"))
    source = _repository(tmp_path / "one")
    slow = "import pytest, time\nimport shared.sums\n\n@pytest.mark.timeout(0.2)\ndef test_slow():\n    time.sleep(9)\n"
    (source / "tests/unit/shared/test_slow.py").write_text(slow)
    place = mutants.Copy(source, tmp_path / "copy")
    test = "tests/unit/shared/test_slow.py::test_slow"
    assert place.outcome(mutants.Mutant("shared/sums.py", 1, "", -1), {test: 0.1}) == ("killed by time", test)


@pytest.mark.slow
def test_a_line_that_only_another_process_executes_is_tried_with_all_direct_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "_COPIED", ("shared", "tests", "pyproject.toml"))
    source = _repository(tmp_path / "one")
    (source / "shared/__init__.py").touch()  # it wins over the real one, which stays on the path here
    code = "from shared.sums import more; assert more(1) == 2"
    (source / "tests/unit/shared/test_started.py").write_text(
        "import subprocess, sys\nimport shared.sums as sums\n\ndef test_started():\n"
        f"    assert sums.LIMIT\n    assert subprocess.run([sys.executable, '-c', {code!r}]).returncode == 0\n"
    )
    monkeypatch.setattr(mutants, "ROOT", source)
    mutants._begin(source, tmp_path, float("inf"))  # a process of the pool begins so
    file = "tests/unit/shared/test_started.py"
    known = {file: mutants._lines_of((file, "", ["shared/sums.py"]))}
    more = next(one for one in draw(["shared/sums.py"], 99, 0) if one.change == "Add to Sub")
    less = next(one for one in draw(["shared/sums.py"], 99, 0) if one.change == "Lt to LtE")
    rows = [mutants._judge(mutants._job(one, known)) for one in (more, less)]
    assert [(row["outcome"], row["tests"], row["executed_by"]) for row in rows if row] == [
        ("killed", "other processes", 0),
        ("lives", "other processes", 0),
    ]


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


class _Fake:
    """Copies nothing; mutants live where `living` says so, for each kind of tests."""

    living: dict[str, set[int]] = {}

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder

    def lines(self, file: str, paths: list[str]) -> dict[str, object]:
        return {"seconds": {f"{file}::test": 0.1}, "lines": {file: {path: list(range(1000)) for path in paths}}}

    def outcome(self, mutant: mutants.Mutant, tests: dict[str, float]) -> tuple[str, str]:
        kind = "direct" if set(tests) == {"tests/unit/rollout_server/test_gate.py::test"} else "area"
        return "lives" if mutant.place in self.living[kind] | {-1} else "killed", ""


def test_rows_say_which_tests_killed_and_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "Copy", _Fake)
    monkeypatch.setattr(mutants, "NEEDED", ())
    monkeypatch.setattr(mutants, "AREAS", ("tests/unit/rollout_server",))
    monkeypatch.setattr(mutants, "fitting_tests", lambda path: ["tests/unit/rollout_server/test_gate.py"])
    out, target = tmp_path / "mutants.jsonl", ["rollout_server/gate.py"]
    drawn = draw(target, 8, 0)
    monkeypatch.setattr(_Fake, "living", {"direct": {one.place for one in drawn[:3]}, "area": {drawn[1].place}})

    def rows() -> list[dict[str, object]]:
        return [json.loads(line) for line in out.read_text().splitlines()]

    old = {"path": drawn[0].path, "line": drawn[0].line, "change": drawn[0].change, "place": drawn[0].place}
    out.write_text(json.dumps(old | {"outcome": "lives"}) + "\n")
    for number in (5, 8):
        mutants.main(out=out, target=target, number=number, seed=0, seconds=100, workers=2, again=False)
    found = {row["place"]: (row["outcome"], row["tests"]) for row in rows()[1:]}
    assert len(rows()) == 10, "the one that only direct tests had tried goes on, others once; a control"
    assert found[-1] == ("lives", "area")
    assert found[drawn[0].place] == found[drawn[2].place] == ("killed", "area")
    assert found[drawn[1].place] == ("lives", "area")
    assert [found[one.place] for one in drawn[3:]] == [("killed", "direct")] * 5
    printed = capsys.readouterr().out
    assert "all: killed 7 of 8" in printed
    kept = [json.loads(line)["file"] for line in out.with_suffix(".lines.jsonl").read_text().splitlines()]
    assert len(kept) == len(set(kept)), "what tests execute is kept too"
    monkeypatch.setattr(_Fake, "living", {"direct": set(), "area": set()})
    mutants.main(out=out, target=target, number=1, seed=0, seconds=100, workers=1, again=True)
    assert len(rows()) == 11
    assert "all: killed 8 of 8" in capsys.readouterr().out
