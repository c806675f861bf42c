"""The table of the project's size counts what is there."""

from __future__ import annotations

from pathlib import Path

from tools.size import LIMITS, by_subject, lines_of, long_files, measured, tracked


def test_every_limit_is_measured() -> None:
    found = measured()
    assert found.keys() == LIMITS.keys()
    assert (found["imports up"], found["circles"]) == (0, 0)
    assert min(found["core, lines"], found["tests, lines"], found["learner keys"]) > 0


def test_lines_are_those_of_code() -> None:
    here = Path("tests/test_size.py")
    assert lines_of([here, Path("README.md")]) == {here: len(Path(__file__).read_text().splitlines())}
    assert long_files({Path("learner/a.py"): 451, Path("shared/b.py"): 450, here: 999}) == [Path("learner/a.py")]


def test_each_line_of_the_core_has_one_subject() -> None:
    assert sum(by_subject(lines_of(tracked())).values()) == measured()["core, lines"]
    assert by_subject({Path("learner/tasks/detection/gaps.py"): 2})["gaps, audit, predict, calibrate"] == 2
    assert by_subject({Path("learner/trainer.py"): 2, Path("tools/size.py"): 1})["run, journal, wiring, trainer"] == 2
